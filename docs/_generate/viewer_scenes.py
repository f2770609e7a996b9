"""The scenes of the viewer: traces that the real engine writes when the documentation is built.

Scheduler, memory manager, block tables and decoding methods are the project's own; only the model is a script
that says which tokens come next. Each scene becomes `docs/scenes/NAME.jsonl`, which the page loads on demand.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from pages import responsive

from minipaged.components import Components
from minipaged.config import EngineConfig
from minipaged.decoding.params import BeamSearchParams, DecodingParams, SamplingParams
from minipaged.engine import Engine
from minipaged.memory import BlockAllocator
from minipaged.playground.simulated import SimulatedRun
from minipaged.scheduling import FCFSScheduler, PrefillFirst, Recompute, Sample, StepPlan, StepResult
from minipaged.simulation.baselines.contiguous import ContiguousKVManager, reserve_max
from minipaged.simulation.costs import CostModel
from minipaged.simulation.executor import SimulatedExecutor
from minipaged.simulation.run import Simulation
from minipaged.simulation.systems import OPT_13B
from minipaged.simulation.workloads import Arrival, Lengths
from minipaged.viewer.pictures.runs import NoModel, modelless, run
from minipaged.viewer.pictures.tables import tables_svg
from minipaged.viewer.recorder import StepRecord
from minipaged.viewer.replay import read_trace
from minipaged.viewer.trace import TraceWriter

SCORE = ["Four", "score", "and", "seven", "years", "ago", "our", "fathers", "brought", "forth", "on"]
BEST = ["It", "was", "the", "best", "of", "times", "it"]
WORDS = tuple(dict.fromkeys((*SCORE, *BEST, "mothers", "gave")))
PLAIN = {"enable_prefix_caching": False, "enable_chunked_prefill": False}

Requests = Mapping[str, tuple[Sequence[int], DecodingParams]]


class Scene(NamedTuple):
    """What a page says of a scene, and how it is recorded."""

    title: str
    start: int  # the step that is shown first
    record: Callable[[Path], None]


class Script(NoModel):
    """Says the next words of each request; `texts`: request id -> the words of each of its sequences."""

    def __init__(self, num_blocks: int, texts: Mapping[str, Sequence[Sequence[str]]]) -> None:
        super().__init__(4, num_blocks, 0)
        self.texts = texts

    def execute(self, plan: StepPlan) -> StepResult:
        """The next word of every sequence; of a prompt that forks, the next of each sample."""
        samples = []
        for sequence, start, num_tokens, count in plan.scheduled:
            texts = self.texts[sequence.request.request_id]
            own = texts if count > 1 else [texts[sequence.index]]
            tokens = [WORDS.index(text[start + num_tokens]) for text in own[: max(1, count)]]
            samples.append(Sample(tokens, [-1.0] * len(tokens)))
        return StepResult(samples)


class FreshFirst(BlockAllocator):
    """Hands out blocks that were never used before those that came back, as the figure numbers them."""

    def reclaim(self, block: int) -> None:
        """Put an evictable block back at the far end of the free list."""
        super().reclaim(block)
        self._free.insert(0, self._free.pop())


class Beams(NoModel):
    """Scores candidates so that the next beams are those of `parents`: for each step, whom each continues."""

    def __init__(self, num_blocks: int, parents: Mapping[int, Sequence[int]]) -> None:
        super().__init__(4, num_blocks, 0)
        self.parents = parents

    def execute(self, plan: StepPlan) -> StepResult:
        """The chosen candidates get the best totals, in their order."""
        samples = []
        chosen = self.parents.get(plan.step, range(len(plan.scheduled)))
        for beam, (sequence, start, num_tokens, count) in enumerate(plan.scheduled):
            places = [place for place, parent in enumerate(chosen) if parent == beam]
            tokens = [start + num_tokens + 100 * place for place in places]
            totals = [-(plan.step + 1.0) - 0.1 * place for place in places]
            others = count - len(places)
            tokens += range(500 + 50 * beam, 500 + 50 * beam + others)
            totals += [-1000.0] * others
            samples.append(Sample(tokens, [total - sequence.cumulative_logprob for total in totals]))
        return StepResult(samples)


def play(path: Path, engine: Engine, requests: Requests, arrivals: Mapping[str, int] = {}) -> None:
    """Record requests to their end; `arrivals`: id -> step, if not the first."""
    engine.on_committed.append(lambda *_: engine.check_invariants())
    with TraceWriter(path, engine):
        engine.detokenizer = None  # (the trace has taken its words; nothing is generated as text)
        run(engine, requests, arrivals)


def _engine(executor: NoModel, order: Sequence[int], allocator: type = BlockAllocator) -> Engine:
    config = EngineConfig(block_size=4, disable_log_stats=True, max_num_batched_tokens=16, **PLAIN)
    return Engine(executor, config, components=Components(allocator=partial(allocator, order=order)))


def _scripted(order: Sequence[int], num_blocks: int, texts: Mapping[str, Sequence[Sequence[str]]]) -> Engine:
    engine = _engine(Script(num_blocks, texts), order)
    # Only the trace asks for texts (see `play`).
    words = SimpleNamespace(token=lambda token: f"{WORDS[token]} ", tokenizer=None)
    engine.detokenizer = words  # type: ignore[assignment]
    return engine


def _prompt(words: Sequence[str]) -> list[int]:
    return [WORDS.index(word) for word in words]


def _greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def fig6(path: Path) -> None:
    """Blocks 7, 1 and 3 of nine."""
    play(path, _scripted((7, 1, 3), 9, {"A": [SCORE]}), {"A": (_prompt(SCORE[:7]), _greedy(3))})


def fig7(path: Path) -> None:
    """A second request in blocks 5 and 2."""
    engine = _scripted((7, 1, 5, 2, 3), 9, {"A": [SCORE], "B": [BEST]})
    requests = {"A": (_prompt(SCORE[:7]), _greedy(3)), "B": (_prompt(BEST[:5]), _greedy(2))}
    play(path, engine, requests, arrivals={"B": 2})


def fig8(path: Path) -> None:
    """Two samples; block 1 is copied to block 3."""
    first, second = ([*SCORE[:7], *words] for words in (("fathers", "brought"), ("mothers", "gave")))
    engine = _scripted((7, 1, 3), 9, {"A": [first, second]})
    params = SamplingParams(n=2, temperature=1.0, max_tokens=2, ignore_eos=True)
    play(path, engine, {"A": (_prompt(SCORE[:7]), params)})


def fig9(path: Path) -> None:
    """Four beams in blocks 0 to 8; their children, which all continue beams 2 and 3, in 9 to 12."""
    # Blocks 13 to 16 are those of beams that the figure does not show any more.
    order = (0, 1, 2, 13, 14, 3, 15, 16, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    parents = {0: (0, 0, 0, 0), 4: (0, 0, 0, 1), 8: (0, 0, 0, 3), 12: (1, 1, 2, 2)}
    engine = _engine(Beams(17, parents), order, FreshFirst)
    params = BeamSearchParams(beam_width=4, max_tokens=16, ignore_eos=True)
    play(path, engine, {"beam": (range(4), params)})


def prefix_hit(path: Path) -> None:
    """B begins like A, which has ended; C like B, which runs; D needs blocks that only the cache holds."""
    prefix = list(range(12))
    requests: Requests = {
        "A": ([*prefix, 90, 91], _greedy(3)),
        "B": ([*prefix, 80, 81, 82], _greedy(8)),
        "C": ([*prefix, 70, 71], _greedy(4)),
        "D": (range(200, 222), _greedy(4)),
    }
    play(path, modelless(12, max_num_batched_tokens=32), requests, {"B": 4, "C": 6, "D": 8})


def chunked_prefill(path: Path) -> None:
    """A long prompt is cut to what the decodes leave of a budget of 16 tokens."""
    requests: Requests = {
        "A": (range(6), _greedy(12)),
        "B": (range(20, 30), _greedy(10)),
        "C": (range(100, 140), _greedy(4)),
        "D": (range(200, 206), _greedy(5)),
    }
    engine = modelless(32, max_num_batched_tokens=16, enable_prefix_caching=False)
    play(path, engine, requests, {"C": 3, "D": 4})


def _preempted(path: Path, mode: str) -> None:
    prompts = {"A": range(9), "B": range(50, 59), "C": range(100, 109)}
    engine = modelless(12, 6, preemption_mode=mode, enable_prefix_caching=False, max_num_batched_tokens=32)
    play(path, engine, {name: (prompt, _greedy(12)) for name, prompt in prompts.items()})


def _grown(path: Path, growth: str) -> None:
    # Each may generate 24 tokens, but the engine does not know that most of them end early.
    ends = {"A": 7, "B": 20, "C": 5, "D": 9, "E": 4, "F": 24}
    requests: Requests = {}
    for number, (name, count) in enumerate(ends.items()):
        prompt = range(100 * number, 100 * number + 5 + number)
        requests[name] = (prompt, _greedy(24, stop_token_ids=(len(prompt) + count - 1,)))
    play(
        path,
        modelless(24, page_growth=growth, enable_prefix_caching=False, max_num_batched_tokens=64),
        requests,
    )


LENGTHS = ((6, 9), (4, 20), (9, 5), (5, 14), (7, 6), (3, 17), (8, 8), (6, 12))
"""Prompt and output tokens of the requests that meet both Orca and paging."""


def orca(path: Path) -> None:
    """Orca (Max): a region for the longest sequence there can be, 32 slots, for every request."""
    kv = ContiguousKVManager(128, 32, reserve_max)
    scheduler = FCFSScheduler(kv, PrefillFirst(), Recompute(), 256, 64, 32)
    costs = CostModel(OPT_13B.deployment, 1, paged=False)
    simulation = Simulation(scheduler, SimulatedExecutor(costs))
    with TraceWriter(path, simulation.engine):
        for number, lengths in enumerate(LENGTHS):
            simulation.add(Arrival(number, 0.0, Lengths(*lengths)))
        simulation.advance()


def paging(path: Path) -> None:
    """The same requests and the same 128 slots, in blocks of 4."""
    requests: Requests = {
        str(number): (range(100 * number, 100 * number + prompt), _greedy(output))
        for number, (prompt, output) in enumerate(LENGTHS)
    }
    play(path, modelless(32, max_num_batched_tokens=64, **PLAIN), requests)


def playground(path: Path) -> None:
    """What the playground shows before the engine is loaded; another run than its questions ask about."""
    simulated = SimulatedRun({"num_blocks": 24, "requests": 12, "rate": 4, "preemption_mode": "swap"})
    path.write_text("\n".join(simulated.advance(10_000)))


SCENES = {
    "fig6": Scene("Figure 6: blocks 7, 1 and 3", 0, fig6),
    "fig7": Scene("Figure 7: two requests in one pool", 3, fig7),
    "fig8": Scene("Figure 8: two samples, copy-on-write", 1, fig8),
    "fig9": Scene("Figure 9: beam search", 12, fig9),
    "prefix-hit": Scene("Prefix hits, and what is evicted for a new prompt", 4, prefix_hit),
    "chunked-prefill": Scene("Chunked prefill beside decodes", 3, chunked_prefill),
    "swap": Scene("Preemption by swapping", 8, lambda path: _preempted(path, "swap")),
    "recompute": Scene("Preemption by recomputation", 8, lambda path: _preempted(path, "recompute")),
    "reserve": Scene("Everything reserved at admission", 0, lambda path: _grown(path, "reserve")),
    "chunked": Scene("Several blocks at a time", 0, lambda path: _grown(path, "chunked")),
    "on-demand": Scene("A block at a time", 0, lambda path: _grown(path, "on_demand")),
    "orca": Scene("Orca: a region for the longest sequence, for every request", 0, orca),
    "paging": Scene("Paging: the same requests in the same memory", 0, paging),
    "playground": Scene("Twelve requests in a pool of 24 blocks", 44, playground),
}


@functools.cache
def trace(name: str) -> str:
    """The trace of a scene; KeyError if there is none of that name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.jsonl")
        SCENES[name].record(path)
        return path.read_text()


def recorded(name: str) -> tuple[list[StepRecord], dict[int, str]]:
    """The records of a scene, and the texts of its tokens, read from its trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.jsonl")
        path.write_text(trace(name))
        whole = read_trace(path)
        return list(whole), whole.texts


def scene_html(name: str) -> str:
    """A scene for a page; without scripts, and on paper, one picture of it."""
    scene = SCENES[name]
    records, texts = recorded(name)
    view = next(record.planned for record in records if record.step == scene.start)
    picture = responsive(tables_svg(view, lambda token: texts.get(token, f"{token} ")))
    title = escape(scene.title)
    sheet = f'<div class="sheet" tabindex="0" role="group" aria-label="{title}">{picture}</div>'
    return (
        f'<figure class="scene" data-scene="{name}" data-start="{scene.start}" aria-label="{title}">'
        f'<div class="scene-stage">{sheet}</div><figcaption><strong>{title}.</strong> '
        "A trace of the engine, made when this page was built.</figcaption></figure>\n"
    )
