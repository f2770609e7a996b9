"""The leaderboard: scores that can be compared, from seeds that nobody has seen."""

import json

import pytest

from minipaged.components import Components
from minipaged.memory import Chunked
from minipaged.simulation.score import CONTESTS, Leaderboard, Marks, points, run_contest, seed_of

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


def test_a_component_that_wastes_memory_is_told_by_its_waste():
    """Catches marks of the project's own engine, whoever competes."""
    own = run_contest("questions", "k", Components(), 100)
    chunked = run_contest("questions", "k", Components(page_growth=Chunked), 100)
    assert chunked.waste > own.waste + 0.1


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


def test_the_file_does_not_tell_a_key_that_was_given(tmp_path):
    """Catches a teacher's key in a file that students may read."""
    board = Leaderboard(tmp_path / "file")
    board.enter("secret", "me", 90.0)
    text = (tmp_path / "file").read_text()
    assert "secret" not in text
    assert json.loads(text)["key"] == board.key
