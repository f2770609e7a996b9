"""A lesson in a browser tab: its own tests on the student's file, and the engine with the student's classes.

    check("01", source, announce)       what `minipaged learn check 01` reports, in JSON
    run("01", source, 0)                the trace of a run, in JSON, for the viewer

The package lies beside `tests/` and `tutorials/`, as in a clone; `source` becomes the exercise there.
"""

from __future__ import annotations

import importlib
import json
import linecache
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minipaged.decoding.params import BeamSearchParams, DecodingParams, SamplingParams
from minipaged.learn.lessons import LearnError, Lesson, find, repository
from minipaged.learn.overrides import components_from, parse_use
from minipaged.learn.trials import (
    NOT_STARTED,
    Outcome,
    Trial,
    is_green,
    pytest_arguments,
    read_outcomes,
    with_missing,
)
from minipaged.learn.words import report, sentence
from minipaged.viewer.pictures.runs import modelless
from minipaged.viewer.pictures.runs import run as run_to_end
from minipaged.viewer.trace import TraceLines

Requests = Mapping[str, tuple[Sequence[int], DecodingParams]]

NEEDS_TORCH = "ModuleNotFoundError: No module named 'torch'"
"""How tests that compare with other software fail where it is not installed."""


def _asked(*lengths: tuple[int, int], shared: int = 0) -> Requests:
    """Requests A, B, ... of these prompt and output lengths; all prompts begin with `shared` tokens."""
    requests = {}
    for i, (prompt, output) in enumerate(lengths):
        own = range(100 * (i + 1), 100 * (i + 1) + prompt - shared)
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
        requests[chr(65 + i)] = ([*range(shared), *own], params)
    return requests


class Demo(NamedTuple):
    """A run that shows a lesson's classes at work, in blocks of 4 tokens."""

    look: str  # what to look at
    requests: Requests
    num_blocks: int
    options: Mapping[str, Any] = {}
    num_host_blocks: int = 0
    classes: Sequence[str] = ()  # of the exercise; none: all that the lesson puts in place
    arrivals: Mapping[str, int] = {}  # request -> step, if not the first


PLAIN = {"enable_prefix_caching": False}
FOUR = _asked((9, 14), (9, 14), (7, 16), (5, 18))

DEMOS: dict[str, list[Demo]] = {
    "01": [Demo("Three sequences, each with your table", _asked((7, 10), (5, 14), (9, 6)), 16, PLAIN)],
    "02": [
        Demo(
            "Four samples share a prompt; the first write to a shared block copies it",
            {"A": (range(6), SamplingParams(n=4, max_tokens=8, ignore_eos=True))},
            24,
            PLAIN,
        )
    ],
    "04": [
        Demo(
            "Two at a time: the third waits, and is admitted after one has ended",
            _asked((6, 12), (8, 12), (4, 8)),
            24,
            PLAIN | {"enable_chunked_prefill": False, "max_num_seqs": 2},
        )
    ],
    "05": [
        Demo(f"{name}: how much of what is held is empty", FOUR, 30, PLAIN, classes=[name])
        for name in ("OnDemand", "Reserve", "Chunked")
    ],
    "06": [
        Demo(f"{name}: who is preempted, and how", FOUR, 14, PLAIN, 14, classes=[name])
        for name in ("Recompute", "Swap", "Auto")
    ],
    "07": [
        Demo(
            "A budget of 8 tokens: a prompt of 30 in chunks, beside the decodes",
            _asked((5, 16), (30, 8), (6, 8)),
            24,
            PLAIN | {"max_num_batched_tokens": 8},
            arrivals={"B": 2, "C": 3},
        )
    ],
    "08": [
        Demo(
            "The second prompt finds the blocks of the first",
            _asked((18, 6), (20, 6), (22, 6), shared=16),
            16,
            {"max_num_seqs": 1},
        )
    ],
    "09": [
        Demo(
            "Three samples",
            {"A": (range(6), SamplingParams(n=3, max_tokens=10, ignore_eos=True))},
            24,
            PLAIN,
            classes=["SamplingMethod"],
        ),
        Demo(
            "A beam of three",
            {"A": (range(6), BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True))},
            24,
            PLAIN,
            classes=["BeamSearch"],
        ),
    ],
    "13": [
        Demo(
            "One at a time, the shortest prompt first",
            _asked((16, 6), (8, 6), (4, 6)),
            16,
            PLAIN | {"max_num_seqs": 1},
        )
    ],
}
"""The lessons that a page can run, those without torch, and what their classes do when they run."""


