"""States of recurrent layers: each sequence goes on with its own, and those worth it are kept for others.

The layer here remembers what it has read, token by token, so that any foreign, lost or stale state shows.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Iterator
from itertools import count
from weakref import WeakKeyDictionary, ref

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache

from minipaged.execution.batch import BatchBuilder
from minipaged.execution.recurrent import Place, compute_piecewise
from minipaged.execution.state_table import StateTable
from minipaged.memory import BlockAllocator, BlockTable, PrefixCache
from minipaged.memory.prefix_cache import HashFunction
from minipaged.scheduling import (
    ChunkedPrefill,
    PrefillFirst,
    Recompute,
    Request,
    ScheduledSequence,
    StepPlan,
    StepResult,
    Swap,
)
from minipaged.scheduling.request import Sequence
from tests.toy import ToyEngine, ToyExecutor, beams, samples, toy_scheduler

SIZE = 4
WIDTH = 64
PROMPT = list(range(101, 121))


class Memory(nn.Module):
    """A layer whose state, and output after each row, is the last `WIDTH` tokens that it has read, plus 1."""

    layer_idx = 0

    def __init__(self, in_chunks: bool) -> None:
        super().__init__()
        self.in_chunks = in_chunks  # else a chunk forgets what was before it, as in transformers' Mamba
        self.caches: list[ref[Cache]] = []  # of its calls in the last step
        self.shapes: list[tuple[int, ...]] = []
        compute_piecewise(self)

    def forward(self, token_ids: Tensor, cache_params: Cache) -> Tensor:
        """[B, T] -> [B, T, WIDTH]."""
        self.caches.append(ref(cache_params))
        self.shapes.append(tuple(token_ids.shape))
        state = cache_params.layers[0].recurrent_states[0]
        if state is None or (token_ids.shape[1] > 1 and not self.in_chunks):
            state = token_ids.new_zeros(len(token_ids), WIDTH)
        assert len(state) == len(token_ids)
        outputs = []
        for column in token_ids.T:
            state = torch.cat([state[:, 1:], column[:, None] + 1], 1)
            outputs.append(state)
        cache_params.update_recurrent_state(state, self.layer_idx)
        return torch.stack(outputs, 1)


class Computer:
    """A state table, and the only layer of its model."""

    def __init__(self, in_chunks: bool = True, num_kept: int = 0) -> None:
        self.states = StateTable(in_chunks, num_kept)
        self.layer = Memory(in_chunks)
        self.builder = BatchBuilder("cpu")
        self.read: WeakKeyDictionary[Sequence, list[int]] = WeakKeyDictionary()  # up to its last row

    def compute(self, scheduled: list[ScheduledSequence], fails: bool = False) -> None:
        """One step, in which each sequence must have read its own tokens, all of them, and no others."""
        self.layer.caches, self.layer.shapes = [], []
        batch = self.builder.build(scheduled)
        with self.states.step(batch):
            outputs = iter(self.layer(batch.input_ids, None)[0].tolist())
            if fails:
                raise InjectedError
        for sequence, start, num_tokens, _ in scheduled:
            for stop in range(start + 1, start + num_tokens + 1):
                self.read[sequence] = read = [number - 1 for number in next(outputs) if number]
                assert read == list(sequence.token_ids[:stop][-WIDTH:]), f"{sequence} after {stop} tokens"


class InjectedError(Exception):
    """What a test makes fail."""


class Toy(Computer):
    """Sequences whose steps are written by hand."""

    def __init__(self, in_chunks: bool = True, num_kept: int = 0, hash_function: HashFunction = hash) -> None:
        super().__init__(in_chunks, num_kept)
        self.pool = BlockAllocator(500)
        self.cache = PrefixCache(self.pool, SIZE, hash_function) if num_kept else None
        self.fresh = count(1001)

    def add(self, token_ids: Iterable[int], start: int = 0) -> Sequence:
        """A request's only sequence, which starts after `start` cached tokens."""
        table = BlockTable(self.pool, SIZE)
        (sequence,) = Request("r", list(token_ids), None, None, 1000, table).sequences
        sequence.num_computed_tokens = start
        return sequence

    def fork(self, parent: Sequence) -> Sequence:
        """Another one of its group."""
        parent.request.sequences.append(child := parent.fork(parent.table.fork()))
        return child

    def group(self, *members: tuple[list[int], int]) -> list[Sequence]:
        """A request that is to be recomputed: of each sequence its tokens, and where it starts."""
        first, *others = (self.add(*member) for member in members)
        for other in others:
            other.request = first.request
        first.request.sequences += others
        return [first, *others]

    def step(self, *parts: tuple[Sequence, int], fails: bool = False) -> None:
        """Compute the next tokens of these sequences."""
        scheduled = []
        for sequence, num_tokens in parts:
            for member in sequence.request.sequences if self.cache is not None else ():
                self.cache.extend_hashes(member.block_hashes, member.token_ids)
            sequence.table.append(len(sequence.token_ids) - sequence.table.num_tokens)
            scheduled.append(ScheduledSequence(sequence, sequence.num_computed_tokens, num_tokens, 0))
        self.compute(scheduled, fails)
        for sequence, num_tokens in parts:
            sequence.num_computed_tokens += num_tokens

    def decode(self, *sequences: Sequence) -> None:
        """Compute one new token of each."""
        for sequence in sequences:
            sequence.token_ids.append(next(self.fresh))
        self.step(*((sequence, 1) for sequence in sequences))

    def started(self, *lengths: int) -> Iterator[Sequence]:
        """Sequences of so many different tokens, all computed."""
        for length in lengths:
            sequence = self.add([next(self.fresh) for _ in range(length)])
            self.step((sequence, length))
            yield sequence

    def each_has_read_its_own(self, *sequences: Sequence) -> bool:
        """Whether the state of each has seen its computed tokens, all of them, and no others."""
        return all(self.read[s] == list(s.token_ids[: s.num_computed_tokens]) for s in sequences)

    def used(self) -> list[Cache | None]:
        """The states of the last step's calls, as far as they are still alive."""
        return [cache() for cache in self.layer.caches]

    def kept(self) -> list[int]:
        """After how many tokens each of the kept states is, the next to be dropped first."""
        return [kept.place.num_tokens for kept in self.states.kept.values()]


