"""A plan becomes flat ragged tensors: the rows, slots and tables are those of the block tables."""

import random
from functools import partial
from types import SimpleNamespace

import pytest

from minipaged.execution.batch import Batch, BatchBuilder
from minipaged.memory import BlockAllocator, BlockTable
from minipaged.scheduling import ScheduledSequence
from minipaged.scheduling.request import Request
from tests.engine.ctrl_c import interrupted_at_line

BLOCK_SIZE = 4


def chunk(
    pool: BlockAllocator,
    start: int,
    count: int,
    candidates: int = 1,
    prompt: int = 0,
    wanted: int | None = None,
) -> ScheduledSequence:
    """A chunk of a sequence with tokens 100, 101, ...; `prompt` of them, at least up to the chunk's end."""
    table = BlockTable(pool, BLOCK_SIZE)
    tokens = list(range(100, 100 + max(prompt, start + count)))
    request = Request("r", tokens, None, SimpleNamespace(prompt_logprobs=wanted), 1000, table)
    table.append(start + count)
    return ScheduledSequence(request.sequences[0], start, count, candidates)


@pytest.fixture
def pool() -> BlockAllocator:
    return BlockAllocator(64)


def check(batch: Batch, chunks: list[ScheduledSequence]) -> None:
    """Against the slow way: one token after the other, through `BlockTable.slot`."""
    tokens, positions, slots, starts = [], [], [], [0]
    for sequence, start, count, _ in chunks:
        tokens += sequence.token_ids[start : start + count]
        positions += range(start, start + count)
        slots += sequence.table.slots(start, start + count)
        starts.append(starts[-1] + count)
    metadata = batch.metadata
    contexts = [c.start + c.num_tokens for c in chunks]
    assert batch.input_ids.tolist() == [tokens]
    assert batch.positions.tolist() == [positions]
    assert metadata.slot_mapping.tolist() == slots
    assert metadata.query_start.tolist() == metadata.query_start_list == starts
    assert metadata.context_len.tolist() == metadata.context_len_list == contexts
    assert metadata.max_query_len == max(c.num_tokens for c in chunks)
    assert metadata.max_context_len == max(contexts)
    longest = max(len(c.sequence.table.blocks) for c in chunks)
    assert metadata.block_tables.shape == (len(chunks), longest)
    for row, context, (sequence, *_) in zip(metadata.block_tables.tolist(), contexts, chunks):
        used = -(-context // BLOCK_SIZE)
        assert row[:used] == sequence.table.blocks[:used]


def test_prompt_decode_and_chunk_in_one_batch(pool: BlockAllocator) -> None:
    """The picture of the module's docstring."""
    chunks = [chunk(pool, 0, 5), chunk(pool, 8, 1), chunk(pool, 5, 2)]
    batch = BatchBuilder("cpu").build(chunks)
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 8, 5, 6]]
    assert batch.metadata.query_start.tolist() == [0, 5, 6, 8]
    assert batch.metadata.context_len.tolist() == [5, 9, 7]
    assert batch.output_indices.tolist() == [4, 5, 7]
    check(batch, chunks)


def test_dtypes_are_those_of_the_kernels(pool: BlockAllocator) -> None:
    """A kernel reads int32 tables and int64 slots; the wrong width is garbage on a GPU."""
    metadata = BatchBuilder("cpu").build([chunk(pool, 0, 5)]).metadata
    names = ("slot_mapping", "query_start", "context_len", "block_tables")
    assert [str(getattr(metadata, name).dtype) for name in names] == [
        "torch.int64",
        "torch.int32",
        "torch.int32",
        "torch.int32",
    ]


def test_only_chunks_with_candidates_have_logits(pool: BlockAllocator) -> None:
    """A chunk in the middle of a prompt predicts nothing that anybody wants."""
    chunks = [chunk(pool, 0, 5, 0), chunk(pool, 8, 1), chunk(pool, 5, 2, 0), chunk(pool, 2, 3, 2)]
    batch = BatchBuilder("cpu").build(chunks)
    assert batch.output_indices.tolist() == [5, 10]
    assert batch.sampling == [chunks[1], chunks[3]]
    assert batch.sampling_index is None


def test_a_step_without_candidates_has_no_logits(pool: BlockAllocator) -> None:
    """An empty list of rows, not "all rows"."""
    batch = BatchBuilder("cpu").build([chunk(pool, 0, 5, 0)])
    assert batch.output_indices.tolist() == []
    assert batch.sampling == []


def test_prompt_rows_are_those_that_predict_a_prompt_token(pool: BlockAllocator) -> None:
    """Prompt of 7, tokens 3..6: rows 3, 4, 5 predict tokens 4, 5, 6; row 6 predicts the first output."""
    last = chunk(pool, 3, 4, 1, prompt=7, wanted=0)
    middle = chunk(pool, 3, 2, 0, prompt=7, wanted=2)
    decode = chunk(pool, 8, 1, 1, prompt=9)
    batch = BatchBuilder("cpu").build([decode, last, middle, decode])
    assert batch.output_indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.prompts == [(last, 1), (middle, 5)]
    assert batch.sampling_index == [0, 4, 7]


def test_a_prompts_last_token_has_its_row(pool: BlockAllocator) -> None:
    """Catches a prompt whose last chunk has two tokens, and no log-probability of the second."""
    end = chunk(pool, 5, 2, 1, prompt=7, wanted=0)
    assert BatchBuilder("cpu").build([end]).output_indices.tolist() == [0, 1]


