"""The simulated clock: worked examples, determinism, and that scheduler and memory are the real ones."""

import subprocess
import sys
from collections import Counter
from dataclasses import asdict

import pytest

from minipaged.metrics import quantile
from minipaged.routing import PrefixAware, least_loaded
from minipaged.simulation.fleet import find_router, round_robin, simulate_fleet
from minipaged.simulation.hardware import UnknownNameError
from minipaged.simulation.measure import saturate
from minipaged.simulation.records import Record, Run, Usage, time_to_first_token
from minipaged.simulation.report import report
from minipaged.simulation.run import Simulation, simulate
from minipaged.simulation.scripts import ScriptedBeams, ScriptedSampling
from minipaged.simulation.systems import OPT_13B, Setup, paged
from minipaged.simulation.workloads import ALPACA, Arrival, Lengths, poisson, steady

SMALL = Setup(OPT_13B.deployment, 2048 + 512)
METHOD_NAMES = ["one", "three samples", "four beams"]
METHODS = [
    lambda a: ScriptedSampling(a.lengths.output),
    lambda a: ScriptedSampling(a.lengths.output, 3),
    lambda a: ScriptedBeams(a.lengths.output, 4, a.number, switch=0.4),
]


def run_checked(simulation: Simulation, arrivals) -> None:
    """Everything at once, invariants of the real scheduler and manager checked after every step."""
    for arrival in arrivals:
        simulation.add(arrival)
    while simulation.scheduler.has_unfinished:
        simulation.engine.step()
        simulation.scheduler.check_invariants()
    kv = simulation.scheduler.kv
    assert kv.num_free == kv.allocator.num_blocks


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("method", METHODS, ids=METHOD_NAMES)
def test_a_tight_pool_keeps_all_invariants_and_finishes_everything(chunked, mode, method):
    """2,560 slots for 60 requests: preemption happens. Catches a script that disagrees with the scheduler
    about who is alive, and lengths that are not the trace's."""
    options = {"enable_chunked_prefill": chunked, "preemption_mode": mode}
    simulation = paged(SMALL, method_of=method, enable_prefix_caching=True, **options)
    run_checked(simulation, poisson(ALPACA, float("inf"), 60, 0))
    assert len(simulation.run.records) == 60


@pytest.mark.parametrize("method", METHODS, ids=METHOD_NAMES)
def test_every_request_generates_as_many_tokens_as_the_trace_says(method):
    """One gap less than tokens a request. Catches an output that ends one token early or late."""
    arrivals = list(poisson(ALPACA, 5.0, 40, 0))
    run = simulate(paged(OPT_13B, method_of=method), arrivals)
    assert sum(run.gaps.values()) == sum(a.lengths.output - 1 for a in arrivals)
    assert run.output_tokens == sum(a.lengths.output for a in arrivals)


def test_a_run_of_single_tokens_has_no_time_between_them():
    """Catches a division by zero, and a latency of nothing."""
    assert (Run().gap_mean, Run().gap_quantile(0.99)) == (0.0, 0.0)


def test_an_output_ends_at_the_longest_sequence_of_the_model():
    """2,000 + 100 tokens end at 2,048. Catches sequences longer than the model can attend to."""
    run = simulate(paged(OPT_13B), [Arrival(0, 0.0, Lengths(2000, 100))])
    assert run.records[0].lengths.output == 48
    assert run.num_cut_short == 1


def test_outputs_that_outgrow_the_pool_are_counted():
    """Four blocks of 16 hold 64 tokens, the last of which is not computed: 50 + 15 fit, 50 + 16 do not.
    Catches answers that end early and are reported as finished."""
    setup = Setup(OPT_13B.deployment, 64)
    run = simulate(paged(setup), [Arrival(0, 0.0, Lengths(50, 15)), Arrival(1, 0.0, Lengths(50, 16))])
    assert [record.num_tokens for record in run.records] == [15, 15]
    assert (run.num_cut_short, report([run]).cut_short) == (1, 1)


def test_a_prompt_that_can_never_run_is_refused_and_the_rest_goes_on():
    run = simulate(paged(OPT_13B), [Arrival(0, 0.0, Lengths(5000, 1)), Arrival(1, 0.0, Lengths(5, 1))])
    assert (run.num_refused, len(run.records)) == (1, 1)


