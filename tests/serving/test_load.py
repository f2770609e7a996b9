"""The load tool, the commands of the guide, and many clients at once."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from minipaged import AsyncLLM, SamplingParams
from minipaged.cli.main import app
from minipaged.serving.load import Load, LoadError, Record, _summary, run_load
from minipaged.serving.server import make_server
from minipaged.serving.settings import ServerSettings
from minipaged.workload import random_workload
from tests.processes import started
from tests.serving.conftest import running, wait_for
from tests.serving.toys import toy

ROOT = Path(__file__).parents[2]


def test_a_closed_loop_counts_every_request_once():
    """Catches tokens of events counted for tokens of requests, and figures that nobody measured."""
    with running(toy()) as server:
        items = random_workload(24, 12, 9, vocab_size=50, shared_prefix=8)
        found = run_load(Load(url=server.url, items=items, users=6, ttft_target=30, itl_target=30))
        assert (found["requests"], found["failed"], found["output_tokens"]) == (24, 0, 24 * 9)
        assert found["good_requests"] == 24
        for target in ("ttft_target", "itl_target"):
            missed = run_load(Load(url=server.url, items=items, **{target: 1e-9}))
            assert (missed["good_requests"], missed["goodput_per_s"]) == (0, 0)
        assert found["cached_tokens"] > 20 * 8 - 1
        assert 0 <= found["queue_s_mean"] < found["inference_s_mean"]
        assert found["ttft_ms_p50"] <= found["e2e_ms_p50"]
        assert server.llm.engine.metrics.request_success == {"length": 3 * 24}
        server.assert_released()


def test_a_request_is_good_if_it_ended_well_within_its_targets():
    """Catches a mean that counts the first token's time or one gap too many, and answers that broke off."""

    def good(**targets) -> float:
        done = Record(0.0, ttft=1.0, total=3.0, num_tokens=3)  # two gaps, of a second each on average
        broken = Record(0.0, ttft=0.1, total=0.2, num_tokens=3, error="gone")
        load = Load(url="http://a", items=[], **targets)
        figures = _summary(load, [done, broken], 0, 4.0)
        assert figures["goodput_per_s"] == figures["good_requests"] / 4
        return figures["good_requests"]

    assert [good(itl_target=seconds) for seconds in (0.99, 1.0)] == [0, 1]
    assert [good(ttft_target=seconds) for seconds in (0.99, 1.0)] == [0, 1]
    assert good(ttft_target=2, itl_target=0.5) == good(ttft_target=0.5, itl_target=2) == 0


def test_whole_answers_are_counted_and_timed_as_wholes():
    """Catches a stream where none was asked for, and times between tokens that no client can see."""
    with running(toy()) as server:
        items = random_workload(8, 12, 9, vocab_size=50, shared_prefix=8)
        found = run_load(Load(url=server.url, items=items, users=4, stream=False))
        assert (found["requests"], found["failed"], found["output_tokens"]) == (8, 0, 8 * 9)
        assert found["cached_tokens"] > 4 * 8 - 1
        assert 0 < found["inference_s_mean"] <= found["s_per_token_mean"] * 9
        assert not [name for name in found if name.startswith(("ttft", "itl"))]
        with pytest.raises(LoadError, match=r"no request was answered.*400"):
            run_load(Load(url=server.url, items=[{"prompt_token_ids": [99], "max_tokens": 1}], stream=False))
    with pytest.raises(LoadError, match=r"itl_target is 1.*; stream"):
        Load(url="http://127.0.0.1:1", items=items, stream=False, itl_target=1)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            '\n{\n "choices": [{"text": "a\u2028b"}],\n "error": null,\n "usage": {"completion_tokens": 3}}',
            None,
        ),
        ('{"choices": [{}], "usage": {"completion_tokens": "many"}}', "many"),
        ('{"choices": [{}], "usage": 3}', "TypeError|AttributeError"),
        ("[]", "TypeError|AttributeError"),
        ('{"choices": [{}]}', "without its choices or its usage"),
        ('{"choices": [], "usage": {"completion_tokens": 3}}', "without its choices or its usage"),
        ('{"choices": [{}], "usage": {"completion_tokens": Infinity}}', "OverflowError"),
        ('{"choices": [{}], "usage": {"completion_tokens": 3}, "timing": {"queue_seconds": "x"}}', "x"),
        ('{"error": "tired"}', "tired"),
    ],
)
def test_whole_answers_of_any_server(text, error):
    """Catches an answer taken for lines, and a crash for one that makes no sense."""
    with answering([text.encode()]) as url:
        load = Load(url=url, items=random_workload(2, 3, 4), stream=False)
        if error is None:
            found = run_load(load)
            assert (found["output_tokens"], found["cached_tokens"]) == (6, 0)
            assert found["queue_s_mean"] is None, "only this project's server reports it"
        else:
            with pytest.raises(LoadError, match=error):
                run_load(load)


