"""An executor without a model: each KV slot remembers which token at which position was written there.

Reading a sequence through its block table must give back exactly its tokens; a block handed out twice,
a missed copy, a swap in the wrong order or a prefix registered before it is computed shows up as
foreign content. The next token is a hash of what was *read*, so that garbage also changes the output.

`ToyEngine` steps scheduler and executor together and checks every plan and every invariant; `alone` is
the oracle: the same decoding methods, which are the real ones, on plain lists, without blocks, batches or a
scheduler.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from minipaged.decoding.beam_search import BeamSearch
from minipaged.decoding.methods import SamplingMethod
from minipaged.decoding.params import BeamSearchParams, SamplingParams
from minipaged.decoding.stopping import StopChecker
from minipaged.memory import (
    BlockAllocator,
    KVManager,
    OnDemand,
    PageGrowth,
    PrefixCache,
    SwapSpace,
)
from minipaged.memory.prefix_cache import HashFunction
from minipaged.scheduling import (
    BatchPolicy,
    ChunkedPrefill,
    FCFSScheduler,
    PreemptionPolicy,
    Recompute,
    Request,
    Sample,
    StepPlan,
    StepResult,
)
from minipaged.simulation.baselines.prefix_unaware import PrefixUnawareKVManager


def content(position: int, token_id: int) -> int:
    """What the slot of a token holds."""
    return position << 16 | token_id


class ToyExecutor:
    """Follows plans on lists instead of tensors. A slot that was never written, or poisoned, is None."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int, vocabulary: int = 50) -> None:
        self.block_size = block_size
        self.vocabulary = vocabulary
        self.device: list[int | None] = [None] * (num_blocks * block_size)
        self.host: list[int | None] = [None] * (num_host_blocks * block_size)
        self.num_tokens_computed = 0
        self.num_copies = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Move, write, read, and answer with hashes of what was read."""
        self._copy(self.device, self.host, plan.swap_out)
        self._copy(self.host, self.device, plan.swap_in)
        self._copy(self.device, self.device, plan.copies)
        self.num_copies += len(plan.copies)
        for sequence, start, num_tokens, _ in plan.scheduled:
            for position in range(start, start + num_tokens):
                self.device[sequence.table.slot(position)] = content(position, sequence.token_ids[position])
            self.num_tokens_computed += num_tokens
        answers = []
        for sequence, start, num_tokens, candidates in plan.scheduled:
            stop = start + num_tokens
            read = [self.device[slot] for slot in sequence.table.slots(0, stop)]
            expected = [content(i, token) for i, token in enumerate(sequence.token_ids[:stop])]
            assert read == expected, f"{sequence} reads foreign KV: {read} for {expected}"
            if candidates:
                assert stop == len(sequence.token_ids), "sampled before the last token was computed"
                answers.append(next_tokens(read, candidates, self.vocabulary))
        return StepResult(answers)

    def fail(self, plan: StepPlan) -> None:
        """The step dies half way: whatever it was to write may hold anything now."""
        for sequence, start, num_tokens, _ in plan.scheduled:
            for slot in sequence.table.slots(start, start + num_tokens):
                self.device[slot] = None
        for memory, moves in (
            (self.host, plan.swap_out),
            (self.device, plan.swap_in),
            (self.device, plan.copies),
        ):
            for _, block in moves:
                memory[block * self.block_size : (block + 1) * self.block_size] = [None] * self.block_size

    def _copy(self, source: list, destination: list, copies: Iterable[tuple[int, int]]) -> None:
        size = self.block_size
        read = [(to, source[block * size : (block + 1) * size]) for block, to in copies]
        assert len({to for to, _ in read}) == len(read), "two copies go to one block"
        for block, values in read:
            destination[block * size : (block + 1) * size] = values


def next_tokens(read: Iterable[int], candidates: int, vocabulary: int) -> Sample:
    """What the toy model says after the given content: distinct tokens, best first."""
    rng = random.Random(crc32(array("q", read).tobytes()))
    candidates = min(candidates, vocabulary)
    token_ids = rng.sample(range(vocabulary), candidates)
    logprobs = sorted((-rng.random() * 3 for _ in range(candidates)), reverse=True)
    return Sample(token_ids, logprobs)


def samples(n: int = 1, stop: int | None = None, **options: Any) -> SamplingMethod:
    """n samples; they end at `max_num_tokens` or at the token `stop`."""
    params = SamplingParams(n=n, stop_token_ids=stop_tokens(stop), max_tokens=None, **options)
    return SamplingMethod(params, StopChecker(params, ()))


def beams(width: int, stop: int | None = None, **options: Any) -> BeamSearch:
    """Beam search; without an end token, all beams end together."""
    options.setdefault("num_return_sequences", width)
    params = BeamSearchParams(beam_width=width, stop_token_ids=stop_tokens(stop), max_tokens=None, **options)
    return BeamSearch(params, StopChecker(params, ()))


def stop_tokens(stop: int | None) -> list[int]:
    """The token as a list, or none."""
    return [] if stop is None else [stop]


def toy_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    num_host_blocks: int = 0,
    caching: bool = False,
    growth: PageGrowth | None = None,
    policy: BatchPolicy | None = None,
    preemption: PreemptionPolicy | None = None,
    max_num_seqs: int = 64,
    budget: int = 64,
    max_model_len: int = 1000,
    watermark: float = 0.0,
    order: Iterable[int] | None = None,
    prefix_aware: bool = True,
    hash_function: HashFunction = hash,
) -> FCFSScheduler:
    """A scheduler over real memory parts."""
    allocator = BlockAllocator(num_blocks, order)
    manager = KVManager if prefix_aware else PrefixUnawareKVManager
    kv = manager(
        allocator,
        block_size,
        growth or OnDemand(),
        PrefixCache(allocator, block_size, hash_function) if caching else None,
        SwapSpace(num_host_blocks, num_blocks) if num_host_blocks else None,
        watermark,
    )
    return FCFSScheduler(
        kv, policy or ChunkedPrefill(), preemption or Recompute(), max_num_seqs, budget, max_model_len
    )


class ToyEngine:
    """Scheduler and toy executor, stepped together; invariants are checked after every step."""

    def __init__(self, scheduler: FCFSScheduler, vocabulary: int = 50) -> None:
        self.scheduler = scheduler
        swap = scheduler.kv.swap_space
        self.executor = ToyExecutor(
            scheduler.kv.allocator.num_blocks,
            swap.allocator.num_blocks if swap else 0,
            scheduler.kv.block_size,
            vocabulary,
        )
        self.requests: list[Request] = []
        self.plans: list[StepPlan] = []

    def add(self, prompt: Iterable[int], max_tokens: int = 8, method=None, salt: str = "") -> Request:
        """Queue a request."""
        prompt = list(prompt)
        limit = min(len(prompt) + max_tokens, self.scheduler.max_model_len)
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            method or samples(),
            None,
            limit,
            self.scheduler.kv.new_table(),
            salt,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> StepPlan:
        """Schedule, execute, commit, check. `meanwhile` runs while the step is in flight."""
        plan = self._schedule()
        result = self.executor.execute(plan)
        meanwhile()
        self.scheduler.commit(plan, result)
        self.scheduler.check_invariants()
        return plan

    def fail_step(self, meanwhile: Callable[[], None] = lambda: None) -> StepPlan:
        """Schedule, die while executing, roll back, check."""
        plan = self._schedule()
        self.executor.fail(plan)
        return self._roll_back(plan, meanwhile)

    def fail_commit(self, meanwhile: Callable[[], None] = lambda: None) -> StepPlan:
        """Schedule, execute, die after the decoding methods have chosen, roll back, check."""
        plan = self._schedule()
        answers = iter(self.executor.execute(plan).samples)
        for request in plan.sampling:
            request.method.advance(request, [next(answers) for _ in request.sequences])
        return self._roll_back(plan, meanwhile)

    def _roll_back(self, plan: StepPlan, meanwhile: Callable[[], None]) -> StepPlan:
        meanwhile()
        self.scheduler.roll_back(plan)
        self.scheduler.check_invariants()
        return plan

    def _schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.scheduler.check_invariants()
        check_plan(plan, self.scheduler)
        self.plans.append(plan)
        return plan

    def run(self, max_steps: int = 10_000) -> list[list[list[int]]]:
        """Step until nothing is left; the output tokens of every completion of every request."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                kv = self.scheduler.kv
                assert kv.num_free == kv.allocator.num_blocks, "blocks are held after the last request"
                return [outputs(request) for request in self.requests]
            self.step()
        unfinished = [*self.scheduler.running, *self.scheduler.swapped, *self.scheduler.waiting]
        raise AssertionError(f"not finished after {max_steps} steps: {unfinished}")

    def alone(self) -> list[list[list[int]]]:
        """The oracle of `run`: what each request outputs by itself."""
        vocabulary = self.executor.vocabulary
        return [
            alone(r.prompt_token_ids, r.max_num_tokens - len(r.prompt_token_ids), r.method, vocabulary)
            for r in self.requests
        ]


