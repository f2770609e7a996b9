"""Which of several equal engines takes a request: the one whose cache has a prefix of the prompt.

    prompt --> keys of its prefixes --> PrefixAware(keys, loads) --> replica 0 | replica 1 | ...

The router keeps no tokens and asks no cache; it remembers where it sent each prefix. The simulator's
fleets and `minipaged serve --replicas` both use this code.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

MOST_PREFIXES = 1 << 17
"""Prefixes that are remembered; the least recently used are forgotten."""


def prefix_keys(prompt: Sequence[Hashable], size: int, root: Hashable = None) -> list[int]:
    """A key for each prefix of `size`, 2 x `size`, ... items, shortest first.

    Like the keys of the prefix cache, each is a hash of the one before it and of the next items.

    Args:
        prompt: token ids, or a text.
        size: items per key; a shorter rest has none.
        root: who may share prefixes, as a cache's salt; other roots have other keys.
    """
    keys, key = [], hash(root)
    for end in range(size, len(prompt) + 1, size):
        key = hash((key, *prompt[end - size : end]))
        keys.append(key)
    return keys


def least_loaded(keys: Sequence[int], loads: Sequence[float]) -> int:
    """Where the fewest requests are."""
    return min(range(len(loads)), key=loads.__getitem__)


class PrefixAware:
    """The replica that last received the longest known prefix, unless it is much busier than the others.

    Args:
        slack: requests that a replica may have beyond twice the least loaded.
    """

    def __init__(self, slack: int = 8) -> None:
        self.slack = slack
        # Key -> replica, the most recently used last. (To find its first entry, a plain dict walks past all
        # those deleted before it.)
        self._home: OrderedDict[int, int] = OrderedDict()
        self._num_sent: dict[int, int] = {}

    def __call__(self, keys: Sequence[int], loads: Sequence[float]) -> int:
        """The replica of a request, which is remembered.

        Args:
            keys: of its prompt; see `prefix_keys`.
            loads: requests of each replica; infinite for one that cannot take any.
        """
        # (Among equals the one that was sent the fewest: new prefixes spread over all caches.)
        chosen = min(range(len(loads)), key=lambda i: (loads[i], self._num_sent.get(i, 0)))
        home = next((self._home[key] for key in reversed(keys) if key in self._home), chosen)
        if loads[home] <= 2 * loads[chosen] + self.slack:
            chosen = home
        self._num_sent[chosen] = self._num_sent.get(chosen, 0) + 1
        for key in keys:
            self._home.pop(key, None)
            self._home[key] = chosen
        while len(self._home) > MOST_PREFIXES:
            self._home.popitem(last=False)
        return chosen
