"""Pictures: the paper's figures with the paper's numbers, readable by everybody, true to the memory."""

from __future__ import annotations

import io
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from minipaged.decoding.params import SamplingParams
from minipaged.memory import BlockAllocator, BlockTable
from minipaged.outputs import CompletionOutput, RequestOutput
from minipaged.viewer.displays import register_displays
from minipaged.viewer.highlights import PlacedOutput
from minipaged.viewer.page import trace_page
from minipaged.viewer.pictures import build as drawing
from minipaged.viewer.pictures import runs, scenes
from minipaged.viewer.pictures.names import colour_of, colours, holders, labels
from minipaged.viewer.pictures.palette import DARK, LIGHT, OWNERS, css, rgb
from minipaged.viewer.pictures.plan import Share, plan_svg, shares
from minipaged.viewer.pictures.pool import pool_svg
from minipaged.viewer.pictures.svg import SLOT_TEXT, fit, text_width
from minipaged.viewer.pictures.tables import tables_svg
from minipaged.viewer.pictures.tree import tree_svg
from minipaged.viewer.recorder import recording
from minipaged.viewer.replay import read_trace
from minipaged.viewer.snapshot import PoolView, TableView, view_of
from minipaged.viewer.terminal import Pool, Table
from minipaged.viewer.trace import TraceWriter
from tests.docs.run_notebook import html_of
from tests.toy import ToyEngine, samples, toy_scheduler

ASSETS = Path(__file__).parents[2] / "docs" / "assets"
PICTURES = drawing.pictures()
NARROW = {name: svg.narrow for name, svg in PICTURES.items() if svg.narrow}


def texts(svg: str) -> list[str]:
    """What is written in a picture."""
    root = ElementTree.fromstring(svg)
    return [element.text or "" for element in root.iter() if element.tag.endswith("}text")]


def table(request: str, position: int, blocks: tuple[int, ...], num_tokens: int, **fields) -> TableView:
    view = TableView(request, position, False, blocks, num_tokens, num_tokens, 0, tuple(range(num_tokens)))
    return view._replace(**fields)


def rows(view: PoolView) -> dict[str, list[tuple[int, int]]]:
    """Of each sequence (physical block, # filled) per logical block, as the paper's Fig. 6 has it."""
    return {
        name: [(block, t.filled(i, view.block_size)) for i, block in enumerate(t.blocks)]
        for name, t in view.tables.items()
    }


class TestThePapersFigures:
    def test_fig6_has_the_blocks_of_the_paper_after_each_token(self):
        """Another block, another fill count, or a block taken before the last one is full."""
        tables = [rows(moment.view)["A/0"] for moment in scenes.fig6()]
        assert tables == [[(7, 4), (1, 3)], [(7, 4), (1, 4)], [(7, 4), (1, 4), (3, 1)]]

    def test_fig7_has_both_requests_in_one_pool(self):
        """Requests drawn as if each had memory of its own."""
        (moment,) = scenes.fig7()
        assert rows(moment.view) == {"A/0": [(7, 4), (1, 4), (3, 1)], "B/0": [(5, 4), (2, 2)]}

    def test_fig8_counts_go_from_2_to_1_when_the_first_sample_writes(self):
        """The copy made by both writers, or by none."""
        counts = [
            {b.block: b.ref_count for b in moment.view.blocks() if b.ref_count} for moment in scenes.fig8()
        ]
        assert counts == [{7: 2, 1: 2}, {7: 2, 1: 1, 3: 1}, {7: 2, 1: 1, 3: 1}]
        last = scenes.fig8()[-1].view
        words = {n: " ".join(map(scenes.text_of, t.token_ids[4:])) for n, t in last.tables.items()}
        assert words == {"A/0": "years ago our fathers", "A/1": "years ago our mothers"}

    def test_fig9_frees_blocks_2_4_5_and_8_and_takes_9_to_12(self):
        """Beams that keep blocks of candidates that left, or copy more than the last block."""
        before, after = (moment.view for moment in scenes.fig9())
        used = [{b.block for b in view.blocks() if b.state == "used"} for view in (before, after)]
        assert used[0] - used[1] == {2, 4, 5, 8}
        assert used[1] - used[0] == {9, 10, 11, 12}
        assert [t.blocks for t in after.tables.values()] == [
            (0, 1, 3, 6, 9), (0, 1, 3, 6, 10), (0, 1, 3, 7, 11), (0, 1, 3, 7, 12),
        ]  # fmt: skip
        assert "9 blocks for 20 table entries; blocks 2, 4, 5, 8 became free" in texts(
            tree_svg(after, before)
        )

    def test_one_of_anything_is_written_in_the_singular(self):
        """Catches "1 of 1 blocks", "1 of 1 slots empty" and "1 blocks for 1 table entries"."""
        before = view_of([table("A", 0, (1,), 1)], 1, 2)
        after = view_of([table("B", 0, (0,), 1)], 1, 1)
        assert "1 block for 1 table entry; block 1 became free" in texts(tree_svg(after, before))
        assert after.usage == "1 of 1 block in use, 0 free"
        assert after.tables["B/0"].usage(1) == "1 token in 1 block, 0 of 1 slot empty"
        engine = ToyEngine(toy_scheduler(1, 1))
        assert "0 of 1 block in use" in html_of(engine.scheduler.kv)
        kv_table = BlockTable(BlockAllocator(1), 1)
        kv_table.append()
        assert "1 token, 0 of 1 slot empty" in html_of(kv_table)


