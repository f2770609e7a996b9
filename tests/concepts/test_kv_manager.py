"""The KV manager: the sequences of a request get all their blocks or none, and every block is accounted for
(paper, sections 4.2 to 4.5)."""

import random
from array import array

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from minipaged.memory import (
    BlockAllocator,
    Chunked,
    KVManager,
    OnDemand,
    OutOfBlocksError,
    PrefixCache,
    Reserve,
    SwapSpace,
)
from tests.toy import content, kv_sequence


def manager(num_blocks=8, block_size=2, growth=None, caching=False, num_host_blocks=0, watermark=0.0):
    allocator = BlockAllocator(num_blocks)
    return KVManager(
        allocator,
        block_size,
        growth or OnDemand(),
        PrefixCache(allocator, block_size) if caching else None,
        SwapSpace(num_host_blocks, num_blocks) if num_host_blocks else None,
        watermark,
    )


def admit(kv, *groups):
    """Admit groups of sequences as given; returns them."""
    for group in groups:
        admission = kv.can_admit(group)
        assert admission.fits
        kv.admit(group, admission)
    return groups


def compute(kv, *sequences):
    """Pretend that a step computed everything."""
    for sequence in sequences:
        kv.register(sequence, len(sequence.token_ids))
        sequence.num_computed_tokens = len(sequence.token_ids)
    kv.commit_registered()


def fork(kv, sequence):
    """What a scheduler does for a branch."""
    child = kv_sequence(kv, sequence.token_ids, sequence.max_num_tokens, sequence.cache_salt)
    child.table = kv.fork(sequence)
    child.num_computed_tokens = sequence.num_computed_tokens
    child.num_registered_blocks = sequence.num_registered_blocks
    child.block_hashes = list(sequence.block_hashes)
    return child


def family(kv, num_tokens, num_forks):
    """A computed sequence and its forks; each has a new token that needs a slot, and up to 40 in the end."""
    ((parent,),) = admit(kv, [kv_sequence(kv, range(num_tokens), max_num_tokens=num_tokens)])
    compute(kv, parent)
    group = [parent, *(fork(kv, parent) for _ in range(num_forks))]
    for sequence in group:
        sequence.max_num_tokens = 40
        sequence.token_ids.append(9)
    return group


# -- admission ---------------------------------------------------------------------------------------------


def test_admission_gives_every_token_a_slot():
    """Catches a prompt whose last token has none."""
    kv = manager()
    ((sequence,),) = admit(kv, [kv_sequence(kv, range(5))])
    assert (len(sequence.table.blocks), sequence.table.num_tokens) == (3, 5)
    assert (kv.num_free, kv.num_used) == (5, 3)


def test_can_admit_changes_nothing():
    """Catches a question that allocates or evicts."""
    kv = manager(caching=True)
    sequence = kv_sequence(kv, range(5))
    assert kv.can_admit([sequence]) == kv.can_admit([sequence])
    assert kv.num_free == 8
    assert sequence.table.blocks == []


def test_the_watermark_is_kept_while_others_run():
    """Catches an admission that takes the blocks which running requests need for their next token."""
    kv = manager(num_blocks=10, watermark=0.2)
    assert kv.can_admit([kv_sequence(kv, range(16))]).fits
    assert not kv.can_admit([kv_sequence(kv, range(17))]).fits
    assert kv.can_admit([kv_sequence(kv, range(20))], others_run=False).fits


def test_the_watermark_is_a_hundredth_of_the_pool_unless_told_otherwise():
    """Catches another default: of 200 blocks of one token, 2 stay free."""
    kv = KVManager(BlockAllocator(200), 1, OnDemand())
    assert kv.can_admit([kv_sequence(kv, range(198))]).fits
    assert not kv.can_admit([kv_sequence(kv, range(199))]).fits


def test_a_group_is_admitted_together_or_not_at_all():
    """Catches half a group: a beam without its neighbours cannot go on."""
    kv = manager()
    group = [kv_sequence(kv, [i] * 5) for i in range(3)]
    assert not kv.can_admit(group).fits
    admit(kv, group[:2])
    assert kv.num_free == 2


