"""An executor without a model: each KV slot remembers which token at which position was written there.

Reading a sequence through its block table must give back exactly its tokens; a block handed out twice,
a missed copy, a swap in the wrong order or a prefix published before it is computed shows up as
foreign content. The next token is a hash of what was *read*, so that garbage also changes the output.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from zlib import crc32

from minipaged.memory import (
    BlockAllocator,
    KVManager,
    OnDemand,
    PageGrowth,
    PrefixCache,
    SwapSpace,
)
from minipaged.scheduling import (
    BatchPolicy,
    Branch,
    ChunkedPrefill,
    FCFSScheduler,
    PreemptionPolicy,
    Recompute,
    Request,
    Sample,
    StepPlan,
    StepResult,
)

Content = tuple[int, int]  # position, token id


class ToyExecutor:
    """Follows plans on lists instead of tensors."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int, vocabulary: int = 50) -> None:
        self.block_size = block_size
        self.vocabulary = vocabulary
        self.device: list[Content | None] = [None] * (num_blocks * block_size)
        self.host: list[Content | None] = [None] * (num_host_blocks * block_size)
        self.num_tokens_computed = 0
        self.num_copies = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Move, write, read, and answer with hashes of what was read."""
        self._copy(self.device, self.host, plan.swap_out)
        self._copy(self.host, self.device, plan.swap_in)
        self._copy(self.device, self.device, plan.copies)
        self.num_copies += len(plan.copies)
        for sequence, start, num_tokens, _ in plan.chunks:
            assert num_tokens >= 1, "an empty chunk"
            for position in range(start, start + num_tokens):
                self.device[sequence.table.slot(position)] = (position, sequence.token_ids[position])
            self.num_tokens_computed += num_tokens
        samples = []
        for sequence, start, num_tokens, candidates in plan.chunks:
            stop = start + num_tokens
            read = [self.device[slot] for slot in sequence.table.slots(0, stop)]
            assert read == list(enumerate(sequence.token_ids[:stop])), f"{sequence} reads foreign KV"
            if candidates:
                assert stop == len(sequence.token_ids), "sampled before the last token was computed"
                samples.append(next_tokens(read, candidates, self.vocabulary))
        return StepResult(samples)

    def _copy(self, source: list, destination: list, copies: Iterable[tuple[int, int]]) -> None:
        size = self.block_size
        content = [(to, source[block * size : (block + 1) * size]) for block, to in copies]
        for block, values in content:
            destination[block * size : (block + 1) * size] = values


def next_tokens(read: Iterable[Content | None], candidates: int, vocabulary: int) -> Sample:
    """What the toy model says after the given content: distinct tokens, best first."""
    rng = random.Random(crc32(repr(list(read)).encode()))
    token_ids = rng.sample(range(vocabulary), candidates)
    logprobs = sorted((-rng.random() * 3 for _ in range(candidates)), reverse=True)
    return Sample(token_ids, logprobs)


class ToySampling:
    """n samples: fork once, then append; ends at `max_num_tokens` or at the token `stop`."""

    def __init__(self, n: int = 1, stop: int | None = None) -> None:
        self.num_sequences = n
        self.stop = stop

    def num_candidates(self, request: Request) -> int:
        """n for the root, then one each."""
        return self.num_sequences if is_root(request) else 1

    def advance(self, request: Request, samples: list[Sample]) -> list[Branch]:
        """One branch per candidate."""
        return [
            Branch(parent, token, logprob, finish_reason(parent, token, self.stop), None if len(s[0]) == 1 else i)
            for parent, s in zip(request.sequences, samples)
            for i, (token, logprob) in enumerate(zip(s.token_ids, s.logprobs))
        ]


class ToyBeams:
    """Beam search without hypotheses: the best `width` candidates go on; all end together."""

    def __init__(self, width: int) -> None:
        self.num_sequences = width

    def num_candidates(self, request: Request) -> int:
        """`width` a beam."""
        return self.num_sequences

    def advance(self, request: Request, samples: list[Sample]) -> list[Branch]:
        """The best `width` by cumulative log-probability, ties by order."""
        candidates = [
            Branch(parent, token, logprob, finish_reason(parent, token, None))
            for parent, s in zip(request.sequences, samples)
            for token, logprob in zip(s.token_ids, s.logprobs)
        ]
        candidates.sort(key=lambda b: b.parent.cumulative_logprob + b.logprob, reverse=True)
        return candidates[: self.num_sequences]


def is_root(request: Request) -> bool:
    """Whether the request has generated nothing yet."""
    return len(request.sequences[0].token_ids) == len(request.prompt_token_ids)


def finish_reason(parent, token: int, stop: int | None) -> str | None:
    """Stop token, then length."""
    if token == stop:
        return "stop"
    return "length" if len(parent.token_ids) + 1 >= parent.max_num_tokens else None


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
) -> FCFSScheduler:
    """A scheduler over real memory parts."""
    allocator = BlockAllocator(num_blocks, order)
    kv = KVManager(
        allocator,
        block_size,
        growth or OnDemand(),
        PrefixCache(allocator, block_size) if caching else None,
        SwapSpace(num_host_blocks, num_blocks) if num_host_blocks else None,
        watermark,
        prefix_aware,
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
            method or ToySampling(),
            None,
            limit,
            self.scheduler.kv.new_table(),
            salt,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> StepPlan:
        """Schedule, execute, commit, check."""
        plan = self.scheduler.schedule()
        self.scheduler.commit(plan, self.executor.execute(plan))
        self.scheduler.check_invariants()
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
        raise AssertionError(f"not finished after {max_steps} steps: {self.scheduler.running}")


def outputs(request: Request) -> list[list[int]]:
    """Generated tokens of each completion, in the order of their sample index."""
    return [c.output_token_ids for c in sorted(request.completions, key=lambda c: c.index)]


def alone(prompt: Iterable[int], max_tokens: int, method, vocabulary: int = 50) -> list[list[int]]:
    """The oracle: the request by itself in an ample pool of one-token blocks, nothing cached."""
    engine = ToyEngine(toy_scheduler(4096, 1, budget=4096), vocabulary)
    engine.add(prompt, max_tokens, method)
    return engine.run()[0]


def tokens(*values: int) -> array:
    """Token ids as sequences hold them."""
    return array("i", values)