class TestEveryPicture:
    @pytest.mark.parametrize("name", PICTURES)
    def test_is_what_lies_in_the_documentation(self, name):
        """A picture that the code would not draw any more; run python -m minipaged.viewer.pictures.build."""
        assert (ASSETS / name).read_text() == PICTURES[name]

    def test_nothing_else_lies_there(self):
        """A picture that nobody makes any more."""
        assert {path.name for path in ASSETS.glob("*.svg")} == set(PICTURES)

    @pytest.mark.parametrize("name", PICTURES)
    def test_has_a_title_a_description_and_a_role(self, name):
        """A reader who cannot see it learns nothing."""
        root = ElementTree.fromstring(PICTURES[name])
        title, description = root[0], root[1]
        assert root.get("role") == "img"
        assert title.tag.endswith("}title")
        assert description.tag.endswith("}desc")
        assert len(description.text) > 20
        assert root.get("aria-label") == f"{title.text}. {description.text}"

    @pytest.mark.parametrize("name", PICTURES)
    def test_asks_nobody_and_runs_nothing(self, name):
        """A font, a script or a picture from elsewhere."""
        bare = PICTURES[name].replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"http|url\(|@import|<script|<image|<use", bare)

    @pytest.mark.parametrize("name", NARROW)
    def test_in_its_narrow_form_fits_a_phone(self, name):
        """Half a picture on a narrow screen, or one that shrinks until nobody can read it."""
        assert float(ElementTree.fromstring(NARROW[name]).get("width")) <= 410

    @pytest.mark.parametrize("name", NARROW)
    def test_in_its_narrow_form_says_the_same(self, name):
        """A sentence that ends at the edge of a phone: "block 1 is copied to block"."""
        forms = [ElementTree.fromstring(form) for form in (PICTURES[name], NARROW[name])]
        assert forms[0].get("aria-label") == forms[1].get("aria-label")
        captions = [" ".join(e.text for e in form.iter() if e.get("font-size") == "15") for form in forms]
        assert captions[0] == captions[1] != ""

    @pytest.mark.parametrize(
        "svg",
        [*PICTURES.values(), *NARROW.values()],
        ids=[*PICTURES, *(f"narrow {name}" for name in NARROW)],
    )
    def test_keeps_everything_on_the_sheet(self, svg):
        """A block or a text cut off at the edge. (Widths of text are estimated.)"""
        root = ElementTree.fromstring(svg)
        width, height = float(root.get("width")), float(root.get("height"))
        for element in root.iter():
            if element.tag.endswith("}rect"):
                x, y = float(element.get("x", 0)), float(element.get("y", 0))
                assert x + float(element.get("width")) <= width
                assert y + float(element.get("height")) <= height
            elif element.tag.endswith("}text"):
                size = float(element.get("font-size"))
                mono, bold = "mono" in element.get("class"), element.get("font-weight") is not None
                wide = len(element.text) * size * 0.6 if mono else text_width(element.text, size, bold)
                anchor = {"middle": 0.5, "end": 1}.get(element.get("text-anchor"), 0)
                left = float(element.get("x")) - anchor * wide
                assert left > 0
                assert left + wide < width, element.text
                assert float(element.get("y")) < height

    def test_is_made_by_the_documented_command(self, tmp_path):
        """A command in the docstring that fails."""
        command = [sys.executable, "-m", "minipaged.viewer.pictures.build", "--out", str(tmp_path / "new")]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        assert {path.name for path in (tmp_path / "new").iterdir()} == set(PICTURES)


