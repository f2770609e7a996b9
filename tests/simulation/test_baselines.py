"""Orca and FasterTransformer: what they reserve, and that nothing of it is lost."""

import random

import pytest

from minipaged.memory import BlockAllocator, KVManager, OnDemand
from minipaged.scheduling import FCFSScheduler, PrefillFirst, Recompute
from minipaged.simulation.baselines.contiguous import (
    ContiguousKVManager,
    reserve_max,
    reserve_oracle,
    reserve_pow2,
)
from minipaged.simulation.baselines.seldom_prefills import SeldomPrefills
from minipaged.simulation.baselines.static_batch import StaticBatchScheduler
from minipaged.simulation.costs import CostModel
from minipaged.simulation.executor import SimulatedExecutor
from minipaged.simulation.run import Simulation, simulate
from minipaged.simulation.scripts import ScriptedBeams, ScriptedSampling
from minipaged.simulation.systems import OPT_13B
from minipaged.simulation.workloads import Arrival, Lengths


def arrivals(*lengths: tuple[int, int], time: float = 0.0) -> list[Arrival]:
    return [Arrival(i, time, Lengths(*pair)) for i, pair in enumerate(lengths)]


def orca(num_slots: int, reserve=reserve_oracle, longest: int = 64, method_of=None) -> Simulation:
    kv = ContiguousKVManager(num_slots, longest, reserve)
    scheduler = FCFSScheduler(kv, PrefillFirst(), Recompute(), 64, 256, longest)
    executor = SimulatedExecutor(CostModel(OPT_13B.deployment, 1, paged=False))
    options = {} if method_of is None else {"method_of": method_of}
    return Simulation(scheduler, executor, **options)


def test_what_the_three_reserve():
    """The paper's example: an output of 25 tokens reserves 32 under Pow2."""
    assert reserve_max(10, 25, 2048) == 2048
    assert reserve_pow2(10, 25, 2048) == 10 + 32
    assert reserve_pow2(10, 32, 2048) == 10 + 32
    assert reserve_pow2(1000, 1025, 2048) == 2048
    assert reserve_oracle(10, 25, 2048) == 35


def test_max_holds_as_many_requests_as_the_longest_sequence_fits_into_the_pool():
    """Whatever is asked: 4 x 64 = 256 slots hold four requests of 3 tokens."""
    simulation = orca(256, reserve_max)
    for arrival in arrivals(*[(2, 9)] * 6):
        simulation.add(arrival)
    simulation.engine.step()
    assert [len(simulation.scheduler.running), len(simulation.scheduler.waiting)] == [4, 2]


def test_a_region_is_rounded_up_to_a_power_of_two():
    """5 + 4 tokens take 16 of 64 slots, so that four requests fit, not seven. This rounding is what makes
    the published Orca numbers come out."""
    simulation = orca(64)
    for arrival in arrivals(*[(5, 4)] * 7):
        simulation.add(arrival)
    simulation.engine.step()
    assert len(simulation.scheduler.running) == 4
    assert simulation.scheduler.kv.num_free == 0


def test_first_come_first_served_stops_at_the_first_that_does_not_fit():
    """A large request at the head blocks the small ones behind it, as in the paged system."""
    simulation = orca(64)
    for arrival in arrivals((5, 27), (5, 59), (5, 3)):
        simulation.add(arrival)
    simulation.engine.step()
    assert [r.request_id for r in simulation.scheduler.running] == ["0"]


def test_samples_share_nothing():
    """Three samples of 5 + 3 tokens reserve three regions of 8 at admission."""
    simulation = orca(64, method_of=lambda a: ScriptedSampling(a.lengths.output, 3))
    simulation.add(arrivals((5, 3))[0])
    simulation.engine.step()
    assert simulation.scheduler.kv.num_free == 64 - 3 * 8


def test_a_fork_copies_what_the_parent_has_computed():
    """The prompt of 5 tokens is copied to the two other samples. Catches forks that are free of charge."""
    simulation = orca(64, method_of=lambda a: ScriptedSampling(a.lengths.output, 3))
    simulation.add(arrivals((5, 3))[0])
    simulation.engine.step()
    plans = []
    simulation.engine.on_planned.append(plans.append)
    simulation.engine.step()
    (plan,) = plans
    assert len(plan.copies) == 2 * 5
    assert len({copy.destination for copy in plan.copies}) == 10
    assert {copy.source for copy in plan.copies} == set(range(5))


