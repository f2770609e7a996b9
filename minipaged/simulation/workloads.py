"""Requests: token lengths, arrival times, shared prefixes. The seed determines every value.

The data sets behind the sources' figures cannot be shipped; lengths are drawn from lognormal
distributions with the published means (paper, Fig. 11), a stated spread and an assumed limit; a file with
real lengths may be given instead. Arrivals are a Poisson process.
"""

import math
import random
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from minipaged.simulation.hardware import find
from minipaged.text_io import read_json


def normal_cdf(x: float) -> float:
    """Of the standard normal distribution. (`statistics` takes long to load in a browser.)"""
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


class WorkloadError(ValueError):
    """A workload that cannot be simulated; the message names the value and the fix."""


class Lengths(NamedTuple):
    """Tokens of a prompt and of its output, both at least 1; the first `prefix_tokens` of the prompt are
    those of the shared prefix `prefix_id`."""

    prompt: int
    output: int
    prefix_id: int = 0
    prefix_tokens: int = 0


class Arrival(NamedTuple):
    """One request of a trace: number, seconds since the start, lengths."""

    number: int
    time: float
    lengths: Lengths


@dataclass(frozen=True)
class Lognormal:
    """Lognormal lengths, in tokens, cut to 1..`most`, whose mean *after* the cut is `mean`."""

    mean: float
    sigma: float  # standard deviation of the logarithm: 0.5 is a mild, 1 a heavy skew
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.mean < self.most:
            raise WorkloadError(
                f"mean is {self.mean} tokens; give at least 1 and less than {self.most}, the maximum"
            )

    @cached_property
    def mu(self) -> float:
        """Mean of the logarithm that gives `mean` after the cut, found by bisection."""
        low, high = -5.0, 2 * math.log(self.most)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cut_mean(middle) < self.mean else (low, middle)
        return low

    def _cut_mean(self, mu: float) -> float:
        """E[max(1, min(X, most))] in closed form."""
        cdf, s = normal_cdf, self.sigma
        a, b = (0 - mu) / s, (math.log(self.most) - mu) / s
        inside = math.exp(mu + s * s / 2) * (cdf(b - s) - cdf(a - s))
        return cdf(a) + inside + self.most * (1 - cdf(b))

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return round(max(1.0, min(self.most, math.exp(rng.gauss(self.mu, self.sigma)))))


class Workload(Protocol):
    """A source of lengths."""

    def lengths(self, seed: int) -> Iterator[Lengths]:
        """Endless, the same for the same seed."""
        ...


@dataclass(frozen=True)
class Independent:
    """Prompts and outputs drawn independently, behind one of `num_prefixes` equally likely prefixes."""

    prompt: Lognormal
    output: Lognormal
    prefix_tokens: int = 0  # in front of the drawn prompt
    num_prefixes: int = 1

    def lengths(self, seed: int) -> Iterator[Lengths]:
        """Endless, the same for the same seed."""
        rng = random.Random(seed)
        while True:
            prefix = rng.randrange(self.num_prefixes) if self.prefix_tokens else 0
            prompt = self.prompt.draw(rng) + self.prefix_tokens
            yield Lengths(prompt, self.output.draw(rng), prefix, self.prefix_tokens)


@dataclass(frozen=True)
class Chat:
    """Rounds of conversations: the prompt is the conversation so far and a new question, cut to its last
    `most_prompt` tokens; the output ends at `most_output`."""

    turn: Independent
    mean_rounds: float
    most_prompt: int
    most_output: int

    @property
    def output(self) -> Lognormal:
        """Outputs before the cut."""
        return self.turn.output

    def lengths(self, seed: int) -> Iterator[Lengths]:
        """Endless, the same for the same seed."""
        rng = random.Random(seed)
        turns = self.turn.lengths(seed + 1)
        while True:
            history = 0
            # Geometric number of rounds, at least one.
            while True:
                prompt, output, *_ = next(turns)
                output = min(output, self.most_output)
                yield Lengths(min(self.most_prompt, history + prompt), output)
                history += prompt + output
                if rng.random() < 1 / self.mean_rounds:
                    break


