"""`minipaged serve --replicas` as users start it: real processes, killed in the middle."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from minipaged import SamplingParams
from minipaged.config import ConfigError
from minipaged.serving import fleet as fleets
from minipaged.serving import replica as replicas
from minipaged.serving.fleet import Fleet, ReplicaError
from minipaged.serving.settings import ServerSettings
from tests.processes import children, is_alive, needs_proc, started, wait_until
from tests.serving.conftest import C

REPLICA = "serving.replica"
PROMPTS = ["The little robot", "Once upon a time", "A fox"]


@contextmanager
def served(*arguments: str):
    """The command, its first line (the URL) and its replicas' process ids."""
    command = ["-m", "minipaged", "serve", "--port", "0", "--num-blocks", "128", "--disable-log-stats"]
    with started(*command, *arguments) as process:
        line = process.stdout.readline()
        found = re.fullmatch(r"Serving pocket at (http://127\.0\.0\.1:\d+) with 2 replicas\n", line)
        assert found, line
        yield process, found[1], children(REPLICA, process.pid)


@pytest.mark.slow
@needs_proc
def test_two_replicas_give_the_tokens_of_one_process_and_survive_the_death_of_one(offline):
    """Catches another model, other settings, a request lost with a process, a replica that stays dead,
    and processes that outlive the server. (One test, for replicas take seconds to start.)"""
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = [output.outputs[0].text for output in offline.generate(PROMPTS, params)]
    with served("--replicas", "2") as (process, url, before), httpx.Client(base_url=url, timeout=60) as http:
        assert len(before) == 2

        def texts(**fields) -> list[tuple[str, str]]:
            body = {"temperature": 0, "max_tokens": 24, **fields}
            answers = [http.post(C, json={**body, "prompt": prompt}) for prompt in PROMPTS]
            return [(a.json()["choices"][0]["text"], a.headers["X-Replica"]) for a in answers]

        first = texts()
        assert [text for text, _ in first] == expected
        assert {where for _, where in first} == {"0", "1"}

        body = {"prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with http.stream("POST", C, json=body) as answer:
            number = int(answer.headers["X-Replica"])
            pieces = answer.iter_text()
            text = next(pieces)
            victims = children(REPLICA, process.pid)
            # (Process ids grow with the order of the starts, unless they wrap around.)
            os.kill(victims[number], signal.SIGKILL)
            text += "".join(pieces)
        assert '"code": "replica_lost"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert [text for text, _ in texts()] == expected
        wait_until(lambda: http.get("/health").json()["up"] == 2, 60, "the replica that was started anew")
        assert f'minipaged:replica_starts_total{{replica="{number}"}} 2.0' in http.get("/metrics").text
        assert [text for text, _ in texts()] == expected

        last = children(REPLICA, process.pid)
        assert len(last) == 2
        with http.stream("POST", C, json=body) as answer:
            pieces = answer.iter_text()
            text = next(pieces)
            process.send_signal(signal.SIGTERM)
            text += "".join(pieces)
        assert '"finish_reason": "length"' in text, "what ran was not finished"
        assert process.wait(30) in (0, -signal.SIGTERM)
        assert not [pid for pid in last if is_alive(pid)]
        log = process.stderr.read()
        assert "Traceback" not in log
        assert f"Replica {number} was killed by SIGKILL; restarting it" in log


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_no_replica_is_left_when_the_server_is_ended(name, tmp_path, monkeypatch):
    """Catches replicas that outlive Ctrl-C or a crash of the router, and files that stay for good."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with served("--replicas", "2") as (process, _, pids):
        process.send_signal(getattr(signal, name))
        process.wait(30)
        assert len(pids) == 2
        wait_until(lambda: not any(map(is_alive, pids)), 10, "the end of the replicas")
    assert not any(map(is_alive, pids))
    assert not list(tmp_path.glob("minipaged-*"))


def fleet(count: int = 1, **options) -> Fleet:
    return Fleet(count, None, "pocket", {"num_blocks": 64, **options}, (), ServerSettings())


@pytest.mark.slow
def test_an_interrupted_replica_leaves_no_traceback(capfd):
    """Catches a traceback in the router's log after `kill -INT`."""
    with fleet() as one:
        process = one.replicas[0]._process
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, -signal.SIGINT)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_replica_that_cannot_start_is_reported_with_the_reason():
    """Catches a server that waits forever, or leaves the others running."""
    one = fleet(2, max_model_len=10**9)
    with pytest.raises(ReplicaError, match=r"replica \d cannot start: .*max_model_len"), one:
        pass
    assert all(replica._process.poll() is not None for replica in one.replicas)


@pytest.mark.slow
@needs_proc
def test_a_replica_that_lost_a_rank_ends(capfd):
    """Catches one that is out of service for half a minute, though it is known that it cannot recover."""
    with fleet(tensor_parallel_size=2) as one:
        process = one.replicas[0]._process
        (worker,) = children("distributed.worker", process.pid)
        os.kill(worker, signal.SIGKILL)
        assert process.wait(10) == 1
    assert "replica 0: rank 1 was killed by SIGKILL" in capfd.readouterr().err


class Process:
    """In the place of a `Popen`: ends at once, or when it is killed."""

    stdin = None

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        pass

    def wait(self, seconds: float = 0.0) -> int:
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("replica", seconds)
        return code

    def kill(self) -> None:
        self.code = -signal.SIGKILL


def starts(monkeypatch, code: int | None = None, reports: bool = True) -> list[Process]:
    """Let replicas start such processes, which can serve at once or never will; those that were started."""
    found: list[Process] = []

    def start(module, job, environment, **options) -> Process:
        if reports:
            Path(job["report"]).write_text(json.dumps({"port": 1234}))
        found.append(Process(code))
        return found[-1]

    monkeypatch.setattr(fleets, "start", start)
    return found


