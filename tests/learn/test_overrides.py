"""Overrides: a class of your own is found, loaded, watched and run; what is wrong is reported in one line."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from minipaged.components import Components, build_scheduler
from minipaged.config import EngineConfig
from minipaged.learn.contracts import CONCEPTS, ContractError
from minipaged.learn.contracts.allocator import AllocatorContract
from minipaged.learn.overrides import OverrideError, components_from, load_override, parse_use
from minipaged.memory import BlockAllocator
from minipaged.scheduling import Auto, PreemptionCosts, Recompute, Swap
from tests.overrides import installed, replacements

ROOT = Path(__file__).parents[2]
LIMITS = SimpleNamespace(
    block_size=16,
    num_blocks=8,
    num_host_blocks=0,
    max_model_len=64,
    kept_states=None,
    preemption_costs=PreemptionCosts(1.0, 1.0, 1.0),
)


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def mine(tmp_path):
    """A file with an allocator, a growth policy and a broken class."""
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent(
            """
            from minipaged.memory import BlockAllocator, Chunked

            class Mine(BlockAllocator):
                pass

            class Twice(BlockAllocator):
                def allocate(self, count=1):
                    return [0] * count

            class Generous(Chunked):
                pass

            class Empty:
                pass
            """
        )
    )
    return file


def test_a_class_of_a_file_runs_watched_and_the_rest_is_the_projects_own(mine):
    """Catches a class that is loaded and then not used."""
    components = components_from({"allocator": f"{mine}:Mine"})
    scheduler = build_scheduler(EngineConfig(), LIMITS, components)
    assert isinstance(scheduler.kv.allocator, AllocatorContract)
    assert type(scheduler.kv.allocator._inner).__name__ == "Mine"
    assert components.prefix_cache is Components().prefix_cache


def test_a_class_may_be_given_itself_and_the_projects_own_runs_unwatched():
    """Catches a watcher around every engine, which would cost speed."""
    assert components_from({"allocator": BlockAllocator}).allocator is BlockAllocator
    assert components_from({"allocator": type("Mine", (BlockAllocator,), {})}).allocator is not BlockAllocator


def test_without_a_watch_a_class_is_used_as_it_is():
    """Catches a benchmark that measures the contract beside the class."""
    mine = type("Mine", (BlockAllocator,), {})
    assert components_from({"allocator": mine}, watch=False).allocator is mine


def test_a_preemption_policy_is_made_with_the_costs_if_it_asks_for_them():
    """Catches `use={"preemption": Recompute}` that calls the class with an argument it does not take."""
    for own in (Recompute, Swap, Auto):
        mine = type("Mine", (own,), {})
        for policy in (own, mine):
            made = components_from({"preemption": policy}).preemption(LIMITS.preemption_costs)
            assert made.choose_victim([1, 2]) == 2 if policy is own else isinstance(made._inner, mine)


@pytest.mark.parametrize("concept", CONCEPTS)
def test_every_concept_is_a_field_of_components(concept):
    """Catches a concept that can be named and then does nothing."""
    assert hasattr(Components(), concept)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["alocator=a.py:B"], "unknown concept 'alocator'; did you mean allocator"),
        (["magic=a.py:B"], "unknown concept 'magic'; choose one of allocator, "),
        (["allocator"], "--use allocator is not CONCEPT=FILE.py:Class"),
        (["allocator=a.py"], "is not CONCEPT=FILE.py:Class"),
        (["allocator=a.py:A", "allocator=a.py:B"], "--use allocator is given twice: a.py:A and a.py:B"),
    ],
)
def test_a_use_option_that_cannot_be_read_is_reported(values, message):
    """Catches a typo that silently runs the project's own class."""
    with pytest.raises(OverrideError, match=message):
        parse_use(values)