def test_a_group_that_comes_back_shares_what_it_has_in_common():
    """Catches recomputing the prompt of a preempted group once per sample, also with caching off."""
    kv = manager()
    group = [kv_sequence(kv, [0, 1, 2, 3, 4, i]) for i in range(3)]
    admission = kv.can_admit(group)
    assert admission.grants == [3, 1, 1]
    kv.admit(group, admission)
    assert [s.table.blocks[:2] for s in group] == [group[0].table.blocks[:2]] * 3
    assert [s.num_computed_tokens for s in group] == [0, 4, 4]
    assert kv.num_free == 3


def test_the_last_token_of_a_group_is_never_shared():
    """Catches equal sequences that would share the block both are about to write."""
    kv = manager()
    group = [kv_sequence(kv, range(4)) for _ in range(2)]
    admit(kv, group)
    assert group[0].table.blocks[0] == group[1].table.blocks[0]
    assert group[0].table.blocks[1] != group[1].table.blocks[1]


def test_a_sequence_shares_with_whoever_came_first_in_its_branch():
    """Catches a leader with whom a sequence has less in common than with another, and cached blocks that are
    given up for a leader who has no more."""
    kv = manager(16, caching=True)
    (cached,) = admit(kv, [kv_sequence(kv, [0, 1, 2, 3, 9])])[0]
    compute(kv, cached)
    group = [
        kv_sequence(kv, ids)
        for ids in (
            [0, 1, 2, 3, 4, 5, 6],  # two blocks cached
            [0, 1, 2, 3, 8, 8, 8],  # no more in common with the first
            [0, 1, 2, 3, 8, 8, 7],  # three with the second
            [0, 1, 2, 3, 8, 8, 8],  # three with the second, too: the last token is computed
            [6, 6, 6],  # nothing with anybody
            [6, 6, 5],  # one with the fifth
        )
    ]
    hits = kv.can_admit(group).hits
    assert [(hit.num_shared, len(hit.blocks), hit.leader) for hit in hits] == [
        (2, 2, None),
        (2, 2, None),
        (3, 0, 1),
        (3, 0, 1),
        (0, 0, None),
        (1, 0, 4),
    ]
    admit(kv, group)
    tables = [sequence.table.blocks for sequence in group]
    assert tables[2][:3] == tables[3][:3] == tables[1][:3] != tables[0][:3]
    assert tables[1][:2] == tables[0][:2] == cached.table.blocks[:2]
    assert tables[5][0] == tables[4][0]


def test_the_leader_of_a_sequence_has_most_in_common_with_it():
    """Catches blocks of somebody who agrees in some block, but not in all before it."""
    rng = random.Random(0)
    kv = manager(200)

    def common(one, other):
        equal = [a == b for a, b in zip(one.token_ids[:-1], other.token_ids[:-1])]
        return [*equal, False].index(False) // 2

    for _ in range(300):
        group = [kv_sequence(kv, rng.choices(range(2), k=rng.randint(3, 12))) for _ in range(5)]
        for i, (sequence, hit) in enumerate(zip(group, kv.can_admit(group).hits)):
            assert hit.num_shared == max((common(sequence, other) for other in group[:i]), default=0)
            assert hit.leader is None or common(sequence, group[hit.leader]) == hit.num_shared


def test_a_look_at_a_group_reads_each_token_once():
    """Catches sequences that are compared with each other: 256 of 2,000 tokens took 432 ms at every look."""

    class CountedTokens(array):
        num_read = 0

        def __getitem__(self, key):
            item = super().__getitem__(key)
            CountedTokens.num_read += len(item) if isinstance(key, slice) else 1
            return item

    kv = manager(4, block_size=16)
    group = [kv_sequence(kv, range(2000)) for _ in range(256)]
    for i, sequence in enumerate(group):
        sequence.token_ids = CountedTokens("i", [*range(1990), *[i] * 10])
    assert not kv.can_admit(group).fits
    assert 0 < CountedTokens.num_read <= 256 * 2000


def test_a_reserving_policy_waits_while_others_run_and_takes_what_it_gets_when_alone():
    """Catches a group that came back with nobody else running and is cut, though its tokens fit."""
    kv = manager(growth=Reserve())
    sequence = kv_sequence(kv, range(5), max_num_tokens=40)
    assert not kv.can_admit([sequence]).fits
    admission = kv.can_admit([sequence], others_run=False)
    assert (admission.fits, admission.grants) == (True, [3])


