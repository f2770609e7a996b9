"""The docs page, from the JSON of the experiments alone: tables, figures, constants, commands."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from minipaged.simulation.hardware import CHIPS, CONSTANTS, GB, MODELS
from minipaged.simulation.reproduce import claim_row, number_text
from minipaged.simulation.scripts import BEAM_SWITCH
from minipaged.simulation.sensitivity import FITTED_TO
from minipaged.simulation.workloads import ALPACA, SHAREGPT, TRANSLATION

CLAIM, CLAIM_ALIGN = "claim | source | published | measured | ratio", "---|---|---:|---:|---:"

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
all figures, some of them [fitted](#what-is-fitted) to figures of this page. So the *ratios* between systems
are what to look at.

Ratio: measured over published; inside a published range it is 1, outside it is taken to the nearer end. A
bound with an open end is not scored: it holds, or the ratio says by how much not. "(plot)": we read the
number off a plot. "(words)": the source says it in words, the bound is our reading. A reason below a table
was checked in the way that it says; what has none is not explained.
"""

FITTED = """\
Six values were fitted, by hand, to figures that this page scores: agreement with those is not evidence.
Sentence lengths were chosen with Fig. 16 in view, machine and lengths of the page growth with the source's
table. Nothing was fitted to Fig. 17, 18 b and 19, chunked prefill and prefix-caching-aware scheduling.

Each fitted value was moved by 20 %, the others left where they are. The table says by how many percent a
figure changes (value lower / higher), some in shorter runs than those of the claim; where nothing stands, it
cannot change. A sigma moves for prompts and outputs together, and the means stay."""


def write_page(results: Sequence[dict[str, Any]], changes: list[dict[str, Any]], folder: Path) -> None:
    """Write index.md, results.json and sensitivity.json into the folder; `changes`: see `sensitivity`."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "sensitivity.json").write_text(json.dumps(changes, indent=1) + "\n")
    (folder / "index.md").write_text(page(results, changes))


def page(results: Sequence[dict[str, Any]], changes: list[dict[str, Any]]) -> str:
    """Markdown."""
    parts = [INTRODUCTION, _furthest(results), _fitted(changes), *map(_section, results), _appendix()]
    return "\n".join(parts)


def _furthest(results: Sequence[dict[str, Any]]) -> str:
    claims = [claim for result in results for claim in result["claims"] if claim["ratio"]]
    claims.sort(key=lambda claim: -abs(math.log(claim["ratio"])))
    rows = [(claim["claim"], *claim_row(claim)) for claim in claims[:6]]
    return "\n".join(["## Furthest off", *_table(CLAIM, CLAIM_ALIGN, rows), ""])


def _fitted(changes: list[dict[str, Any]]) -> str:
    def shown(row: dict[str, Any], name: str) -> str:
        return " / ".join(f"{change:+.3g}" if change else "0" for change in row["change"].get(name, ()))

    values = {"BEAM_SWITCH": f"{BEAM_SWITCH:g}"}
    for name, lengths in (("ShareGPT", SHAREGPT), ("Alpaca", ALPACA)):
        values[f"sigma, {name}"] = f"{lengths.prompt.sigma:g} and {lengths.output.sigma:g}"
    fitted = [
        (f"`{name}`", values.get(name) or f"{getattr(CONSTANTS, name):g} s", to)
        for name, to in FITTED_TO.items()
    ]
    lines = ["## What is fitted", "", FITTED]
    lines += _table("fitted value | is | fitted to", "---|---:|---", fitted)
    if changes:
        heads = " | ".join(("figure", "source", "value", *(f"`{name}`" for name in FITTED_TO)))
        align = "---|---|" + "|".join(["---:"] * (1 + len(FITTED_TO)))
        rows = [
            (row["figure"], row["source"], number_text(row["value"]), *(shown(row, n) for n in FITTED_TO))
            for row in changes
        ]
        lines += _table(heads, align, rows)
    return "\n".join([*lines, ""])


def _section(result: dict[str, Any]) -> str:
    name, title = result["experiment"], result["title"]
    notes = list(dict.fromkeys(claim["note"] for claim in result["claims"] if claim["note"]))
    rows = []
    for claim in result["claims"]:
        mark = f" ({notes.index(claim['note']) + 1})" if claim["note"] else ""
        rows.append((claim["claim"] + mark, *claim_row(claim)))
    head = f"## {title}\n\n{result['source']}. {result['setup']}\n\n"
    head += f"```bash\nminipaged reproduce {name}\n```\n\n![{title}]({name}.svg)"
    table = _table(CLAIM, CLAIM_ALIGN, rows)
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
