"""`minipaged bench`: run a workload through the engine and measure it.

It is decoded greedily with EOS ignored; all requests arrive at t = 0, or as a Poisson process. Latencies are
those of `metrics.py`, counted from when a request was due (it may be seen only at the end of a step);
percentiles are nearest-rank. CPU seconds are the process's; with one thread, a busy machine affects them
least.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

from minipaged.components import build_scheduler
from minipaged.decoding.params import SamplingParams
from minipaged.engine import Engine
from minipaged.learn.overrides import components_from
from minipaged.llm import LLM
from minipaged.metrics import quantile
from minipaged.scheduling import Request, ScheduledSequence, StepPlan
from minipaged.viewer.profile import StepProfile
from minipaged.workload import WorkloadError, WorkloadItem


def tokenized(llm: LLM, items: list[WorkloadItem]) -> list[WorkloadItem]:
    """The same requests with token ids. Raises `WorkloadError` for a text without a tokenizer."""
    params = SamplingParams()

    def ids(number: int, item: WorkloadItem) -> list[int]:
        if "prompt" not in item:
            return item["prompt_token_ids"]
        try:
            return llm.tokenize(item["prompt"], params)[0]
        except ValueError as error:
            raise WorkloadError(f"entry {number}: {error}") from error

    return [
        {"prompt_token_ids": ids(number, item), "max_tokens": item["max_tokens"]}
        for number, item in enumerate(items)
    ]


class PhaseClock:
    """Seconds and tokens of the steps that compute prompts (prefill), and of those that do not (decode)."""

    def __init__(self) -> None:
        self.seconds = {"prefill": 0.0, "decode": 0.0}
        self.tokens = {"prefill": 0, "decode": 0}
        self.decode_steps = self.decode_kv_tokens = 0
        self._phase = "decode"
        self._plan = StepPlan(0)

    def plan(self, plan: StepPlan) -> None:
        """Called before each step: decodes beside a prompt's chunk count for neither."""
        chunks = list(filter(_is_chunk, plan.scheduled))
        self._phase = "prefill" if chunks else "decode"
        self.tokens[self._phase] += sum(item.num_tokens for item in chunks or plan.scheduled)
        self._plan = plan
        if not chunks:
            self.decode_steps += 1
            context = sum(item.start + item.num_tokens for item in plan.scheduled)
            self.decode_kv_tokens += min(context, self._kv.num_used * self._kv.block_size)  # shared ones once

    def end(self, seconds: float) -> None:
        """Called after each step, when it is known which draft tokens of the plan were rejected."""
        self.seconds[self._phase] += seconds
        drafts = [event.detail for event in self._plan.events if event.kind == "drafted"]
        self.tokens["decode"] -= sum(draft["tokens"] - draft["accepted"] for draft in drafts)

    @contextmanager
    def watch(self, engine: Engine) -> Iterator[None]:
        """Observe each plan of an engine inside the `with`."""
        self._kv = engine.scheduler.kv
        engine.on_planned.append(self.plan)
        try:
            yield
        finally:
            engine.on_planned.remove(self.plan)

    def rate(self, phase: str) -> float | None:
        """Tokens per second; None if there was no such step."""
        return self.per_second(self.tokens[phase], phase)

    def per_second(self, count: int, phase: str) -> float | None:
        """The same of something else in the steps of a phase."""
        return count / self.seconds[phase] if self.seconds[phase] else None


def _is_chunk(item: ScheduledSequence) -> bool:
    """Whether it computes tokens of a prompt, or again those of a preempted request."""
    return item.num_tokens > 1 or item.start < item.sequence.num_prompt_tokens


def repeat_workload(
    llm: LLM, items: list[WorkloadItem], repeat: int, profile: StepProfile | None = None, **options: Any
) -> tuple[dict[str, Any], dict[str, tuple[float, float]]]:
    """Run a workload `repeat` times after one run that is not counted.

    Returns the median of each field (the tokens are those of the last run), its minimum and maximum; a field
    that no run reports is None.
    `profile` gets the seconds of all runs that count; `options` are those of `run_workload`.
    """
    if repeat < 1:
        raise WorkloadError(f"repeat is {repeat}; give at least 1")
    run_workload(llm, items, **options)
    runs = [run_workload(llm, items, profile=profile, **options) for _ in range(repeat)]
    columns = {
        name: [run[name] for run in runs] for name in runs[0] if None not in (run[name] for run in runs)
    }
    tokens = columns.pop("tokens")[-1]
    median = {name: _median(values) for name, values in columns.items()}
    spread = {name: (min(values), max(values)) for name, values in columns.items()}
    return dict.fromkeys(runs[0]) | median | {"tokens": tokens}, spread


def _median(values: list[Any]) -> int | float:
    """A count stays one if all runs agree."""
    return values[0] if len(set(values)) == 1 else statistics.median(values)


