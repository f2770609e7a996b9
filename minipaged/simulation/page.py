"""The docs page, from the JSON of the experiments alone: tables, figures, constants, commands."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from minipaged.simulation.hardware import CHIPS, CONSTANTS, GB, MODELS
from minipaged.simulation.reproduce import claim_row
from minipaged.simulation.scripts import BEAM_SWITCH
from minipaged.simulation.workloads import ALPACA, SHAREGPT, TRANSLATION

INTRODUCTION = """# The sources, reproduced on a laptop

The figures of the PagedAttention paper, and the numbers that text-generation-inference gives for dynamic page
growth and vLLM for prefix-caching-aware scheduling and chunked prefill, run again with this project's own
memory manager and scheduler on a simulated clock. A step takes as long as a roofline model says; which blocks
go where, who is admitted and who is preempted is decided by the code that also serves real models.

```bash
minipaged reproduce --all
```

runs everything and prints these tables; `--json` prints the claims, `--docs docs/reproduce` writes this page.

What is simulated, and what that means: the data sets cannot be shipped, so lengths are drawn from lognormal
distributions with the published means; the time of a step is a model with the constants below, one set for
all figures. So the *ratios* between systems are what to look at. Ratio: measured over published; inside a
published range it is 1, outside it is taken to the nearer end. Where something does not come out, the
reason stands below the table.
"""


def write_page(results: Sequence[dict[str, Any]], folder: Path) -> None:
    """Write index.md and results.json into the folder."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "index.md").write_text(page(results))


def page(results: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    return "\n".join([INTRODUCTION, *map(_section, results), _appendix()])


def _section(result: dict[str, Any]) -> str:
    name, title = result["experiment"], result["title"]
    notes = list(dict.fromkeys(claim["note"] for claim in result["claims"] if claim["note"]))
    rows = []
    for claim in result["claims"]:
        mark = f" ({notes.index(claim['note']) + 1})" if claim["note"] else ""
        rows.append((claim["claim"] + mark, *claim_row(claim)))
    head = f"## {title}\n\n{result['source']}. {result['setup']}\n\n"
    head += f"```bash\nminipaged reproduce {name}\n```\n\n![{title}]({name}.svg)"
    table = _table("claim | source | published | measured | ratio", "---|---|---:|---:|---:", rows)
    return "\n".join([head, *table, "", *(f"({i}) {note}.  " for i, note in enumerate(notes, start=1)), ""])


def _appendix() -> str:
    constants = [(f"`{c.name}`", f"{c.default:g}", c.metadata["source"]) for c in fields(CONSTANTS)]
    chips = []
    for c in CHIPS.values():
        rates = (
            f"{c.bandwidth / 1e9:,.0f} GB/s",
            f"{c.flops / 1e12:g} TFLOP/s",
            f"{c.host_link / 1e9:.0f} GB/s",
        )
        chips.append((c.name, f"{c.memory / GB:.0f} GB", *rates, c.source))
    models = [
        (m.name, f"{m.weight_bytes / GB:.0f} GB", f"{m.kv_bytes / 1024:.0f} KiB", m.max_model_len, m.source)
        for m in MODELS.values()
    ]
    lengths = [
        (name, *(f"{drawn.mean:g}, {drawn.sigma:g}" for drawn in (w.prompt, w.output)), w.prompt.most)
        for name, w in (("ShareGPT-like", SHAREGPT), ("Alpaca-like", ALPACA), ("translation", TRANSLATION))
    ]
    heads = "chip | memory | bandwidth | 16-bit peak | host link | source"
    lines = ["## Constants"]
    lines += _table("constant | value | what it is, and from where", "---|---:|---", constants)
    lines += _table(heads, "---|---:|---:|---:|---:|---", chips)
    lines += _table("model | weights | KV a token | longest | source", "---|---:|---:|---:|---", models)
    heads = "lengths | prompt: mean, sigma | output: mean, sigma | longest"
    lines += _table(heads, "---|---:|---:|---:", lengths)
    return "\n".join([*lines, "", LENGTHS, ""])


def _table(heads: str, align: str, rows: Iterable[tuple[Any, ...]]) -> list[str]:
    body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return ["", f"| {heads} |", f"|{align}|", *body]


LENGTHS = f"""\
The means of the first two are published (paper, Fig. 11), the variances are not: each sigma of the
logarithm is fitted once, ShareGPT's to the mean context of a running request that Fig. 2 and 13 a
imply, Alpaca's to Fig. 15. Nothing is published about the translated sentences: a plausible
pair of means, chosen with Fig. 16 in view. In a beam search each place draws its parent at random
with probability {BEAM_SWITCH:g}, else it continues its own; fitted once, to Fig. 15."""
