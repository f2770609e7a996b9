"""The site and the repository's own pages: links, anchors, versions, messages, generated pages."""

import re
import tomllib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from pkgutil import resolve_name
from urllib.parse import unquote, urldefrag

import pages
import pytest
from reading import docstring_as_markdown, piece_of_source, read_facts, read_messages

import minipaged
from minipaged.viewer.pictures.svg import Svg
from tests.docs.site import ROOT, build_once

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "docs/architecture.md",
    *sorted(ROOT.glob("tutorials/*/lesson.md")),
    *sorted(ROOT.glob("minipaged/**/*.md")),
]
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_in_the_repository_leads_to_a_file(page):
    """Catches a file that was renamed under the table that names it."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = [target for target in LINK.findall(text) if not re.match(r"[a-z]+:", target)]
    assert [target for target in targets if not (page.parent / target).exists()] == []


NOTED = [page for page in sorted(ROOT.glob("docs/**/*.md")) if "[^" in page.read_text()]


@pytest.mark.parametrize("page", NOTED, ids=lambda page: page.name)
def test_every_footnote_that_a_page_cites_has_a_line_of_its_own(page):
    """Catches notes that were wrapped into one paragraph: Markdown knows a note by the start of its line."""
    text = re.sub(r"`[^`]*`", "", page.read_text())
    notes = re.findall(r"^\[\^(\w+)\]:", text, re.MULTILINE)
    assert sorted(notes) == sorted(set(re.findall(r"\[\^(\w+)\](?!:)", text)))


API = [
    name
    for page in sorted(ROOT.glob("docs/api/*.md"))
    for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)
]


GENERATED = {"_fragments", "_generate", "benchmarks", "learn"}
WRITTEN = sorted(page for page in (ROOT / "docs").glob("**/*.md") if GENERATED.isdisjoint(page.parts))


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_a_sentence(page):
    """Catches a page that begins with a table, a listing or a section, and does not say what it is for."""
    _, _, rest = f"\n{page.read_text()}".partition("\n# ")
    begins = rest.partition("\n")[2].lstrip()[:60]
    includes = page.stem in ("index", "changelog", "contributing")
    assert includes or re.match(r"[A-Za-z*`](?!``)", begins), begins


@pytest.mark.parametrize("name", API)
def test_what_the_api_pages_document_exists(name):
    """Catches a class that was renamed under the page that shows its docstring."""
    assert resolve_name(name) is not None


def test_the_version_is_the_same_everywhere():
    """Catches a release whose package, citation and changelog disagree."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert minipaged.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version} " in (ROOT / "CHANGELOG.md").read_text()


def test_the_readme_shows_what_the_experiments_measured():
    """Catches numbers that were true of an earlier version."""
    assert pages.headlines() in (ROOT / "README.md").read_text()


def test_what_troubleshooting_explains_is_what_the_code_says():
    """Catches a message that was reworded: nobody would find its explanation any more."""
    page = (ROOT / "docs/guides/troubleshooting.md").read_text()
    explained = re.findall(r'^### `(.*)` \{ data-toc-label="[^"]+" \}$', page, re.MULTILINE)
    assert len(explained) == page.count("\n### "), "a message without a short name for the table of contents"
    printed = [message.text for message in read_messages()]
    assert len(explained) > 15
    assert [text for text in explained if not any(whole.startswith(text) for whole in printed)] == []


def test_the_configuration_page_explains_every_setting():
    """Catches a generator that leaves out fields without a default."""
    page = pages.configuration()
    assert "overrides [`kv_cache_memory`](#kv_cache_memory)." in page
    assert "default `4294967296` (4 GiB)" in page
    page = re.sub(r"\[`(\w+)`\]\(#\1\)", r"\1", page)
    for name, option in minipaged.EngineConfig.__dataclass_fields__.items():
        assert f"## `{name}` {{ #{name} }}\n\n{option.metadata['help']}" in page


