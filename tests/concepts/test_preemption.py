"""Preemption: who is preempted when the blocks run out, and how it comes back (paper, section 4.5).

Several tests begin like this: 8 blocks of 2 tokens, and two requests of 5 tokens that generate 8 each.

    step    r0             r1
    0       3 blocks       3 blocks
    3       4 blocks       4 blocks       8 tokens each: the pool is full
    4       5 blocks       preempted      the ninth token of r0 takes a block from r1
    8       has ended      resumed        recompute: all 9 tokens in one prefill; swap: only the ninth
"""

import logging
import re
from itertools import product

import pytest

from minipaged.memory import Chunked
from minipaged.scheduling import (
    Auto,
    Decision,
    PreemptionCosts,
    Recompute,
    RequestState,
    StepPlan,
    Swap,
)
from tests.toy import ToyEngine, alone, beams, samples, toy_scheduler

MODES = {"recompute": Recompute, "swap": Swap}


def engine_of(num_blocks=8, mode="recompute", **options):
    options.setdefault("num_host_blocks", num_blocks)
    return ToyEngine(toy_scheduler(num_blocks, 2, preemption=MODES[mode](), **options))


def engine_of_two(mode="recompute", **options):
    """The example above."""
    engine = engine_of(8, mode, **options)
    engine.add(range(5), 8)
    engine.add(range(20, 25), 8)
    return engine


def events(engine, *kinds):
    return [(e.kind, e.request_id) for plan in engine.plans for e in plan.events if e.kind in kinds]


# -- who ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_latest_arrived_is_preempted(mode):
    """Catches a victim that arrived first."""
    engine = engine_of(12, mode)
    for i in range(3):
        engine.add([i] * 5, 10)
    assert engine.run() == engine.alone()
    victims = [name for _, name in events(engine, "preempted")]
    assert victims[0] == "r2"
    assert "r0" not in victims


def test_the_latest_is_preempted_even_if_it_needs_the_block_itself():
    """Catches a late request that takes an earlier one's blocks."""
    engine = engine_of(7)
    engine.add(range(4), 4)
    engine.add(range(10, 17), 4)
    while not events(engine, "preempted"):
        engine.step()
    assert events(engine, "preempted") == [("preempted", "r1")]
    assert [r.request_id for r in engine.scheduler.running] == ["r0"]
    assert engine.run() == engine.alone()


def test_nobody_is_preempted_while_there_are_blocks():
    """Catches preemption one block too early: the last block of the pool is used."""
    engine = engine_of(8)
    engine.add(range(5), 4)
    engine.add(range(10, 15), 4)
    assert engine.run() == engine.alone()
    assert events(engine, "preempted") == []


def test_a_request_that_the_step_computes_already_is_not_a_candidate():
    """Catches a policy that is offered a request whose blocks the same step writes."""

    class Earliest(Recompute):
        def choose_victim(self, candidates):
            return candidates[0]

    engine = ToyEngine(toy_scheduler(12, 2, preemption=Earliest()))
    for i in range(3):
        engine.add([i] * (4 + i), 10)
    assert engine.run() == engine.alone()
    assert ("preempted", "r1") in events(engine, "preempted")


# -- all or nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_victim_loses_all_its_blocks(mode):
    """Catches eviction block by block: a sequence that lacks one of its blocks cannot run at all."""
    engine = engine_of_two(mode)
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert engine.scheduler.kv.num_used == 5, "those of r0"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", [samples(3), beams(3)])
def test_the_sequences_of_a_request_are_preempted_and_come_back_together(mode, method):
    """Catches a group of which some samples run and others wait."""
    engine = engine_of(16, mode)
    engine.add(range(8), 16)
    group = engine.add(range(10, 16), 8, method)
    while engine.scheduler.has_unfinished:
        engine.step()
        kv = engine.scheduler.kv
        assert len({bool(s.table.blocks) and s.table.pool is kv.pool for s in group.sequences}) <= 1
    assert ("preempted", "r1") in events(engine, "preempted")
    assert [r.completions and len(r.completions) for r in engine.requests] == [1, 3]
    assert engine.run() == engine.alone()


