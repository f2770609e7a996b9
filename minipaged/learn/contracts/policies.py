"""The contracts of page growth, policies and decoding methods (paper, 4.3 to 4.5), and of drafters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from minipaged.learn.contracts.rules import Watcher, short
from minipaged.learn.contracts.scheduler import check_plan, check_progress
from minipaged.memory import KVManager
from minipaged.scheduling import Branch, Decision, FCFSScheduler, PreemptionCosts, Request, Sample, StepPlan
from minipaged.scheduling import Sequence as TokenSequence


class PageGrowthContract(Watcher):
    """How many blocks to ask for, made by `cls()`; see `minipaged.memory.PageGrowth`.

    1. Both methods answer with at least one block count, the preferred first.
    2. No count is below `needed` (a token would have no slot) or above `remaining` (it would never be used).
    """

    def at_admission(self, needed: int, remaining: int) -> tuple[int, ...]:
        """Rules 1 and 2."""
        return self._check("at_admission", needed, remaining)

    def while_running(self, needed: int, remaining: int) -> tuple[int, ...]:
        """Rules 1 and 2."""
        return self._check("while_running", needed, remaining)

    def _check(self, name: str, needed: int, remaining: int) -> tuple[int, ...]:
        wishes = self._call(name, needed, remaining)
        what = f"{name}(needed={needed}, remaining={remaining}) returned {short(wishes)}"
        counts = isinstance(wishes, tuple) and wishes and all(isinstance(wish, int) for wish in wishes)
        self.require(bool(counts), f"{what}; give a tuple of at least one int")
        self.require(min(wishes) >= needed, f"{what}; a count below {needed} leaves tokens without a slot")
        self.require(max(wishes) <= remaining, f"{what}; more than {remaining} blocks are never used")
        return wishes


class BatchPolicyContract(Watcher):
    """In which order the phases of the scheduler fill a step, made by `cls()`; see `scheduling.BatchPolicy`.

    1. At most `scheduler.max_num_batched_tokens` tokens are scheduled.
    2. A sequence is scheduled once a step.
    """

    def fill(self, plan: StepPlan, scheduler: FCFSScheduler) -> None:
        """Rules 1 and 2."""
        self._call("fill", plan, scheduler)
        check_plan(self.rules, plan, scheduler)
        check_progress(self.rules, plan, scheduler)


class PreemptionContract(Watcher):
    """Who is preempted and how, made by `cls()` or `cls(costs)`; see `scheduling.PreemptionPolicy`.

    1. The victim is one of the candidates.
    2. The mode is "recompute" or "swap", with a reason; "swap" only if `kv.can_swap_out(victim.sequences)`.
    3. The victim is left as it is: the scheduler frees or swaps it.
    """

    def __init__(self, concept: str, make: Callable[..., Any], costs: PreemptionCosts) -> None:
        super().__init__(concept, make_preemption, make, costs)

    def choose_victim(self, candidates: SequenceOf[Request]) -> Request:
        """Rule 1."""
        victim = self._call("choose_victim", list(candidates))
        names = short([request.request_id for request in candidates])
        message = f"choose_victim chose {short(victim)}, which is not one of the candidates {names}"
        self.require(any(victim is candidate for candidate in candidates), message)
        return victim

    def choose_mode(self, victim: Request, kv: KVManager) -> Decision:
        """Rules 2 and 3."""
        before = _state_of(victim)
        decision = self._call("choose_mode", victim, kv)
        message = f"choose_mode({victim.request_id}) changed its sequences, tokens or blocks; only decide"
        self.require(_state_of(victim) == before, message)
        what = f"choose_mode({victim.request_id}) returned {short(decision)}"
        is_pair = isinstance(decision, tuple) and len(decision) == 2 and isinstance(decision[1], str)
        is_decision = is_pair and decision[0] in ("recompute", "swap")
        self.require(is_decision, f'{what}; give Decision("recompute" or "swap", reason)')
        message = f"{what}, but the host pool cannot take its blocks; ask kv.can_swap_out first"
        self.require(decision[0] == "recompute" or kv.can_swap_out(victim.sequences), message)
        return Decision(*decision)


def _state_of(request: Request) -> list[list[tuple[Any, ...]]]:
    groups = request.sequences, request.completions
    return [
        [(s, s.num_tokens, s.num_computed_tokens, list(s.table.blocks)) for s in group] for group in groups
    ]


def make_preemption(policy: Callable[..., Any], costs: PreemptionCosts) -> Any:
    """Make a preemption policy; the costs are for one that asks for them."""
    return policy(costs) if inspect.signature(policy).parameters else policy()


class DecodingMethodContract(Watcher):
    """How samples become branches, made by `cls(params, stop)`; see `scheduling.DecodingMethod`.

    1. `num_sequences` is at least 1, and never more sequences are alive.
    2. Every live sequence is asked for at least one candidate.
    3. A branch continues a live sequence with one of the candidates of that very sequence; the request
       is left as it is, because the scheduler appends, forks and frees.
    4. A branch that reaches the request's `max_num_tokens` has a `finish_reason`.
    5. `rank` returns some of the request's completions, at least one, each once.
    """

    def __init__(self, concept: str, make: Callable[..., Any], params: Any, stop: Any) -> None:
        super().__init__(concept, make, params, stop)
        self.require(self.num_sequences >= 1, f"num_sequences is {self.num_sequences}; give at least 1")

    def num_candidates(self, request: Request) -> int:
        """Rule 2."""
        count = self._call("num_candidates", request)
        enough = isinstance(count, int) and count >= 1
        self.require(enough, f"num_candidates returned {count!r}; give at least 1")
        return count

    def advance(self, request: Request, samples: SequenceOf[Sample]) -> list[Branch]:
        """Rules 1, 3 and 4."""
        live, before = list(request.sequences), _state_of(request)
        offered_to = [s._replace(token_ids=list(s.token_ids), logprobs=list(s.logprobs)) for s in samples]
        branches = self._call("advance", request, offered_to)
        message = f"advance({request.request_id}) changed its sequences, tokens or blocks; return branches"
        self.require(_state_of(request) == before, message)
        message = f"advance({request.request_id}) returned {short(branches)}; give a list of Branch"
        self.require(isinstance(branches, list | tuple), message)
        self.require(all(isinstance(branch, Branch) for branch in branches), message)
        for branch in branches:
            what = f"advance({request.request_id}) continues {short(branch.parent)} with {branch.token_id}"
            offered = [sample for sequence, sample in zip(live, samples) if sequence is branch.parent]
            self.require(bool(offered), f"{what}, which is not a live sequence of the request")
            candidates = zip(offered[0].token_ids, offered[0].logprobs)
            message = f"{what} (log-probability {branch.logprob:.4f}), which is not one of its candidates"
            self.require((branch.token_id, branch.logprob) in candidates, message)
            length, most = len(branch.parent.token_ids) + 1, request.max_num_tokens
            message = f"{what}, which is token {length} of at most {most}; give it a finish_reason"
            self.require(branch.finish_reason is not None or length < most, message)
        alive, most = sum(branch.finish_reason is None for branch in branches), self.num_sequences
        message = f"advance({request.request_id}) left {alive} sequences alive; num_sequences is {most}"
        self.require(alive <= most, message)
        return branches

    def rank(self, request: Request) -> list[TokenSequence]:
        """Rule 5."""
        ranked = self._call("rank", request)
        message = f"rank({request.request_id}) returned {short(ranked)}; give a list of sequences"
        self.require(isinstance(ranked, list | tuple), message)
        places = {i for s in ranked for i, done in enumerate(request.completions) if done is s}
        message = f"rank({request.request_id}) returned {len(ranked)} sequences of which {len(places)} are"
        self.require(len(places) == len(ranked), f"{message} completions of the request")
        message = f"rank({request.request_id}) returned none of {len(request.completions)} completions"
        self.require(bool(ranked or not request.completions), message)
        return ranked


class DrafterContract(Watcher):
    """Drafts the next tokens of texts, made by `cls()`; see `decoding.speculation.Drafter`.

    1. There is one draft per sequence, of at most as many token ids as were asked for; it may be empty.
    2. The sequences are left as they are.
    """

    def draft(
        self, sequences: SequenceOf[TokenSequence], counts: SequenceOf[int]
    ) -> SequenceOf[SequenceOf[int]]:
        """Rules 1 and 2."""
        before = [list(sequence.token_ids) for sequence in sequences]
        drafts = self._call("draft", list(sequences), list(counts))
        unchanged = [list(sequence.token_ids) for sequence in sequences] == before
        self.require(unchanged, "draft changed a sequence; only read it")
        message = f"draft returned {short(drafts)} for {len(counts)} sequences; give a list of as many lists"
        self.require(isinstance(drafts, list | tuple) and len(drafts) == len(counts), message)
        for draft, count in zip(drafts, counts):
            what = f"draft returned {short(draft)}"
            are_ids = isinstance(draft, SequenceOf) and all(type(t) is int and t >= 0 for t in draft)
            self.require(are_ids, f"{what}; give a list of token ids, integers from 0")
            message = f"{what} where {count} tokens were asked for; give at most so many"
            self.require(len(draft) <= count, message)
        return drafts
