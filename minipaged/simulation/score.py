"""A leaderboard for components of your own (lesson 13): three workloads whose seeds come from a secret key.

Scores are relative to the project's own engine on the same requests, which has 100 points:

    throughput   finished requests a second
    wait         seconds to the first token that 95 % of the requests do not exceed
    waste        share of the held slots that hold no token, over time

    points = 100 x geometric mean, over workloads, of throughput / own, own wait / wait and full / own full,
             where full = 1 - waste
"""

import hashlib
import json
import math
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from minipaged.components import Components
from minipaged.simulation.records import time_to_first_token
from minipaged.simulation.run import explained_hidden_fields, simulate
from minipaged.simulation.systems import OPT_13B, paged
from minipaged.simulation.workloads import SHAREGPT, Independent, Lognormal, Workload, poisson
from minipaged.text_io import TextError, read_json


class ScoreError(ValueError):
    """A score that cannot be given; the message says why."""


class Marks(NamedTuple):
    """The measurements of a run."""

    throughput: float  # requests/s
    wait: float  # s
    waste: float  # 0 to 1
    preemptions: int = 0  # (they earn and cost nothing)

    def relative_to(self, own: "Marks") -> float:
        """The product of the three ratios; above 1 is better."""
        return (
            (self.throughput / own.throughput) * (own.wait / self.wait) * (1 - self.waste) / (1 - own.waste)
        )


@dataclass(frozen=True)
class Contest:
    """One workload, and the settings of the engine that runs it."""

    workload: Workload
    rate: float  # requests/s, on average
    options: dict[str, Any]


CONTESTS = {
    "questions": Contest(  # prompts of very different lengths, short answers, 16 at once
        Independent(Lognormal(300, 1.2, 1500), Lognormal(60, 0.6, 300)),
        6.4,
        {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "enable_chunked_prefill": True},
    ),
    "chat": Contest(SHAREGPT, 2.4, {}),  # long answers: memory is short and requests are preempted
    "documents": Contest(  # long prompts, eight shared beginnings
        Independent(Lognormal(700, 0.8, 1400), Lognormal(50, 0.6, 200), prefix_tokens=256, num_prefixes=8),
        5.0,
        {"enable_prefix_caching": True, "enable_chunked_prefill": True},
    ),
}

REQUESTS = 600


def seed_of(key: str, contest: str) -> int:
    """The seed of a contest; nobody can guess it without the key."""
    return int.from_bytes(hashlib.sha256(f"{key} {contest}".encode()).digest()[:6], "big")


def run_contest(contest: str, key: str, components: Components, count: int) -> Marks:
    """Run `count` requests on the simulated clock, and look at the memory after every step.

    Raises `ScoreError` unless all of them are answered in full.
    """
    asked = CONTESTS[contest]
    simulation = paged(OPT_13B, components=components, usage_every=1, **asked.options)
    with explained_hidden_fields("requests of the workloads", ScoreError):
        run = simulate(simulation, poisson(asked.workload, asked.rate, count, seed_of(key, contest)))
    num_full = sum(record.num_tokens == record.lengths.output for record in run.records)
    if num_full < count:
        lost = f"{run.num_refused} were refused and {count - num_full - run.num_refused} ended early"
        raise ScoreError(f"of {count} requests of {contest}, {lost}; answer all of them in full")
    waste = 1 - run.usage.tokens / run.usage.held
    return Marks(run.throughput, run.quantile(time_to_first_token, 0.95), waste, run.num_preemptions)


def points(marks: dict[str, Marks], own: dict[str, Marks]) -> float:
    """100 for the project's own engine, more for a better one."""
    ratios = [marks[contest].relative_to(own[contest]) for contest in marks]
    return 100 * math.prod(ratios) ** (1 / (3 * len(ratios)))


class Leaderboard:
    """The best score of each name, by key, in a JSON file. The key of a new file is drawn at random.

    Raises `ScoreError` if the file holds something else.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            data: Any = read_json("leaderboard", file) if file.exists() else {}
        except TextError:
            data = None
        if not _is_leaderboard(data):
            raise ScoreError(f"{file} is not a leaderboard; move it away, and a new one begins")
        self.key: str = data.get("key") or secrets.token_hex(8)
        self._points: dict[str, dict[str, float]] = data.get("points", {})

    def rows(self, key: str) -> list[tuple[str, float]]:
        """Name and points, the best first. Only scores of one key can be compared."""
        return sorted(self._points.get(board(key), {}).items(), key=lambda row: -row[1])

    def enter(self, key: str, name: str, scored: float) -> None:
        """Record a score, if it is the best of its name. Others may have entered theirs in the meantime."""
        if not name.isprintable() or not name.strip():
            raise ScoreError(f"name is {name!r}; give one that can be shown in a line")
        if self.file.exists():
            self._points = Leaderboard(self.file)._points
        scores = self._points.setdefault(board(key), {})
        scores[name] = max(scored, scores.get(name, 0.0))
        new = self.file.with_suffix(f".{os.getpid()}.new")
        new.write_text(
            json.dumps({"key": self.key, "points": self._points}, indent=1) + "\n", encoding="utf-8"
        )
        new.replace(self.file)


def _is_leaderboard(data: Any) -> bool:
    if not isinstance(data, dict) or not isinstance(data.get("key", ""), str):
        return False
    boards = data.get("points", {})
    if not isinstance(boards, dict) or not all(isinstance(scores, dict) for scores in boards.values()):
        return False
    return all(isinstance(best, int | float) for scores in boards.values() for best in scores.values())


def board(key: str) -> str:
    """The name of a key in the file, which does not reveal the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]