def test_a_prompt_is_reported_by_its_first_sequence_alone(pool: BlockAllocator) -> None:
    """Catches each of several samples, computed again after a preemption, that reports the prompt anew."""
    first, second = (chunk(pool, 0, 5, 1, prompt=5, wanted=0) for _ in range(2))
    second.sequence.request.sequences.insert(0, first.sequence)
    assert BatchBuilder("cpu").build([second]).output_indices.tolist() == [4]


def test_a_generated_token_is_not_a_prompt_token(pool: BlockAllocator) -> None:
    """Recomputing prompt and output after a preemption reports the prompt part alone."""
    again = chunk(pool, 0, 6, 1, prompt=6, wanted=1)
    del again.sequence.request.prompt_token_ids[3:]
    batch = BatchBuilder("cpu").build([again])
    assert batch.output_indices.tolist() == [0, 1, 5]


def test_a_request_that_decodes_has_no_prompt_rows(pool: BlockAllocator) -> None:
    """Catches every later step of a request looking for log-probabilities that it has found already."""
    decode = chunk(pool, 8, 1, 1, prompt=9, wanted=1)
    del decode.sequence.request.prompt_token_ids[5:]
    batch = BatchBuilder("cpu").build([decode])
    assert batch.output_indices.tolist() == [0]
    assert (batch.prompts, batch.sampling_index) == ([], None)


def test_a_later_batch_leaves_an_earlier_one_alone(pool: BlockAllocator) -> None:
    """The tables are kept between steps; a tensor that is a view of them would change under the GPU."""
    builder = BatchBuilder("cpu")
    first, second = [chunk(pool, 0, 8)], [chunk(pool, 0, 8)]
    batch = builder.build(first)
    builder.build(second)
    check(batch, first)


@pytest.mark.parametrize(
    "batches", [([4, 4, 4], [30]), ([30], [4, 4, 4])], ids=["fewer and longer", "more and shorter"]
)
def test_the_next_batch_may_be_fewer_and_longer_or_more_and_shorter(
    pool: BlockAllocator, batches: tuple[list[int], list[int]]
) -> None:
    """Catches kept tables that grow one way and shrink the other, below what they held."""
    builder = BatchBuilder("cpu")
    for lengths in batches:
        chunks = [chunk(pool, 0, length) for length in lengths]
        check(builder.build(chunks), chunks)


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_those_of_the_block_tables(seed: int) -> None:
    """The translation of `BlockTable.slots`, for random tables, block sizes and parts of sequences."""
    source = random.Random(seed)
    block_size, num_blocks = source.choice((1, 3, 4, 16)), 300
    pool = BlockAllocator(num_blocks)
    pool.allocate(source.randrange(50))
    scheduled, expected = [], []
    for _ in range(source.randrange(1, 9)):
        table = BlockTable(pool, block_size)
        num_tokens = source.randrange(1, 30)
        table.append(num_tokens)
        source.shuffle(table.blocks)
        table.preallocate(source.randrange(3))
        request = Request("r", [7] * num_tokens, None, None, 1000, table)
        start = source.randrange(num_tokens)
        count = source.randrange(1, num_tokens - start + 1)
        scheduled.append(ScheduledSequence(request.sequences[0], start, count, 0))
        expected += table.slots(start, start + count)
    assert BatchBuilder("cpu").build(scheduled).metadata.slot_mapping.tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_kept_tables_never_go_stale(seed: int) -> None:
    """Rows change hands, sequences grow and move (swap, copy-on-write): each batch is as if built anew."""
    source = random.Random(seed)
    pool, builder = BlockAllocator(200), BatchBuilder("cpu")
    alive = [chunk(pool, 0, source.randrange(1, 20)) for _ in range(4)]
    for _ in range(60):
        action = source.randrange(4)
        which = source.randrange(len(alive))
        table = alive[which].sequence.table
        if action == 0 and len(alive) < 8:
            alive.insert(which, chunk(pool, source.randrange(9), source.randrange(1, 20)))
        elif action == 1 and len(alive) > 1:
            table.free()
            del alive[which]
        elif action == 2:  # moved: the same sequence and length, other blocks
            table.move_to(pool, pool.allocate(len(table.blocks)))
        else:  # the next token
            sequence, start, count, _ = alive[which]
            sequence.token_ids.append(source.randrange(100))
            table.append(1)
            alive[which] = ScheduledSequence(sequence, start + count, 1, 1)
        check(builder.build(alive), alive)


@pytest.mark.parametrize("repeats", [True, False])
def test_ctrl_c_at_any_line_leaves_no_stale_table(repeats: bool) -> None:
    """Catches a step that reads blocks of another sequence, because an interrupted one noted a table that it
    had not written, or the other way around; and rows that were allocated and are never found again."""
    number, found = 1, True
    while found:
        pool, builder = BlockAllocator(64), BatchBuilder("cpu")
        before = [chunk(pool, 4, 1), chunk(pool, 9, 1)]
        builder.build(before)
        alive = [before[0], chunk(pool, 0, 14), chunk(pool, 2, 1), before[1]]
        build = partial(builder.build, alive)
        found = interrupted_at_line(number, build, ("minipaged/execution/batch.py",))
        after = alive if repeats else before
        check(builder.build(after), after)
        number += 1
    assert number > 50
