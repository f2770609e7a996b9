"""What the architecture page and the README say about the code is so: line counts, names, what calls what."""

import inspect
import re
import sys
from array import array
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import reading_order
import torch

from minipaged import LLM, SamplingParams
from minipaged.bench import run_workload
from minipaged.components import Components
from minipaged.execution.accel.limits import shares_of_limits
from minipaged.memory import BlockAllocator, BlockTable
from minipaged.serving.schemas import CompletionBody
from minipaged.viewer.profile import STAGES
from tests.docs.site import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
FOLDERS = (ROOT / "minipaged", ROOT)


def file_of(name: str):
    """The file that the page calls `name`, whatever it leaves out in front; None if there is none."""
    return next((folder / name for folder in FOLDERS if (folder / name).exists()), None)


def listed_functions(heading: str) -> list[tuple[str, str]]:
    """(file, function) of each row of a table of the page."""
    rows = re.search(rf"<!-- {heading} -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)[1]
    found = re.findall(r"^\| \d+ \| `([\w.]+)` \| `([\w./]+)` \|", rows, re.MULTILINE)
    return [(str(file_of(file).resolve()), function) for function, file in found]


def traced(watch: Callable[[FrameType, str, Any], bool], **options) -> list[tuple[str, str]]:
    """The project's functions of a run for which `watch(frame, event, result)` holds, each once."""
    seen = {}
    here = tuple(str(ROOT / folder) for folder in ("minipaged", "kernels"))

    def profile(frame, event, result):
        code = frame.f_code
        if code.co_filename.startswith(here) and watch(frame, event, result):
            # Its file, not the link in minipaged/ through which kernels are imported.
            seen[code.co_filename.replace("/minipaged/kernels/", "/kernels/"), code.co_qualname] = None

    llm = LLM(disable_log_stats=True, **options)
    params = SamplingParams(temperature=0, max_tokens=3)
    llm.generate("The little robot found a", params)  # what is done once, is done
    llm.engine.reset_prefix_cache()
    sys.setprofile(profile)
    try:
        llm.generate("The little robot found a", params)
    finally:
        sys.setprofile(None)
    return list(seen)


@pytest.mark.parametrize(("page", "links"), [("README.md", True), ("docs/architecture.md", False)])
def test_the_core_is_listed_with_its_line_counts(page, links):
    """Catches counts of an earlier version; `python docs/_generate/reading_order.py` writes them anew."""
    assert reading_order.table(links) in (ROOT / page).read_text()


def test_the_core_can_be_read_in_one_sitting():
    """Catches a core that grows file by file."""
    assert sum(map(reading_order.count_lines, reading_order.CORE)) <= 2000


def test_each_file_of_the_core_needs_only_those_above_it_and_what_may_be_skipped():
    """Catches a reading order that sends its reader back and forth."""
    skipped = set(re.findall(r"`([\w/]+\.py)`", PAGE.split("Skip on a first reading")[1].split("## ")[0]))
    core = [file.removeprefix("minipaged/") for file in reading_order.CORE]
    for number, file in enumerate(reading_order.CORE):
        source = (ROOT / file).read_text()
        imported = re.findall(r"^from minipaged\.((?:memory|scheduling)\.\w+) import", source, re.MULTILINE)
        needed = {f"{module.replace('.', '/')}.py" for module in imported}
        assert needed <= {*core[:number], *skipped}, file


def test_every_file_that_the_page_names_exists():
    """Catches a module that was moved under the page that explains it."""
    names = re.findall(r"`([\w/]+(?:\.py|/))`", PAGE)
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    assert len(names) > 60
    for row in rows:  # `execution/attention.py`, `chunked_attention.py`: the second lies where the first does
        first, *others = re.findall(r"`([\w/]+(?:\.py|/))`", row) or [""]
        for other in (name for name in others if "/" not in name):
            assert file_of(f"{first.rpartition('/')[0]}/{other}".lstrip("/")), f"{other} beside {first}"
    with_a_folder = [name for name in names if "/" in name]
    assert [name for name in with_a_folder if file_of(name) is None] == []


@pytest.mark.parametrize("term", ["Hypothesis", "Salt", "Executor", "Device, host"])
def test_the_glossary_explains_what_the_lessons_only_use(term):
    """Catches a word that a reader meets before anything says what it is."""
    assert re.search(rf"^{term}\n:   \w", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)


def test_every_file_that_the_glossary_names_exists():
    """Catches a term whose place in the code has moved."""
    names = re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "docs/glossary.md").read_text())
    assert len(names) > 30
    assert [name for name in names if file_of(name) is None] == []