class TestPalette:
    @pytest.mark.parametrize("theme", [LIGHT, DARK])
    def test_text_has_the_contrast_that_accessibility_asks(self, theme):
        """Grey on grey: WCAG AA asks 4.5 for text and 3 for edges."""
        owners = range(len(OWNERS))
        for background in ("paper", "shade", *(f"tint{i}" for i in owners)):
            assert contrast(theme["ink"], theme[background]) >= 4.5
        for background in ("paper", "shade"):
            assert contrast(theme["soft"], theme[background]) >= 4.5
        for edge in ("line", *(f"hue{i}" for i in owners)):
            assert contrast(theme[edge], theme["paper"]) >= 3

    @pytest.mark.parametrize("theme", [LIGHT, DARK])
    @pytest.mark.parametrize("missing", [None, "red", "green"])
    def test_neighbouring_owners_differ_for_colour_blind_readers(self, theme, missing):
        """Two requests of one colour for one reader in twelve (Vienot et al. 1999, simplified)."""
        seen = [perceived(colour, missing) for colour in (theme[f"hue{i}"] for i in range(4))]
        for first, second in itertools.combinations(seen, 2):
            assert sum((a - b) ** 2 for a, b in zip(first, second)) ** 0.5 > 25

    def test_a_request_has_the_colour_of_its_letter_or_number(self):
        """A request that changes its colour when another ends; a name that is longer than a letter."""
        assert [colour_of(name, 2) for name in ("B", "1", "Bob", "b", "\u0662")] == [1, 1, 2, 2, 2]

    def test_light_colours_stand_where_variables_are_not_known(self):
        """A black picture in viewers that know no CSS variables."""
        assert f"fill:{LIGHT['ink']};fill:var(--mp-ink)" in css()
        assert "prefers-color-scheme:dark" in css()

    def test_the_contrast_of_black_and_white_is_21(self):
        """A contrast that flatters."""
        assert contrast("#000000", "#ffffff") == pytest.approx(21)
        assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours by WCAG 2.1, from 1 to 21."""
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    unit = [value / 255 for value in rgb(colour)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in unit]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def perceived(colour: str, missing: str | None) -> tuple[float, float, float]:
    """Roughly what a dichromat sees of #rrggbb."""
    red, green, blue = rgb(colour)
    if missing is None:
        return red, green, blue
    mixed = 0.11 * red + 0.89 * green if missing == "red" else 0.29 * red + 0.71 * green
    return mixed, mixed, blue