def test_the_specification_names_every_test_of_the_concepts():
    """Catches a parser that misses tests in classes or after a heading."""
    page = pages.specification(None)
    for file in ROOT.glob("tests/concepts/test_*.py"):
        names = re.findall(r"def test_(\w+)\(", file.read_text())
        assert [fact.name for fact in read_facts(file)] == [f"test_{name}" for name in names]
        assert all(f"**{fact.statement}.**" in page for fact in read_facts(file))


def test_a_piece_of_source_is_the_whole_method_without_its_indentation():
    """Catches a cut that loses the decorator or the last line."""
    piece = piece_of_source("minipaged/memory/block_table.py", "BlockTable.capacity")
    assert piece.startswith("@property\ndef capacity(self) -> int:\n")
    assert piece.endswith("    return len(self.blocks) * self.block_size\n")


def test_a_docstring_becomes_text_and_its_drawing_code():
    """Catches drawings that are folded into paragraphs."""
    text = docstring_as_markdown("minipaged/memory/allocator.py")
    assert text.startswith("Who holds which KV block")
    assert "```text\n    allocate " in text


def test_links_of_a_lesson_lead_to_the_pages_of_the_site(monkeypatch):
    """Catches links that work in the repository and break on the site."""
    monkeypatch.delenv("MINIPAGED_REPO_URL", raising=False)
    lesson = (
        "[a](../02_allocator/lesson.md#x) [b](../../minipaged/memory/allocator.py) [c](exercise.py) "
        "[d](../../docs/reproduce/)"
    )
    source = ROOT / "tutorials/01_block_table"
    assert pages.rewrite_links(lesson, source, Path("learn")) == (
        "[a](02_allocator.md#x) [b](../concepts/allocator.md) c [d](../reproduce/index.md)"
    )
    monkeypatch.setenv("MINIPAGED_REPO_URL", "https://example.org/m")
    assert pages.rewrite_links("[c](exercise.py)", source, Path("learn")) == (
        "[c](https://example.org/m/blob/main/tutorials/01_block_table/exercise.py)"
    )


def test_a_lesson_links_to_the_page_that_includes_a_file():
    """Catches a link that the site drops, although one of its pages shows the file."""
    include = re.compile(r'^ *--8<-- "((?:kernels|minipaged)/[^"]*\.py)"', re.MULTILINE)
    shown = {
        path: page.relative_to(ROOT / "docs").as_posix()
        for page in ROOT.glob("docs/**/*.md")
        for path in include.findall(page.read_text())
    }
    linked = {
        path
        for lesson in ROOT.glob("tutorials/*/lesson.md")
        for path in re.findall(r"\]\(\.\./\.\./([^)#]+\.py)\)", lesson.read_text())
    }
    both = linked & shown.keys()
    assert {path: pages.PAGE_OF.get(path) for path in both} == {path: shown[path] for path in both}


def test_a_link_to_a_file_of_the_benchmarks_leads_to_its_section():
    """Catches links to Markdown files that are not pages of the site."""
    links = "[a](peers.md) [b](gpu.md#tile-sizes) [c](cpu_kernels.md#avx2-only)"
    assert pages.rewrite_links(links, ROOT / "docs/benchmarks", Path()) == (
        "[a](benchmarks.md#against-other-engines) [b](benchmarks.md#tile-sizes) [c](cpu-kernels.md#avx2-only)"
    )


def test_the_benchmarks_begin_with_a_summary_and_every_file_has_a_place():
    """Catches ten thousand words without a beginning, and a file that no page shows."""
    heads = re.findall(r"^## (.*)$", pages.benchmarks(), re.MULTILINE)
    assert heads[:2] == ["In short", "Against other engines"]
    files = {file.stem for file in ROOT.glob("docs/benchmarks/*.md")}
    assert files == {*pages.BENCHMARKS, "cpu_kernels"}


