"""Dynamic page growth: reserving everything a request may use, compared with growing while it runs."""

from dataclasses import replace
from functools import partial
from typing import Any

from minipaged.simulation.baselines.seldom_prefills import SeldomPrefills
from minipaged.simulation.experiments.common import grid
from minipaged.simulation.records import inference_time, queue_time
from minipaged.simulation.results import Claim, Curve, Experiment, Outcome, Panel
from minipaged.simulation.run import simulate
from minipaged.simulation.systems import PAGED, Setup, paged, setup
from minipaged.simulation.workloads import SHAREGPT, Independent, Lognormal, steady

SOURCE = "TGI pull request #2024"
SECONDS, RATE, USERS, MAX_NEW_TOKENS = 60.0, 10.0, 100, 2048
MAX_BATCH_PREFILL_TOKENS = 4096
WORKLOAD = Independent(SHAREGPT.prompt, Lognormal(160, 0.8, 1024))
CHIPS = setup("llama-3-8b", "a10g")
_CHIP, _HOST = CHIPS.deployment.chip, CHIPS.deployment.constants
_SLOW_CHIP = replace(_CHIP, bandwidth=_CHIP.bandwidth / 2, flops=_CHIP.flops / 2)
_SLOW_HOST = replace(_HOST, step_seconds=2 * _HOST.step_seconds, sequence_seconds=2 * _HOST.sequence_seconds)
HALF = replace(CHIPS, deployment=replace(CHIPS.deployment, chip=_SLOW_CHIP, constants=_SLOW_HOST))
GROWTH = {"reserve all": "reserve", "grow by 16": "chunked", "on demand": "on_demand"}

SLOWER = (
    "the source's machine is unknown and took about twice as long per token (checked: a machine half as "
    "fast takes {0[per_token]:.3f} s per token when it reserves and {1[per_token]:.3f} s when it grows; but "
    "only {0[finished]} and {1[finished]} requests finish)"
)
TEXT = {
    "finished": ("requests finished", ""),
    "request_rate": ("requests finished per second", "req/s"),
    "token_rate": ("generated tokens of finished requests per second", "tokens/s"),
    "queue_mean": ("queue time, mean", "s"),
    "queue_p95": ("queue time, 95th percentile", "s"),
    "inference_mean": ("inference time, mean", "s"),
    "per_token": ("inference time per token, mean", "s"),
    "dropped": ("arrivals turned away", ""),
}
PUBLISHED = {
    "reserve all": dict(zip(TEXT, (91.0, 1.49, 219.0, 13.33, 32.49, 6.67, 0.10759, 410.0))),
    "grow by 16": dict(zip(TEXT, (206.0, 3.38, 434.0, 0.54, 1.34, 10.88, 0.23086, 296.0))),
}


def load(growth: str, chips: Setup = CHIPS, workload: Independent = WORKLOAD) -> dict[str, float]:
    """What the load generator sees in a minute, by the names of `TEXT`."""
    simulation = paged(
        chips,
        max_output=MAX_NEW_TOKENS,
        components=replace(PAGED.get(), prefill_first=SeldomPrefills),
        page_growth=GROWTH[growth],
        max_num_batched_tokens=MAX_BATCH_PREFILL_TOKENS,
    )
    run = simulate(simulation, steady(workload, RATE, SECONDS), until=SECONDS, max_users=USERS)
    count = len(run.records)
    values = (
        count,
        count / SECONDS,
        run.output_tokens / SECONDS,
        sum(map(queue_time, run.records)) / count,
        run.quantile(queue_time, 0.95),
        sum(map(inference_time, run.records)) / count,
        sum(inference_time(record) / record.num_tokens for record in run.records) / count,
        run.num_dropped,
    )
    return dict(zip(TEXT, values))


def conclude(results: dict[Any, dict[str, float]]) -> Outcome:
    """The source's table, and the two ratios it is about."""
    claims = []
    slower = SLOWER.format(*(results["half as fast", name] for name in PUBLISHED))
    for growth in GROWTH:
        measured = results[growth]
        published = PUBLISHED.get(growth, {})
        for field, (text, unit) in TEXT.items():
            paper, value = published.get(field), measured[field]
            close = paper is None or 0.75 < value / paper < 1.33
            note = "" if close or field.startswith("queue") else slower
            claims.append(Claim(f"{text}, {growth}", SOURCE, paper, value, unit, note))
    for text, field, over, under in (
        ("requests finished, growing over reserving", "finished", "grow by 16", "reserve all"),
        ("queue time p95, reserving over growing", "queue_p95", "reserve all", "grow by 16"),
    ):
        paper, value = (of[over][field] / of[under][field] for of in (PUBLISHED, results))
        claims.append(Claim(text, SOURCE, paper, value))
    names, known = list(GROWTH), list(PUBLISHED)
    panels = []
    for field in ("finished", "queue_p95", "per_token"):
        text, unit = TEXT[field]
        curves = [
            Curve("measured", names, [results[name][field] for name in names]),
            Curve("published", known, [PUBLISHED[name][field] for name in known], True),
        ]
        panels.append(Panel(text, "", f"{text} [{unit}]".replace(" []", ""), curves, "bar"))
    return claims, panels


EXPERIMENT = Experiment(
    "growth",
    "Dynamic page growth",
    "text-generation-inference (TGI), pull request #2024, re-allocate pages dynamically",
    "We simulate 10 arrivals per second for 60 s (a rate that follows from the source's counts of finished, "
    "dropped and open requests), with at most 100 in the system and a max_new_tokens of 2048. The source "
    "names neither chip nor model; we use Llama-3-8B on an A10G (24 GB), a size that fits the source's "
    "fastest token (39 ms). Outputs end after 160 tokens on average; the source's finished requests averaged "
    "129 to 147. Prompts join as in TGI, with its defaults of 2024: when 0.3 times as many wait as run, or "
    "after 20 tokens without any, up to 4,096 tokens of prompts at a time.",
    grid(load, GROWTH) | {("half as fast", name): partial(load, name, HALF) for name in PUBLISHED},
    conclude,
    chooses=("page_growth", "prefill_first"),
)
