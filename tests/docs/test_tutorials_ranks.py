"""The ranks of lesson 14: the worked ones, or those of `--use paged_attention=...`."""

import copy
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from minipaged.kernels.reference import oracle
from minipaged.kernels.reference.attention import paged_attention
from minipaged.learn.overrides import load_override
from tests.kernels.cases import assert_close, make_case

WORKED = Path(__file__).parent / "worked/14_two_ranks.py"


def attention_on_two_ranks():
    """The function of the exercise; the project's own, which knows no ranks, stands for the worked one."""
    if paged_attention.__module__.startswith("minipaged."):
        return load_override(f"{WORKED}:paged_attention")
    return paged_attention


@pytest.fixture
def rank_class():
    return sys.modules[attention_on_two_ranks().__module__].Rank


def bare(rank_class, number, size):
    """A rank without pools."""
    rank = rank_class.__new__(rank_class)
    rank.number, rank.size = number, size
    return rank


def made(rank_class, number, size):
    """A rank that holds its heads of 4; without pools as long as `own` is not written."""
    try:
        return rank_class(number, size, *pools())
    except NotImplementedError:
        return bare(rank_class, number, size)


def pools(num_blocks=5, heads=4, block_size=4, head_dim=3):
    """Keys and values, every number another."""
    count = num_blocks * heads * block_size * head_dim
    keys = torch.arange(count, dtype=torch.float32).view(num_blocks, heads, block_size, head_dim)
    return keys, keys + 10_000


def ranks_over(rank_class, size, **shape):
    keys, values = pools(**shape)
    ranks = [rank_class(number, size, keys.clone(), values.clone()) for number in range(size)]
    return ranks, keys, values


@contextmanager
def read_only(method, **arguments):
    """A method of a rank leaves its arguments as they are."""
    before = copy.deepcopy(arguments)
    yield
    for name, value in arguments.items():
        same = value.equal(before[name]) if isinstance(value, torch.Tensor) else value == before[name]
        assert same, f"{method} changed {name}, which it may only read"


def assert_pools(ranks, keys, values):
    """The ranks' pools, side by side, are these; else say which (block, head, place) differ."""
    for name, expected in (("key_pool", keys), ("value_pool", values)):
        found = torch.cat([getattr(rank, name) for rank in ranks], 1)
        assert found.shape == expected.shape
        wrong = (found != expected).any(-1).nonzero().tolist()
        at = tuple(wrong[0]) if wrong else (0, 0, 0)
        assert not wrong, (
            f"{name}, (block, head, place) {at}: expected {expected[at].tolist()}, got {found[at].tolist()}; "
            f"{len(wrong)} places differ"
        )


def assert_sum(parts, whole):
    """The parts of the ranks add up to this."""
    found, whole = torch.broadcast_tensors(sum(parts), whole)
    differences = (found - whole).abs()
    at = tuple(int(i) for i in torch.unravel_index(differences.argmax(), whole.shape))
    message = (
        f"size {len(parts)}, the sum at (token, output) {at}: expected {whole[at]:.4g}, got {found[at]:.4g}"
    )
    assert differences.max().item() < 1e-3, message


