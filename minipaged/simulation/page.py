"""The docs page, made only from the experiments' JSON: tables, figures, constants, commands."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from minipaged.simulation.claims import claim_row, number_text
from minipaged.simulation.hardware import CHIPS, CONSTANTS, GB, MODELS
from minipaged.simulation.scripts import BEAM_SWITCH
from minipaged.simulation.sensitivity import FITTED_TO
from minipaged.simulation.workloads import ALPACA, SHAREGPT, TRANSLATION

PAPER = "PagedAttention paper"
"""How the sources of the paper's own figures begin."""

CLAIM, CLAIM_ALIGN = "claim | source | published | measured | ratio", "---|---|---:|---:|---:"

INTRODUCTION = """# Do the results reproduce?

This page reproduces the figures of the PagedAttention paper with this project's memory manager and scheduler
on a simulated clock. It also reproduces the numbers that text-generation-inference reports for dynamic page
growth, and those that vLLM reports for prefix-caching-aware scheduling and chunked prefill. A roofline model
estimates how long a step takes. The same code that serves real models decides which blocks go where, and
which requests are admitted and preempted.

Except under [chunked prefill](#chunked-prefill), all systems compute prompts in steps without decodes, as
vLLM did before it had chunked prefill, and, except under [page growth](#dynamic-page-growth), as soon as
there is room. The paper batches prompts together with decodes (section 4.3); where we found that this makes
a difference, the section says so.

This command runs all experiments, and prints a table of claims for each:

```bash
minipaged reproduce --all
```

`--json` prints the claims as JSON, with the reasons for differences. `--docs docs/reproduce` writes this
page; only then is the dependence on the [fitted values](#what-is-fitted) computed.

The data sets cannot be included, so lengths are drawn from lognormal distributions with the published means.
The time of a step comes from a model with the constants below. The same constants are used for all figures,
and some of them are [fitted](#what-is-fitted) to figures on this page. Compare the *ratios* between systems
rather than the absolute values.

All numbers come from one seed, and the runs are short, so the last digits are chance. In Fig. 12 a, paged
sustains 1.79 to 2.05 times as many requests as Orca (Oracle) with seeds 0 to 4 (this page has 1.93, from seed
0); in Fig. 14, with beam width 6, it is 1.74 to 2.02 times with seeds 0 to 3 (this page has 2.01).

*Paged* is the paper's system, vLLM, here with this project's memory manager and scheduler. Orca reserves one
contiguous region per sequence at admission: *Orca (Max)* the longest that the model allows, *Orca (Pow2)*
the prompt and the next power of two of the output's true length, and *Orca (Oracle)* exactly what the
sequence will need. *FasterTransformer* also reserves the longest, and starts a batch only when every request
of the last one has ended.

*Normalized latency* is the paper's metric (section 6.1): the mean over all requests of the end-to-end latency
divided by the output length. The *sustained rate* is the number of requests per second that a system
completes while its queue never empties; we compute it as output tokens per second divided by the mean output
length. In the paper's plots, it is the rate at which latency explodes.

The ratio is the measured value divided by the published one. If a range was published, the ratio is 1 within
it; outside the range, we compare with the nearest bound. A range with an open end is not scored: either it
holds, or the ratio shows how far off the measured value is. "(plot)" means that we read the number off a
plot, and "(words)" that the source states it in words and the bound is our interpretation. The reasons given
below a table were checked as described there. A difference without a reason is unexplained.
"""

FITTED = """\
Six values were fitted by hand to figures that this page scores, so agreement with those figures is not
evidence. We had already seen Fig. 16 when we chose the sentence lengths, and the published table when we
chose the machine and the lengths for page growth. No value was fitted to Figs. 13 b, 17, 18 b and 19, to
chunked prefill or to prefix-caching-aware scheduling.

To see how much depends on the fitted values, we changed each one by 20 % and left the others alone. The
second table, which leaves out `_seconds`, gives the resulting change in each figure, in percent (with the
value lowered / raised). Some of these runs were shorter than those behind the claims. An empty cell means
that the figure does not depend on the value. A sigma is changed for prompts and outputs together, while the
means stay the same."""