def test_every_count_that_the_policy_would_take_is_tried_in_its_order():
    """Catches a sequence that gets the minimum although a middle count fits."""

    class Halving(OnDemand):
        def at_admission(self, needed, remaining):
            return (8, 4, needed)

    kv = manager(num_blocks=6, growth=Halving())
    assert kv.can_admit([kv_sequence(kv, range(3), max_num_tokens=40)]).grants == [4]


def test_a_policy_is_asked_for_the_fewest_blocks_it_admits():
    """Catches a request that is refused for good because the pool is smaller than a whole grant."""
    assert manager(growth=Chunked(16)).blocks_for_admission(3, 40) == 2
    assert manager(growth=Reserve()).blocks_for_admission(3, 40) == 20


def test_no_less_remains_than_is_needed():
    """Catches a policy that grants less than the tokens need: `remaining` is at least `needed`."""
    kv = manager(growth=Reserve())
    assert kv.blocks_for_admission(5, 4) == 3
    assert kv.can_admit([kv_sequence(kv, range(5), max_num_tokens=4)]).grants == [3]


# -- growth ------------------------------------------------------------------------------------------------


def test_the_preferred_counts_are_granted_if_they_just_fit():
    """Catches a block that is always left over."""
    kv = manager(num_blocks=8, growth=Chunked(8))
    ((sequence,),) = admit(kv, [kv_sequence(kv, range(4), max_num_tokens=40)])
    assert len(sequence.table.blocks) == 8


def test_sequences_of_a_group_may_have_fewer_counts_than_others():
    """Catches counts cut to as many as the first sequence has, or read beyond the end of another's."""

    class OneOrTwo(OnDemand):
        def at_admission(self, needed, remaining):
            return (needed,) if needed == 1 else (remaining, needed)

    kv = manager(num_blocks=8, growth=OneOrTwo())
    group = [kv_sequence(kv, values, max_num_tokens=30) for values in ([1], [2, 3, 4], [5])]
    admit(kv, group)
    assert [len(sequence.table.blocks) for sequence in group] == [1, 2, 1]


@pytest.mark.parametrize("num_sequences", [1, 2, 3])
def test_blocks_to_grow_is_what_grow_takes(num_sequences):
    """Catches a promise to the scheduler that the tables do not keep: the last writer copies nothing."""
    kv = manager(num_blocks=20)
    group = family(kv, 5, num_sequences - 1)
    assert kv.blocks_to_grow(group) == num_sequences - 1
    copies = kv.grow(group, num_sequences - 1)
    assert len(copies) == num_sequences - 1
    assert kv.num_free == 20 - 3 - len(copies)
    assert len({s.table.blocks[2] for s in group}) == num_sequences


def test_a_holder_outside_the_group_makes_every_writer_copy():
    """Catches the exception for the last writer being granted to one that is not the last."""
    kv = manager(num_blocks=20)
    _outside, *group = family(kv, 5, 2)
    assert kv.blocks_to_grow(group) == 2
    assert len(kv.grow(group, 2)) == 2


def test_a_grant_leaves_the_rest_of_the_group_its_minimum():
    """Catches a first sample that takes 16 pages while the second one has none."""
    kv = manager(num_blocks=6, growth=Chunked())
    group = family(kv, 4, 2)
    needed = kv.blocks_to_grow(group)
    assert needed == 3
    kv.grow(group, needed)
    assert all(s.table.num_tokens == 5 for s in group)


def test_a_grant_that_just_leaves_the_others_their_minimum_is_given():
    """Catches a grant that counts a sequence's own block twice, or always leaves one."""
    kv = manager(num_blocks=7, growth=Chunked(4))
    group = family(kv, 4, 1)
    kv.grow(group, kv.blocks_to_grow(group))
    assert [len(s.table.blocks) for s in group] == [2 + 4, 2 + 1]


def test_a_grant_leaves_their_minimum_to_all_that_follow_and_to_no_one_before():
    """Catches a grant that looks at one neighbour only, or at those who have had theirs."""
    for num_blocks, grants in (5, [1, 1, 1]), (6, [2, 1, 1]), (7, [2, 2, 1]), (8, [2, 2, 2]):
        kv = manager(num_blocks, growth=Chunked(2))
        group = family(kv, 4, 2)
        kv.grow(group, kv.blocks_to_grow(group))
        assert [len(sequence.table.blocks) - 2 for sequence in group] == grants