# -- recomputation -----------------------------------------------------------------------------------------


def test_recompute_is_one_prefill_of_prompt_and_generated_tokens():
    """Catches a resumption that decodes its old tokens one by one, or drops the token it samples."""
    engine = engine_of_two()
    assert engine.run() == engine.alone()
    (plan,) = [plan for plan in engine.plans if any(e.kind == "resumed" for e in plan.events)]
    (chunk,) = [c for c in plan.scheduled if c.sequence.request.request_id == "r1"]
    assert (chunk.start, chunk.num_tokens, chunk.num_candidates) == (0, 5 + 4, 1)


@pytest.mark.parametrize("caching", [False, True])
def test_a_recomputed_group_shares_its_prompt_again(caching):
    """Catches a group that needs more blocks after preemption than before, and is cut or computed n times."""
    engine = engine_of(16, caching=caching)
    engine.add(range(6), 9)
    engine.add(range(10, 18), 6, samples(3))
    assert engine.run() == engine.alone()
    resumed = [plan for plan in engine.plans if any(e.kind == "resumed" for e in plan.events)]
    assert resumed
    for plan in resumed:
        starts = [c.start for c in plan.scheduled if c.sequence.request.request_id == "r1"]
        assert all(start >= 8 for start in starts[1:])


@pytest.mark.parametrize("mode", MODES)
def test_preempting_a_half_prefilled_request_keeps_its_whole_prompt(mode):
    """Catches a victim that comes back with the part of its prompt that was computed: 8 of 16 tokens."""
    engine = engine_of(12, mode, budget=4)
    engine.add(range(4), 10, samples(2))
    victim = engine.add(range(20, 36), 4)
    while not victim.num_preemptions:
        num_computed = victim.sequences[0].num_computed_tokens
        engine.step()
    assert (num_computed, victim.sequences[0].num_tokens) == (8, 16)
    assert engine.run() == engine.alone()


