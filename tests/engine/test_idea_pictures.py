"""The pictures of the lessons' ideas: they say what the real classes answer."""

import re
import tomllib
from pathlib import Path

from minipaged.viewer.pictures import ideas, runs
from minipaged.viewer.pictures.build import pictures
from minipaged.viewer.pictures.svg import text_width

ROOT = Path(__file__).parents[2]


def texts(svg):
    """Every text of a picture, in order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_the_block_freed_last_is_first_on_the_free_list():
    """Catches a picture of a queue: the allocator's free list is a stack."""
    shown = texts(ideas.free_list_svg())
    last = len(shown) - shown[::-1].index("free list, next first") - 1
    assert shown[last + 1] == "7"


def test_eight_requests_fit_in_blocks_where_two_fit_with_reservations():
    """Catches numbers under a picture that are not those of the run it shows."""
    before, after = (runs.grown(policy, 52) for policy in ("reserve", "on_demand"))
    assert [len(view.tables) for view in (before, after)] == [2, 8]
    shown = " ".join(texts(ideas.waste_svg(before, after)))
    for view in (before, after):
        held = sum(table.num_tokens for table in view.tables.values())
        share = 100 * held / (view.num_blocks * view.block_size)
        assert f"{len(view.tables)} requests run, {share:.0f} % of the memory holds tokens" in shown


def test_the_second_prompt_hits_two_blocks_and_tails_are_evicted_first():
    """Catches a chain that shares what it must not, and a head that is evicted before its tail."""
    shown = texts(ideas.chain_svg())
    assert shown.count("hit: shared") == 2
    assert shown.count("computed") == 4
    order = shown[shown.index("both have ended; evicted first \u2192 last:") + 1 :][:4]
    assert order == ["2", "3", "1", "0"]


def test_a_gathered_row_has_all_words_in_order():
    """Catches a gather that draws physical order."""
    shown = texts(ideas.gather_svg())
    words = [text for text in shown if text in ideas.SCORE]
    assert words == ideas.SCORE
    assert [text for text in shown if text.startswith("table[")] == [
        "table[0] = 7",
        "table[1] = 1",
        "table[2] = 3",
    ]


def test_a_gather_calls_the_place_in_a_block_its_offset():
    """Catches "slot = position % 4": a slot is block x size + offset, in every text beside the picture."""
    assert "block = table[position // 4], offset = position % 4" in " ".join(texts(ideas.gather_svg()))


def test_the_shorter_mean_wait_is_that_of_the_shortest_first():
    """Catches waits that are drawn and not computed: 14 before 3 makes somebody wait 14."""
    waits = [text for text in texts(ideas.order_svg((14, 3))) if text.startswith("mean wait")]
    assert waits == ["mean wait 7.0 tokens", "mean wait 1.5 tokens"]


def test_the_queue_is_that_of_the_lesson():
    """Catches a picture of other prompts than those of the lesson's worked numbers."""
    lesson = (ROOT / "tutorials/13_your_policy/lesson.md").read_text()
    numbers = re.search(r"prompts of ([\d, and]+) tokens", lesson)
    assert numbers is not None
    lengths = list(map(int, re.findall(r"\d+", numbers[1])))
    assert pictures()["queue.svg"] == ideas.order_svg(lengths)


def test_every_title_stays_inside_its_box_of_the_map():
    """Catches a long title that runs over the next lesson."""
    for file in ROOT.glob("tutorials/*/tasks.toml"):
        lines = ideas.title_lines(tomllib.loads(file.read_text())["title"], 142)
        assert len(lines) <= 3, lines
        assert all(text_width(line, 12) <= 142 for line in lines), lines