@pytest.mark.parametrize("start", ["data: ", "data:"])  # (the space is optional; TGI sends none)
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_streams_of_any_server(start, end, size):
    """Catches an event cut at a character that ends lines elsewhere: its request counted as failed."""
    events = [
        *('{"choices": [{"text": "a\u2028b\x85c"}]}', '{"choices": [{"text": "é"}]}'),
        *('{"choices": [], "usage": {"completion_tokens": 3}}', "[DONE]"),
    ]
    sent = "".join(f"{start}{event}{end}" for event in events).encode()
    with answering([sent[at : at + size] for at in range(0, len(sent), size)]) as url:
        found = run_load(Load(url=url, items=random_workload(2, 3, 4)))
        assert (found["requests"], found["failed"], found["output_tokens"]) == (2, 0, 6)


def test_answers_of_one_event_have_no_time_between_events():
    """Catches 0 ms, the best time there can be, where none was measured."""
    events = ['{"choices": [{"text": "a b c"}]}', '{"choices": [], "usage": {"completion_tokens": 3}}']
    with answering([f"data: {event}\n\n".encode() for event in events]) as url:
        found = run_load(Load(url=url, items=random_workload(2, 3, 3)))
    assert {found[f"itl_ms_p{percent}"] for percent in (50, 95, 99)} == {None}
    assert found["ttft_ms_p50"] > 0


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_only_who_asks_for_it_sends_what_openai_does_not_have(ignore_eos):
    """Catches --until-eos refused by a server that refuses unknown fields."""
    bodies = []
    answer = b'{"choices": [{}], "usage": {"completion_tokens": 4}}'
    with answering([answer], bodies) as url:
        load = Load(url=url, items=random_workload(1, 3, 4), stream=False, ignore_eos=ignore_eos)
        run_load(load)
    fields = {"model", "prompt", "max_tokens", "temperature"}
    assert set(json.loads(bodies[-1])) == fields | ({"ignore_eos"} if ignore_eos else set())


@contextmanager
def answering(parts, bodies=None):
    """The URL of a server that answers any request with these parts; `bodies` gets what it was sent."""

    async def other(scope, receive, send):
        if bodies is not None:
            bodies.append((await receive())["body"])
        found = [b'{"data": [{"id": "other"}]}'] if scope["path"] == "/v1/models" else parts
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in found:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    front = uvicorn.Server(uvicorn.Config(other, port=0, lifespan="off", log_config=None))
    thread = threading.Thread(target=front.run)
    thread.start()
    try:
        while not front.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{front.servers[0].sockets[0].getsockname()[1]}"
    finally:
        front.should_exit = True
        thread.join(20)


def test_a_workload_may_have_texts(server, tmp_path):
    """Catches texts of one's own that only a script can send."""
    (file := tmp_path / "items.json").write_text('[{"prompt": "Once upon", "max_tokens": 2}]')
    ran = CliRunner().invoke(app, ["bench", "--url", server.url, "--workload", str(file), "--json"])
    assert json.loads(ran.stdout)["output_tokens"] == 2