class TestTables:
    view = view_of(
        [table("A", 0, (2, 0), 6), table("A", 1, (2, 3), 5), table("B", 0, (5,), 4, num_computed=1)],
        4,
        8,
        evictable=[6],
    )

    def test_a_block_says_who_holds_it_in_letters(self):
        """Owners distinguished by colour alone."""
        label = labels(self.view)
        held = {block.block: holders(block, label) for block in self.view.blocks() if block.owners}
        assert held == {0: "A.1", 2: "A.1 A.2", 3: "A.2", 5: "B"}
        assert label == {"A/0": "A.1", "A/1": "A.2", "B/0": "B"}
        several = view_of([*(table("A", i, (2, 3), 8) for i in range(4)), table("B", 0, (3,), 4)], 4, 8)
        held = {b.block: holders(b, labels(several)) for b in several.blocks() if b.owners}
        assert held == {2: "A \u00d74", 3: "\u00d75"}

    def test_free_evictable_and_held_blocks_are_named(self):
        """A hatch that nobody understands."""
        written = texts(tables_svg(self.view))
        assert written.count("free") == 3
        assert written.count("cached, evictable") == 1
        assert (
            "4 of 8 blocks in use, 1 cached and evictable, 3 free; 5 table entries, 1 saved by sharing"
            in written
        )

    def test_a_long_name_does_not_run_into_the_number_of_its_first_block(self):
        """The name beam.1 and the number 0 read as "beam.10". (Wide bold letters: 0.7 of their size.)"""
        root = ElementTree.fromstring(tables_svg(scenes.fig9()[0].view))
        written = [element for element in root.iter() if element.tag.endswith("}text")]
        names = [
            element for element in written if element.text.startswith("beam.") and element.get("font-weight")
        ]
        assert len(names) >= 4
        for name in names[:4]:
            end = float(name.get("x")) + 0.7 * float(name.get("font-size")) * len(name.text)
            (number,) = (
                float(element.get("x"))
                for element in written
                if element.text == "0" and element.get("y") == name.get("y") and float(element.get("x")) < 200
            )
            assert end + 4 < number - 0.62 * 13

    def test_its_narrow_form_says_where_each_block_is(self):
        """Tables that point nowhere."""
        drawn = tables_svg(scenes.fig6()[-1].view, scenes.text_of).narrow
        blocks = [b for t in scenes.fig6()[-1].view.on_device() for b in t.blocks]
        assert [word for word in texts(drawn) if word.startswith("\u2192")] == [f"\u2192 {b}" for b in blocks]
        assert blocks

    def test_the_description_has_every_table(self):
        """An alt text that says "a diagram"."""
        description = ElementTree.fromstring(tables_svg(self.view))[1].text
        assert "Sequence A.2: 5 tokens in physical blocks 2, 3." in description

    def test_one_is_not_plural(self):
        """Catches "1 tokens in physical blocks 5"."""
        view = view_of([TableView("A", 0, False, (5,), 1, 1, 1, (1,))], 4, 8)
        assert "Sequence A: 1 token in physical block 5." in ElementTree.fromstring(tables_svg(view))[1].text

    def test_slots_that_are_not_computed_yet_are_hatched(self):
        """A chunked prompt drawn as if it were all there."""

        def hatched(view: PoolView) -> int:
            return tables_svg(view).count('class="rule" stroke-width="0.8"')

        plain = view_of([table("B", 0, (5,), 4)], 4, 8)
        part = view_of([table("B", 0, (5,), 4, num_computed=1)], 4, 8)
        assert hatched(plain) == 0
        assert hatched(part) == 2 * 3  # three slots, in the table and in the pool

    def test_of_a_large_pool_only_blocks_in_use_are_drawn(self):
        """A picture with sixteen thousand rows."""
        view = view_of([table("A", 0, (9000, 4), 6)], 4, 16384)
        assert texts(tables_svg(view)).count("free") == 0
        assert len(tables_svg(view)) < 20_000

    def test_a_request_keeps_its_colour_when_others_leave(self):
        """B blue in one picture and orange in the next."""
        assert colours(self.view) == {"A/0": 0, "A/1": 0, "B/0": 1}
        assert colours(view_of([table("B", 0, (5,), 4)], 4, 8)) == {"B/0": 1}
        assert colours(view_of([table("17", 0, (5,), 4)], 4, 8)) == {"17/0": 5}
        several = view_of([table("B", 0, (5,), 4), table("B", 1, (6,), 4)], 4, 8)
        assert colours(several) == {"B/0": 0, "B/1": 1}

    def test_text_from_a_prompt_cannot_break_the_picture(self):
        """A prompt with markup in it that ends up in the page."""
        svg = tables_svg(self.view, lambda token: "<script>&\"'", caption="<b>")
        ElementTree.fromstring(svg)
        assert "<script" not in svg

    @pytest.mark.parametrize("word", ["", " ", "\n", "a", "internationalization", "\u4e2d\u6587"])
    @pytest.mark.parametrize("width", [6, 20, 58])
    def test_a_word_never_leaves_its_slot(self, word, width):
        """Words that run into the next slot."""
        shown, size = fit(word, width)
        assert len(shown) * size * 0.6 <= width + 1e-9
        assert size <= SLOT_TEXT

    def test_a_block_table_in_a_notebook_has_the_columns_of_fig6(self):
        """A repr that shows an address."""
        written = texts(html_of(fig8_table()))
        assert written[:4] == ["logical", "filled", "physical", "refs"]
        assert written[4:8] == ["0", "4/4", "7", "\u00d72"]
        assert written[8:12] == ["1", "3/4", "1", "\u00d72"]


