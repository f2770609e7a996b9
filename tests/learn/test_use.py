"""`use={...}`: the project's own classes are checked, too, where they do not belong."""

import pytest

from minipaged.decoding.beam_search import BeamSearch
from minipaged.learn.contracts import CONCEPTS, ContractError
from minipaged.learn.overrides import components_from
from minipaged.memory import BlockAllocator, OnDemand, PrefixCache
from minipaged.scheduling import FCFSScheduler


@pytest.mark.parametrize(
    ("concept", "given", "message"),
    [
        ("allocator", PrefixCache, r"PrefixCache has no method .*reclaim\(block\), .*; see BlockAlloc"),
        ("allocator", BlockAllocator(3), "<.*BlockAllocator.*> is not a class; see BlockAllocator in"),
        ("preemption", OnDemand, r"OnDemand has no method .*choose_mode\(victim, kv\); see PreemptionPolicy"),
        ("scheduler", BeamSearch, "BeamSearch must be a subclass of FCFSScheduler"),
        ("kv_manager", FCFSScheduler, "FCFSScheduler must be a subclass of KVManager"),
        ("allocator", None, "None is not a class"),
    ],
)
def test_a_class_of_the_projects_in_the_wrong_place_is_reported(concept, given, message):
    """Catches a TypeError from the middle of the engine, and a policy that fails at the first preemption."""
    with pytest.raises(ContractError, match=f"^{concept}: {message}"):
        components_from({concept: given})


@pytest.mark.parametrize("concept", CONCEPTS)
def test_the_projects_own_classes_are_fine_in_their_place(concept):
    """Catches a check that refuses what the engine itself uses."""
    for own in CONCEPTS[concept].originals:
        assert components_from({concept: own})