class TestSequences:
    """Each goes on with its own state."""

    def test_chunks_and_decodes_share_a_step(self) -> None:
        """Catches rows, or states of pieces, that change places."""
        toy = Toy()
        b, c = toy.started(3, 6)
        a, d = toy.add(PROMPT[:5]), toy.add(PROMPT[7:11])
        toy.step((d, 2))
        for sequence in (b, c):
            sequence.token_ids.append(7)
        toy.step((a, 5), (b, 1), (c, 1), (d, 2))
        assert toy.layer.shapes == [(1, 5), (1, 2), (2, 1)]

    def test_a_fork_continues_with_the_state_of_its_parent(self) -> None:
        """Catches forks that write into the state of one another, or find none."""
        toy = Toy()
        (parent,) = toy.started(6)
        child = toy.fork(parent)
        toy.decode(parent, child)
        grandchild = toy.fork(child)
        for _ in range(2):
            toy.decode(parent, child, grandchild)
        assert toy.each_has_read_its_own(parent, child, grandchild)

    def test_a_fork_finds_its_parent_behind_others(self) -> None:
        """Catches a search that ends at the first of the group, which is not as far."""
        toy = Toy()
        first, parent = toy.group((PROMPT[:9], 0), (PROMPT[2:8], 0))
        toy.step((first, 4))
        toy.step((parent, 6))
        child = toy.fork(parent)
        toy.decode(parent, child)
        assert toy.each_has_read_its_own(first, parent, child)

    def test_a_sequence_of_the_group_with_other_tokens_is_not_a_parent(self) -> None:
        """As many tokens are not the same ones."""
        toy = Toy()
        first, other = toy.group((PROMPT[:9], 0), ([*PROMPT[:3], *PROMPT[10:16]], 0))
        toy.step((first, 8))
        other.num_computed_tokens = 8
        with pytest.raises(RuntimeError, match="state after 8 tokens of Sequence"):
            toy.step((other, 1))

    def test_nobody_continues_from_a_state_after_fewer_tokens(self) -> None:
        """Tokens would be left out, quietly."""
        toy = Toy()
        first, other = toy.group((PROMPT[:9], 0), (PROMPT[:10], 0))
        toy.step((first, 8))
        for sequence in (first, other):
            sequence.num_computed_tokens = 9
        with pytest.raises(RuntimeError, match="after 9 tokens"):
            toy.step((other, 1))

    def test_a_state_waits_for_a_sequence_that_is_swapped_out(self) -> None:
        """It was one of three in a tensor, which the others go on with."""
        toy = Toy()
        a, b, c = toy.started(3, 5, 6)
        toy.decode(a, b, c)
        for _ in range(3):
            toy.decode(a, c)
        toy.decode(b)
        toy.decode(a, b, c)
        assert toy.each_has_read_its_own(a, b, c)

    def test_a_sequence_that_waits_holds_its_own_state_alone(self) -> None:
        """Catches the states of a whole batch that live as long as the one that waits."""
        toy = Toy()
        a, b = toy.started(3, 5)
        toy.decode(a, b)
        (together,) = map(ref, toy.used())
        toy.decode(b)  # starts from there
        assert together() is not None
        toy.decode(b)
        assert together() is None
        toy.decode(a)

    def test_states_that_all_wait_are_not_copied(self) -> None:
        """Catches a copy of each, where one tensor has them and nobody else's."""
        toy = Toy()
        a, b, c = toy.started(3, 5, 7)
        toy.decode(a, b)
        (together,) = toy.used()
        toy.decode(c)
        toy.decode(a, b)
        assert toy.used() == [together]

    @pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["first", "last"])
    def test_a_preempted_sequence_has_no_state(self, order: slice) -> None:
        """It will be computed from its first token on, or from kept states."""
        toy = Toy()
        a, b = list(toy.started(3, 3))[order]
        toy.decode(a)
        (state,) = map(ref, toy.used())
        assert state() is not None
        a.num_computed_tokens = 0
        toy.decode(b)
        assert state() is None
        toy.step((a, 4))

    def test_a_sequence_that_is_resumed_at_once_starts_from_a_kept_state(self) -> None:
        """Catches the state from before its preemption, which has seen later tokens."""
        toy = Toy(num_kept=8)
        sequence = toy.add(PROMPT[:11])
        toy.step((sequence, 11))
        sequence.num_computed_tokens = 8
        toy.step((sequence, 3))
        assert toy.each_has_read_its_own(sequence)

    def test_a_state_goes_with_its_sequence(self) -> None:
        """Catches a table that keeps sequences alive."""
        toy = Toy()
        (a,) = toy.started(3)
        (state,) = map(ref, toy.used())
        del a
        gc.collect()
        assert state() is None

    def test_sequences_of_a_failed_step_start_anew(self) -> None:
        """Only some layers have new states then; those of sequences outside the step are untouched."""
        toy = Toy(num_kept=8)
        a, b = toy.started(3, 6)
        leader, follower = toy.group((PROMPT[:10], 0), (PROMPT[:9], 8))
        a.token_ids.append(7)
        with pytest.raises(InjectedError):
            toy.step((a, 1), (leader, 9), fails=True)
        assert toy.kept() == [4]  # b's
        leader.num_computed_tokens = 9
        for sequence in (a, leader, follower):
            with pytest.raises(RuntimeError, match="is missing"):
                toy.step((sequence, 1))
        toy.decode(b)


