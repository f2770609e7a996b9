"""The leaderboard: scores that can be compared, from seeds that nobody has seen."""

import json
from collections import deque

import pytest
from typer.testing import CliRunner

from minipaged.cli.main import app
from minipaged.cli.score import IDLE
from minipaged.components import Components
from minipaged.learn.contracts import CONCEPTS
from minipaged.learn.lessons import LearnError
from minipaged.learn.overrides import components_from
from minipaged.memory import Chunked
from minipaged.scheduling import FCFSScheduler, RequestTooLongError
from minipaged.simulation.score import (
    CONTESTS,
    Leaderboard,
    Marks,
    ScoreError,
    points,
    run_contest,
    seed_of,
)

OWN = {"a": Marks(2.0, 10.0, 0.1), "b": Marks(4.0, 1.0, 0.5)}


def test_the_own_engine_has_100_points():
    """Catches a score that is not relative to the run it is compared with."""
    assert points(OWN, OWN) == pytest.approx(100)


@pytest.mark.parametrize(
    "better", [Marks(2.2, 10.0, 0.1), Marks(2.0, 9.0, 0.1), Marks(2.0, 10.0, 0.0)], ids=str
)
def test_more_throughput_less_wait_and_less_waste_bring_points(better):
    """Catches a ratio that is upside down."""
    assert points({**OWN, "a": better}, OWN) > 100


def test_points_are_a_geometric_mean():
    """Catches a mean in which one workload outweighs the others: twice as good here, half as good there."""
    marks = {"a": Marks(4.0, 10.0, 0.1), "b": Marks(2.0, 1.0, 0.5)}
    assert points(marks, OWN) == pytest.approx(100)
    assert points({"a": Marks(16.0, 10.0, 0.1), "b": OWN["b"]}, OWN) == pytest.approx(100 * 8 ** (1 / 6))


@pytest.mark.parametrize("contest", CONTESTS)
def test_a_key_decides_the_requests(contest):
    """Catches a score that changes from run to run, and seeds that do not depend on the key."""
    one, again, other = (run_contest(contest, key, Components(), 60) for key in ("k", "k", "l"))
    assert one == again
    assert one != other


def test_every_contest_has_a_seed_of_its_own():
    """Catches three workloads with the same arrivals."""
    assert len({seed_of("k", contest) for contest in CONTESTS}) == len(CONTESTS) == 3


def test_a_component_that_wastes_memory_is_recognized_by_its_waste():
    """Catches marks of the project's own engine, whoever competes."""
    own = run_contest("questions", "k", Components(), 100)
    chunked = run_contest("questions", "k", Components(page_growth=Chunked), 100)
    assert chunked.waste > own.waste + 0.1


class Busy(FCFSScheduler):
    """Refuses whoever would be one too many."""

    def add(self, request):
        if len(self.running) > 2:
            raise RequestTooLongError("busy")
        super().add(request)


class Curt(FCFSScheduler):
    """Ends every request after its first tokens."""

    def commit(self, plan, result):
        touched = super().commit(plan, result)
        for request in tuple(self.running):
            self.end(request, "length")
            touched.append(request)
        return list(dict.fromkeys(touched))


@pytest.mark.parametrize(
    ("scheduler", "lost"),
    [(Busy, r"\d+ were refused and 0 ended early"), (Curt, r"0 were refused and \d+ ended early")],
)
def test_work_that_is_not_done_brings_no_points(scheduler, lost):
    """Catches a first place for a scheduler that refuses requests or cuts their answers."""
    message = f"^of 60 requests of questions, {lost}; answer all of them in full$"
    with pytest.raises(ScoreError, match=message):
        run_contest("questions", "k", Components(scheduler=scheduler), 60)


class Short(FCFSScheduler):
    """Goes by a parameter that requests have in an engine with a model."""

    def admit_waiting(self, *given, **options):
        assert [request.params.max_tokens for request in self.waiting]
        return super().admit_waiting(*given, **options)


def test_a_class_that_asks_for_parameters_is_told_that_there_are_none():
    """Catches "'Lengths' object has no attribute 'max_tokens'" alone, of which no lesson speaks."""
    message = r"test_score.py, line \d+\); requests of the workloads have no request.params: go by"
    with pytest.raises(ScoreError, match=message):
        run_contest("questions", "k", components_from({"scheduler": Short}), 9)


class Knows(FCFSScheduler):
    """Serves the shortest answer first, which nobody can know."""

    @staticmethod
    def length(request):
        return request.params.output

    def admit_waiting(self, *given, **options):
        self.waiting = deque(sorted(self.waiting, key=self.length))
        used = super().admit_waiting(*given, **options)
        self.waiting = deque(sorted(self.waiting, key=lambda request: request.arrival))
        return used


class Asks(Knows):
    """The same, from the method."""

    @staticmethod
    def length(request):
        return request.method.num_output_tokens