def fig8_table() -> BlockTable:
    first = BlockTable(BlockAllocator(9, order=(7, 1, 3)), 4)
    first.append(7)
    first.fork()
    return first


class TestPool:
    def test_preemption_shows_the_victim_on_the_host(self):
        """A swapped-out request that vanishes from the picture."""
        record = runs.preempted()
        written = texts(pool_svg(record.planned))
        assert "host (swapped out)" in written
        host = written[written.index("host (swapped out)") :]
        assert host.count("C") == 4
        assert "C" not in written[: written.index("host (swapped out)")]

    def test_a_large_pool_says_how_much_is_not_drawn(self):
        """A pool of sixteen thousand blocks that looks like one of 48."""
        view = view_of([table("A", 0, (3, 4), 6)], 4, 16384)
        assert "and 16,372 more, all free" in texts(pool_svg(view))
        far = view_of([table("A", 0, (16000, 4), 6)], 4, 16384)
        assert "and 16,192 more, 16,191 free" in texts(pool_svg(far))

    def test_a_manager_in_a_notebook_counts_references(self):
        """A pool without its reference counts and evictable blocks."""
        engine = ToyEngine(toy_scheduler(8, 4, caching=True))
        engine.add(range(8), 2, samples(2))
        engine.step()
        written = texts(html_of(engine.scheduler.kv))
        assert written.count("used") == 2
        assert written.count("\u00d72") == 2
        engine.run()
        assert "cached, evictable (2)" in texts(html_of(engine.scheduler.kv))


class TestPlan:
    def test_a_token_is_a_decode_a_prefill_or_cached(self):
        """A last chunk of one token, or a first of one, taken for the wrong kind."""
        first, _ = runs.chunked()
        assert shares(first) == [
            Share("decode", "A", 1),
            Share("decode", "B", 2),
            Share("prefill", "C", 20),
            Share("prefill", "D", 9),
            Share("cached", "C", 20),
        ]

    def test_the_single_token_that_an_admitted_request_lacks_is_no_decode(self):
        """Catches a decode where the rest of a prompt was cached, or was computed in the step before, and
        where a preempted request comes back."""
        params = SamplingParams(max_tokens=16)
        chunks = runs.run(runs.modelless(8, max_num_batched_tokens=4), {"A": (range(5), params)})
        assert shares(chunks[1]) == [Share("prefill", "A", 1)]
        cached = runs.run(runs.modelless(16), dict.fromkeys("AB", (range(9), params)), arrivals={"B": 1})
        assert shares(cached[1]) == [
            Share("decode", "A", 1), Share("prefill", "B", 1), Share("cached", "B", 8)
        ]  # fmt: skip
        requests = {"A": (range(6), params), "C": (range(50, 57), SamplingParams(n=2, max_tokens=16))}
        preempted = runs.run(runs.modelless(9, preemption_mode="recompute"), requests)
        [back] = [record for record in preempted if "resumed" in [event["kind"] for event in record.events]]
        assert {share.kind for share in shares(back) if share.request == "C"} == {"prefill", "cached"}

    def test_a_plan_and_its_record_give_the_same_picture(self):
        """Two ways to draw that drift apart."""
        engine = runs.modelless(30, max_num_batched_tokens=16)
        engine.add_request("A", range(20), SamplingParams(max_tokens=4))
        engine.add_request("B", range(50, 55), SamplingParams(n=2, temperature=1.0, max_tokens=4))
        plans, drawn = [], []
        engine.on_planned += [plans.append, lambda plan: drawn.append(plan_svg(plan, 16))]
        with recording(engine) as records:
            for _ in range(4):
                engine.step()
        assert [plan_svg(record, 16) for record in records] == drawn
        assert "Step 0: 16 tokens of a budget of 16" in texts(drawn[0])
        assert "Step 3" in html_of(plans[3])

    def test_moves_and_reasons_are_reported(self):
        """A preemption without its reason."""
        written = texts(plan_svg(runs.preempted()))
        assert any(line.startswith("swap out: device") for line in written)
        assert "request C preempted (swap): preemption_mode is swap" in written

    def test_one_is_not_plural(self):
        """Catches "1 tokens" and "1 blocks"."""
        engine = runs.modelless(30)
        engine.add_request("A", range(1), SamplingParams(max_tokens=4))
        with recording(engine) as records:
            engine.step()
        picture = plan_svg(records[0])
        assert "Step 0: 1 token" in texts(picture)
        assert "request A admitted: prompt of 1 token, 1 block" in texts(picture)
        assert ": 1 token. " in ElementTree.fromstring(picture)[1].text