def check_workload(engine: Engine, items: list[WorkloadItem]) -> None:
    """Raise `WorkloadError`, with the number of the entry, unless this engine can run all of them."""
    for number, item in enumerate(items):
        params = SamplingParams(temperature=0, max_tokens=item["max_tokens"])
        try:
            request = engine.make_request(f"check-{number}", item["prompt_token_ids"], params)
        except ValueError as error:
            raise WorkloadError(f"entry {number}: {error}") from error
        wanted = len(item["prompt_token_ids"]) + item["max_tokens"]
        if wanted > request.max_num_tokens:
            raise WorkloadError(
                f"entry {number} has {wanted} tokens, prompt and output together, but max_model_len is "
                f"{request.max_num_tokens}; ask for fewer, or raise max_model_len"
            )
        kv = engine.scheduler.kv
        room = kv.allocator.num_blocks * kv.block_size
        if wanted > room + 1:  # (the last token is never stored)
            raise WorkloadError(
                f"entry {number} has {wanted} tokens, prompt and output together, but the pool has room for "
                f"{room}; ask for fewer, or raise num_blocks or kv_cache_memory"
            )


def check_contracts(llm: LLM, items: list[WorkloadItem], use: Mapping[str, Any]) -> None:
    """Run a workload with the contracts of these overrides checked; from then on, nothing checks them.

    So that what is measured is the override, not its contract.
    """
    run_workload(llm, items)
    engine = llm.engine
    plain = components_from(use, watch=False)
    engine.components = replace(engine.components, **{name: getattr(plain, name) for name in use})
    engine.scheduler = build_scheduler(engine.config, engine.executor, engine.components)
    if plain.paged_attention is not None:
        attending: Any = engine.executor
        attending.use_attention(plain.paged_attention)


def run_workload(
    llm: LLM,
    items: list[WorkloadItem],
    *,
    rate: float | None = None,
    seed: int = 0,
    profile: StepProfile | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Run a workload once, after a warm-up and with an empty prefix cache.

    `items` have token ids; `rate` is arrivals per second; `progress` gets the number of finished requests.
    Returns the fields of `minipaged bench --json` (None: there was nothing to measure), and "tokens": the
    generated ids per request.
    """
    engine = llm.engine
    check_workload(engine, items)
    # A warm-up, so that libraries choose their kernels and memory is touched.
    prompts = [{"prompt_token_ids": item["prompt_token_ids"]} for item in items[:32]]
    lengths = [min(2, item["max_tokens"]) for item in items[:32]]
    llm.generate(prompts, [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths])
    engine.reset_prefix_cache()
    engine.reset_metrics()
    engine.metrics.time_to_first_token = deque()  # all of them, not only the last `KEEP`
    engine.metrics.inter_token_latency = deque()
    rng = random.Random(seed)
    gaps = (rng.expovariate(rate) if rate else 0.0 for _ in items[1:])
    arrivals = deque(zip(accumulate(gaps, initial=0.0), items))
    requests: list[Request] = []
    num_finished = 0
    phases = PhaseClock()
    with phases.watch(engine), profile.watch(engine) if profile else nullcontext():
        start, cpu_start = engine.clock(), time.process_time()
        while arrivals or engine.has_unfinished:
            now = engine.clock() - start
            while arrivals and arrivals[0][0] <= now:
                due, item = arrivals.popleft()
                params = SamplingParams(temperature=0, max_tokens=item["max_tokens"], ignore_eos=True)
                request = engine.add_request(f"bench-{len(requests)}", item["prompt_token_ids"], params)
                request.arrival_time = start + due  # (and not the end of the step that it came in)
                requests.append(request)
            if engine.has_unfinished:
                if profile:
                    profile.start()
                began = engine.clock()
                num_finished += sum(request.is_finished for request in engine.step())
                progress(num_finished)
                phases.end(engine.clock() - began)
            else:
                time.sleep(max(0.0, arrivals[0][0] - now))
        wall, cpu = engine.clock() - start, time.process_time() - cpu_start
    for number, request in enumerate(requests):
        if request.error is not None:  # (without it, the others would be faster)
            raise WorkloadError(f"entry {number} failed: {request.error}")
    tokens = [request.completions[0].output_token_ids for request in requests]
    metrics, count = engine.metrics, sum(map(len, tokens))
    itl = metrics.inter_token_latency
    is_all = llm.config.num_ranks == 1  # (the CPU time of other ranks is not known)
    return {
        "wall_s": wall,
        "cpu_s": cpu if is_all else None,
        "requests": len(items),
        "prompt_tokens": sum(len(item["prompt_token_ids"]) for item in items),
        "output_tokens": count,
        "out_tok_per_s": count / wall,
        "out_tok_per_cpu_s": count / cpu if cpu and is_all else None,
        "prefill_tok_per_s": phases.rate("prefill"),
        "decode_tok_per_s": phases.rate("decode"),
        "decode_steps_per_s": phases.per_second(phases.decode_steps, "decode"),
        "decode_kv_tokens": phases.decode_kv_tokens / phases.decode_steps if phases.decode_steps else None,
        "steps": metrics.steps,
        "ttft_ms_p50": 1e3 * quantile(metrics.time_to_first_token, 0.5),
        "ttft_ms_p95": 1e3 * quantile(metrics.time_to_first_token, 0.95),
        "itl_ms_p50": 1e3 * quantile(itl, 0.5) if itl else None,
        "itl_ms_p99": 1e3 * quantile(itl, 0.99) if itl else None,
        "preemptions": metrics.num_preemptions,
        "draft_tokens": metrics.draft_tokens,
        "accepted_tokens": metrics.accepted_tokens,
        "prefix_cache_hit_tokens": metrics.prefix_cache_hits,
        "peak_kv_blocks": metrics.peak_kv_blocks,
        "kv_waste": metrics.kv_waste,
        "tokens": tokens,
    }
