"""Speculative decoding: draft the next tokens, and verify them all in one step (Leviathan et al., arXiv
2211.17192).

A decode is memory-bound: it reads every weight to compute one row. A few more rows hardly take longer, so a
step also computes a *draft*, tokens that may follow:

    tokens   A cat sat. A cat     "A cat" was followed by "sat." before: that is the draft
    rows     cat | sat  | .       decodes over one block table, each with one token more
    samples  sat | down | ..      "sat" is accepted, so the sample after it counts, too; "." is rejected

The draft is what a grammar forces, if there is one, and else what a `Drafter` proposes. A row is a decode of
a copy of the sequence that ends there, so executor, kernels and sampler know nothing of drafts, and its
sample is the one that a later step would have drawn. Drafts change how many steps a text takes, not the
text. The slots of rejected tokens are written again, and blocks that only they needed are freed.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from minipaged.config import DRAFT_ROWS
from minipaged.decoding.params import SamplingParams
from minipaged.scheduling import FCFSScheduler, Request, Sample, ScheduledSequence, StepPlan, StepResult
from minipaged.scheduling.plan import Event
from minipaged.scheduling.request import Sequence

logger = logging.getLogger(__name__)


class Drafter(Protocol):
    """Proposes draft tokens."""

    def draft(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> SequenceOf[SequenceOf[int]]:
        """Tokens of the vocabulary that may follow the `token_ids` of each sequence, at most counts[i] (1 or
        more) for sequences[i], or none."""
        ...


class PromptLookup:
    """What followed the last tokens where they occurred before (A. Saxena, *Prompt Lookup Decoding*, 2023).

    It continues from the earlier place where most of the last tokens agree, at least 2 and at most 4; from
    the latest, if there are several. A text that repeats itself up to its end goes on repeating.
    """

    def draft(self, sequences: SequenceOf[Sequence], counts: SequenceOf[int]) -> list[list[int]]:
        """See `Drafter`."""
        return [self._continue(s.token_ids, count) for s, count in zip(sequences, counts)]

    @staticmethod
    def _continue(text: array[int], count: int) -> list[int]:
        import numpy as np  # here, because the engine also runs in a browser, without it

        ids = np.frombuffer(text, np.int32)
        places = np.flatnonzero(ids[:-1] == ids[-1])  # where the last token occurred
        agreeing = None
        for back in range(1, 4):
            places = places[places >= back]
            places = places[ids[places - back] == ids[-1 - back]] if len(places) else places
            if not len(places):
                break
            agreeing = places
        if agreeing is None:
            return []
        followed = ids[agreeing[-1] + 1 :][:count].tolist()
        return [followed[i % len(followed)] for i in range(count)]


class Draft(NamedTuple):
    """Draft tokens that the step in flight verifies."""

    sequence: Sequence
    copies: list[Sequence]  # the sequence with one token of the draft, with two, ...
    num_blocks: int  # that its table had before


@dataclass(eq=False, repr=False)
class SpeculativeScheduler(FCFSScheduler):
    """Adds drafts to decode steps that have rows to spare."""

    drafter: Drafter | None  # None: it has failed
    num_speculative_tokens: int  # the most in one draft
    vocab_size: int  # token ids are below it

    def __post_init__(self) -> None:
        super().__post_init__()
        self._drafts: list[Draft] = []
        self._lengths: WeakKeyDictionary[Request, int] = WeakKeyDictionary()  # of the next draft

    def schedule(self) -> StepPlan:
        """Plan a step; its spare rows go to drafts."""
        plan, self._drafts = super().schedule(), []
        num_rows = len(plan.scheduled)
        spare = min(DRAFT_ROWS, self.max_num_batched_tokens) - num_rows
        if spare > 0 and num_rows == plan.num_tokens:  # (a step with a prompt computes enough)
            self._add_drafts(plan, spare)
        return plan

    def _add_drafts(self, plan: StepPlan, spare: int) -> None:
        eligible = [request.sequences[0] for request in plan.sampling if can_draft(request)]
        lengths = {sequence: self._most(sequence, math.ceil(spare / len(eligible))) for sequence in eligible}
        lengths = {sequence: length for sequence, length in lengths.items() if length > 0}
        for sequence, tokens in self._draft(lengths):
            num_blocks = len(sequence.table.blocks)
            if copies := self._schedule_draft(plan, sequence, tokens[: min(spare, lengths[sequence])]):
                self._drafts.append(Draft(sequence, copies, num_blocks))
                spare -= len(copies)

    def _draft(self, lengths: dict[Sequence, int]) -> Iterator[tuple[Sequence, SequenceOf[int]]]:
        """Tokens that a grammar forces are always accepted; without a grammar, the drafter drafts."""
        free = []
        for sequence in lengths:
            if (grammar := sequence.request.params.structured_outputs) is None:
                free.append(sequence)
            else:
                yield sequence, grammar.compiled.forced_tokens(sequence)
        if free and self.drafter is not None:
            texts = [sequence.token_ids[:] for sequence in free]
            try:
                drafts = self.drafter.draft(free, [lengths[sequence] for sequence in free])
                drafts = [self._checked(tokens[: lengths[s]]) for s, tokens in zip(free, drafts)]
            except Exception as error:
                logger.warning("the drafter failed and will not be asked again: %s", error)
                self.drafter = None  # (or every step that asks it would fail)
                raise
            finally:
                # (It may have written to the texts, or keep NumPy views of them: such a text cannot grow.)
                for sequence, text in zip(free, texts):
                    sequence.token_ids = text
            yield from zip(free, drafts)

    def _checked(self, tokens: SequenceOf[int]) -> SequenceOf[int]:
        for token_id in tokens:
            if not 0 <= token_id < self.vocab_size:  # (the model would read past its embeddings)
                raise ValueError(
                    f"the drafter drafted token {token_id}, but the model has {self.vocab_size} tokens; "
                    f"draft ids from 0 to {self.vocab_size - 1}"
                )
        return tokens

    def _most(self, sequence: Sequence, share: int) -> int:
        """The longest draft; the sample after its last token must still fit the request."""
        room = sequence.max_num_tokens - len(sequence.token_ids) - 1
        return min(share, room, self._lengths.get(sequence.request, self.num_speculative_tokens))

    def _schedule_draft(self, plan: StepPlan, sequence: Sequence, tokens: SequenceOf[int]) -> list[Sequence]:
        """Schedule the rows of a draft if there are free blocks; a draft preempts nobody."""
        table, text, copies = sequence.table, sequence.token_ids[:], []
        if table.blocks_to_append(len(tokens)) > self.kv.num_free:
            return []
        table.append(len(tokens))
        for token_id in tokens:
            text.append(token_id)
            copies.append(Sequence(sequence.request, text[:], table, sequence.index))
            plan.scheduled.append(ScheduledSequence(copies[-1], len(text) - 1, 1, 1))
        return copies

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Commit the step's result, and of each draft the tokens before the first rejected one."""
        drafts, self._drafts = self._drafts, []
        if not drafts:
            return super().commit(plan, result)
        sampled = [item.sequence for item in plan.scheduled if item.num_candidates]
        samples, errors = dict(zip(sampled, result.samples)), dict(result.errors)
        for sequence, copies, _ in drafts:
            if _is_valid(samples[sequence]) and not all(_is_valid(samples[copy]) for copy in copies):
                errors.pop(sequence.request.request_id, None)  # only its draft has no valid token
        touched = super().commit(plan, result._replace(errors=errors))
        failures = []
        for draft in drafts:
            try:
                self._settle(plan, draft, samples)
            except BaseException as failure:
                failures.append(failure)
                self._deferred_ends[draft.sequence.request] = f"{type(failure).__name__}: {failure}"
        if failures:
            self._end_deferred()
            raise failures[0]
        return touched

    def _settle(self, plan: StepPlan, draft: Draft, samples: dict[Sequence, Sample]) -> None:
        """Append the samples after accepted tokens, and free the blocks of rejected ones."""
        sequence, request, num_accepted = draft.sequence, draft.sequence.request, 0
        for copy in draft.copies:
            is_accepted = not request.is_finished and sequence.token_ids[-1] == copy.token_ids[-1]
            if not (is_accepted and _is_valid(samples[copy])):
                break
            num_accepted += 1
            sequence.num_computed_tokens += 1
            self.kv.register(sequence, sequence.num_computed_tokens)  # not before it is accepted
            self.num_generated_tokens += 1
            self.apply_branches(request, request.method.advance(request, [samples[copy]]))
        self.kv.commit_registered()
        if not request.is_finished:
            table, num_tokens = sequence.table, sequence.num_computed_tokens
            # (Blocks that page growth had preallocated stay.)
            table.truncate(max(num_tokens, draft.num_blocks * table.block_size))
            table.use_slots(num_tokens)
        tokens = [copy.token_ids[-1] for copy in draft.copies]
        text = (request.completions or [sequence])[0].token_ids
        output = list(text[draft.copies[0].num_tokens - 1 :])
        found = {"tokens": len(tokens), "accepted": num_accepted, "draft": tokens, "output": output}
        plan.events.append(Event("drafted", request.request_id, found))
        # Where tokens are accepted, drafts grow at once; where they are rejected, a step has one row more.
        self._lengths[request] = min(2 * num_accepted + 1, self.num_speculative_tokens)


def can_draft(request: Request) -> bool:
    """Whether a request gets drafts: it has one sequence, and no logits processors."""
    params, is_single = request.params, request.method.num_sequences == 1
    return is_single and isinstance(params, SamplingParams) and not params.logits_processors


def _is_valid(sample: Sample) -> bool:
    return not math.isnan(sample.logprobs[0])