def test_the_table_has_room_for_a_long_error(server, tmp_path):
    """Catches a table in which nothing but the first error can be read."""
    items = [{"prompt_token_ids": [5], "max_tokens": 2}, {"prompt_token_ids": [10**6], "max_tokens": 2}]
    (file := tmp_path / "items.json").write_text(json.dumps(items))
    ran = CliRunner().invoke(app, ["bench", "--url", server.url, "--workload", str(file)])
    assert ran.exit_code == 1  # (a script would take the figures for those of all requests)
    assert "output_tokens" in ran.output
    assert "first error: 400" in ran.output


@pytest.mark.parametrize("loop", [[], ["--rate", "200"]], ids=["closed", "open"])
def test_an_interrupted_load_reports_what_has_ended(loop, tmp_path):
    """Catches an hour of measurements that Ctrl-C throws away."""
    (file := tmp_path / "items.json").write_text('[{"prompt_token_ids": [1, 2], "max_tokens": 3}]')
    command = ["-m", "minipaged", "bench", "--workload", str(file), "--seconds", "600", "--json", *loop]
    with running(toy()) as server:
        with started(*command, "--url", server.url) as process:
            wait_for(lambda: server.llm.engine.metrics.request_success["length"] > 50)
            process.send_signal(signal.SIGINT)
            output, said = process.communicate(timeout=60)
        found = json.loads(output)
        assert found["requests"] > 20
        assert (found["failed"], found["interrupted"]) == (0, True)
        assert process.returncode == 130
        assert said == "minipaged: interrupted; these are the requests until then\n"
        server.assert_released()


@pytest.mark.parametrize("option", ["--block-size", "--threads"])
def test_what_a_server_cannot_be_told_is_named(option):
    """Catches "engine settings" as the name of whatever does not go with --url."""
    ran = CliRunner().invoke(app, ["bench", "--url", "http://localhost:1", option, "2"])
    assert isinstance(ran.exception, ValueError)
    assert f"drop {option}" in str(ran.exception)


def test_an_open_loop_turns_away_whom_the_system_has_no_place_for():
    """Catches a load generator that waits for the server before it sends the next."""
    llm = toy()
    llm.engine.executor.seconds = 0.02
    with running(llm) as server:
        items = [{"prompt_token_ids": [1, 2], "max_tokens": 20}]
        found = run_load(Load(url=server.url, items=items, users=3, rate=40, seconds=1.5))
        assert found["turned_away"] > 5
        assert found["wall_s"] >= 1.5
        server.assert_released()
        assert llm.engine.metrics.request_success["abort"] > 0, "what was open at the end was waited for"


def test_a_rate_that_the_clients_cannot_keep_up_with_shows():
    """Catches 390 arrivals a second under the name of 1,000, with latencies that do not show it."""
    answer = b'{"choices": [{}], "usage": {"completion_tokens": 4}}'
    items = random_workload(200, 3, 4)
    with answering([answer]) as url:
        found = run_load(Load(url=url, items=items, users=200, rate=1e6, stream=False))
        assert found["late_ms_p95"] > 1
        assert found["late_ms_p95"] <= 1e3 * found["wall_s"]
        assert run_load(Load(url=url, items=items[:5], rate=20, stream=False))["late_ms_p95"] >= 0
        assert "late_ms_p95" not in run_load(Load(url=url, items=items[:5], stream=False))


def test_a_load_that_cannot_work_is_reported_in_one_line():
    """Catches figures of nothing, and a traceback."""
    items = random_workload(1, 4, 4)
    for values in ({"users": 0}, {"rate": 0}, {"seconds": float("nan")}, {"url": "localhost:1"}):
        with pytest.raises(LoadError, match=r"; give"):
            Load(**{"url": "http://127.0.0.1:1", "items": items, **values})
    with pytest.raises(LoadError, match="start the server"):
        run_load(Load(url="http://127.0.0.1:1", items=items))
    with running(toy()) as server, pytest.raises(LoadError, match=r"no request was answered.*99"):
        run_load(Load(url=server.url, items=[{"prompt_token_ids": [99], "max_tokens": 1}]))


