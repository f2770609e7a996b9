"""A request and its sequences (the paper's "sequence group", section 4.5).

One idea covers prefill, chunked prefill, decode, recompute and prefix hits: `num_computed_tokens` of a
sequence's `num_tokens` have K/V in the cache, and each step computes some of the rest. One uncomputed token
is a decode, several are a prefill; recomputation after preemption is a prefill of prompt + generated tokens.

A request starts with one sequence, the prompt. Its decoding method turns the samples of a step into branches;
the scheduler turns branches into `fork`, `append` and `free`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from minipaged.memory import BlockTable, CachedBlock

TopLogprobs = dict[int, tuple[float, int]]  # token id -> (log-probability, rank)


class RequestState(Enum):
    """Which of the scheduler's queues a request is in, by name; once finished, in none."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Sample(NamedTuple):
    """Candidates for the next token of one sequence, as the executor returns them."""

    token_ids: list[int]  # as many as were asked for; for beam search the best first
    logprobs: list[float]
    top_logprobs: list[TopLogprobs] | None = None  # per candidate, if the request asked for logprobs


@dataclass(slots=True)
class Branch:
    """Continue `parent` with one token: what a decoding method returns. With a `finish_reason` it is a
    finished completion. `sample_index` renumbers it (sample 2 of 4); None keeps the parent's."""

    parent: Sequence
    token_id: int
    logprob: float
    finish_reason: str | None = None
    sample_index: int | None = None
    top_logprobs: TopLogprobs | None = None


class DecodingMethod(Protocol):
    """Greedy and random sampling, n samples, beam search: how samples become branches."""

    num_sequences: int
    """The most sequences alive at once; counted against `max_num_seqs`."""

    def num_candidates(self, request: Request) -> int:
        """How many candidate tokens each live sequence needs from the next step, >= 1."""
        ...

    def advance(self, request: Request, samples: SequenceOf[Sample]) -> list[Branch]:
        """Choose the branches, in the order the live sequences should take; none live ends the request.

        `samples` has one entry per live sequence. Changes nothing, because a failed step is repeated.
        """
        ...

    def rank(self, request: Request) -> list[Sequence]:
        """The completions of a finished request to return, in order."""
        ...

    def score(self, sequence: Sequence) -> float | None:
        """What completions are ranked by; None if they are not."""
        ...


class Sequence:
    """One token string of a request, and its KV blocks."""

    def __init__(self, request: Request, token_ids: array[int], table: BlockTable, index: int = 0) -> None:
        self.request = request
        self.token_ids = token_ids  # prompt and generated tokens, int32
        self.table = table
        self.index = index  # position among the request's samples or beams, for output order and seeds
        self.num_computed_tokens = 0  # how many have their K/V in the cache
        self.block_hashes: list[int] = []  # these three are the prefix cache's, see `KVSequence`
        self.num_registered_blocks = 0
        self.last_registered: CachedBlock | None = None
        self.cumulative_logprob = 0.0  # of the generated tokens
        self.logprobs: list[TopLogprobs] | None = None  # per generated token, if asked for
        self.finish_reason: str | None = None  # "stop", "length", "abort" or "error"; None while alive
        self.text_state: Any = None  # what the stop checker remembers of the text

    @property
    def max_num_tokens(self) -> int:
        """The length at which the sequence ends."""
        return self.request.max_num_tokens

    @property
    def cache_salt(self) -> str:
        """See `Request`."""
        return self.request.cache_salt

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K/V is not computed yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return list(self.token_ids[len(self.request.prompt_token_ids) :])

    def fork(self, table: BlockTable) -> Sequence:
        """A copy that continues on its own, over `table`."""
        child = Sequence(self.request, self.token_ids[:], table, self.index)
        child.num_computed_tokens = self.num_computed_tokens
        child.block_hashes = self.block_hashes[:]
        child.num_registered_blocks = self.num_registered_blocks
        child.last_registered = self.last_registered
        child.cumulative_logprob = self.cumulative_logprob
        child.logprobs = None if self.logprobs is None else self.logprobs[:]
        child.text_state = self.text_state
        return child

    def append(self, branch: Branch) -> None:
        """Add a generated token."""
        self.token_ids.append(branch.token_id)
        self.cumulative_logprob += branch.logprob
        self.finish_reason = branch.finish_reason
        if branch.sample_index is not None:
            self.index = branch.sample_index
        if branch.top_logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.append(branch.top_logprobs)

    def __repr__(self) -> str:
        computed = f"{self.num_computed_tokens} of {self.num_tokens} computed"
        return f"Sequence({self.request.request_id}/{self.index}, {computed}, blocks {self.table.blocks})"


class Request:
    """What a user asked for.

    Args:
        request_id: unique among the requests the engine holds.
        prompt_token_ids: at least one token.
        method: the decoding method.
        params: its parameters, for the executor; opaque to the scheduler.
        max_num_tokens: prompt + output tokens at which a sequence ends.
        table: an empty block table for the first sequence.
        cache_salt: requests share cached prefixes only with the same salt.
        arrival_time: seconds on the caller's clock; recorded, but never used in a decision.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        method: DecodingMethod,
        params: Any,
        max_num_tokens: int,
        table: BlockTable,
        cache_salt: str = "",
        arrival_time: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt_token_ids)
        self.method = method
        self.params = params
        self.max_num_tokens = max_num_tokens
        self.cache_salt = cache_salt
        self.arrival_time = arrival_time
        self.arrival = -1  # place in the order of arrival; the scheduler's logical clock
        self.state = RequestState.WAITING
        self.sequences: list[Sequence] = [Sequence(self, array("i", self.prompt_token_ids), table)]  # alive
        self.completions: list[Sequence] = []  # ended
        self.error: str | None = None  # why it failed
        self.num_preemptions = 0
        self.has_run = False  # in a step that was committed
        self.num_cached_tokens = 0  # of the prompt, when it was first admitted
        self.prompt_logprobs: dict[int, TopLogprobs] = {}  # of each position, if asked for
        self.times: dict[str, float] = {}  # when it was "scheduled", ...; kept by the metrics

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of all live sequences whose K/V is not computed yet."""
        if len(self.sequences) == 1:
            return len(self.sequences[0].token_ids) - self.sequences[0].num_computed_tokens
        return sum(sequence.num_uncomputed_tokens for sequence in self.sequences)

    @property
    def is_prefill(self) -> bool:
        """Whether more than the newest token of a live sequence is uncomputed."""
        return self.num_uncomputed_tokens > len(self.sequences)

    @property
    def is_finished(self) -> bool:
        """Whether no sequence is alive."""
        return self.state is RequestState.FINISHED