@pytest.mark.parametrize(
    ("scheduler", "name"), [(Knows, "params"), (Asks, "method.num_output_tokens")], ids=["params", "method"]
)
def test_where_a_request_will_end_is_hidden(scheduler, name):
    """Catches points for a class that reads the length of an answer from its request."""
    message = f"requests of the workloads have no request.{name}: go by request.prompt_token_ids"
    with pytest.raises(ScoreError, match=message):
        run_contest("questions", "k", components_from({"scheduler": scheduler}), 60)


@pytest.mark.parametrize("concept", CONCEPTS)
def test_what_counts_is_made_in_some_contest(concept):
    """Catches a class that is scored though no workload calls it, and one that counts and is refused."""
    own = getattr(components_from({concept: CONCEPTS[concept].originals[0]}), concept)
    made = []

    def make(*args, **kw):
        made.append(concept)
        return own(*args, **kw)

    for contest in CONTESTS:
        run_contest(contest, "k", Components(**{concept: make}), 4)
    assert bool(made) is (concept not in IDLE)


@pytest.mark.parametrize("concept", IDLE)
def test_a_class_that_counts_for_nothing_is_refused(concept):
    """Catches 100.0 points for a class that no workload ever calls."""
    arguments = ["learn", "score", "--use", "allocator=mine.py:Mine", "--use", f"{concept}=mine.py:Mine"]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, LearnError)
    counted = ", ".join(name for name in CONCEPTS if name not in IDLE)
    assert str(error) == f"{concept} counts for nothing in the workloads; give one of {counted}"


@pytest.mark.parametrize(
    "text",
    [
        *("", "no JSON", "[]", "null", "7", '{"key": 7}', '{"points": []}', '{"points": {"b": 7}}'),
        *('{"points": {"b": {"me": "many"}}}', "\xff", "[" * 100_000),
    ],
)
def test_a_file_that_is_not_a_leaderboard_is_reported(tmp_path, text):
    """Catches a traceback, and "Expecting value: line 1 column 1" without the name of a file."""
    file = tmp_path / "board.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ScoreError, match=r"board.json is not a leaderboard; move it away, and a new one beg"):
        Leaderboard(file)


def test_a_new_leaderboard_draws_a_key_and_keeps_it(tmp_path):
    """Catches a key that is the same on every machine, or another at every run."""
    one, other = Leaderboard(tmp_path / "one"), Leaderboard(tmp_path / "other")
    assert one.key != other.key
    one.enter(one.key, "me", 90.0)
    assert Leaderboard(tmp_path / "one").key == one.key


def test_a_leaderboard_keeps_the_best_of_each_name_by_key(tmp_path):
    """Catches a worse second try that replaces the first, and scores of different requests side by side."""
    for key, name, scored in (("k", "me", 90.0), ("k", "you", 95.0), ("k", "me", 80.0), ("l", "me", 120.0)):
        Leaderboard(tmp_path / "file").enter(key, name, scored)
    board = Leaderboard(tmp_path / "file")
    assert board.rows("k") == [("you", 95.0), ("me", 90.0)]
    assert board.rows("l") == [("me", 120.0)]
    assert board.rows("none") == []


def test_the_file_does_not_reveal_a_key_that_was_given(tmp_path):
    """Catches a teacher's key in a file that students may read."""
    board = Leaderboard(tmp_path / "file")
    board.enter("secret", "me", 90.0)
    text = (tmp_path / "file").read_text()
    assert "secret" not in text
    assert json.loads(text)["key"] == board.key


def test_a_leaderboard_keeps_what_others_entered_in_the_meantime(tmp_path):
    """Catches scores that are lost when several are made at once."""
    boards = [Leaderboard(tmp_path / "file")]
    boards[0].enter("k", "first", 80.0)
    boards = [Leaderboard(tmp_path / "file") for _ in range(2)]
    boards[0].enter("k", "one", 90.0)
    boards[1].enter("k", "other", 95.0)
    assert dict(Leaderboard(tmp_path / "file").rows("k")) == {"first": 80.0, "one": 90.0, "other": 95.0}
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["", " ", "a\nb"])
def test_a_name_can_be_shown(tmp_path, name):
    """Catches rows without a name, and names that break the table."""
    with pytest.raises(ScoreError, match="give one that can be shown in a line"):
        Leaderboard(tmp_path / "file").enter("k", name, 90.0)


def test_marks_count_preemptions_which_earn_and_cost_nothing():
    """Catches a policy that preempts far more often, and nobody sees it."""
    assert run_contest("chat", "k", Components(), 200).preemptions > 0
    assert run_contest("questions", "k", Components(), 60).preemptions == 0
    assert Marks(2.0, 10.0, 0.1, 99).relative_to(OWN["a"]) == 1