def test_the_command_prints_the_figures(server):
    """Catches an option that does not reach the load."""
    url = f"{server.url}/v1"  # as clients give it
    command = ["bench", "--url", url, "--requests", "6", "--users", "3", "--output-tokens", "5"]
    ran = CliRunner().invoke(app, [*command, "--prompt-tokens", "20", "--shared-prefix", "16", "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert (found["requests"], found["output_tokens"]) == (6, 30)
    assert "ttft_ms_p50" in found
    ran = CliRunner().invoke(app, [*command, "--prompt-tokens", "20", "--no-stream", "--json"])
    assert "ttft_ms_p50" not in json.loads(ran.stdout)


def test_every_run_sends_prompts_that_the_server_has_not_seen(server):
    """Catches a second run that measures the prefix cache, and requests repeated until the time is over."""

    def cached(*options: str) -> tuple[int, int]:
        command = ["bench", "--url", server.url, "--prompt-tokens", "40", "--output-tokens", "2"]
        found = json.loads(CliRunner().invoke(app, [*command, *options, "--json"]).stdout)
        return found["cached_tokens"], found["seed"]

    (_, seed), (count, other) = cached("--requests", "4"), cached("--requests", "4")
    assert count == 0
    assert seed != other
    assert cached("--requests", "4", "--seed", str(other)) == (4 * 32, other)
    table = CliRunner().invoke(app, ["bench", "--url", server.url, "--requests", "1", "--seed", "1234567"])
    assert "1234567" in table.stdout  # (and not 1,234,567, which the option would refuse)
    assert cached("--users", "1", "--seconds", "0.5")[0] == 0
    assert (
        cached("--users", "1", "--seconds", "1", "--requests", "1")[0] > 0
    )  # (the same one, again and again)


def test_answers_with_fewer_tokens_than_asked_for_are_counted(server):
    """Catches 48 tokens under the name of 100, where the context ends."""
    long = {"prompt_token_ids": [5] * 2000, "max_tokens": 100}
    items = [long, {"prompt_token_ids": [5], "max_tokens": 3}]
    found = run_load(Load(url=server.url, items=items))
    assert (found["requests"], found["cut_short"]) == (2, 1)
    assert "cut_short" not in run_load(Load(url=server.url, items=items, ignore_eos=False))


def test_the_time_before_the_first_arrival_is_not_measured():
    """Catches throughput that is divided by a wait: at 1 request in 100 s, the first came after 186 s."""
    with running(toy()) as server:
        found = run_load(Load(url=server.url, items=random_workload(1, 4, 4, vocab_size=50), rate=0.01))
    assert found["wall_s"] < 20


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_lines_of_the_guide_work(server):
    """Catches a line that readers copy and that fails."""
    text = (ROOT / "docs/guides/serving.md").read_text()
    block = re.search(r"<!-- curl -->\n```bash\n(.*?)```", text, re.DOTALL)[1]
    lines = block.strip().splitlines()
    assert len(lines) > 8
    for line in lines:
        command = shlex.split(line.replace("http://127.0.0.1:8000", server.url))
        ran = subprocess.run([*command, "-w", "\n%{http_code}"], capture_output=True, text=True, timeout=60)
        assert ran.stdout.endswith("\n200"), f"{line}\n{ran.stdout}{ran.stderr}"


def test_the_guide_lists_every_endpoint():
    """Catches a path that only the code knows."""
    text = (ROOT / "docs/guides/serving.md").read_text()
    with running(toy()) as server:
        paths = set(server.server.config.app.openapi()["paths"])
    assert {path for path in paths if f"`{path.split('/{')[0]}`" not in text} == set()


def test_the_garbage_collector_leaves_alone_what_was_there_before_the_first_request(monkeypatch):
    """Catches everybody waiting 0.24 s while it looks at the 400,000 objects of libraries again."""
    looked_at = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda *given: looked_at.append(len(gc.get_objects())))
    try:
        with toy() as llm:
            make_server(llm, "toy", ServerSettings()).run()
    finally:
        gc.unfreeze()
    assert looked_at[0] < 1000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_clients_of_whom_a_third_leave(offline):
    """Catches an answer lost, cut or mixed up, blocks, tasks, threads or memory that are left.

    60 s, or the seconds in MINIPAGED_SOAK_SECONDS.
    """
    seconds = float(os.environ.get("MINIPAGED_SOAK_SECONDS", "60"))
    starts = ["Once upon a time", "The little robot", "One day Tom", "The fox", "Mia saw a bird"]
    bodies = [
        {"prompt": f"{starts[i % 5]} {i}", "temperature": 0, "max_tokens": 8 + i % 40, "stream": i % 2 == 0}
        for i in range(40)
    ]
    # oneDNN compiles products for each new length of a step, and keeps them: that comes before.
    for number in range(9, 300):
        offline.generate([{"prompt_token_ids": [number] * number}], SamplingParams(max_tokens=1))
    params = [SamplingParams(temperature=0, max_tokens=body["max_tokens"]) for body in bodies]
    rights = [o.outputs[0].text for o in offline.generate([body["prompt"] for body in bodies], params)]
    llm = AsyncLLM(num_blocks=40, max_waiting=400, disable_log_stats=True)
    sizes = []
    with running(llm, max_waiting=400) as server, ProcessPoolExecutor(1, get_context("spawn")) as apart:
        num_threads = threading.active_count()
        work = apart.submit(send_for, seconds, server.url, bodies, rights)
        while not work.done():
            time.sleep(seconds / 20)
            gc.collect()
            sizes.append(resident_bytes())
        counts = work.result()
        server.assert_released(60)
        llm.between_steps(llm.engine.check_invariants)
        assert llm.engine.metrics.num_preemptions > 20
        assert llm.is_running
        assert threading.active_count() <= num_threads + 12  # (of the pool for long texts and templates)
    print(counts, "preemptions", llm.engine.metrics.num_preemptions, "MiB", [size >> 20 for size in sizes])
    assert min(counts.values()) > 20, counts
    assert sizes[-1] < 1.05 * sizes[len(sizes) // 3], [size >> 20 for size in sizes]


def send_for(seconds: float, url: str, bodies: list[dict], rights: list[str]) -> dict[str, int]:
    """200 clients, in a process of their own, so that their memory is not the server's. Returns what came of
    their requests."""
    bad = [{"prompt": ""}, {"prompt": "a", "temperature": -1}, {"prompt": "a", "max_tokens": 0}, {}]
    counts = {"whole": 0, "left": 0, "refused": 0}

    async def client(number: int, http: httpx.AsyncClient, end: float) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            if draw.random() < 0.1:
                answer = await http.post("/v1/completions", json=draw.choice(bad))
                assert answer.status_code == 400
                assert answer.json()["error"]["message"]
                counts["refused"] += 1
                continue
            i = draw.randrange(len(bodies))
            work = asyncio.ensure_future(ask(http, bodies[i]))
            if number % 3 == 0:
                done, _ = await asyncio.wait((work,), timeout=draw.random() * 2)
                if not done:
                    work.cancel()
                    counts["left"] += 1
                    continue
            assert await work == rights[i], bodies[i]
            counts["whole"] += 1

    async def main() -> None:
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
            await asyncio.gather(*(client(i, http, end) for i in range(200)))

    asyncio.run(main())
    return counts


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def ask(http: httpx.AsyncClient, body: dict) -> str:
    """The text of an answer, which is complete."""
    if not body["stream"]:
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]
    text, reason, is_done = "", None, False
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.rstrip() == "data: [DONE]":  # (httpx 0.23 keeps the ends of lines)
                is_done = True
            elif line.startswith("data: "):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["text"]
                reason = choice["finish_reason"] or reason
    assert is_done
    assert reason in ("stop", "length")
    return text