def test_every_figure_of_bench_is_explained():
    """Catches `decode_kv_tokens`, printed beside the others and explained nowhere."""
    page = (ROOT / "docs/benchmarks/how_to_compare.md").read_text()
    section = page.partition("## What bench reports")[2].partition("\n## ")[0]
    source = inspect.getsource(run_workload) + inspect.getsource(shares_of_limits)
    figures = set(re.findall(r'^        "(\w+)": ', source, re.MULTILINE))
    assert len(figures) > 20
    assert figures - {"tokens"} <= set(re.findall(r"`(\w+)`", section))


def test_the_parts_of_a_step_have_the_names_that_profile_prints():
    """Catches a table of an earlier version."""
    page = (ROOT / "docs/benchmarks/how_to_compare.md").read_text()
    table = page.partition("| part of a step |")[2].partition("\n\n")[0]
    parts = re.findall(r"^\| ([a-z].*?) \|", table, re.MULTILINE)
    assert sorted(parts) == sorted({*STAGES.values(), "schedule", "commit"})


def test_every_field_that_openai_does_not_have_is_in_the_guide_to_serving():
    """Catches a parameter that the server takes and no page names."""
    openais = {"model", "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias"}
    openais |= {"seed", "stop", "stream", "stream_options", "response_format", "max_tokens", "prompt"}
    openais |= {"suffix", "user", "metadata", "store", "service_tier", "safety_identifier"}
    openais |= {"prompt_cache_key", "prompt_cache_retention"}
    guide = (ROOT / "docs/guides/serving.md").read_text(encoding="utf-8")
    assert [f for f in CompletionBody.model_fields.keys() - openais if f"`{f}`" not in guide] == []


def test_every_module_of_the_engine_has_its_line():
    """Catches a module that was added without a description."""
    folders = ("memory", "scheduling", "decoding", "execution", "kernels", "")
    table = PAGE[PAGE.index("## All modules") :]
    missing = []
    for folder in folders:
        base = ROOT / "kernels" if folder == "kernels" else ROOT / "minipaged" / folder
        names = [file.name for file in base.glob("*.py") if not file.name.startswith("__")]
        missing += [f"{folder}/{name}" for name in names if not re.search(rf"[`/]{name}`", table)]
    assert missing == []


def test_the_comparison_says_how_large_the_project_is():
    """Catches a size of an earlier version: thousands of lines, without the wings and with them."""
    around = ("simulation", "viewer", "learn")
    files = [*(ROOT / "minipaged").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    own = {file.resolve() for file in files}
    counts = {file: len(file.read_text().splitlines()) for file in own}
    small = sum(n for file, n in counts.items() if file.relative_to(ROOT).parts[1] not in around)
    stated = re.search(r"([\d,]+) lines of Python, ([\d,]+) with", (ROOT / "docs/comparison.md").read_text())
    assert abs(small - int(stated[1].replace(",", ""))) <= 1000
    assert abs(sum(counts.values()) - int(stated[2].replace(",", ""))) <= 1000
    assert f"The package is {stated[2]} lines of Python" in (ROOT / "README.md").read_text()


def test_a_request_passes_the_functions_that_the_page_lists():
    """Catches a list of an earlier version, or one in another order than the run's."""
    listed = listed_functions("a request passes")
    called = traced(lambda frame, event, result: event == "call", attention_backend="torch")
    assert [name for name in called if name in set(listed)] == listed
    core = {str((ROOT / file).resolve()) for file in reading_order.CORE}
    stated = re.search(r"about (\d+) of the project's functions. These (\d+) .*? (\d+)\s+of them", PAGE)
    assert int(stated[2]) == len(listed)
    assert int(stated[3]) == sum(file in core for file, _ in listed)
    assert abs(len(called) - int(stated[1])) <= 15, f"{len(called)} functions are called"


def test_a_block_id_passes_the_functions_that_the_page_lists():
    """Catches a function on the list that never sees the id, and one that is not called any more."""
    block = 2777
    pool = Components(allocator=lambda num_blocks: BlockAllocator(num_blocks, order=[block]))

    def holds(value) -> bool:
        if isinstance(value, BlockTable):
            return block in value.blocks
        if isinstance(value, list | array):
            return len(value) < 100 and any(type(entry) is int and entry == block for entry in value)
        if isinstance(value, torch.Tensor):  # ids, or slots of 16 a block
            return value.dtype in (torch.int32, torch.int64) and holds(value.numpy())
        if isinstance(value, np.ndarray):
            return bool(((value == block) | (value // 16 == block)).any())
        return hasattr(value, "block_tables") and holds(value.block_tables)

    def watch(frame, event, result):
        return event == "return" and any(map(holds, (result, *frame.f_locals.values())))

    holding = traced(watch, num_blocks=3000, components=pool, attention_backend="torch")
    listed = listed_functions("a block id passes")
    assert len(listed) == 7
    assert [function for function in listed if function not in holding] == []