def test_a_report_of_two_replicas_has_what_its_labels_say():
    """Catches another quantile under a label, and a mean in which an idle replica weighs like a busy one."""
    records = [Record(0.0, Lengths(1, 2), i / 10, i, finished=2.0 * i, num_tokens=2) for i in range(1, 101)]
    gaps = Counter({1000: 98, 2000: 1, 3000: 1})
    records[0].is_cut_short = True
    busy = Run(records, 200.0, 100.0, num_preemptions=2, num_refused=1, num_cached_tokens=5, gaps=gaps)
    busy.gap_seconds, busy.usage = 1.03, Usage(4, 0.25, 0.5, 0)
    idle = Run([], 100.0, 50.0, num_preemptions=1, num_refused=1, usage=Usage(2, 0.2, 0.4, 0))
    assert asdict(report([busy, idle])) == pytest.approx(
        {
            "requests": 100,
            "cut_short": 1,
            "refused": 2,
            "seconds": 200,
            "request_rate": 0.5,
            "token_rate": 1,
            "ttft_p50": 50,
            "ttft_p95": 95,
            "itl_mean": 0.0103,
            "itl_p99": 0.02,
            "normalized_latency": 50.5,
            "queue_p95": 9.5,
            "preemptions": 3,
            "cached_tokens": 5,
            "running": 2.5,
            "kv_usage": 0.175,
            "kv_waste": 0.5,
        }
    )


def test_the_clock_is_the_sum_of_the_steps():
    """One request of 3 tokens: a prefill and two decodes. Catches time that passes twice or not at all."""
    simulation = paged(OPT_13B)
    costs = simulation.executor.costs
    expected = []
    execute = simulation.executor.execute

    def watched(plan):
        expected.append(costs.step_seconds(plan))
        return execute(plan)

    simulation.executor.execute = watched
    run = simulate(simulation, [Arrival(0, 7.0, Lengths(50, 3))])
    assert len(expected) == run.num_steps == 3
    assert run.seconds == pytest.approx(7.0 + sum(expected))
    assert time_to_first_token(run.records[0]) == pytest.approx(expected[0])
    assert run.normalized_latency == pytest.approx(sum(expected) / 3)


def test_the_mean_gap_is_that_of_the_records():
    """Catches a mean of gaps that are rounded down to a tenth of a millisecond."""
    run = simulate(paged(OPT_13B), poisson(ALPACA, 5.0, 40, 0))
    gaps = sum(record.num_tokens - 1 for record in run.records)
    exact = sum(record.last_token - record.first_token for record in run.records) / gaps
    assert run.gap_mean == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("prompt", [20, 120, 150])
def test_no_gap_exceeds_the_quantile_of_all(prompt):
    """One gap of a decode step. Catches a bin named by its lower end or its middle."""
    run = simulate(paged(OPT_13B), [Arrival(0, 0.0, Lengths(prompt, 2))])
    gap = run.records[0].last_token - run.records[0].first_token
    assert gap <= run.gap_quantile(1.0) < gap + 2e-5


def test_an_idle_clock_jumps_to_the_next_arrival():
    run = simulate(paged(OPT_13B), [Arrival(0, 1000.0, Lengths(5, 1))])
    assert run.records[0].admitted == 1000.0
    assert run.num_steps == 1