class TestOutput:
    completions = (
        CompletionOutput(0, " b c", [2, 3], -1.0, "stop"),
        CompletionOutput(1, " <d>", [4], -1.0, "length"),
    )
    output = RequestOutput("7", "a", [1, 1, 1], list(completions), True, 2)

    def test_without_a_placement_it_is_the_text(self):
        """A repr that needs what is not there."""
        html = html_of(self.output)
        assert "a b c" in html
        assert "&lt;d&gt;" in html
        assert "3 prompt tokens, 2 cached, 2 generated (stop)" in html

    def test_with_a_placement_each_token_stands_in_its_block(self):
        """A token in its neighbour's block; a shared block that looks like two."""
        tables = (
            TableView("7", 0, False, (5, 2), 4, 4, 3, (1, 1, 1, 2)),
            TableView("7", 1, False, (5,), 3, 3, 3, (1, 1, 1)),
        )
        html = html_of(PlacedOutput(self.output, 3, tables, lambda token: f"<{token}>"))
        blocks = re.findall(r"<b>(.*?)</b><code>(.*?)</code>", html)
        assert [name for name, _ in blocks] == ["block 5, \u00d72", "block 2", "block 5, \u00d72"]
        assert re.findall(r'<span class="(kv.*?)"><b>', html) == ["kv", "kv kv0", "kv"]
        assert re.sub("<[^>]*>", "", blocks[0][1]) == "&lt;1&gt;" * 3
        assert re.sub("<[^>]*>", "", blocks[1][1]) == "&lt;2&gt;"

    def test_the_prompt_is_marked_to_its_last_token(self):
        """A generated token taken for a word of the prompt: the prompt ends in the middle of a block."""
        views = (TableView("7", 0, False, (5, 2, 4), 6, 6, 3, (1, 1, 1, 2, 2, 2)),)
        html = html_of(PlacedOutput(self.output, 2, views, str))
        assert re.findall(r'<code><span class="prompt">(.*?)</span>(.*?)</code>', html) == [
            ("11", ""),
            ("1", "2"),
            ("", "22"),
        ]

    def test_one_is_not_plural(self):
        """Catches "1 prompt tokens", and a single block without its size."""
        output = RequestOutput("7", "a", [1], [CompletionOutput(0, " b", [2], -1.0, "stop")], True, 0)
        html = html_of(PlacedOutput(output, 3, (TableView("7", 0, False, (5,), 1, 1, 1, (1,)),), str))
        assert "1 prompt token, 1 generated (stop)" in html
        assert 'Request 7: a prompt of 1 token and 1 completion"' in html
        assert "1 token in 1 block of 3, 2 of 3 slots empty" in html


class TestDisplays:
    def test_ipython_is_told_how_to_draw_every_type(self, monkeypatch):
        """A notebook that shows an address: no import of IPython, and no display without it."""
        drawn: dict[type, Callable] = {}
        html = SimpleNamespace(for_type=drawn.__setitem__)
        shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters={"text/html": html}))
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
        register_displays()
        assert drawn[BlockTable](fig8_table()) == html_of(fig8_table())

    def test_a_subclass_is_drawn_as_what_it_is(self):
        """A student's own block table that is shown as an address."""

        class Mine(BlockTable):
            pass

        assert "logical" in html_of(Mine(BlockAllocator(4), 4))
        assert html_of(object()) is None

    def test_a_trace_is_the_viewer_in_a_frame(self, tmp_path):
        """An address for a run; a frame that a name in the trace could break out of."""
        path = tmp_path / 'a "quoted" <name>.jsonl'
        engine = runs.modelless(8)
        with TraceWriter(path, engine):
            engine.add_request("</iframe><script>", range(5), SamplingParams(max_tokens=3))
            while engine.has_unfinished:
                engine.step()
        html = html_of(read_trace(path))
        (frame,) = re.findall(r'^<iframe [^<>"]*(?:"[^"<>]*"[^<>"]*)*></iframe>$', html)
        (srcdoc,) = re.findall(r'srcdoc="([^"]*)"', frame)
        assert unescape(srcdoc) == trace_page(path)
        assert 'sandbox="allow-scripts allow-popups"' in frame


