"""The cost model: the paper's sizes, and what must grow with what."""

from array import array
from dataclasses import fields

import pytest

from minipaged.memory import BlockAllocator, BlockCopy, BlockTable
from minipaged.scheduling import Request, ScheduledSequence, Sequence, StepPlan
from minipaged.simulation.costs import CostModel, attended_pairs
from minipaged.simulation.hardware import (
    CHIPS,
    CONSTANTS,
    GIB,
    MODELS,
    Constants,
    Deployment,
    DoesNotFitError,
    UnknownNameError,
    find,
)
from minipaged.simulation.scripts import ScriptedSampling
from minipaged.simulation.systems import OPT_13B, OPT_66B, OPT_175B, system


def plan_of(*chunks: tuple[int, int]) -> StepPlan:
    """A plan of (start, tokens) chunks."""
    table = BlockTable(BlockAllocator(1), 16)
    request = Request("r", [0], ScriptedSampling(1), None, 1, table)
    made = [
        ScheduledSequence(Sequence(request, array("i", [0]), table), start, count, 1)
        for start, count in chunks
    ]
    return StepPlan(0, scheduled=made)


def seconds(*chunks, deployment=OPT_13B.deployment, **options) -> float:
    return CostModel(deployment, **options).step_seconds(plan_of(*chunks))


def test_sizes_are_those_of_the_papers_table():
    """800 KiB a token for OPT-13B; 15.7K, 9.7K and 60.1K slots."""
    assert MODELS["opt-13b"].kv_bytes == 800 * 1024
    assert OPT_13B.num_slots == pytest.approx(15_700, rel=0.005)
    assert OPT_66B.num_slots == pytest.approx(21 * GIB / MODELS["opt-66b"].kv_bytes, rel=0.02)
    assert OPT_175B.num_slots == pytest.approx(60_100, rel=0.005)
    assert [MODELS[m].weight_bytes / 1e9 for m in ("opt-13b", "opt-66b", "opt-175b")] == [26, 132, 346]


def test_llama_3_8b_keeps_an_eighth_of_the_kv_of_its_width():
    """32 layers x 2 x 8 heads x 128 x 2 bytes = 128 KiB. Catches counting query heads."""
    assert MODELS["llama-3-8b"].kv_bytes == 128 * 1024


def test_a_decode_step_is_bound_by_reading_the_weights():
    """Twice the sequences take less than 1.2 times as long: what batching lives on."""
    few, many = (seconds(*[(100, 1)] * n) for n in (8, 16))
    assert few < many < 1.2 * few


def test_a_long_prefill_is_bound_by_computing():
    """Twice the tokens take about twice as long, host time aside."""
    short, long = (CostModel(OPT_13B.deployment).prefill_seconds(n) for n in (1000, 2000))
    assert long == pytest.approx(2 * short, rel=0.1)


def test_a_prompt_alone_takes_its_prefill_and_the_host():
    """Catches attention that costs a prompt as little as a decode: 2,048 tokens attend to 2 million pairs."""
    costs = CostModel(OPT_13B.deployment)
    host = CONSTANTS.step_seconds + CONSTANTS.sequence_seconds
    assert seconds((0, 2048)) == pytest.approx(host + costs.prefill_seconds(2048))
    pairs = 2048 * 2049 / 2
    matrices, attention = 2048 * 2 * 13e9, pairs * 4 * 40 * 5120
    assert costs.prefill_seconds(2048) == pytest.approx((matrices + attention) / (0.7 * 312e12))


def test_one_decode_is_at_least_the_time_to_read_the_weights():
    """26 GB at 1.555 TB/s are 16.7 ms. Catches a unit that is off by a thousand."""
    assert 26e9 / 1.555e12 < seconds((100, 1)) < 0.05


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ([(100, 1)], [(1000, 1)]),
        ([(100, 1)], [(100, 1), (100, 1)]),
        ([(0, 100)], [(0, 200)]),
        ([(0, 512)], [(1536, 512)]),
    ],
    ids=["longer context", "more sequences", "longer prompt", "later chunk"],
)
def test_more_work_takes_longer(smaller, larger):
    assert seconds(*smaller) < seconds(*larger)


def test_a_token_attends_to_itself_and_all_before_it():
    """Catches a prefill whose attention costs nothing, or a chunk that forgets what was computed before."""
    chunks = [(0, 5), (7, 3), (20, 1)]
    pairs = sum(position + 1 for start, count in chunks for position in range(start, start + count))
    assert attended_pairs(plan_of(*chunks)) == pairs