def test_only_one_of_the_counts_is_granted():
    """Catches a sequence that gets every count that fits, one after the other."""

    class Halving(OnDemand):
        def while_running(self, needed, remaining):
            return (8, 4, 2, needed)

    kv = manager(num_blocks=2 + 7, growth=Halving())
    group = family(kv, 4, 0)
    kv.grow(group, kv.blocks_to_grow(group))
    assert len(group[0].table.blocks) == 2 + 4


def test_a_copy_on_write_gets_no_grant():
    """Catches pages for a sequence that has slots left: it asks when its last block is full."""
    kv = manager(num_blocks=20, growth=Chunked(4))
    group = family(kv, 5, 1)
    assert len(kv.grow(group, kv.blocks_to_grow(group))) == 1
    assert [len(sequence.table.blocks) for sequence in group] == [3, 3]


def test_more_blocks_than_there_are_raise():
    """Catches a growth that goes on without a slot."""
    kv = manager(num_blocks=2)
    ((sequence,),) = admit(kv, [kv_sequence(kv, range(4))])
    sequence.token_ids.append(9)
    assert kv.blocks_to_grow([sequence]) == 1
    with pytest.raises(OutOfBlocksError):
        kv.grow([sequence], 1)
    kv.check_invariants([sequence])


def test_preallocated_blocks_can_be_given_back():
    """Catches a lone request that is cut while it holds blocks without a token."""
    kv = manager(growth=Reserve())
    ((sequence,),) = admit(kv, [kv_sequence(kv, range(3), max_num_tokens=16)])
    assert kv.num_free == 0
    assert kv.free_preallocated([sequence]) == 6
    assert (kv.num_free, len(sequence.table.blocks)) == (6, 2)


# -- freeing and swapping ----------------------------------------------------------------------------------


def test_a_freed_sequence_starts_from_nothing():
    """Catches a preempted request that believes its tokens are still computed."""
    kv = manager(caching=True)
    ((sequence,),) = admit(kv, [kv_sequence(kv, range(5))])
    compute(kv, sequence)
    kv.free([sequence])
    assert (sequence.num_computed_tokens, sequence.num_registered_blocks, kv.num_free) == (0, 0, 8)
    kv.check_invariants([sequence])


def test_a_freed_sequence_registers_its_blocks_from_the_first():
    """Catches a first block that follows what was the last before: nobody would find it."""
    kv = manager(caching=True)
    ((sequence,),) = admit(kv, [kv_sequence(kv, range(5))])
    compute(kv, sequence)
    kv.free([sequence])
    kv.prefix_cache.clear()
    admit(kv, [sequence])
    compute(kv, sequence)
    assert kv.can_admit([kv_sequence(kv, range(5))]).hits[0].blocks == sequence.table.blocks[:2]


def test_what_follows_the_blocks_of_a_leader_is_found_again():
    """Catches a sequence whose own blocks are registered as if they were the first."""
    kv = manager(num_blocks=16, caching=True)
    group = [kv_sequence(kv, [0, 1, 2, 3, i, i, i]) for i in (4, 5)]
    admit(kv, group)
    compute(kv, *group)
    for sequence in group:
        assert kv.can_admit([kv_sequence(kv, sequence.token_ids)]).hits[0].blocks == sequence.table.blocks[:3]


def test_only_computed_blocks_move_to_the_host():
    """Catches host room spent on reserved blocks that hold nothing."""
    kv = manager(growth=Reserve(), num_host_blocks=3)
    ((sequence,),) = admit(kv, [kv_sequence(kv, range(5), max_num_tokens=16)])
    compute(kv, sequence)
    sequence.token_ids.append(9)
    assert kv.can_swap_out([sequence])
    assert len(kv.swap_out([sequence])) == 3
    assert kv.num_free == 8
    kv.check_invariants([sequence])


def test_a_group_that_is_half_recomputed_cannot_be_swapped_out():
    """Catches blocks moved to the host that count as computed and that nobody has filled yet."""
    kv = manager(num_host_blocks=8)
    group = [kv_sequence(kv, [0, 1, 2, 3, i]) for i in range(2)]
    admit(kv, group)
    for num_computed, fits in (0, False), (3, False), (4, True):
        group[0].num_computed_tokens = num_computed
        assert kv.can_swap_out(group) is fits
    assert not manager().can_swap_out(group), "there is no swap space at all"