def check_plan(plan: StepPlan, scheduler: FCFSScheduler) -> None:
    """What every plan must obey, whatever the settings."""
    scheduled = sum(s.num_tokens for s in plan.scheduled)
    assert plan.num_tokens == scheduled, (
        f"{scheduled} tokens are scheduled, the plan counts {plan.num_tokens}"
    )
    budget = scheduler.max_num_batched_tokens
    assert plan.num_tokens <= budget, f"the step computes {plan.num_tokens} tokens, its budget is {budget}"
    assert len({id(s.sequence) for s in plan.scheduled}) == len(plan.scheduled), (
        "a sequence is scheduled twice"
    )
    for sequence, start, num_tokens, _ in plan.scheduled:
        assert num_tokens >= 1, f"{num_tokens} tokens are scheduled of {sequence}"
        computed = sequence.num_computed_tokens
        assert start == computed, f"{sequence} goes on at token {start}, {computed} are computed"
        assert sequence.request in scheduler.running, f"{sequence} is computed, its request does not run"
    sampled = [s.sequence for s in plan.scheduled if s.num_candidates]
    assert sampled == [s for request in plan.sampling for s in request.sequences], "half a group is sampled"
    started = [event.request_id for event in plan.events if event.kind in ("admitted", "resumed")]
    assert not (plan.num_preempted and started), "admitted and preempted in one step"
    holders = [r for r in scheduler.running if any(s.table.blocks for s in r.sequences)]
    held = sum(len(r.sequences) for r in holders)
    assert held <= scheduler.max_num_seqs, f"{held} sequences hold blocks of at most {scheduler.max_num_seqs}"
    for queue in (scheduler.waiting, scheduler.running, scheduler.swapped):
        assert [r.arrival for r in queue] == sorted(r.arrival for r in queue), "not in order of arrival"
    if scheduler.swapped:
        late = [r for r in scheduler.running if r.arrival > scheduler.swapped[0].arrival]
        assert not [r for r in late if r.request_id in started], "admitted while something is swapped out"
    if isinstance(scheduler.kv.growth, OnDemand):
        for sequence in (s for r in scheduler.running for s in r.sequences):
            waste = sequence.table.capacity - sequence.table.num_tokens
            assert waste < scheduler.kv.block_size, f"{sequence} wastes a whole block"