def test_a_picture_of_a_lesson_stands_in_its_page():
    """Catches an image file, which cannot follow the page's colours, and an exercise that is not shown."""
    page = pages.lessons()["learn/02_allocator.md"]
    assert page.count("<figure ") == 2
    assert "![" not in page
    assert "## The files" in page
    assert 'raise NotImplementedError("Lesson 2, task 1: take blocks off' in page


@pytest.mark.parametrize(
    "lesson", sorted(ROOT.glob("tutorials/*/lesson.md")), ids=lambda lesson: lesson.parent.name
)
def test_markdown_of_an_answer_is_rendered(lesson):
    """Catches backticks and links that are shown as they are: HTML ends only at an empty line."""
    text = lesson.read_text()
    assert not re.search(r"</summary>\n.*\S", text)
    page = pages.lessons()[f"learn/{lesson.parent.name}.md"]
    assert page.count('    ??? note "Answer"\n\n        ') == text.count("<details>")
    assert "<details>" not in page


def test_wide_pictures_may_scroll_on_a_phone():
    """Catches a map or a chart that shrinks until its words cannot be read."""
    assert 'class="sheet wide"' in pages.framed(Svg('<svg viewBox="0 0 986 520">'))
    assert 'class="sheet"' in pages.framed(Svg('<svg viewBox="0 0 720 144">'))


def test_a_small_picture_is_not_enlarged_until_a_phone_cannot_show_it():
    """Catches a table of 400 pixels that takes 560 of a phone's 360."""
    assert 'class="sheet small"' in pages.framed(Svg('<svg viewBox="0 0 406 144">'))


@pytest.mark.parametrize(("width", "narrow", "stops"), [(720, None, 1), (720, "<svg>", 0), (406, None, 0)])
def test_keys_stop_only_at_a_picture_that_may_scroll(width, narrow, stops):
    """Catches 25 stops on the way through the tour at which there is nothing to do."""
    picture = Svg(f'<svg viewBox="0 0 {width} 144">')
    picture.narrow = narrow
    assert pages.framed(picture).count('tabindex="0"') == stops


def test_no_picture_of_the_tour_scrolls_on_a_phone():
    """Catches a picture of which a phone shows the tables, and not the pool that they point into."""
    text = pages.tour()
    narrow = re.findall(r'<div class="on-phone"><svg [^>]* viewBox="0 0 ([\d.]+)', text)
    assert len(narrow) == text.count('<div class="on-wide">') == 22
    assert text.count('class="sheet small"') == text.count('class="sheet') == 25
    assert max(map(float, narrow)) <= 500  # (more than a phone has; it is shrunk)


@pytest.mark.parametrize("page", ["learn/01_block_table.md", "learn/02_allocator.md"])
def test_block_tables_stand_above_their_pool_on_a_phone(page):
    """Catches a narrow form that the page of a lesson does not have."""
    text = pages.lessons()[page]
    assert text.count('<div class="on-phone"><svg ') == text.count('<div class="on-wide"><svg ') == 1


def test_a_phone_shows_what_each_lesson_needs_in_the_table_alone():
    """Catches a map of which a phone shows two lessons of sixteen."""
    index = pages.lessons()["learn/index.md"]
    assert '<div class="on-wide"><figure class="frame">' in index
    assert index.count("<svg ") == 1
    assert "| 06 | [Preemption: recompute and swap](06_preemption.md) | 04 | 40 |" in index


def test_the_tour_is_a_page_with_its_pictures():
    """Catches a tour that a visitor of the site cannot take."""
    page = pages.tour()
    assert page.count("<svg ") > 20
    assert "# A tour of paged attention" in page


def test_the_tour_shows_the_texts_in_their_blocks():
    """Catches "This is the same as plain text:" with nothing below it."""
    section = pages.tour().partition("This is the same as plain text:")[2].partition("## 2.")[0]
    assert section.count('<figure class="mp"') == 2
    assert " village. Everyone called" in section