def test_what_cannot_be_loaded_is_reported(tmp_path, mine):
    """Catches a traceback of importlib where the file name is wrong, empty or not Python."""
    with pytest.raises(
        OverrideError, match=r"there is no file .*nowhere.py; give the path from where you are"
    ):
        load_override(f"{tmp_path}/nowhere.py:A")
    with pytest.raises(OverrideError, match="has no Yours; it defines Mine, Twice, Generous, Empty"):
        load_override(f"{mine}:Yours")
    (tmp_path / "bad.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(OverrideError, match=r"bad.py, line 2 cannot be loaded: SyntaxError: [^(]+; fix the"):
        load_override(f"{tmp_path}/bad.py:f")
    (tmp_path / "bare.py").write_text("")
    with pytest.raises(OverrideError, match=r"bare.py has no f; define it there$"):
        load_override(f"{tmp_path}/bare.py:f")
    for statement, message in (("raise SystemExit", "SystemExit;"), ("raise MemoryError", "MemoryError;")):
        (tmp_path / "ends.py").write_text(statement)
        with pytest.raises(OverrideError, match=rf"ends.py cannot be loaded: {message} fix the file"):
            load_override(f"{tmp_path}/ends.py:f")
    (tmp_path / "needs.py").write_text("import no_such_package.part")
    with pytest.raises(OverrideError, match=r"needs.py needs no_such_package, which is not installed; "):
        load_override(f"{tmp_path}/needs.py:f")
    with pytest.raises(OverrideError, match=r"mine.py:' names no class; give FILE.py:Class"):
        load_override(f"{mine}:")
    with pytest.raises(OverrideError, match=r"mine is not a Python file; give one whose name ends in .py"):
        load_override(f"{mine.rename(tmp_path / 'mine')}:Mine")
    mine = (tmp_path / "mine").rename(mine)
    with pytest.raises(ContractError, match="allocator: Empty has no method allocate"):
        components_from({"allocator": f"{mine}:Empty"})


def test_the_command_line_reports_a_breach_in_one_line(mine):
    """Catches a stack trace from deep inside the engine."""
    prompt = "a b c d e f g h i j k l m n o p q r s t u v"
    ran = python("-m", "minipaged", "generate", "--prompt", prompt, "--use", f"allocator={mine}:Twice")
    assert ran.returncode == 2
    lines = [line for line in ran.stderr.splitlines() if line.startswith("minipaged: ")]
    assert len(lines) == 1
    assert "each block may be handed out once" in lines[0]
    assert "Traceback" not in ran.stderr


def test_pytest_use_replaces_the_class_in_package_and_tests(mine):
    """Catches a test that still holds the project's class; here the first allocator test must fail."""
    ran = python(
        *("-m", "pytest", "-p", "no:cacheprovider", "tests/learn/test_overrides.py"),
        *("-k", "whoever_is_installed", "--use", f"allocator={mine}:Twice"),
    )
    assert "Twice is installed" in ran.stdout


def test_whoever_is_installed_hands_out_distinct_blocks():
    """The one that `test_pytest_use...` runs on a broken allocator."""
    blocks = BlockAllocator(4).allocate(2)
    assert blocks == [0, 1], f"{BlockAllocator.__name__} is installed"


def test_an_override_replaces_the_class_it_is_named_for_or_derives_from(mine):
    """Catches an override of Chunked put in the place of OnDemand."""
    from minipaged.memory import Chunked

    assert [original for original, _ in replacements([f"page_growth={mine}:Generous"])] == [Chunked]


def test_overrides_are_taken_out_again(mine):
    """Catches a trial that leaves its override behind for the next one."""
    import minipaged.memory.allocator as home

    before = home.BlockAllocator
    with installed(replacements([f"allocator={mine}:Mine"])):
        assert home.BlockAllocator.__name__ == BlockAllocator.__name__ == "Mine"
    assert home.BlockAllocator is BlockAllocator is before


def test_trials_run_one_test_on_several_overrides(tmp_path, mine):
    """Catches results that belong to another trial, and a missing test that counts as passed."""
    test = "tests/learn/test_overrides.py::test_whoever_is_installed_hands_out_distinct_blocks"
    trials = [
        {"name": "good", "use": [f"allocator={mine}:Mine"], "tests": [test, f"{test}_too"]},
        {"name": "bad", "use": [f"allocator={mine}:Twice"], "tests": [test]},
        {"name": "empty", "use": [f"allocator={mine}:Empty"], "tests": [test]},
        {"name": "good again", "use": [], "tests": [test]},
    ]
    source, destination = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(json.dumps(trials))
    ran = python(
        *("-m", "pytest", "-p", "no:cacheprovider", "tests/learn/test_overrides.py"),
        *("--trials", str(source), "--trials-out", str(destination)),
    )
    assert destination.exists(), ran.stdout + ran.stderr
    read = json.loads(destination.read_text())
    results = {
        trial: {test: o["failure"] for test, o in outcomes.items()} for trial, outcomes in read.items()
    }
    assert results["good"] == {test: "", f"{test}_too": "there is no such test"}
    assert "Twice is installed" in results["bad"][test]
    assert "has no method allocate" in results["empty"][test]
    assert results["good again"] == {test: ""}


@pytest.fixture
def exercise(tmp_path):
    """An exercise as it ships, and the same as its start."""
    for file in (tmp_path / "02_x/exercise.py", tmp_path / ".start/02_x.py"):
        file.parent.mkdir()
        file.write_text("class BlockAllocator:\n    pass\n\n\nclass Mine:\n    pass\n")
    return tmp_path / "02_x/exercise.py"


def test_a_skipped_lesson_borrows_the_projects_class(exercise, caplog):
    """Catches lesson 12 that cannot be run without lessons 02 to 09, and a loan without a notice."""
    assert components_from({"allocator": f"{exercise}:BlockAllocator"}).allocator is BlockAllocator
    assert "has not been started" in caplog.text


def test_a_skipped_lesson_is_recognized_from_its_own_folder(exercise, monkeypatch):
    """Catches a loan that depends on where the command is typed."""
    monkeypatch.chdir(exercise.parent)
    assert components_from({"allocator": "exercise.py:BlockAllocator"}).allocator is BlockAllocator


def test_a_path_may_have_a_colon(exercise, tmp_path):
    """Catches every override on Windows, whose paths begin with one."""
    folder = exercise.parent.rename(tmp_path / "C:x")
    start = (tmp_path / ".start/02_x.py").rename(tmp_path / ".start/C:x.py")
    where = f"{folder}/exercise.py:BlockAllocator"
    assert components_from({"allocator": where}).allocator is BlockAllocator
    start.unlink()
    assert load_override(where).__name__ == "BlockAllocator"


def test_a_file_may_define_a_dataclass(tmp_path):
    """Catches a module that Python does not know: a dataclass looks there for the types of its fields."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n\n\n"
        "@dataclass\nclass Mine:\n    size: int = 3\n"
    )
    assert load_override(f"{file}:Mine")().size == 3


def test_what_was_begun_is_never_replaced(exercise):
    """Catches a student's class that is quietly left out because it is not finished."""
    exercise.write_text(exercise.read_text() + "\n# begun\n")
    with pytest.raises(ContractError, match="has no method allocate"):
        components_from({"allocator": f"{exercise}:BlockAllocator"})


def test_a_class_of_ones_own_is_not_borrowed(exercise):
    """Catches another class of the file that is taken for the exercise's."""
    with pytest.raises(ContractError, match="Mine has no method allocate"):
        components_from({"allocator": f"{exercise}:Mine"})