def outputs(request: Request) -> list[list[int]]:
    """Generated tokens of each completion, in the order of their sample index."""
    return [c.output_token_ids for c in sorted(request.completions, key=lambda c: c.index)]


def ranked(request: Request) -> list[list[int]]:
    """Generated tokens of the completions that a user gets, in their order."""
    return [c.output_token_ids for c in request.method.rank(request)]


def alone(prompt: Iterable[int], max_tokens: int, method, vocabulary: int = 50) -> list[list[int]]:
    """The oracle: the outputs of a request by itself, on lists of tokens, without blocks or batches."""
    return outputs(run_alone(prompt, max_tokens, method, vocabulary))


def run_alone(prompt: Iterable[int], max_tokens: int, method, vocabulary: int = 50) -> Request:
    """The request behind `alone`, finished."""
    prompt = list(prompt)
    request = Request("alone", prompt, method, None, len(prompt) + max_tokens, table=None)
    while request.sequences:
        candidates = method.num_candidates(request)
        answers = [
            next_tokens([content(*slot) for slot in enumerate(s.token_ids)], candidates, vocabulary)
            for s in request.sequences
        ]
        live = []
        for branch in method.advance(request, answers):
            child = branch.parent.fork(table=None)
            child.append(branch)
            (request.completions if branch.finish_reason else live).append(child)
        request.sequences = live
    return request


def kv_sequence(kv: KVManager, token_ids: Iterable[int], max_num_tokens: int = 1000, salt: str = ""):
    """A sequence as far as the manager looks at it; nothing computed, an empty table."""
    return SimpleNamespace(
        token_ids=array("i", token_ids),
        num_computed_tokens=0,
        max_num_tokens=max_num_tokens,
        table=kv.new_table(),
        block_hashes=[],
        num_registered_blocks=0,
        last_registered=None,
        cache_salt=salt,
    )


def tokens(*values: int) -> array:
    """Token ids as sequences hold them."""
    return array("i", values)
