"""The policy that fleets in the simulator and `minipaged serve --replicas` share."""

import math
from collections import OrderedDict

from minipaged.routing import MOST_PREFIXES, PrefixAware, prefix_keys


def test_prompts_share_the_keys_of_what_they_share_and_no_others():
    """Catches keys of single pieces, which two prompts share without sharing what is before them."""
    keys = prefix_keys("abcdefgh", 2)
    assert len(keys) == 4
    assert prefix_keys("abcdefg!", 2)[:3] == keys[:3]
    assert prefix_keys("abcdefg!", 2)[3] != keys[3]
    assert not set(prefix_keys("xycdefgh", 2)) & set(keys)
    assert prefix_keys("a", 2) == []
    assert prefix_keys([1, 2, 3], 2) == prefix_keys([1, 2, 4], 2)


def test_another_root_has_other_keys():
    """Catches tenants whose requests are sent together for a prefix that their caches never share."""
    assert not set(prefix_keys("abcd", 2, "one")) & set(prefix_keys("abcd", 2, "other"))


def test_a_prompt_goes_where_its_longest_known_beginning_went():
    """Catches a search from the shortest beginning: all conversations share their system prompt."""
    router = PrefixAware()
    assert router([1, 2], [0, 5]) == 0
    assert router([1, 3], [50, 0]) == 1
    assert router([1, 2, 9], [3, 1]) == 0
    assert router([1, 3, 8], [1, 3]) == 1


def test_a_home_that_is_much_busier_than_the_others_is_left_for_good():
    """Catches a boundary that is off by one, and a prefix that goes back and forth."""
    router = PrefixAware(slack=2)
    assert router([7], [0, 1]) == 0
    assert router([7], [4, 1]) == 0
    assert router([7], [5, 1]) == 1
    assert router([7], [1, 3]) == 1


def test_a_replica_with_an_infinite_load_gets_nothing():
    """Catches a dead replica that keeps its prefixes."""
    router = PrefixAware()
    assert router([7], [0, 1, 1]) == 0
    assert router([7], [math.inf, 1, 1]) == 1
    assert router([], [math.inf, math.inf, 5]) == 2


def test_new_prefixes_spread_over_idle_replicas():
    """Catches a fleet that uses one cache of three as long as requests come one by one."""
    router = PrefixAware()
    assert [router([key], [0, 0, 0]) for key in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [router([key], [0, 0, 0]) for key in range(6)] == [0, 1, 2, 0, 1, 2]


def test_what_is_unused_for_longest_is_forgotten():
    """Catches a router that grows forever, and one that forgets what is used all the time."""
    router = PrefixAware()
    router([-1], [0, 1])
    router([-2], [0, 1])
    router(range(MOST_PREFIXES - 2), [1, 0])
    router([-1], [0, 0])
    router([MOST_PREFIXES], [1, 0])
    assert len(router._home) == MOST_PREFIXES
    assert router([-1], [1, 0]) == 0
    assert router([-2], [1, 0]) == 1
    router(range(2 * MOST_PREFIXES), [0, 0])
    assert len(router._home) == MOST_PREFIXES


def test_the_oldest_prefix_is_found_without_a_search():
    """Catches a plain dict, which walks past all entries deleted before its first: seconds for a long prompt,
    once the router is full."""
    assert isinstance(PrefixAware()._home, OrderedDict)