@pytest.mark.parametrize("reserve", [reserve_max, reserve_pow2, reserve_oracle])
@pytest.mark.parametrize("method", ["sampling", "beams"])
def test_random_requests_leave_no_region_behind(reserve, method):
    """Forks, ends and frees in random order, invariants checked after every step. Catches a beam's region
    that is given back twice or never, and two sequences in one region."""
    rng = random.Random(7)

    def method_of(arrival):
        n = rng.randint(1, 4)
        if method == "beams":
            return ScriptedBeams(arrival.lengths.output, n, arrival.number, switch=0.5)
        return ScriptedSampling(arrival.lengths.output, n)

    simulation = orca(300, reserve, method_of=method_of)
    for i in range(40):
        prompt = rng.randint(1, 30)
        simulation.add(Arrival(i, 0.0, Lengths(prompt, rng.randint(1, 30))))
    while simulation.scheduler.has_unfinished:
        simulation.engine.step()
        simulation.scheduler.check_invariants()
    assert simulation.scheduler.kv.num_free == 300
    assert len(simulation.run.records) == 40


def static(num_seqs: int) -> Simulation:
    kv = ContiguousKVManager(num_seqs * 64, 64, reserve_max)
    scheduler = StaticBatchScheduler(kv, num_seqs, 64)
    return Simulation(scheduler, SimulatedExecutor(CostModel(OPT_13B.deployment, 1, paged=False)))


def test_a_static_batch_hands_back_everything_with_its_last_member():
    """Outputs of 2, 5 and 9 tokens all end after 9 steps. Catches latencies of an iteration-level system."""
    run = simulate(static(3), arrivals((4, 2), (4, 5), (4, 9)))
    assert run.num_steps == 9
    assert len({record.finished for record in run.records}) == 1
    assert [record.lengths.output for record in run.records] == [2, 5, 9]


def test_nobody_joins_a_static_batch_while_it_runs():
    """The fourth request waits for the longest of the first three, not for the shortest."""
    simulation = static(3)
    run = simulate(simulation, arrivals((4, 2), (4, 5), (4, 9), (4, 1)))
    assert run.num_steps == 9 + 1
    last = run.records[-1]
    assert last.lengths.output == 1
    assert last.admitted == run.records[0].finished


def test_a_static_batch_takes_whatever_waits():
    """It does not wait to be full: one request alone starts at once."""
    run = simulate(static(3), [*arrivals((4, 3)), Arrival(9, 10.0, Lengths(4, 3))])
    assert [record.admitted for record in run.records] == [0.0, 10.0]


def seldom() -> Simulation:
    """Ten requests that run for long."""
    kv = KVManager(BlockAllocator(1000), 4, OnDemand())
    scheduler = FCFSScheduler(kv, SeldomPrefills(), Recompute(), 64, 256, 2048)
    simulation = Simulation(scheduler, SimulatedExecutor(CostModel(OPT_13B.deployment, 4)))
    for arrival in arrivals(*[(4, 100)] * 10):
        simulation.add(arrival)
    simulation.engine.step()
    return simulation


@pytest.mark.parametrize(("newcomers", "steps"), [(1, 20), (2, 20), (3, 1)])
def test_few_prompts_wait_for_20_tokens_and_many_join_at_once(newcomers, steps):
    """0.3 of ten running requests are three. Catches a queue that is empty as soon as memory is free."""
    simulation = seldom()
    for i in range(newcomers):
        simulation.add(Arrival(10 + i, 0.0, Lengths(4, 10)))
    for _ in range(steps - 1):
        simulation.engine.step()
        assert len(simulation.scheduler.waiting) == newcomers
    simulation.engine.step()
    assert not simulation.scheduler.waiting


def test_the_20_tokens_are_counted_from_the_last_prompts():
    """Catches a count that never begins anew: the second newcomer would join in the next step."""
    simulation = seldom()
    for number in (10, 11):
        simulation.add(Arrival(number, 0.0, Lengths(4, 100)))
        for _ in range(19):
            simulation.engine.step()
        assert len(simulation.scheduler.waiting) == 1
        simulation.engine.step()
        assert len(simulation.scheduler.running) == number + 1