def test_a_replica_is_started_anew_after_its_temporary_files_have_been_removed(monkeypatch, tmp_path):
    """Catches a fleet that loses its replicas for good, weeks after a cleaner has passed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    starts(monkeypatch)
    with fleet() as whole:
        (one,) = whole.replicas
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
        one._process.kill()
        asyncio.run(one.tend())
        assert one.has_reported()
        assert one.num_starts == 2
    assert not list(tmp_path.iterdir())


def test_a_replica_that_dies_again_and_again_is_started_ever_less_often(monkeypatch):
    """Catches processes started without a pause, and a minute's wait although the last one has served."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(fleets.asyncio, "sleep", sleep)
    (one,) = (whole := fleet()).replicas
    starts(monkeypatch, code=1, reports=False)
    one.start()
    for _ in range(10):
        asyncio.run(one.tend())
    assert slept == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert not one.is_up

    starts(monkeypatch)
    asyncio.run(one.tend())
    one._process.code = 1
    asyncio.run(one.tend())
    assert slept[10:] == [60, 0]
    whole.stop()


def test_a_replica_that_is_started_anew_has_not_reported(monkeypatch):
    """Catches requests sent to the address of the process before."""
    (one,) = (whole := fleet()).replicas
    starts(monkeypatch)
    one.start()
    assert one.has_reported()
    starts(monkeypatch, reports=False)
    one.start()
    assert not one.has_reported()
    assert one.num_starts == 2
    whole.stop()


def test_a_replica_that_takes_long_to_start_is_named_again_and_again(monkeypatch, caplog):
    """Catches a replica that hangs while it loads its model, about which the log says nothing."""
    now = [0.0]
    (one,) = (whole := fleet()).replicas
    starts(monkeypatch, reports=False)
    one.start()

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 150.0:
            one._report.write_text(json.dumps({"port": 1234}))

    monkeypatch.setattr(fleets.asyncio, "sleep", sleep)
    monkeypatch.setattr(fleets.time, "monotonic", lambda: now[0])
    one._process.kill()
    with caplog.at_level(logging.WARNING, "minipaged"):
        asyncio.run(one.tend())
    assert caplog.messages == [
        "Replica 0 was killed by SIGKILL; restarting it in 0 s",
        "Replica 0 has been starting for 60 s",
        "Replica 0 has been starting for 120 s",
    ]
    whole.stop()


@pytest.mark.parametrize(("needs", "ended", "code"), [(5.0, 5.0, 0), (1000.0, 30.0 + 10.0, -signal.SIGKILL)])
def test_a_replica_that_ends_may_finish_what_it_runs(needs, ended, code, monkeypatch, caplog):
    """Catches an answer that is cut by the end, an endless wait, and a replica killed in silence."""
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    class Busy(Process):
        def poll(self) -> int | None:
            return 0 if now[0] >= needs else self.code

    monkeypatch.setattr(fleets.asyncio, "sleep", sleep)
    monkeypatch.setattr(fleets.time, "monotonic", lambda: now[0])
    (one,) = (whole := fleet()).replicas
    one._process = Busy(None)
    with caplog.at_level(logging.WARNING, "minipaged"):
        asyncio.run(one.end(30.0))
    assert caplog.messages == (["Replica 0 did not end within 40 s; killing it"] if code else [])
    assert now[0] == pytest.approx(ended, abs=0.1)
    assert one._process.poll() == code
    whole.stop()


def test_a_replica_that_lives_but_cannot_serve_is_killed_and_started_anew(monkeypatch):
    """Catches one that is left out forever, and one that is killed for one bad moment or while it starts."""
    now = [0.0]
    monkeypatch.setattr(fleets.time, "monotonic", lambda: now[0])
    (one,) = (whole := fleet()).replicas
    processes = starts(monkeypatch)
    one.start()
    for now[0] in (0, 20, 25, 26, 50, 57, 58):
        one.is_up = now[0] == 25
        asyncio.run(one.tend())
        assert len(processes) == 1 + (now[0] >= 57)
    assert [process.code for process in processes] == [-signal.SIGKILL, None]
    assert one.url == "http://127.0.0.1:1234"
    whole.stop()


@pytest.mark.parametrize(
    ("visible", "ranks", "number", "expected"),
    [(None, 1, 1, "1"), (None, 2, 1, "2,3"), ("4,5,6,7", 2, 0, "4,5"), ("GPU-a,GPU-b,c,d", 1, 2, "c")],
)
def test_each_replica_sees_gpus_of_its_own(visible, ranks, number, expected, monkeypatch):
    """Catches two replicas that fill the memory of the same GPU."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    replicas._take_gpus(number, {"tensor_parallel_size": ranks})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_more_replicas_than_gpus_are_refused(monkeypatch):
    """Catches a replica that computes on the CPU in silence, and one that may not even if it is asked to."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    replicas._take_gpus(1, {"tensor_parallel_size": 2, "device": "cpu"})
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6"
    with pytest.raises(ConfigError, match="replica 1 needs 2 GPUs of its own, but this machine has 3"):
        replicas._take_gpus(1, {"tensor_parallel_size": 2})


@pytest.mark.parametrize("count", ["0", "65", "-1"])
def test_a_number_of_replicas_that_cannot_be_is_refused(count):
    """Catches a server of none."""
    command = [sys.executable, "-m", "minipaged", "serve", "--replicas", count]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (
        2,
        f"minipaged: replicas is {count}; give a number from 1 to 64\n",
    )


def test_the_router_loads_no_model():
    """Catches an import that makes the router as large as a replica."""
    code = "import minipaged.serving.router, minipaged.serving.fleet, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