def write_page(results: Sequence[dict[str, Any]], changes: list[dict[str, Any]], folder: Path) -> None:
    """Write index.md, results.json and sensitivity.json into the folder; `changes`: see `sensitivity`."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "sensitivity.json").write_text(json.dumps(changes, indent=1) + "\n", encoding="utf-8")
    (folder / "index.md").write_text(page(results, changes), encoding="utf-8")


def page(results: Sequence[dict[str, Any]], changes: list[dict[str, Any]]) -> str:
    """Markdown."""
    parts = [INTRODUCTION, _furthest(results), _fitted(changes), *map(_section, results), _appendix()]
    return "\n".join(parts)


def _furthest(results: Sequence[dict[str, Any]]) -> str:
    lines = ["## Furthest off", ""]
    for head, of_the_paper in (("In the paper:", True), ("In other sources:", False)):
        chosen = [r for r in results if r["source"].startswith(PAPER) == of_the_paper]
        claims = [claim for result in chosen for claim in result["claims"] if claim["ratio"]]
        claims.sort(key=lambda claim: -abs(math.log(claim["ratio"])))
        rows = [(claim["claim"], *claim_row(claim)) for claim in claims[:6]]
        lines += [head, *_table(CLAIM, CLAIM_ALIGN, rows), ""] if rows else []
    return "\n".join(lines)


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
        short = {"BEAM_SWITCH": "beam switch"}
        names = (short.get(name, name.removesuffix("_seconds")) for name in FITTED_TO)
        heads = " | ".join(("figure", "source", "value", *names))
        align = "---|---|---:|" + "|".join([":---:"] * len(FITTED_TO))  # (centred cells may wrap)
        rows = [
            (row["figure"], row["source"], number_text(row["value"]), *(shown(row, n) for n in FITTED_TO))
            for row in changes
        ]
        lines += _table(heads, align, rows)
    return "\n".join([*lines, ""])


def _section(result: dict[str, Any]) -> str:
    name, title = result["experiment"], result["title"]
    notes = list(dict.fromkeys(claim["note"] for claim in result["claims"] if claim["note"]))
    published: list[tuple[str, ...]] = []
    measured_only: dict[str, list[tuple[str, ...]]] = {}
    for claim in result["claims"]:
        mark = f" ({notes.index(claim['note']) + 1})" if claim["note"] else ""
        row = (claim["claim"] + mark, *claim_row(claim))
        if claim["paper"] is None:
            measured_only.setdefault(claim["reading"], []).append((row[0], row[1], row[3]))
        else:
            published.append(row)
    head = f"## {title}\n\nSource: {result['source']}. {result['setup']}\n\n"
    head += f"```bash\nminipaged reproduce {name}\n```\n\n![{title}]({name}.svg)"
    lines = _table(CLAIM, CLAIM_ALIGN, published) if published else []
    for reading, rows in measured_only.items():
        plotted = "Plotted in the source, but not read off:" if reading else "Without a published value:"
        lines += ["", plotted, *_table("measured only | source | measured", "---|---|---:", rows)]
    explained = [f"({i}) {note[0].upper()}{note[1:]}.  " for i, note in enumerate(notes, start=1)]
    return "\n".join([head, *lines, "", *explained, ""])


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
    lines += _table("constant | value | what it is, and where it is from", "---|---:|---", constants)
    lines += _table(heads, "---|---:|---:|---:|---:|---", chips)
    lines += _table("model | weights | KV per token | longest | source", "---|---:|---:|---:|---", models)
    heads = "lengths | prompt: mean, sigma | output: mean, sigma | longest"
    lines += _table(heads, "---|---:|---:|---:", lengths)
    return "\n".join([*lines, "", LENGTHS, ""])


def _table(heads: str, align: str, rows: Iterable[tuple[Any, ...]]) -> list[str]:
    body = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return ["", f"| {heads} |", f"|{align}|", *body]


LENGTHS = f"""\
The means of the first two are published (paper, Fig. 11), but their variances and limits are not. We assumed
the limits, and fitted each sigma of the logarithm once: ShareGPT's to the mean context of a running request
implied by Fig. 2 and 13 a, and Alpaca's to Fig. 15. Nothing is published about the translated sentences, so
we chose plausible means with Fig. 16 in mind. In a beam search, each beam draws a random parent with
probability {BEAM_SWITCH:g} and otherwise continues its own sequence. We fitted this probability to Fig.
15."""
