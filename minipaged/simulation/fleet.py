"""Many replicas behind a router: round robin, least loaded, or where the prefix is already cached.

    arrival --> router --> replica 0 | replica 1 | ...      each a whole engine with a clock of its own

When a request arrives, every replica is stepped up to that moment, so the router sees what a real router
would see: how many requests each replica has. Time and memory grow linearly with the requests.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count

from minipaged.routing import PrefixAware, least_loaded
from minipaged.simulation.hardware import find
from minipaged.simulation.records import Run
from minipaged.simulation.run import Simulation
from minipaged.simulation.workloads import Arrival

Router = Callable[[Sequence[int], Sequence[float]], int]
"""Picks the replica of a request, by the keys of its prompt and the requests that each replica has."""


def round_robin() -> Router:
    """Each replica in turn."""
    turns = count()
    return lambda keys, loads: next(turns) % len(loads)


def find_router(name: str) -> Router:
    """A router by name, or `UnknownNameError`."""
    routers: dict[str, Router] = {
        "round-robin": round_robin(),
        "least-loaded": least_loaded,
        "prefix-aware": PrefixAware(),
    }
    return find("router", routers, name)


def simulate_fleet(replicas: Sequence[Simulation], arrivals: Iterable[Arrival], router: Router) -> list[Run]:
    """Run a trace over all replicas; one result each."""
    for arrival in arrivals:
        for replica in replicas:
            replica.advance(arrival.time)
        lengths = arrival.lengths
        keys = [lengths.prefix_id] if lengths.prefix_tokens else []  # (what follows is not shared)
        replicas[router(keys, [replica.num_present for replica in replicas])].add(arrival)
    for replica in replicas:
        replica.advance()
    return [replica.finish() for replica in replicas]