# -- coming back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_preempted_requests_come_back_before_new_ones(mode):
    """Catches a request that has been served already, and goes to the end of the queue: r2 waits from the
    beginning, r3 arrives after the preemption."""
    engine = engine_of_two(mode, max_num_seqs=2)
    engine.add([1], 2)
    while not events(engine, "preempted"):
        engine.step()
    engine.add([2], 2)
    assert engine.run() == engine.alone()
    assert events(engine, "admitted", "resumed")[2:] == [
        ("resumed", "r1"),
        ("admitted", "r2"),
        ("admitted", "r3"),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_nobody_is_admitted_in_a_step_that_preempts(mode):
    """Catches a newcomer that takes the blocks that the preemption has just freed."""
    engine = engine_of_two(mode)
    while engine.scheduler.has_unfinished:
        if len(engine.requests) < 20:
            engine.add([1], 1)
        kinds = {event.kind for event in engine.step().events}
        assert "preempted" not in kinds or not kinds & {"admitted", "resumed"}
    assert events(engine, "preempted")


def test_a_request_comes_back_only_when_max_num_seqs_allows_it():
    """Catches more sequences than the executor has room for, where a scheduler of your own has admitted a
    later arrival first."""
    scheduler = toy_scheduler(16, 4, num_host_blocks=16, preemption=Swap(), max_num_seqs=1)
    engine = ToyEngine(scheduler)
    earlier, later = engine.add(range(4)), engine.add(range(4, 8))
    scheduler.waiting.reverse()
    scheduler.commit(plan := scheduler.schedule(), engine.executor.execute(plan))
    scheduler.preempt(StepPlan(1), later)
    for _ in range(2):
        scheduler.resume_preempted(StepPlan(2), 8)
        assert (scheduler.running, list(scheduler.swapped)) == ([earlier], [later])


def test_a_request_that_has_no_room_to_come_back_uses_none_of_the_budget():
    """Catches tokens that are counted but not computed, so that nobody else is computed either."""
    scheduler = toy_scheduler(5, 4, num_host_blocks=5, preemption=Swap())
    engine = ToyEngine(scheduler)
    engine.add(range(12), 8)
    later = engine.add(range(8), 8)
    engine.step()
    scheduler.preempt(StepPlan(1), later)
    engine.step()  # the first one takes its fourth block
    assert scheduler.kv.num_free == 1
    assert scheduler.resume_preempted(StepPlan(2), 8) == 0
    assert later.state is RequestState.SWAPPED


def test_a_preempted_request_is_recomputed_in_chunks_while_others_are_swapped_out():
    """Catches one that waits, with all behind it, for a step with nobody else in it."""
    scheduler = toy_scheduler(16, 4, num_host_blocks=16, budget=8)
    engine = ToyEngine(scheduler)
    _first, earlier, later = (engine.add(range(n), 20) for n in (2, 10, 1))
    for _ in range(3):
        engine.step()
    scheduler.preempt(StepPlan(1), earlier)
    scheduler.preemption = Swap()
    scheduler.preempt(StepPlan(2), later)
    assert [chunk.num_tokens for chunk in engine.step().scheduled] == [1, 7]


def test_a_swapped_request_that_waits_for_the_next_step_uses_none_of_the_budget():
    """Catches the tokens of the one admitted before it counted once more, or a loop that never ends."""
    scheduler = toy_scheduler(16, 4, num_host_blocks=16)
    engine = ToyEngine(scheduler)
    earlier, later = engine.add(range(3)), engine.add(range(3))
    engine.step()
    scheduler.preempt(StepPlan(1), earlier)
    scheduler.preemption = Swap()
    scheduler.preempt(StepPlan(2), later)
    assert scheduler.resume_preempted(StepPlan(3), 16) == 4
    assert (earlier.state, later.state) == (RequestState.RUNNING, RequestState.SWAPPED)


@pytest.mark.parametrize("modes", [*product(MODES, repeat=3)], ids="-".join)
def test_the_earliest_comes_back_first_whichever_way_each_one_went(modes):
    """Catches a request that is brought back before an earlier one because it waits in the other queue."""
    engine = engine_of(40)
    requests = [engine.add([i] * 3, 6) for i in range(3)]
    engine.step()
    plan = StepPlan(0)
    for request, mode in zip(requests, modes):
        engine.scheduler.preemption = MODES[mode]()
        engine.scheduler.preempt(plan, request)
    engine.executor.execute(plan)
    engine.add([9], 2)
    assert engine.run() == engine.alone()
    names = [name for _, name in events(engine, "resumed", "admitted")]
    assert names == ["r0", "r1", "r2"] * 2 + ["r3"]


def test_a_step_without_budget_left_brings_nobody_back():
    """Catches a preempted request that takes blocks in a step that cannot compute any of its tokens."""
    scheduler = toy_scheduler(16, 4, num_host_blocks=16, preemption=Swap())
    engine = ToyEngine(scheduler)
    earlier, later = engine.add(range(4)), engine.add(range(4, 8))
    engine.step()
    scheduler.preempt(StepPlan(1), later)
    scheduler.preemption = Recompute()
    scheduler.preempt(StepPlan(2), earlier)
    assert scheduler.resume_preempted(StepPlan(3), 0) == 0
    assert (earlier.state, later.state) == (RequestState.WAITING, RequestState.SWAPPED)
    assert scheduler.kv.num_used == 0


def test_a_group_stays_on_the_host_until_a_step_has_room_for_all_of_it():
    """Catches a group that comes back, holds its blocks and cannot be computed."""
    scheduler = toy_scheduler(16, 4, num_host_blocks=16, preemption=Swap(), budget=4)
    engine = ToyEngine(scheduler)
    engine.add([1], 6, samples(2))
    engine.step()
    group = engine.add([2], 6, samples(3))
    while not group.sequences[0].num_generated_tokens:
        engine.step()
    engine.step()
    scheduler.preempt(StepPlan(0), group)
    assert scheduler.resume_preempted(StepPlan(1), 2) == 0
    assert group.state is RequestState.SWAPPED
    assert scheduler.resume_preempted(StepPlan(2), 3) == 3


def test_a_group_as_large_as_the_budget_comes_back():
    """Catches a swapped-out group that waits forever for a budget greater than the largest there is."""
    engine = engine_of(12, "swap", budget=2)
    engine.add(range(4), 20)
    engine.step()
    engine.step()
    engine.add([9], 4, samples(2))
    outputs = engine.run(max_steps=60)
    assert events(engine, "preempted", "resumed") == [("preempted", "r1"), ("resumed", "r1")]
    assert outputs == engine.alone()


def test_a_mixed_resumption_never_swaps_into_a_block_that_is_still_to_be_copied():
    """Catches a swap-in that overwrites the cached last block of a request which is admitted in the same
    step and fully cached: swap-ins run before copies."""

    class ByName(Swap):
        """r1 is recomputed, others are swapped."""

        def choose_mode(self, victim, kv):
            if victim.request_id == "r1":
                return Decision("recompute", "for the test")
            return super().choose_mode(victim, kv)

    engine = ToyEngine(toy_scheduler(5, 2, num_host_blocks=5, caching=True, preemption=ByName()))
    engine.add([1], 9)
    for _ in range(2):
        engine.step()
    engine.add([1], 9)
    engine.add([9, 9], 8)
    assert engine.run() == engine.alone()
    assert {e.detail["mode"] for p in engine.plans for e in p.events if e.kind == "preempted"} == set(MODES)
    assert events(engine, "resumed")[0] == ("resumed", "r1"), "the earlier one first"


# -- the pool is too small for one -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_lone_request_that_outgrows_the_pool_ends_with_length(mode, caplog):
    """Catches an assertion that kills every request, and a retry that hangs forever."""
    engine = engine_of(4, mode)
    request = engine.add(range(5), 20)
    engine.run()
    (completion,) = request.completions
    assert completion.finish_reason == "length"
    assert completion.num_tokens == 9, "8 tokens have a slot, the ninth is sampled from them"
    assert [completion.output_token_ids] == alone(range(5), 4, samples())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    for word in ("r0", "length", "9 tokens", "4 KV blocks", "2 tokens", "num_blocks"):
        assert word in text


def test_the_others_go_on_when_one_outgrows_the_pool():
    """Catches an engine that is dead afterwards."""
    engine = engine_of(4)
    engine.add(range(3), 2)
    engine.add(range(20, 25), 20)
    engine.add(range(3), 2)
    outputs = engine.run()
    assert outputs[0] == outputs[2] == alone(range(3), 2, samples())
    assert outputs[1] == alone(range(20, 25), 4, samples())


def test_a_group_that_outgrows_the_pool_ends_with_what_it_has():
    """Catches a group of which some samples are lost: 7 blocks hold 6 tokens of each, and the seventh is
    sampled from them."""
    engine = engine_of(7)
    engine.add(range(5), 20, samples(3))
    assert engine.run() == [alone(range(5), 2, samples(3))]


def test_a_lone_group_that_needs_the_block_it_gives_back_ends_with_what_it_has():
    """Catches a count of the missing blocks from before: the first sample had a preallocated one."""
    engine = ToyEngine(toy_scheduler(3, 2, growth=Chunked(3)))
    engine.add(range(4), 8, samples(2))
    assert engine.run() == [alone(range(4), 1, samples(2))]


@pytest.mark.parametrize("mode", MODES)
def test_a_group_that_the_pool_cannot_take_back_ends_with_what_it_has(mode):
    """Catches a group that waits forever: the step in which it was preempted needed a block for each sample,
    and even alone they have one too few."""
    engine = ToyEngine(toy_scheduler(12, 4, num_host_blocks=12, preemption=MODES[mode]()))
    engine.add([1], 12)
    engine.add(range(4), 20, samples(4))
    assert engine.run(max_steps=40) == [alone([1], 12, samples()), alone(range(4), 9, samples(4))]
    assert events(engine, "preempted", "resumed", "outgrown") == [("preempted", "r1"), ("outgrown", "r1")]


def test_an_outgrown_request_is_reported_by_the_commit_of_its_step():
    """Catches a request that ends while planning and is never answered."""
    engine = engine_of(4)
    request = engine.add(range(5), 20)
    reported = []
    while engine.scheduler.has_unfinished:
        plan = engine.scheduler.schedule()
        reported.append(engine.scheduler.commit(plan, engine.executor.execute(plan)))
    assert reported[-1] == [request]


@pytest.mark.parametrize("is_aborted", [False, True], ids=["", "aborted meanwhile"])
def test_a_request_that_outgrew_the_pool_in_a_step_that_failed_is_reported_once(is_aborted):
    """Catches a rollback that succeeded and is done again by the next step."""
    engine = engine_of(4)
    request = engine.add(range(5), 20)
    while not request.is_finished:
        plan = engine.scheduler.schedule()
        if not plan.finished:
            engine.scheduler.commit(plan, engine.executor.execute(plan))
    if is_aborted:
        engine.scheduler.abort(request)
    assert engine.scheduler.roll_back(plan) == [request]
    assert engine.scheduler.schedule().finished == []


# -- what is logged of it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_preemption_warns_with_its_cause_and_the_count_and_the_first_with_its_cure(mode, caplog):
    """Catches silence: the first sign of a pool that is too small would be bad latency; and the same advice
    a hundred times."""
    engine = engine_of(12, mode)
    for i in range(3):
        engine.add([i] * 5, 10)
    engine.run()
    victims = [name for _, name in events(engine, "preempted")]
    assert len(victims) > 1
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(texts) == len(victims) == engine.scheduler.num_preemptions
    for count, (victim, text) in enumerate(zip(victims, texts), start=1):
        assert re.match(
            rf"Request {victim} is preempted by (recompute|swap) because .* space \(.+\)\. ", text
        )
        for cure in (
            "gpu_memory_utilization",
            "max_num_seqs",
            "max_num_batched_tokens",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "num_blocks",
            "kv_cache_memory",
        ):
            assert (cure in text) is (count == 1)
        assert text.endswith(f"total_cumulative_preemption_cnt={count}")


@pytest.mark.parametrize(
    ("num_samples", "size"), [(1, "17 tokens"), (2, "2 sequences of up to 13 tokens")], ids=["one", "two"]
)
def test_what_outgrows_the_pool_is_reported_with_its_size(num_samples, size, caplog):
    """Catches the sum of the samples, in which a shared prompt counts twice."""
    engine = engine_of(8)
    engine.add(range(9), 20, samples(num_samples))
    engine.run()
    [text] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f" ends with finish reason length: its {size} need more than the pool's 8 KV blocks of 2 t" in text


def test_the_count_of_a_request_is_its_own():
    """Catches a count that goes to somebody else."""
    engine = engine_of(12)
    for i in range(3):
        engine.add([i] * 5, 10)
    engine.run()
    victims = [name for _, name in events(engine, "preempted")]
    assert [r.num_preemptions for r in engine.requests] == [victims.count(f"r{i}") for i in range(3)]


def test_a_step_counts_all_that_it_preempts():
    """Catches metrics that see one preemption a step."""
    engine = ToyEngine(toy_scheduler())
    requests = [engine.add(range(4)) for _ in range(2)]
    engine.step()
    plan = StepPlan(1)
    for request in reversed(requests):
        engine.scheduler.preempt(plan, request)
    assert plan.num_preempted == engine.scheduler.num_preemptions == 2


# -- recompute or swap: whichever is cheaper ---------------------------------------------------------------


def auto(seconds_per_block, seconds_per_token, num_host_blocks=8):
    engine = ToyEngine(
        toy_scheduler(
            8,
            2,
            num_host_blocks=num_host_blocks,
            preemption=Auto(PreemptionCosts(0.0, seconds_per_block, seconds_per_token)),
        )
    )
    engine.add(range(5), 8)
    engine.add(range(20, 25), 8)
    assert engine.run() == engine.alone()
    return [e.detail for plan in engine.plans for e in plan.events if e.kind == "preempted"]


def test_auto_takes_the_cheaper_way_and_says_why():
    """Catches the dearer way, and a decision nobody can follow: blocks to move against tokens to compute."""
    (cheap_moves,) = auto(1e-3, 1.0)
    (cheap_tokens,) = auto(1.0, 1e-3)
    assert (cheap_moves["mode"], cheap_tokens["mode"]) == ("swap", "recompute")
    for detail in (cheap_moves, cheap_tokens):
        both = re.search(r"moving \d+ blocks\b.* computing \d+ tokens\b", detail["reason"])
        rule = "expected `moving 7 blocks ... computing 100 tokens` in this order, with its own numbers"
        assert both, f"{rule}, got {detail['reason']!r}"


def test_auto_counts_the_way_out_and_the_way_in():
    """Catches half the price: blocks of 2 tokens at 1 s each way, a token at 0.75 s or 1.5 s."""
    assert [auto(1.0, seconds)[0]["mode"] for seconds in (0.75, 1.5)] == ["recompute", "swap"]


def test_auto_counts_what_the_sequences_of_a_group_share_once():
    """Catches a prompt that counts once for each sample, and a reason with times in another unit."""
    engine = ToyEngine(toy_scheduler(16, 4, num_host_blocks=16))
    group = engine.add(range(16), 8, samples(4))
    engine.step()
    engine.step()
    decision = Auto(PreemptionCosts(0.0, 0.001, 0.01)).choose_mode(group, engine.scheduler.kv)
    assert decision == (
        "swap",
        "moving 8 blocks out and in takes about 16 ms, computing 32 tokens again 320 ms",
    )


def test_auto_counts_tokens_not_the_slots_of_their_blocks():
    """Catches a last block that counts as full: 5 tokens in 2 blocks of 4."""
    engine = ToyEngine(toy_scheduler(16, 4, num_host_blocks=16))
    request = engine.add(range(5))
    engine.step()
    _, reason = Auto(PreemptionCosts(0.0, 0.001, 0.01)).choose_mode(request, engine.scheduler.kv)
    assert reason == "moving 2 blocks out and in takes about 4 ms, computing 5 tokens again 50 ms"


def test_small_blocks_make_swapping_expensive():
    """Catches costs per byte only: it is the many small transfers that make swapping slow (Fig. 19)."""

    def mode(block_size, num_blocks):
        engine = ToyEngine(
            toy_scheduler(
                num_blocks,
                block_size,
                num_host_blocks=num_blocks,
                preemption=Auto(PreemptionCosts(1.0, 0.0, 1.0)),
            )
        )
        engine.add(range(8), 24)
        engine.add(range(20, 28), 24)
        engine.run()
        return next(e.detail["mode"] for plan in engine.plans for e in plan.events if e.kind == "preempted")

    assert (mode(1, 40), mode(8, 5)) == ("recompute", "swap")


def test_auto_recomputes_when_the_host_has_no_room():
    """Catches a swap, however cheap, to a host without room."""
    (detail,) = auto(1e-9, 1.0, num_host_blocks=0)
    assert detail["mode"] == "recompute"


def test_rough_costs_count_two_operations_per_weight_and_the_bytes_of_a_block():
    """Catches a multiplication and its addition counted as one, a GPU's rates for a CPU, and an overhead of
    each block where one kernel moves them all."""
    gpu = PreemptionCosts.estimate("cuda", block_bytes=20_000_000, num_weights=500_000_000)
    cpu = PreemptionCosts.estimate("cpu", block_bytes=20_000_000, num_weights=500_000_000)
    assert gpu == pytest.approx((0, 20e6 / 20e9, 2 * 500e6 / 100e12))
    assert cpu == pytest.approx((1e-6, 20e6 / 5e9, 2 * 500e6 / 50e9))