class TestTerminal:
    def print(self, *renderables) -> str:
        out = io.StringIO()
        Console(file=out, width=80, color_system=None).print(*renderables)
        return out.getvalue()

    def test_the_pool_is_readable_without_colour(self):
        """Owners, fill and sharing shown by colour alone."""
        view = view_of([table("A", 0, (2, 0), 6), table("A", 1, (2, 3), 5)], 4, 8, evictable=[4])
        shown = self.print(Pool(view))
        assert re.search(r"2 A\u00d72 +\u2588{4}", shown)
        assert re.search(r"3 A\.2 +\u2588\u2591{3}", shown)
        assert re.search(r"4 cached", shown)
        assert re.search(r"1 free", shown)
        assert "3 of 8 blocks in use, 1 cached and evictable, 4 free" in shown

    def test_every_block_stands_on_one_line(self):
        """A pool wider than the terminal whose lines repeat each other, or begin one block late."""
        shown = self.print(Pool(view_of([table("A", 0, tuple(range(11)), 44)], 4, 12)))
        assert re.findall(r"(\d+) A ", shown) == [str(block) for block in range(11)]
        assert [line.count("A") for line in shown.splitlines()[:3]] == [4, 4, 3]

    def test_without_unicode_how_full_a_block_is_can_still_be_read(self):
        """Catches ???? for every block in a file that PowerShell or cmd.exe writes."""
        out = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
        view = view_of([table("A", 0, (2, 0), 6), table("A", 1, (2, 3), 5)], 4, 8)
        console = Console(file=out, width=80, color_system=None)
        console.print(Pool(view), Table("Request 0", table("0", 0, (7, 1), 6), 4, "abcdef".__getitem__))
        out.seek(0)
        shown = out.read()
        assert re.search(r"2 Ax2 +####", shown)
        assert re.search(r"3 A\.2 +#\.\.\.", shown)
        assert re.search(r"0 -> 7 4/4 abcd", shown)

    def test_a_pool_of_twice_as_many_blocks_looks_no_oftener_at_all_tables(self):
        """Catches colours and names that are worked out for every block: 12 s for 256 requests."""

        class Tables(dict):
            looks = 0

            def values(self):
                self.looks += 1
                return super().values()

        looks = []
        for size in (1, 2):
            view = view_of([table("A", i, (i,), 4) for i in range(10 * size)], 4, 20)
            tables = Tables(view.tables)
            self.print(Pool(replace(view, tables=tables)))
            pool_svg(replace(view, tables=tables))
            looks.append(tables.looks)
        assert looks[0] == looks[1]

    def test_a_table_has_a_line_a_block_with_its_words(self):
        """Tokens cut off, or put in the wrong block."""
        shown = self.print(Table("Request 0", table("0", 0, (7, 1), 6), 4, "abcdef".__getitem__))
        assert "Request 0: 6 tokens in 2 blocks, 2 of 8 slots empty" in shown
        assert re.search(r"0 \u2192 7 4/4 abcd", shown)
        assert re.search(r"1 \u2192 1 2/4 ef", shown)

    def test_markup_in_a_prompt_stays_text(self):
        """A prompt with [bold] in it that styles the terminal, or crashes it."""
        shown = self.print(Table("x", table("0", 0, (7,), 1), 4, lambda token: "[/red]"))
        assert "[/red]" in shown


def test_memory_and_scheduling_load_no_drawing():
    """A notebook nicety that everybody pays for."""
    code = (
        "import sys, minipaged.memory, minipaged.scheduling; "
        "sys.exit(any('drawing' in name or name == 'rich' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_every_owner_colour_is_okabe_and_itos():
    """A colour added by taste."""
    assert set(OWNERS) <= {
        "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#000000",
    }  # fmt: skip