class TestDecodes:
    """They are computed together, in place if they can be."""

    def test_decodes_that_stay_together_copy_no_state(self) -> None:
        """Catches a copy of each state in each step."""
        toy = Toy()
        a, b = toy.started(3, 5)
        toy.decode(a, b)
        together = toy.used()
        toy.decode(a, b)
        assert toy.used() == together
        assert toy.layer.shapes == [(2, 1)]

    def test_a_lone_sequence_continues_in_the_state_of_its_prompt(self) -> None:
        """Catches a copy where the prompt ends."""
        toy = Toy()
        (a,) = toy.started(3)
        prompt = toy.used()
        toy.decode(a)
        assert toy.used() == prompt

    def test_a_sequence_continues_in_its_own_state_though_an_equal_one_is_kept(self) -> None:
        """Catches a copy where there is no need for one."""
        toy = Toy(num_kept=8)
        sequence = toy.add(PROMPT[:8])
        toy.step((toy.add(PROMPT[:9]), 9))
        toy.step((sequence, 8))
        own = toy.used()[-1:]
        assert toy.kept() == [8, 4]
        toy.decode(sequence)
        assert toy.used() == own

    def test_states_of_those_that_go_on_are_copied_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Catches a copy of each, before they are gathered, when one of many has ended."""
        toy = Toy()
        a, b, c = toy.started(3, 5, 6)
        toy.decode(a, b, c)
        del c
        gc.collect()
        monkeypatch.setattr(Place, "take_out", None)
        toy.decode(a, b)
        assert toy.each_has_read_its_own(a, b)

    @pytest.mark.parametrize("later", ["ba", "a", "b", "aba", "abc", "cab", "ac"])
    def test_other_company_copies(self, later: str) -> None:
        """Catches writes into the rows of others: sequences change places, leave, come."""
        toy = Toy()
        named = dict(zip("abc", toy.started(3, 5, 6)))
        toy.decode(named["a"], named["b"])
        together = toy.used()
        for names in (dict.fromkeys(later), "abc"):
            toy.decode(*(named[name] for name in names))
            assert (toy.used() == together) == ([*names] == ["a", "b"])

    def test_a_state_that_a_follower_waits_with_is_copied(self) -> None:
        """Catches a leader that goes on in the state of both."""
        toy = Toy()
        leader, follower = toy.group((PROMPT[:9], 0), (PROMPT[:10], 8))
        toy.step((leader, 8))
        toy.step((leader, 1))
        toy.decode(leader)
        toy.step((follower, 2))
        assert toy.each_has_read_its_own(leader, follower)

    @pytest.mark.parametrize("last", [1, 2])
    def test_a_kept_state_is_copied(self, last: int) -> None:
        """Catches one that its own sequence moves on, by a decode or a chunk."""
        toy = Toy(num_kept=8)
        first = toy.add(PROMPT[: 8 + last])
        toy.step((first, 8))
        toy.step((first, last))
        second = toy.add([*PROMPT[:8], 7], start=8)
        toy.step((second, 1))
        assert toy.each_has_read_its_own(first, second)

    def test_a_kept_state_that_a_group_waits_with_is_copied(self) -> None:
        """Catches the last of the group that writes into it, one token at a time."""
        toy = Toy(num_kept=8)
        toy.step((toy.add(PROMPT[:9]), 9))
        group = toy.group((PROMPT[:14], 8), (PROMPT[:14], 8))
        for sequence in group:
            toy.step((sequence, 1))
        last = toy.add([*PROMPT[:8], 7], start=8)
        toy.step((last, 1))
        assert toy.each_has_read_its_own(last)


class TestGroups:
    """What two sequences have in common is computed by the first; the second starts after it."""

    @pytest.mark.parametrize("chunks", [[11], [8, 3], [7, 4], [7, 1, 3], [4, 4, 3], [4, 1, 6], [9, 1, 1]])
    @pytest.mark.parametrize("length", [9, 10, 12])
    @pytest.mark.parametrize("delay", [0, 1])
    def test_a_follower_starts_where_its_leader_is_cut(
        self, chunks: list[int], length: int, delay: int
    ) -> None:
        """In the same step or later, whether the leader ends there or goes on, by chunks or single tokens."""
        toy = Toy()
        leader, follower = toy.group((PROMPT[:11], 0), ([*PROMPT[:8], 7, 8, 9, 10][:length], 8))
        wait = delay
        for num_tokens in chunks:
            parts = [(leader, num_tokens)]
            if leader.num_computed_tokens + num_tokens >= 8 and follower.num_computed_tokens == 8:
                if not wait:
                    parts.append((follower, length - 8))
                wait -= 1
            toy.step(*parts)
        if follower.num_computed_tokens == 8:
            toy.step((follower, length - 8))
        toy.decode(leader, follower)
        assert toy.each_has_read_its_own(leader, follower)

    def test_followers_start_at_several_places(self) -> None:
        """Catches pieces that are not in the order of their rows, or that lose one of the followers."""
        toy = Toy()
        starts = (12, 8, 4, 8)
        leader, *followers = toy.group((PROMPT[:17], 0), *(([*PROMPT[:s], s, 1], s) for s in starts))
        toy.step((leader, 17))
        assert toy.layer.shapes == [(1, 4), (1, 4), (1, 4), (1, 5)]
        toy.step(*((follower, 2) for follower in followers))

    def test_a_follower_of_a_follower(self) -> None:
        """Its tokens are those of the second sequence, not of the first, which also passes by there."""
        toy = Toy()
        other = [*PROMPT[:4], 1, 2, 3, 4, 5, 6]
        group = toy.group((PROMPT[:10], 0), (other, 4), ([*other[:8], 9, 9], 8))
        toy.step((group[0], 10), (group[1], 6), (group[2], 2))
        assert toy.each_has_read_its_own(*group)

    def test_groups_do_not_mix(self) -> None:
        """Catches a leader of one request that is cut for another."""
        toy = Toy()
        first, one = toy.group((PROMPT[:9], 0), (PROMPT[:9], 4))
        second, two = toy.group((PROMPT[:10], 0), (PROMPT[:10], 8))
        toy.step((first, 9), (second, 10))
        assert toy.layer.shapes == [(1, 4), (1, 5), (1, 8), (1, 2)]
        toy.step((one, 5), (two, 2))

    def test_a_group_waits_with_a_kept_state_that_others_would_drop(self) -> None:
        """Both found a cached prefix, but the budget is enough for the first alone."""
        toy = Toy(num_kept=1)
        toy.step((toy.add(PROMPT[:9]), 9))
        leader, follower = toy.group((PROMPT[:11], 8), (PROMPT[:12], 8))
        toy.step((leader, 2))
        list(toy.started(5, 5))
        toy.step((follower, 3))
        assert toy.each_has_read_its_own(leader, follower)


class TestLayersThatForgetInChunks:
    """After its first piece, a sequence goes on token by token."""

    def test_only_a_first_chunk_is_computed_at_once(self) -> None:
        """Catches a layer that forgets, and a prompt that is computed token by token for nothing."""
        toy = Toy(in_chunks=False)
        (a, b) = toy.add(PROMPT[:11]), toy.add(PROMPT[2:5])
        for chunk, shapes in ((5, [(1, 5)]), (3, [(1, 1)] * 3), (2, [(1, 1)] * 2), (1, [(1, 1)])):
            toy.step((a, chunk))
            assert toy.layer.shapes == shapes
            assert len({id(states) for states in toy.used()}) == 1, "copied in between"
        toy.step((b, 3))
        toy.decode(a, b)
        assert toy.layer.shapes == [(2, 1)]

    def test_a_first_chunk_ends_where_somebody_needs_its_state(self) -> None:
        """The state there is kept, or a follower starts with it."""
        toy = Toy(in_chunks=False, num_kept=8)
        toy.step((toy.add(PROMPT[:11]), 11))
        assert toy.layer.shapes == [(1, 8), (1, 1), (1, 1), (1, 1)]
        toy.step((toy.add([*PROMPT[:8], 7, 7], start=8), 2))
        assert toy.layer.shapes == [(1, 1), (1, 1)]


class TestKeptStates:
    """A request may start after a cached prefix, with the state there."""

    @pytest.mark.parametrize("length", range(1, 14))
    @pytest.mark.parametrize("budget", [1, 3, 4, 5, 14])
    def test_a_prompt_leaves_one_after_its_last_full_block(self, length: int, budget: int) -> None:
        """Wherever chunks end; an equal prompt must have a token left to compute. Catches a state of each
        chunk, one that is not kept where a chunk ends, or two pieces where one is enough."""
        toy, full = Toy(num_kept=8), (length - 1) // SIZE * SIZE
        sequence = toy.add(PROMPT[:length])
        while (start := sequence.num_computed_tokens) < length:
            chunk = min(budget, length - start)
            toy.step((sequence, chunk))
            assert len(toy.layer.shapes) == 1 + (start < full < start + chunk)
        assert toy.kept() == [full] * bool(full)
        toy.step((toy.add([*PROMPT[:full], 7, 8], full), 2))

    @pytest.mark.parametrize(("length", "kept"), [(6, [4, 20]), (7, [4, 20]), (8, [4, 8, 20]), (9, [8, 20])])
    def test_an_output_leaves_one_after_its_last_full_block(self, length: int, kept: list[int]) -> None:
        """And the one after the prompt stays. Catches a state of each block, which would drop others'."""
        toy = Toy(num_kept=8)
        (sequence,) = toy.started(length)
        for _ in range(23 - length):
            toy.decode(sequence)
        assert toy.kept() == kept
        for start in kept:
            longer = toy.add([*sequence.token_ids[:start], 7, 8], start)
            toy.step((longer, 2))
        toy.decode(sequence)

    def test_a_decode_keeps_no_state_that_its_own_step_computes(self) -> None:
        """A follower's: there is nothing to copy yet. The leader keeps it."""
        toy = Toy(num_kept=8)
        leader, follower = toy.group((PROMPT[:9], 0), (PROMPT[:9], 8))
        toy.step((leader, 9), (follower, 1))
        assert toy.kept() == [8]
        toy.step((toy.add([*PROMPT[:8], 7], start=8), 1))

    def test_the_least_recently_used_is_dropped(self) -> None:
        """Found or computed once more, a state is as good as new."""
        for again in ({"start": 8}, {}):
            toy = Toy(num_kept=2)
            toy.step((toy.add(PROMPT[:9]), 9))
            list(toy.started(5))
            sequence = toy.add(PROMPT[:9], **again)
            toy.step((sequence, 9 - sequence.num_computed_tokens))
            assert toy.kept() == [4, 8]
            list(toy.started(6))
            assert toy.kept() == [8, 4]

    @pytest.mark.parametrize("num_kept", [1, 3, 8])
    def test_at_most_so_many_are_kept(self, num_kept: int) -> None:
        """Each may be as large as the keys and values of a thousand tokens. And no fewer."""
        toy = Toy(num_kept=num_kept)
        list(toy.started(5, 5, 9, 5, 13))
        assert toy.kept() == [4, 4, 8, 4, 12][-num_kept:]

    def test_without_a_prefix_cache_nothing_is_kept(self) -> None:
        """Catches prompts that are cut, and states that are copied, for nobody."""
        toy = Toy()
        (sequence,) = toy.started(7)
        (state,) = toy.used()
        for _ in range(6):
            toy.decode(sequence)
            assert toy.used() == [state]
        assert toy.kept() == []

    def test_a_state_is_that_of_its_tokens_whatever_their_hash(self) -> None:
        """Catches a prefix that continues with the state of another one, whose hash is the same."""
        toy = Toy(num_kept=8, hash_function=lambda _: 0)
        toy.step((toy.add(PROMPT[:5]), 5))
        other = toy.add(PROMPT[5:10], start=4)
        with pytest.raises(RuntimeError, match="after 4 tokens"):
            toy.step((other, 1))