def test_the_same_seed_gives_the_same_numbers_to_the_last_digit():
    """In this process and in another one (hash seeds differ). Catches an order taken from a set."""
    program = (
        "import logging; logging.disable(50)\n"
        "from minipaged.simulation.experiments import fig14\n"
        "from minipaged.simulation.measure import on_trace\n"
        "from minipaged.simulation.systems import OPT_13B, paged\n"
        "from minipaged.simulation.workloads import ALPACA\n"
        "sim = paged(OPT_13B, method_of=fig14.beams(4), enable_prefix_caching=True, usage_every=3)\n"
        "run = on_trace(sim, ALPACA, 12.0, 5.0)\n"
        "print(repr((run.seconds, run.normalized_latency, run.usage, run.num_preemptions)))\n"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
    assert "Usage" in answers.pop()


def test_users_beyond_the_limit_are_turned_away():
    """A closed loop of 3 users: at most 3 requests are in the system, the rest of the 20 is dropped."""
    simulation = paged(OPT_13B)
    run = simulate(simulation, steady(ALPACA, 100.0, 0.2), max_users=3)
    assert run.num_dropped + len(run.records) == 20
    assert run.num_dropped >= 10
    assert simulation.num_present == 0


def test_a_run_stops_at_its_end_and_counts_only_what_finished():
    run = simulate(paged(OPT_13B), poisson(ALPACA, 10.0, 100, 0), until=3.0)
    assert 3.0 <= run.seconds < 3.5
    assert 0 < len(run.records) < 100


def test_reserving_holds_more_memory_than_growing():
    """The usage figures that Fig. 2 is made of. Catches a share that counts reserved slots as tokens."""
    usages = [
        saturate(paged(OPT_13B, page_growth=growth, usage_every=2), ALPACA, 20, 40).usage
        for growth in ("reserve", "on_demand")
    ]
    assert usages[0].held > usages[0].tokens
    assert usages[1].tokens > 2 * usages[0].tokens
    assert all(0 < share <= 1 for usage in usages for share in (usage.tokens, usage.held))


def test_samples_of_a_request_share_the_full_blocks_of_its_prompt():
    """Prompt of 64 tokens, 4 samples, block size 16: four shared blocks a request; with one block each of
    their own, 12 of 20 entries need no block (60 %)."""
    simulation = paged(OPT_13B, method_of=lambda a: ScriptedSampling(8, 4), usage_every=1)
    run = simulate(simulation, [Arrival(0, 0.0, Lengths(64, 8))])
    # Steps 2 to 7 have four sequences of five blocks; step 1 has just forked four times four blocks.
    assert run.usage.shared == pytest.approx(0.6, abs=0.04)


def test_beams_that_never_switch_share_only_the_prompt_and_beams_that_always_do_share_more():
    """The ancestry model at its ends."""

    def shared(switch):
        simulation = paged(
            OPT_13B, method_of=lambda a: ScriptedBeams(200, 4, 0, switch=switch), usage_every=1
        )
        return simulate(simulation, [Arrival(0, 0.0, Lengths(16, 200))]).usage.shared

    assert shared(0.0) < 0.2
    assert shared(0.1) > 0.4
    assert shared(1.0) > 0.6


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2), (0.51, 3), (0.95, 4), (1.0, 4)])
def test_a_quantile_is_the_smallest_value_that_covers_the_share(share, value):
    assert quantile([3, 1, 4, 2], share) == value


def fleet(count: int) -> list[Simulation]:
    return [paged(OPT_13B, enable_prefix_caching=True, usage_every=4) for _ in range(count)]


def test_a_fleet_of_one_is_the_engine():
    """Catches a router or a clock that changes what happens inside a replica."""
    arrivals = list(poisson(ALPACA, 8.0, 60, 0))
    alone = simulate(paged(OPT_13B, enable_prefix_caching=True, usage_every=4), arrivals)
    (run,) = simulate_fleet(fleet(1), arrivals, round_robin())
    assert run.seconds == alone.seconds
    assert [r.finished for r in run.records] == [r.finished for r in alone.records]


def test_round_robin_gives_everyone_the_same_number():
    runs = simulate_fleet(fleet(3), poisson(ALPACA, 30.0, 60, 0), round_robin())
    assert [len(run.records) for run in runs] == [20, 20, 20]


def test_least_loaded_sends_nothing_to_a_busy_replica():
    """One long request holds replica 0; the short ones that follow one by one all go to replica 1."""
    arrivals = [Arrival(0, 0.0, Lengths(10, 2000))]
    arrivals += [Arrival(i, 1.0 * i, Lengths(10, 2)) for i in range(1, 6)]
    runs = simulate_fleet(fleet(2), arrivals, least_loaded)
    assert [len(run.records) for run in runs] == [1, 5]


def test_prefix_aware_routing_finds_more_in_the_caches():
    """Six prefixes over three replicas: each is computed once, not on every replica."""
    arrivals = [Arrival(i, 0.5 * i, Lengths(200, 5, i % 6 if i % 7 else (i + 1) % 6, 160)) for i in range(60)]
    cached = [
        sum(run.num_cached_tokens for run in simulate_fleet(fleet(3), arrivals, router))
        for router in (round_robin(), PrefixAware())
    ]
    assert cached[1] > cached[0]
    assert cached[1] == (60 - 6) * 160


def test_prefix_aware_routing_leaves_an_overloaded_home():
    """All requests share one prefix and come at once: with a slack of 2 they spread."""
    arrivals = [Arrival(i, 0.0, Lengths(100, 20, 0, 96)) for i in range(30)]
    runs = simulate_fleet(fleet(3), arrivals, PrefixAware(slack=2))
    assert min(len(run.records) for run in runs) > 0


def test_an_unknown_router_lists_the_known_ones():
    with pytest.raises(UnknownNameError, match="choose one of round-robin, least-loaded, prefix-aware"):
        find_router("random")