# -- task 1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "size"), [(8, 1), (8, 2), (8, 4), (8, 8), (6, 3)])
def test_every_head_has_one_rank_and_all_ranks_have_as_many(rank_class, heads, size):
    """Catches heads that two ranks hold, or that no rank holds."""
    held = []
    for number in range(size):
        own = bare(rank_class, number, size).own(heads)
        assert isinstance(own, slice), f"own({heads}) on rank {number} of {size}: expected a slice, got {own}"
        held.append(list(range(heads))[own])
    shared = f"{heads} heads, size {size}: expected each on one rank and {heads // size} a rank, got {held}"
    assert sorted([head for mine in held for head in mine]) == list(range(heads)), shared
    assert {len(mine) for mine in held} == {heads // size}, shared


def test_heads_go_to_ranks_in_their_order(rank_class):
    """Catches heads dealt out like cards: query head h must meet its K/V head on the same rank."""
    held = [list(range(8))[bare(rank_class, number, 4).own(8)] for number in range(4)]
    assert held == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(("heads", "size"), [(6, 4), (9, 2), (2, 4)])
def test_heads_that_cannot_be_shared_out_are_refused_with_both_numbers(rank_class, heads, size):
    """Catches a head that is silently lost, and a refusal on one rank alone."""
    for number in range(size):
        with pytest.raises(ValueError) as raised:
            bare(rank_class, number, size).own(heads)
        named = set(re.findall(r"\d+", str(raised.value)))
        assert {str(heads), str(size)} <= named, (
            f"the message has not both {heads} and {size}: {raised.value}"
        )


def test_a_rank_holds_its_heads_of_every_block(rank_class):
    """Catches a rank that keeps whole pools: the memory is what tensor parallelism is for."""
    ranks, keys, values = ranks_over(rank_class, 2)
    assert [list(rank.key_pool.shape) for rank in ranks] == [[5, 2, 4, 3]] * 2
    assert_pools(ranks, keys, values)


# -- task 2 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
def test_new_tokens_go_to_the_same_slots_on_every_rank(rank_class, size):
    """Catches slots recounted on each rank or sorted, another rank's heads, and a token that is left out."""
    ranks, keys, values = ranks_over(rank_class, size)
    new = torch.randn(2, 5, 4, 3)
    slots = [13, 6, 7, 8, 0]  # of three sequences: block 3; blocks 1 and 2; block 0
    with read_only("follow", slots=slots, keys=new[0], values=new[1]):
        for rank in ranks:
            rank.follow([], slots, *new)
    for pool, written in zip((keys, values), new):
        for token, (block, place) in enumerate([(3, 1), (1, 2), (1, 3), (2, 0), (0, 0)]):
            pool[block, :, place] = written[token]
    assert_pools(ranks, keys, values)


def test_a_block_need_not_have_four_slots(rank_class):
    """Catches a 4 where the block size of the pool is meant: here it is 3."""
    ranks, keys, values = ranks_over(rank_class, 2, block_size=3)
    new = torch.randn(2, 2, 4, 3)
    for rank in ranks:
        rank.follow([], [8, 6], *new)
    for pool, written in zip((keys, values), new):
        pool[2, :, 2], pool[2, :, 0] = written
    assert_pools(ranks, keys, values)


def assert_copied(rank_class, copies, sources, slot):
    """After the plan, block i is what block `sources[i]` was, except for a new token in one slot."""
    ranks, keys, values = ranks_over(rank_class, 2)
    new = torch.randn(2, 1, 4, 3)
    with read_only("follow", copies=copies):
        for rank in ranks:
            rank.follow(copies, [slot], *new)
    keys, values = keys[sources], values[sources]
    for pool, written in zip((keys, values), new):
        pool[slot // 4, :, slot % 4] = written[0]
    assert_pools(ranks, keys, values)


def test_every_rank_copies_every_block_of_the_plan_in_its_order(rank_class):
    """Catches a copy that only rank 0 makes, keys without values, and copies made all at once."""
    assert_copied(rank_class, [(0, 2), (2, 3)], [0, 1, 0, 0, 4], slot=16)


def test_a_block_may_be_copied_twice_and_its_copy_written_over(rank_class):
    """Catches copies kept in a dict: with a key for each source, or each destination, one of them is lost."""
    assert_copied(rank_class, [(0, 2), (2, 3), (0, 4), (1, 2)], [0, 1, 1, 0, 0], slot=4)


def test_the_plan_stays_as_it_is_for_the_next_rank(rank_class):
    """Catches a list of copies that the first rank uses up: all ranks follow the same plan."""
    ranks, _, _ = ranks_over(rank_class, 2)
    copies, slots = [(0, 2), (2, 3)], [6, 7]
    ranks[0].follow(copies, slots, torch.zeros(2, 4, 3), torch.zeros(2, 4, 3))
    assert (copies, slots) == ([(0, 2), (2, 3)], [6, 7])


def test_a_block_is_copied_before_its_copy_is_written(rank_class):
    """Catches a copy that overwrites the new token, takes it along into the source, or is made after the new
    tokens are written."""
    assert_copied(rank_class, [(1, 3)], [0, 1, 2, 1, 4], slot=14)


def attended(rank_class, size, case, **parameters):
    ranks = [rank_class(number, size, case.key_cache, case.value_cache) for number in range(size)]
    with read_only("attend", query=case.query, **parameters):
        parts = [rank.attend(case.query, case.metadata, **parameters) for rank in ranks]
    rows, heads, _ = case.query.shape
    expected = [rows, heads // size, case.value_cache.shape[-1]]
    for rank, part in zip(ranks, parts):
        assert isinstance(part, torch.Tensor), f"attend: expected a tensor, got {part}"
        message = (
            f"rank {rank.number} of {size}, shape of the result: expected {expected}, got {list(part.shape)}"
        )
        assert list(part.shape) == expected, message
    return torch.cat(parts, 1)


@pytest.mark.parametrize(("heads", "size"), [((4, 4), 2), ((8, 4), 2), ((8, 4), 4), ((6, 2), 2), ((4, 2), 1)])
def test_a_rank_attends_with_its_query_heads(rank_class, heads, size):
    """Catches queries selected by the number of K/V heads, and every rank using the first ones."""
    case = make_case([(1, 7), (5, 5), (2, 9)], block_size=4, heads=heads)
    whole = oracle.paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, scale=0.3)
    assert_close(attended(rank_class, size, case, scale=0.3), whole, case)


def test_what_all_heads_share_reaches_every_rank(rank_class):
    """Catches a window or a cap that is dropped."""
    case = make_case([(1, 11), (3, 6)], block_size=4, heads=(4, 2))
    options = {"scale": 0.3, "sliding_window": 4, "softcap": 5.0}
    whole = oracle.paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, **options)
    assert_close(attended(rank_class, 2, case, **options), whole, case)


@pytest.mark.parametrize("sinks", [[-1.0, 0.5, 2.0, 4.0], [0.0] * 4])
def test_a_sink_belongs_to_its_query_head(rank_class, sinks):
    """Catches sinks that are dropped, every rank using the first ones, and sinks of 0 taken for none."""
    case = make_case([(1, 7), (2, 9)], block_size=4, heads=(4, 2))
    sinks = torch.tensor(sinks)
    whole = oracle.paged_attention(
        case.query, case.key_cache, case.value_cache, case.metadata, scale=0.3, sinks=sinks
    )
    assert_close(attended(rank_class, 2, case, scale=0.3, sinks=sinks), whole, case)


# -- task 3 --------------------------------------------------------------------------------------


def parts_of(rank_class, size, weight, bias=None, heads=4, head_dim=3):
    """What each rank adds, and what one rank alone would give."""
    torch.manual_seed(0)
    whole = torch.randn(5, heads, head_dim)
    share = heads // size
    with read_only("project", attended=whole, weight=weight, bias=bias):
        parts = [
            made(rank_class, number, size).project(
                whole[:, number * share : (number + 1) * share], weight, bias
            )
            for number in range(size)
        ]
    return parts, torch.nn.functional.linear(whole.flatten(1), weight, bias)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_head_is_multiplied_by_its_own_columns(rank_class, size):
    """Catches another rank's columns, columns counted in heads, and a result that is scaled. The weight is
    the identity: a rank's numbers come out in its own columns, with 0 in all others."""
    whole, share = torch.arange(1.0, 25.0).view(2, 4, 3), 4 // size
    for number in range(size):
        own = slice(number * share, (number + 1) * share)
        expected = torch.zeros(2, 4, 3)
        expected[:, own] = whole[:, own]
        with read_only("project", attended=whole):
            part = made(rank_class, number, size).project(whole[:, own], torch.eye(12))
        assert isinstance(part, torch.Tensor), f"project: expected a tensor, got {part}"
        name = f"rank {number} of {size} with heads {own.start} to {own.stop - 1} of 4"
        assert part.shape == (2, 12), f"{name}: expected the shape [2, 12], got {list(part.shape)}"
        for token, (right, found) in enumerate(zip(expected.flatten(1), part)):
            message = f"{name}, token {token}: expected {in_words(right)}, got {in_words(found)}"
            assert torch.allclose(found, right), message


def in_words(numbers):
    """Where the numbers that are not 0 stand: "[7, 8, 9] in columns 6 to 8"."""
    columns = numbers.nonzero().flatten().tolist()
    if not columns:
        return "0 in every column"
    listed = ", ".join(f"{number:.4g}" for number in numbers[columns[0] : columns[-1] + 1].tolist())
    return f"[{listed}] in columns {columns[0]} to {columns[-1]}"


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("out", [7, 12])
def test_the_sum_over_ranks_is_what_one_rank_gets(rank_class, size, out):
    """Catches rows for columns, a mean, and own heads taken for all heads."""
    parts, whole = parts_of(rank_class, size, torch.randn(out, 12))
    assert_sum(parts, whole)


def test_no_rank_has_it_alone(rank_class):
    """Catches a rank that multiplies with heads it does not hold."""
    parts, whole = parts_of(rank_class, 2, torch.ones(7, 12))
    assert not any(torch.allclose(part, whole, atol=1e-5) for part in parts)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_bias_is_in_the_sum_once(rank_class, size):
    """Catches a bias that every rank adds, and half of it from each: there may be 1 rank, or 4."""
    bias = torch.arange(100.0, 170.0, 10.0)
    parts, whole = parts_of(rank_class, size, torch.randn(7, 12), bias)
    besides = sum(parts)[0] - (whole[0] - bias)
    message = (
        f"size {size}, the sum less the product of heads and columns: expected the bias {bias.int().tolist()}"
    )
    assert torch.allclose(besides, bias, atol=1e-3), f"{message}, got {besides.round().int().tolist()}"
    assert_sum(parts, whole)


@pytest.mark.parametrize("heads", [(4, 2), (8, 4)])
def test_attention_on_two_ranks_is_attention(heads):
    """Catches parts that fit together but not the model."""
    case = make_case([(1, 7), (5, 5), (2, 9)], block_size=4, heads=heads)
    inputs = (case.query, case.key_cache, case.value_cache, case.metadata)
    attend = attention_on_two_ranks()
    assert_close(attend(*inputs, scale=0.3), oracle.paged_attention(*inputs, scale=0.3), case)