def test_a_comment_in_code_is_not_a_heading():
    """Catches shell comments that gain a # when a file becomes a section of a page."""
    text = "# A\n\n```bash\n# a comment\n```\n\n## B\n"
    assert pages.one_level_down(text) == "## A\n\n```bash\n# a comment\n```\n\n### B\n"


# -- the built site ---------------------------------------------------------------------------------


class Links(HTMLParser):
    """The addresses and the ids of a page."""

    def __init__(self, page: Path):
        super().__init__()
        self.links: list[str] = []
        self.resources: list[str] = []
        self.ids: set[str] = set()
        self.images_without_text: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.resources.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.resources.append(given["href"])
        if tag == "img" and "alt" not in given:
            self.images_without_text.append(given.get("src", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built strictly: a warning of mkdocs fails every test that needs it."""
    return build_once(tmp_path_factory)


@pytest.fixture(scope="module")
def parsed(site):
    """Page -> its links and ids."""
    return {page: Links(page) for page in site.glob("**/*.html")}


@pytest.mark.slow
def test_every_link_and_anchor_of_the_site_has_a_target(site, parsed):
    """Catches what mkdocs does not check: links in included code pages, in HTML, and in the theme."""
    broken = []
    for page, found in parsed.items():
        for link in found.links + found.resources:
            address, anchor = urldefrag(unquote(link))
            if re.match(r"[a-z]+:", address) or page.name == "404.html":
                continue
            target = (page.parent / address).resolve() if address else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                broken.append(f"{page.relative_to(site)}: {link}")
            elif anchor and target in parsed and anchor not in parsed[target].ids | {"__consent"}:
                broken.append(f"{page.relative_to(site)}: {link} (no such anchor)")
    assert broken == []


@pytest.mark.slow
def test_no_page_loads_anything_from_elsewhere(site, parsed):
    """Catches a font, a script or a picture that shows a stranger who reads here."""
    loaded = [resource for found in parsed.values() for resource in found.resources]
    assert [resource for resource in loaded if re.match(r"([a-z]+:)?//", resource)] == []
    styles = "".join(style.read_text() for style in site.glob("**/*.css"))
    assert re.findall(r"url\(\s*[\"']?(?:https?:)?//", styles) == []


@pytest.mark.slow
def test_every_picture_says_what_it_shows(parsed):
    """Catches pictures without a description for readers who cannot see them."""
    assert [image for found in parsed.values() for image in found.images_without_text] == []


@pytest.mark.slow
def test_a_shared_link_shows_what_its_page_is_about(parsed):
    """Catches previews that are the same for every page."""
    shown = [re.search(r'og:description" content="(.*?)">', page.read_text(), re.DOTALL) for page in parsed]
    counts = Counter(match[1] for match in shown if match)
    assert len(counts) > 50
    assert [text for text, pages in counts.items() if pages > 2] == []


@pytest.mark.slow
def test_no_markdown_is_left_in_a_page(parsed):
    """Catches links and code that a reader sees as brackets and backticks."""
    left = []
    for page in parsed:
        article = page.read_text().partition("<article")[2].partition("</article")[0]
        prose = re.sub(r"<(pre|code|script|style|svg)\b.*?</\1>", "", article, flags=re.DOTALL)
        left += re.findall(r".*(?:`|\]\().*", re.sub(r"<[^>]+>", "", prose))
    assert left == []


@pytest.mark.slow
def test_every_included_file_is_shown(site):
    """Catches an include that a formatter rewrote: the page would show the directive, not the code."""
    assert [page for page in site.glob("**/*.html") if re.search(r"--8\s*(<|&lt;)", page.read_text())] == []
    text = re.sub(r"<[^>]+>", "", (site / "concepts/allocator/index.html").read_text())
    assert "class BlockAllocator:" in text
    assert "def test_a_pool_hands_out_each_block_once():" in text
