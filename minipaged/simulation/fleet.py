"""Many replicas behind a router: round robin, least loaded, or where the prefix is already cached.

    arrival --> router --> replica 0 | replica 1 | ...      each a whole engine with a clock of its own

When a request arrives, every replica is stepped up to that moment, so the router sees what a real one
would: how many requests each replica has. Time and memory grow linearly with the requests.
"""

from collections.abc import Callable, Iterable, Sequence

from minipaged.simulation.hardware import find
from minipaged.simulation.records import Run
from minipaged.simulation.run import Simulation
from minipaged.simulation.workloads import Arrival

Router = Callable[[Arrival, Sequence[Simulation]], int]
"""Picks the replica of a request: its index."""


def round_robin(arrival: Arrival, replicas: Sequence[Simulation]) -> int:
    """One after the other."""
    return arrival.number % len(replicas)


def least_loaded(arrival: Arrival, replicas: Sequence[Simulation]) -> int:
    """Where the fewest requests are."""
    return min(range(len(replicas)), key=lambda i: replicas[i].num_present)


class PrefixAware:
    """Where the prefix was last sent, unless that one is much busier than the others.

    Args:
        slack: requests that a replica may have beyond twice the least loaded.
    """

    def __init__(self, slack: int = 8) -> None:
        self.slack = slack
        self._home: dict[int, int] = {}

    def __call__(self, arrival: Arrival, replicas: Sequence[Simulation]) -> int:
        """The prefix's home, or a new one."""
        least = least_loaded(arrival, replicas)
        if not arrival.lengths.prefix_tokens:
            return least
        home = self._home.get(arrival.lengths.prefix_id, least)
        if replicas[home].num_present > 2 * replicas[least].num_present + self.slack:
            home = least
        self._home[arrival.lengths.prefix_id] = home
        return home


def find_router(name: str) -> Router:
    """A router by name, or `UnknownNameError`."""
    routers: dict[str, Router] = {
        "round-robin": round_robin,
        "least-loaded": least_loaded,
        "prefix-aware": PrefixAware(),
    }
    return find("router", routers, name)


def simulate_fleet(replicas: Sequence[Simulation], arrivals: Iterable[Arrival], router: Router) -> list[Run]:
    """Run a trace over all replicas; one result each."""
    for arrival in arrivals:
        for replica in replicas:
            replica.advance(arrival.time)
        replicas[router(arrival, replicas)].add(arrival)
    for replica in replicas:
        replica.advance()
    return [replica.finish() for replica in replicas]