@dataclass(frozen=True)
class FromFile:
    """Real lengths, drawn at random with replacement."""

    pairs: tuple[tuple[int, int], ...]

    def lengths(self, seed: int) -> Iterator[Lengths]:
        """Endless, the same for the same seed."""
        rng = random.Random(seed)
        while True:
            yield Lengths(*rng.choice(self.pairs))


def read_lengths(path: Path) -> FromFile:
    """Lengths from a JSON list of [prompt tokens, output tokens]; a `WorkloadError` names the bad entry."""
    pairs = read_json("workload", path)
    if not isinstance(pairs, list) or not pairs:
        raise WorkloadError(f"{path} must be a JSON list of [prompt tokens, output tokens], not empty")
    for i, pair in enumerate(pairs):
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 1 for n in pair)):
            raise WorkloadError(
                f"{path}: entry {i} is {reprlib.repr(pair)}; give [prompt tokens, output tokens], "
                "integers from 1 up"
            )
    return FromFile(tuple((prompt, output) for prompt, output in pairs))


# Means: the paper's Fig. 11. It publishes no variances; the sigmas are fitted once, ShareGPT's to the mean
# context of a running request that Fig. 2 and Fig. 13 a imply (440 to 500 tokens), Alpaca's to the share of
# full prompt blocks that Fig. 15 implies. The limit of 1,024 tokens is assumed. Translation: English in,
# German out; nothing is published.
SHAREGPT = Independent(Lognormal(161.31, 1.0, 1024), Lognormal(337.99, 0.8, 1024))
ALPACA = Independent(Lognormal(19.31, 0.6, 1024), Lognormal(58.45, 0.9, 1024))
TRANSLATION = Independent(Lognormal(40, 0.5, 256), Lognormal(50, 0.5, 256))
CHAT = Chat(SHAREGPT, 4, 1024, 1024)

WORKLOADS: dict[str, Workload] = {
    "sharegpt": SHAREGPT,
    "alpaca": ALPACA,
    "translation": replace(TRANSLATION, prefix_tokens=341),
    "chat": CHAT,
}


def find_workload(name: str) -> Workload:
    """A named workload, or a file of lengths if the name ends in .json."""
    if name.endswith(".json"):
        return read_lengths(Path(name))
    return find("workload", WORKLOADS, name, " or give a .json file of lengths")


SLOWEST = 1e-6
"""Requests a second: one in eleven days."""


def poisson(workload: Workload, rate: float, count: int, seed: int = 0) -> Iterator[Arrival]:
    """`count` requests at `rate` a second on average, exponential gaps. An infinite rate: all at 0.

    The lengths depend on the seed alone: at every rate the same requests come in the same order.
    """
    if not rate >= SLOWEST:
        raise WorkloadError(f"rate is {rate} requests/s; give at least {SLOWEST:g}, or inf for all at once")
    rng = random.Random(f"arrivals {seed}")
    time = 0.0
    for number, lengths in zip(range(count), workload.lengths(seed)):
        time += rng.expovariate(1.0) / rate
        yield Arrival(number, time, lengths)


def steady(workload: Workload, rate: float, seconds: float) -> Iterator[Arrival]:
    """One request every 1 / rate seconds (a load generator's constant arrival rate)."""
    for number, lengths in zip(range(int(rate * seconds)), workload.lengths(0)):
        yield Arrival(number, number / rate, lengths)


FIRST_OWN = 1_000_000
"""Token ids from here on are a prompt's own."""


def prompt_tokens(arrival: Arrival) -> list[int]:
    """Token ids of the prompt: equal in the shared prefix, otherwise the request's own."""
    lengths, own = arrival.lengths, FIRST_OWN + arrival.number
    return [lengths.prefix_id] * lengths.prefix_tokens + [own] * (lengths.prompt - lengths.prefix_tokens)