def test_a_copied_token_costs_contiguous_memory_as_much():
    """Catches Orca's copies for samples and beams counted as blocks of another size."""
    contiguous, blocks = (system(name, OPT_13B).executor.costs for name in ("orca-oracle", "paged"))
    assert 16 * contiguous.block_copy_seconds == pytest.approx(blocks.block_copy_seconds)


def test_smaller_blocks_read_slower_and_contiguous_memory_fastest():
    """Fig. 18 a: 20 to 26 % at block size 16, of the attention alone."""
    costs = {size: CostModel(OPT_13B.deployment, size).kv_read_seconds for size in (1, 16, 256)}
    contiguous = CostModel(OPT_13B.deployment, 1, paged=False).kv_read_seconds
    assert costs[1] > costs[16] > costs[256] > contiguous
    assert 1.20 <= costs[16] / contiguous <= 1.26


def test_swapping_small_blocks_is_slow_and_large_ones_is_bandwidth():
    """Fig. 19 a: the same 256 tokens in blocks of 1 take several times as long as in blocks of 16."""
    move = {size: CostModel(OPT_13B.deployment, size).swap_seconds(256 // size) for size in (1, 16, 256)}
    assert move[1] > 3 * move[16]
    assert move[256] == pytest.approx(256 * 800 * 1024 / 25e9, rel=0.1)


def test_moves_and_copies_are_paid_for():
    """Catches a plan whose swaps or copy-on-write cost nothing."""
    costs, base = CostModel(OPT_13B.deployment), seconds((100, 1))
    block = 16 * 800 * 1024  # bytes
    over_the_link = 2 * 40 * CONSTANTS.transfer_seconds + block / 25e9
    in_memory = 2 * block / (0.8 * 1.555e12)  # read, and written
    for field, cost in (("swap_out", over_the_link), ("swap_in", over_the_link), ("copies", in_memory)):
        plan = plan_of((100, 1))
        getattr(plan, field).append(BlockCopy(0, 1))
        assert costs.step_seconds(plan) - base == pytest.approx(cost)


def test_more_chips_are_faster_but_not_as_many_times():
    """All-reduces and one more worker to tell cost something."""
    model = MODELS["opt-13b"]
    one, four = (seconds((0, 2000), deployment=Deployment(model, CHIPS["a100-40gb"], n)) for n in (1, 4))
    assert one / 4 < four < one
    host = CostModel(Deployment(model, CHIPS["a100-40gb"], 4)).host_seconds
    assert host == pytest.approx(CONSTANTS.step_seconds + 3 * CONSTANTS.worker_seconds)


def test_a_ring_all_reduce_moves_what_it_must():
    """Two a layer, each 2 (n - 1) / n of the rows. Catches a link that is free, or paid n times."""
    costs = CostModel(Deployment(MODELS["opt-13b"], CHIPS["a100-40gb"], 4))
    assert costs.reduce_seconds == pytest.approx(2 * 40 * CONSTANTS.all_reduce_seconds)
    assert costs.reduce_token_seconds == pytest.approx(2 * 40 * (2 * 3 / 4) * 2 * 5120 / 300e9)


def test_a_model_larger_than_the_hardware_is_refused_with_the_numbers():
    with pytest.raises(DoesNotFitError, match=r"opt-175b needs 346 GB .* 1 x a100-80gb has 80 GB"):
        Deployment(MODELS["opt-175b"], CHIPS["a100-80gb"])
    with pytest.raises(DoesNotFitError, match="leave no room for a KV cache"):
        Deployment(MODELS["opt-66b"], CHIPS["h200"]).num_kv_slots(0.9)
    with pytest.raises(DoesNotFitError, match="a10g has no link"):
        Deployment(MODELS["llama-3-8b"], CHIPS["a10g"], 2)
    with pytest.raises(ValueError, match="num_chips is 0"):
        Deployment(MODELS["llama-3-8b"], CHIPS["h200"], 0)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(UnknownNameError, match="choose one of a100-40gb"):
        find("chip", CHIPS, "a100")
    with pytest.raises(UnknownNameError, match="choose one of opt-13b"):
        find("model", MODELS, "gpt-5")


def test_every_constant_has_a_source():
    """One table for all figures; a number without a source would be a number tuned in secret."""
    assert all(constant.metadata["source"] for constant in fields(Constants))
    assert all(chip.source for chip in CHIPS.values())
    assert all(model.source for model in MODELS.values())
    assert Constants() == CONSTANTS
