"""The docs page, from the JSON of the experiments alone: tables, figures, constants, commands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from minipaged.simulation.hardware import CHIPS, CONSTANTS, GB, MODELS
from minipaged.simulation.reproduce import claim_row
from minipaged.simulation.scripts import BEAM_SWITCH
from minipaged.simulation.workloads import ALPACA, SHAREGPT, TRANSLATION

INTRODUCTION = """# The sources, reproduced on a laptop

The figures of the PagedAttention paper and the numbers of the three other sources, run again with this
project's own memory manager and scheduler on a simulated clock. A step takes as long as a roofline model
says; which blocks go where, who is admitted and who is preempted is decided by the code that also serves real
models.

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
    name = result["experiment"]
    lines = [
        f"## {result['title']}",
        "",
        f"{result['source']}. {result['setup']}",
        "",
        "```bash",
        f"minipaged reproduce {name}",
        "```",
        "",
        f"![{result['title']}]({name}.svg)",
        "",
        "| claim | source | published | measured | ratio |",
        "|---|---|---:|---:|---:|",
    ]
    notes = list(dict.fromkeys(claim["note"] for claim in result["claims"] if claim["note"]))
    for claim in result["claims"]:
        mark = f" ({notes.index(claim['note']) + 1})" if claim["note"] else ""
        lines.append(f"| {claim['claim']}{mark} | {' | '.join(claim_row(claim))} |")
    lines += ["", *(f"({i}) {note}.  " for i, note in enumerate(notes, start=1)), ""]
    return "\n".join(lines)


def _appendix() -> str:
    lines = ["## Constants", "", "| constant | value | what it is, and from where |", "|---|---:|---|"]
    for constant in fields(CONSTANTS):
        lines.append(f"| `{constant.name}` | {constant.default:g} | {constant.metadata['source']} |")
    lines += [
        "",
        "| chip | memory | bandwidth | 16-bit peak | host link | source |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for chip in CHIPS.values():
        lines.append(
            f"| {chip.name} | {chip.memory / GB:.0f} GB | {chip.bandwidth / 1e9:,.0f} GB/s "
            f"| {chip.flops / 1e12:g} TFLOP/s | {chip.host_link / 1e9:.0f} GB/s | {chip.source} |"
        )
    lines += ["", "| model | weights | KV a token | longest | source |", "|---|---:|---:|---:|---|"]
    for model in MODELS.values():
        lines.append(
            f"| {model.name} | {model.weight_bytes / GB:.0f} GB | {model.kv_bytes / 1024:.0f} KiB "
            f"| {model.max_model_len} | {model.source} |"
        )
    lines += ["", "| lengths | prompt: mean, sigma | output: mean, sigma | longest |", "|---|---:|---:|---:|"]
    for name, w in (("ShareGPT-like", SHAREGPT), ("Alpaca-like", ALPACA), ("translation", TRANSLATION)):
        lines.append(
            f"| {name} | {w.prompt.mean:g}, {w.prompt.sigma:g} | {w.output.mean:g}, {w.output.sigma:g} "
            f"| {w.prompt.most} |"
        )
    lines += [
        "",
        "The means of the first two are published (paper, Fig. 11), the variances are not: each sigma of the",
        "logarithm is fitted once, ShareGPT's to the mean context of a running request that Fig. 2 and 13 a",
        "imply, Alpaca's to Fig. 15. Nothing is published about the translated sentences: a plausible",
        "pair of means, chosen with Fig. 16 in view. In a beam search each place draws its parent at random",
        f"with probability {BEAM_SWITCH:g}, else it continues its own; fitted once, to Fig. 15.",
    ]
    return "\n".join([*lines, ""])