def test_a_group_that_is_freed_on_the_host_starts_again_on_the_device():
    """Catches a swapped-out sequence that is requeued and then admitted to blocks of the host."""
    kv = manager(num_host_blocks=8)
    ((sequence,),) = admit(kv, [kv_sequence(kv, range(5))])
    compute(kv, sequence)
    kv.swap_out([sequence])
    kv.free([sequence])
    assert (kv.num_free, kv.swap_space.allocator.num_free) == (8, 8)
    admit(kv, [sequence])
    assert (kv.num_free, kv.swap_space.allocator.num_free) == (5, 8)


def test_a_half_computed_prompt_can_be_swapped_out():
    """Catches a prompt that is computed again from its first token, although it is not a group."""
    kv = manager(num_host_blocks=8)
    ((sequence,),) = admit(kv, [kv_sequence(kv, range(6))])
    sequence.num_computed_tokens = 2
    assert kv.can_swap_out([sequence])


def test_a_swapped_group_comes_back_only_if_its_next_tokens_fit_too():
    """Catches a group that is swapped in and at once preempted again, forever."""
    kv = manager(num_blocks=4, num_host_blocks=4)
    ((sequence,),) = admit(kv, [kv_sequence(kv, range(6))])
    compute(kv, sequence)
    sequence.token_ids.append(9)
    kv.swap_out([sequence])
    ((other,),) = admit(kv, [kv_sequence(kv, [7])])
    assert not kv.can_swap_in([sequence])
    kv.free([other])
    assert kv.can_swap_in([sequence])


# -- the check ---------------------------------------------------------------------------------------------


def two_writers(kv, sequences):
    """A preallocated block that two tables would fill."""
    sequences.append(kv_sequence(kv, []))
    first, second = (sequence.table for sequence in sequences)
    first.preallocate(1)
    second.share(first.blocks[-1:])
    second.use_slots(0)


