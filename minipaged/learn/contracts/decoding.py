"""The contract of a decoding method, and a method that is watched (paper, section 4.4)."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from minipaged.learn.contracts.rules import Rules, short
from minipaged.scheduling import Branch, Request, Sample, Sequence


class Method(Protocol):
    """How samples become branches, made by `cls(params, stop)`; see `scheduling.DecodingMethod`.

    1. `num_sequences` is at least 1, and never more sequences are alive.
    2. Every live sequence is asked for at least one candidate.
    3. A branch continues a live sequence with one of the candidates of that very sequence.
    4. `rank` returns some of the request's completions, each once.
    """

    def num_candidates(self, request: Request) -> int:
        """Candidates that each live sequence must get from the next step."""
        ...

    def advance(self, request: Request, samples: SequenceOf[Sample]) -> list[Branch]:
        """Choose the branches."""
        ...

    def rank(self, request: Request) -> list[Sequence]:
        """The completions to return, the best first."""
        ...


class BeamMethod(Method, Protocol):
    """Beam search; besides the rules of every method:

    5. `score` is what its completions are ranked by.
    """

    def score(self, sequence: Sequence) -> float:
        """The score of a completion."""
        ...


class WatchedMethod:
    """A decoding method whose every branch is checked."""

    def __init__(self, make: Callable[..., Any], concept: str, params: Any, stop: Any) -> None:
        self.rules = Rules(concept)
        self._inner = self.rules.call(make, params, stop)
        self.num_sequences: int = self._inner.num_sequences
        self.rules.require(self.num_sequences >= 1, f"num_sequences is {self.num_sequences}; at least 1")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def num_candidates(self, request: Request) -> int:
        """See `Method`."""
        count = self.rules.call(self._inner.num_candidates, request)
        self.rules.require(
            isinstance(count, int) and count >= 1, f"num_candidates answered {count!r}; at least 1"
        )
        return count

    def advance(self, request: Request, samples: SequenceOf[Sample]) -> list[Branch]:
        """See `Method`."""
        live = list(request.sequences)
        branches = self.rules.call(self._inner.advance, request, samples)
        for branch in branches:
            what = f"advance({request.request_id}) continues {short(branch.parent)} with {branch.token_id}"
            parents = [place for place, sequence in enumerate(live) if sequence is branch.parent]
            self.rules.require(bool(parents), f"{what}, which is no live sequence of the request")
            sample = samples[parents[0]]
            self.rules.require(
                (branch.token_id, branch.logprob) in zip(sample.token_ids, sample.logprobs),
                f"{what} (log-probability {branch.logprob:.4f}), which is none of its candidates",
            )
        alive = sum(branch.finish_reason is None for branch in branches)
        self.rules.require(
            alive <= self.num_sequences,
            f"advance({request.request_id}) left {alive} sequences alive; num_sequences is "
            f"{self.num_sequences}",
        )
        return branches

    def rank(self, request: Request) -> list[Sequence]:
        """See `Method`."""
        ranked = self.rules.call(self._inner.rank, request)
        places = [i for s in ranked for i, done in enumerate(request.completions) if done is s]
        self.rules.require(
            len(places) == len(set(places)) == len(ranked),
            f"rank({request.request_id}) returned {len(ranked)} sequences of which {len(set(places))} are "
            "completions of the request",
        )
        return ranked


def watch(concept: str) -> Callable[[Callable[..., Any]], Callable[..., WatchedMethod]]:
    """What makes makers of watched methods."""
    return lambda part: lambda params, stop: WatchedMethod(part, concept, params, stop)