class Executor(ToyExecutor):
    """The toy model, with a recurrent layer."""

    def __init__(self, computer: Computer, *sizes: int) -> None:
        super().__init__(*sizes)
        self.computer = computer

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute and compare, and answer as a toy does."""
        if plan.scheduled:
            self.computer.compute(plan.scheduled)
        return super().execute(plan)

    def fail(self, plan: StepPlan) -> None:
        """The step dies in the middle of the model."""
        if plan.scheduled:
            with pytest.raises(InjectedError):
                self.computer.compute(plan.scheduled, fails=True)
        super().fail(plan)


@pytest.mark.parametrize("seed", range(24))
def test_states_follow_their_sequences_wherever_the_scheduler_takes_them(seed: int) -> None:
    """Random requests with common beginnings, in a pool that is too small for them; steps that fail."""
    source = random.Random(seed)
    num_kept = source.choice((0, 1, 3, 20))
    computer = Computer(in_chunks=source.random() < 0.7, num_kept=num_kept)
    scheduler = toy_scheduler(
        source.randrange(14, 40),
        SIZE,
        num_host_blocks=(num_host := source.choice((0, 14))),
        caching=num_kept > 0,
        policy=source.choice((ChunkedPrefill, PrefillFirst))(),
        preemption=(Swap if num_host else Recompute)(),
        budget=source.choice((6, 17, 64)),
        max_model_len=40,
    )
    scheduler.kv.kept_states = computer.states.kept
    engine = ToyEngine(scheduler)
    engine.executor = Executor(computer, scheduler.kv.allocator.num_blocks, num_host, SIZE)
    for _ in range(12):
        prompt = [*PROMPT[: source.randrange(18)], *source.choices((1, 2), k=source.randrange(1, 4))]
        method = source.choice((samples(), samples(), samples(3), beams(3)))
        engine.add(prompt, source.randrange(2, 14), method)
    while scheduler.has_unfinished:
        (engine.fail_step if source.random() < 0.05 else engine.step)()
        assert len(computer.states.kept) <= num_kept