def check(number: str, source: str, announce: Callable[[str], object]) -> str:
    """Run the tests of a lesson on `source`.

    Args:
        number: one of `DEMOS`.
        source: the text of exercise.py.
        announce: called with the fact that a test checks, before it runs.

    Returns:
        JSON: `green`, `tasks` (see `TaskReport`), and `elsewhere`, how many tests need torch and did not run.
    """
    lesson = _write(number, source)
    outcomes = dict.fromkeys(lesson.tests, NOT_STARTED)
    if not lesson.is_untouched:
        announce("")
        outcomes = _run_tests(lesson, announce)
    elsewhere = [test for test, outcome in outcomes.items() if outcome.message.startswith(NEEDS_TORCH)]
    here = [{test: outcomes[test] for test in task.tests if test not in elsewhere} for task in lesson.tasks]
    tasks = [
        {"green": task.is_green, "head": task.head, "tests": [test.lines for test in task.tests]}
        for task in report(lesson, here)
    ]
    return json.dumps({"green": all(map(is_green, here)), "tasks": tasks, "elsewhere": len(elsewhere)})


def run(number: str, source: str, demo: int) -> str:
    """Run the engine with the classes of `source`, as `--use` does, over an executor without a model.

    Returns JSON: `lines` of a trace; `note`, "" or a remark.

    Raises:
        OverrideError: the file cannot be loaded.
        ContractError: a class breaks a rule of its concept.
    """
    lesson = _write(number, source)
    chosen = DEMOS[number][demo]
    options = lesson.use_options()
    if chosen.classes:
        options = [option for option in options if option.rpartition(":")[2] in chosen.classes]
    components = components_from(parse_use(options))
    engine = modelless(chosen.num_blocks, chosen.num_host_blocks, components, **chosen.options)
    lines: list[str] = []
    trace = TraceLines(engine, lines.append, lambda token: f"{token} ")
    run_to_end(engine, chosen.requests, chosen.arrivals)
    trace.close()
    note = "Nothing is written yet: these are the project's own classes." if lesson.is_untouched else ""
    return json.dumps({"lines": lines, "note": note})


def _write(number: str, source: str) -> Lesson:
    """Make `source` the exercise of a lesson, and forget what is known of the old file."""
    sys.dont_write_bytecode = True
    lesson = find(number)
    lesson.exercise.write_text(source, encoding="utf-8")
    linecache.clearcache()
    return lesson


def _run_tests(lesson: Lesson, announce: Callable[[str], object]) -> dict[str, Outcome]:
    """Run the tests in this process: there is no other."""
    pytest = importlib.import_module("pytest")

    class Announcer:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            announce(sentence(nodeid))

    os.chdir(repository())
    with tempfile.TemporaryDirectory() as folder:
        destination = Path(folder, "out.json")
        trial = Trial(lesson.number, lesson.use_options(), lesson.tests)
        options = ["--noconftest", "-p", "tests.plain", "--import-mode=importlib", "-c", os.devnull]
        options += ["--rootdir", str(Path.cwd())]
        arguments = pytest_arguments([trial], Path(folder), destination)
        code = pytest.main([*arguments, *options], plugins=[Announcer()])
        if not destination.exists():
            raise LearnError(f"the tests could not be run: pytest ended with {code!r}")
        return with_missing(lesson, read_outcomes(destination)[lesson.number])