FAULTS = {
    "more computed tokens than tokens": lambda kv, sequences: setattr(sequences[0], "num_computed_tokens", 6),
    "a token without a slot": lambda kv, sequences: sequences[0].table.use_slots(7),
    "a block neither free nor used": lambda kv, sequences: kv.allocator.release(*kv.allocator.allocate()),
    "a block with two writers": two_writers,
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_check_invariants_sees_every_fault(fault):
    """Catches a check that checks nothing: the tests of the engine rely on it after every step."""
    kv = manager()
    (sequences,) = admit(kv, [kv_sequence(kv, range(5))])
    kv.check_invariants(sequences)
    fault(kv, sequences)
    with pytest.raises(AssertionError):
        kv.check_invariants(sequences)


# -- random operations -------------------------------------------------------------------------------------


class ManagerMachine(RuleBasedStateMachine):
    """Groups of sequences over a vocabulary of 2, so that prefixes collide all the time. `device` and
    `host` are what the blocks would contain; after every step each sequence must read itself."""

    groups = Bundle("groups")

    @initialize(
        num_blocks=st.integers(4, 12),
        block_size=st.integers(1, 4),
        growth=st.sampled_from([OnDemand(), Chunked(2), Reserve()]),
        caching=st.booleans(),
        host=st.booleans(),
    )
    def start(self, num_blocks, block_size, growth, caching, host):
        self.kv = manager(num_blocks, block_size, growth, caching, num_blocks if host else 0)
        self.size = block_size
        self.device = {}
        self.host = {}
        self.swapped = []
        self.live = []

    @rule(target=groups, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12), more=st.integers(1, 8))
    def admit(self, prompt, more):
        group = [kv_sequence(self.kv, prompt, len(prompt) + more)]
        self.bring_in(group)
        return group

    @rule(group=groups, tokens=st.lists(st.integers(0, 1), min_size=4, max_size=4), keep=st.integers(0, 3))
    def decode(self, group, tokens, keep):
        """A token for each; then the first one, or a copy of `keep`, may fork."""
        if not self.runs(group):
            return
        for sequence, token in zip(group, tokens):
            sequence.token_ids.append(token)
        if self.is_full(group):
            self.end(group)
            return
        needed = self.kv.blocks_to_grow(group)
        free = self.kv.num_free
        if needed > free:
            self.kv.free(group)
            self.bring_in(group)
            return
        self.copy(self.device, self.device, self.kv.grow(group, needed))
        if isinstance(self.kv.growth, OnDemand):
            assert self.kv.num_free == free - needed
        self.compute(group)
        if len(group) < 4:
            parent = group[keep % len(group)]
            group.append(fork(self.kv, parent))

    @rule(group=groups, which=st.integers(0, 3))
    def drop_a_beam(self, group, which):
        if self.runs(group) and len(group) > 1:
            self.kv.free([group.pop(which % len(group))])

    @rule(group=groups)
    def finish(self, group):
        if self.runs(group):
            self.end(group)

    @rule(group=groups)
    def recompute(self, group):
        if self.runs(group):
            self.kv.free(group)
            self.bring_in(group)

    @rule(group=groups)
    def swap_out(self, group):
        if self.runs(group) and self.kv.can_swap_out(group):
            self.copy(self.device, self.host, self.kv.swap_out(group))
            self.live.remove(group)
            self.swapped.append(group)

    @precondition(lambda self: self.swapped)
    @rule(which=st.integers(0, 9))
    def swap_in(self, which):
        group = self.swapped[which % len(self.swapped)]
        if self.kv.can_swap_in(group):
            self.swapped.remove(group)
            self.live.append(group)
            self.copy(self.host, self.device, self.kv.swap_in(group))

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def fail(self, prompt):
        """A step that admits and dies: nobody may find what it was to compute."""
        group = [kv_sequence(self.kv, prompt, len(prompt) + 4)]
        admission = self.kv.can_admit(group, others_run=False)
        if admission.fits:
            copies = self.kv.admit(group, admission)
            for _, block in copies:
                self.device[block] = {}
            self.kv.register(group[0], len(prompt))
            for position in range(group[0].num_computed_tokens, len(prompt)):
                self.device.get(group[0].table.blocks[position // self.size], {}).pop(
                    position % self.size, None
                )
            self.kv.roll_back_registered()
            self.kv.free(group)

    def bring_in(self, group):
        """Admit and compute, or forget about it."""
        if group in self.live:
            self.live.remove(group)
        admission = self.kv.can_admit(group, others_run=False)
        assert (
            admission.fits or sum(self.kv.num_blocks_of(len(s.token_ids)) for s in group) > self.kv.num_free
        )
        if not admission.fits:
            return
        free = self.kv.num_free
        evictable = (
            self.kv.prefix_cache.count_evictable({block for hit in admission.hits for block in hit.blocks})
            if self.kv.prefix_cache
            else 0
        )
        self.copy(self.device, self.device, self.kv.admit(group, admission))
        assert self.kv.num_free == free - evictable - sum(admission.grants)
        assert all(s.num_computed_tokens < len(s.token_ids) for s in group), "nothing to compute"
        self.live.append(group)
        self.compute(group)

    def compute(self, group):
        for sequence in group:
            for position in range(sequence.num_computed_tokens, len(sequence.token_ids)):
                block = sequence.table.blocks[position // self.size]
                slots = self.device.setdefault(block, {})
                slots[position % self.size] = content(position, sequence.token_ids[position])
        compute(self.kv, *group)

    def copy(self, source, destination, copies):
        read = [(to, dict(source.get(block, {}))) for block, to in copies]
        destination.update(read)

    def end(self, group):
        self.kv.free(group)
        self.live.remove(group)

    def runs(self, group):
        return any(group is other for other in self.live)

    def is_full(self, group):
        return any(len(s.token_ids) > s.max_num_tokens for s in group)

    @invariant()
    def every_block_is_accounted_for(self):
        if hasattr(self, "kv"):
            self.kv.check_invariants([s for group in (*self.live, *self.swapped) for s in group])

    @invariant()
    def every_sequence_reads_itself(self):
        if not hasattr(self, "kv"):
            return
        for groups, memory in ((self.live, self.device), (self.swapped, self.host)):
            for sequence in (s for group in groups for s in group):
                tokens = sequence.token_ids[: sequence.num_computed_tokens]
                read = [
                    memory[sequence.table.blocks[p // self.size]][p % self.size] for p in range(len(tokens))
                ]
                assert read == [content(p, t) for p, t in enumerate(tokens)]

    def teardown(self):
        if hasattr(self, "kv"):
            for group in (*self.live, *self.swapped):
                self.kv.free(group)
            self.kv.check_invariants([])
            assert self.kv.num_free == self.kv.allocator.num_blocks


ManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRandomOperations = ManagerMachine.TestCase
TestRandomOperations.__doc__ = """Catches lost, doubly held or foreign blocks in orders nobody thought of."""
