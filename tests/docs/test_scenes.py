"""The scenes of the documentation are what the paper's figures and the pages' sentences say."""

from __future__ import annotations

import logging

import pytest
import viewer_scenes

from minipaged.viewer.recorder import StepRecord


@pytest.fixture(scope="module")
def scenes():
    """Name -> the records of a scene, by step."""
    logging.disable(logging.WARNING)
    found = {
        name: {record.step: record for record in viewer_scenes.recorded(name)[0]}
        for name in viewer_scenes.SCENES
    }
    logging.disable(logging.NOTSET)
    for name, scene in viewer_scenes.SCENES.items():
        assert scene.start in found[name], name
    return found


def blocks(record: StepRecord) -> dict[str, tuple[int, ...]]:
    return {name: table.blocks for name, table in record.planned.tables.items()}


def kinds(records: dict[int, StepRecord]) -> list[tuple[str, str, str | None]]:
    return [(e["kind"], e["request"], e.get("mode")) for r in records.values() for e in r.events]


def test_figure_6_has_the_papers_blocks(scenes):
    """Catches a figure whose numbers are not those that readers compare with the paper."""
    records = scenes["fig6"]
    assert [blocks(record) for record in records.values()] == [
        {"A/0": (7, 1)}, {"A/0": (7, 1)}, {"A/0": (7, 1, 3)},
    ]  # fmt: skip
    assert records[2].committed.num_free == 9


def test_figure_7_has_the_papers_blocks(scenes):
    """Catches two requests in other blocks than the paper's."""
    step = scenes["fig7"][3]
    assert blocks(step) == {"A/0": (7, 1, 3), "B/0": (5, 2)}
    assert {name: table.num_tokens for name, table in step.planned.tables.items()} == {"A/0": 9, "B/0": 6}


def test_figure_8_copies_block_1_to_block_3(scenes):
    """Catches a sample that writes in place while the other reads, or that copies twice."""
    records = scenes["fig8"]
    assert {name: table.blocks for name, table in records[0].committed.tables.items()} == {
        "A/0": (7, 1), "A/1": (7, 1),
    }  # fmt: skip
    assert records[1].copies == ((1, 3),)
    assert blocks(records[1]) == {"A/0": (7, 3), "A/1": (7, 1)}


def test_figure_9_has_the_papers_blocks_before_and_after(scenes):
    """Catches beams that share other blocks than in the figure, or blocks 2, 4, 5 and 8 that stay."""
    records = scenes["fig9"]
    assert list(blocks(records[12]).values()) == [(0, 1, 3, 5), (0, 1, 3, 6), (0, 1, 3, 7), (0, 2, 4, 8)]
    assert list(blocks(records[13]).values()) == [
        (0, 1, 3, 6, 9), (0, 1, 3, 6, 10), (0, 1, 3, 7, 11), (0, 1, 3, 7, 12),
    ]  # fmt: skip


def test_prefix_hits_and_an_eviction_are_in_their_scene(scenes):
    """Catches a page that promises a hit on an ended and on a running request, and shows neither."""
    records = scenes["prefix-hit"]
    hits = {
        e["request"]: e["cached_tokens"] for r in records.values() for e in r.events if "cached_tokens" in e
    }
    assert (hits["B"], hits["C"]) == (12, 12)
    assert 3 in records[7].planned.evictable
    assert 3 in blocks(records[8])["D/0"]


def test_a_prompt_is_chunked_beside_decodes(scenes):
    """Catches a scene without a step that has both, or a step beyond the budget."""
    records = scenes["chunked-prefill"]
    mixed = [r for r in records.values() if {1} < {tokens.num_tokens for tokens in r.scheduled}]
    assert len(mixed) >= 3
    assert max(sum(tokens.num_tokens for tokens in r.scheduled) for r in records.values()) == 16


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_latest_is_preempted_and_comes_back(scenes, mode):
    """Catches a scene in which nobody is preempted, or by the other mode."""
    found = kinds(scenes[mode])
    assert ("preempted", "C", mode) in found
    assert [kind for kind, request, _ in found if request == "C"] == ["admitted", "preempted", "resumed"]
    assert any(record.swap_out for record in scenes[mode].values()) == (mode == "swap")


def test_growing_admits_more_at_once_than_reserving(scenes):
    """Catches three scenes that do not show what the page says about them."""
    first = {name: len(scenes[name][0].planned.tables) for name in ("reserve", "chunked", "on-demand")}
    assert first["reserve"] < first["on-demand"]
    steps = {name: max(scenes[name]) for name in first}
    assert steps["on-demand"] < steps["chunked"] < steps["reserve"]


def test_orca_runs_four_requests_where_paging_runs_eight(scenes):
    """Catches a comparison in which both run the same."""
    assert [len(scenes[name][0].planned.tables) for name in ("orca", "paging")] == [4, 8]
    assert {view.num_blocks * view.block_size for name in ("orca", "paging") for view in
            [scenes[name][0].planned]} == {128}  # fmt: skip
    assert max(scenes["paging"]) < max(scenes["orca"])
