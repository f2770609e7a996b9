"""What can be seen of a server: metrics, the live trace, the page."""

from __future__ import annotations

import asyncio
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minipaged import AsyncLLM, EngineConfig, SamplingParams
from minipaged.components import Components
from minipaged.engine import Engine
from minipaged.serving import live
from minipaged.serving.prometheus import HISTOGRAMS, PrometheusMetrics
from minipaged.viewer.replay import Trace
from minipaged.viewer.snapshot import look
from tests.engine.drafters import Foresight
from tests.engine.toy_model import ToyModel
from tests.serving.conftest import C, running, wait_for
from tests.serving.toys import IDS, toy

ROOT = Path(__file__).parents[2]


def samples(server) -> dict[str, float]:
    """Name and labels -> value."""
    return samples_of(server.http.get("/metrics").text)


def samples_of(text: str) -> dict[str, float]:
    """The same of a page of metrics."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            found[sample.name + (str(labels) if labels else "")] = sample.value
    return found


def test_metrics_count_what_happened_under_vllms_names():
    """Catches a counter that does not move, or that is missing before (`rate` would not see its first step),
    a bucket that no dashboard knows, requests counted twice."""
    llm = AsyncLLM(num_blocks=12, max_num_seqs=8, preemption_mode="swap", disable_log_stats=True)
    with running(llm) as server, ThreadPoolExecutor(6) as pool:
        before = samples(server)
        assert before["minipaged:num_preemptions_total"] == 0
        for reason in ("stop", "length", "abort", "error"):
            assert before[f"minipaged:request_success_total{{'finished_reason': '{reason}'}}"] == 0
        body = {"prompt": "The little robot", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
        answers = list(pool.map(lambda _: server.http.post(C, json=body).json(), range(6)))
        server.assert_released()
        found = samples(server)
        tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
        assert tokens == 360
        assert found["minipaged:generation_tokens_total"] == tokens
        assert found["minipaged:prompt_tokens_total"] == sum(a["usage"]["prompt_tokens"] for a in answers)
        assert found["minipaged:request_success_total{'finished_reason': 'length'}"] == 6
        preempted = found["minipaged:num_preemptions_total"]
        assert preempted > 0
        modes = [
            found[f"minipaged:preemptions_by_mode_total{{'mode': '{m}'}}"] for m in ("swap", "recompute")
        ]
        assert sum(modes) == preempted
        moved = [found[f"minipaged:swapped_blocks_total{{'direction': '{to}'}}"] for to in ("out", "in")]
        assert moved[0] >= moved[1] > 0
        assert found["minipaged:num_requests_running"] == found["minipaged:kv_cache_usage_perc"] == 0
        assert found["minipaged:time_to_first_token_seconds_count"] == 6
        assert found["minipaged:inter_token_latency_seconds_count"] == tokens - 6
        for name in (
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_generation_tokens",
        ):
            assert found[f"minipaged:{name}_count"] == 6
        assert found["minipaged:request_generation_tokens_sum"] == tokens
        text = server.http.get("/metrics").text
        assert 'minipaged:time_to_first_token_seconds_bucket{le="0.001",model_name="pocket"}' in text


def test_answers_are_counted_by_path_and_status():
    """Catches refusals that no metric shows, a label for each path that somebody tries, polls that count."""

    def counted(path: str, status: int) -> float:
        return samples(server)[f"http_requests_total{{'handler': '{path}', 'status': '{status}'}}"]

    with running(toy(), api_keys=("sesame",)) as server:
        server.http.headers["authorization"] = "Bearer sesame"
        assert counted(C, 429) == 0  # (`rate` would not see the step from nothing to 1)
        body = {"prompt": [1, 2], "max_tokens": 2}
        for extra in ({}, {"stream": True}, {"n": -1}):
            server.http.post(C, json={**body, **extra})
        server.http.post(C, json=body, headers={"authorization": "Bearer other"})
        server.http.get(C)
        for path in ("/a", "/b", "/health", "/version", "/"):
            server.http.get(path)
        assert [counted(C, status) for status in (200, 400, 401, 405)] == [2, 1, 1, 1]
        assert counted("other", 404) == 2
        assert sum(value for name, value in samples(server).items() if "http_requests" in name) == 7


def test_gauges_and_times_have_exact_values_on_a_clock_that_the_test_holds(monkeypatch):
    """Catches a wait reported as computing, a time that begins with another event, an invalid share."""
    now = [0.0]
    config = EngineConfig(max_num_seqs=1, block_size=4, disable_log_stats=True)
    engine = Engine(ToyModel(num_blocks=8), config, clock=lambda: now[0])
    metrics = PrometheusMetrics(engine, "toy")

    def metrics_of(*names: str) -> list[float]:
        found = samples_of(metrics.text().decode())
        return [found[f"minipaged:{name}"] for name in names]

    for name, prompt in (("first", [1, 2, 3, 4, 5]), ("second", [6, 7, 8])):
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=3))
    for _ in range(6):  # both arrive at 0; a step takes a second, and the second waits for three
        now[0] += 1.0
        engine.step()
        if engine.metrics.steps == 1:
            assert metrics_of("num_requests_running", "num_requests_waiting") == [1, 1]
            assert metrics_of("kv_cache_usage_perc", "kv_cache_waste_perc") == [2 / 8, 3 / 8]
            assert metrics_of("num_requests_swapped") == [0]
            with monkeypatch.context() as patch:
                patch.setattr(engine.scheduler, "swapped", [None] * 3)
                assert metrics_of("num_requests_swapped") == [3]
    sums = [f"request_{part}_time_seconds_sum" for part in ("queue", "prefill", "decode", "inference")]
    assert metrics_of(*sums) == [0 + 3, 1 + 1, 2 + 2, 3 + 3]
    assert metrics_of("time_to_first_token_seconds_sum", "inter_token_latency_seconds_sum") == [1 + 4, 4]
    assert metrics_of("e2e_request_latency_seconds_sum") == [3 + 6]
    assert metrics_of("request_prompt_tokens_sum", "request_generation_tokens_sum") == [8, 6]
    assert metrics_of("iteration_tokens_total_sum", "iteration_tokens_total_count") == [5 + 2 + 3 + 2, 6]


def test_the_tokens_of_all_samples_of_a_request_are_counted():
    """Catches the first sample's tokens taken for all of them."""
    with running(toy()) as server:
        server.http.post(C, json={**IDS, "max_tokens": 4, "n": 3, "temperature": 1, "ignore_eos": True})
        found = samples(server)
    for name in ("request_generation_tokens_sum", "generation_tokens_total"):
        assert found[f"minipaged:{name}"] == 12


def test_a_request_that_fails_at_once_has_no_time_to_a_first_token():
    """Catches a latency of a token that never came."""
    with running(AsyncLLM(num_blocks=12, disable_log_stats=True)) as server:
        body = {"prompt": [5], "allowed_token_ids": [5], "no_repeat_ngram_size": 1}
        assert "forbid every token" in server.http.post(C, json=body).text
        found = samples(server)
        assert found["minipaged:request_success_total{'finished_reason': 'error'}"] == 1
        assert found["minipaged:time_to_first_token_seconds_count"] == 0


def test_the_dashboard_asks_for_metrics_that_exist():
    """Catches a panel that stays empty: a metric renamed, a histogram asked without its suffix."""
    dashboard = json.loads((ROOT / "docs/assets/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 12
    with running(toy()) as server:
        known = {re.split(r"[{ ]", line)[0] for line in server.http.get("/metrics").text.splitlines()}
    asked = {name for query in queries for name in re.findall(r"minipaged:\w+|http_\w+", query)}
    assert asked <= known, asked - known
    for name in HISTOGRAMS:
        assert name.endswith(("_seconds", "_tokens", "_total"))
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def lines_of(response) -> list[dict]:
    """Lines of a live trace as they come."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def test_a_late_joiner_rebuilds_the_memory(tmp_path):
    """Catches a snapshot that lacks a table, a text or a block, and a line against another memory."""
    llm = AsyncLLM(num_blocks=64, disable_log_stats=True)
    with running(llm) as server, ThreadPoolExecutor(2) as pool:
        body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 300, "ignore_eos": True}
        compute = llm.engine.executor.execute
        llm.engine.executor.execute = lambda plan: (time.sleep(0.004), compute(plan))[1]
        pool.submit(server.http.post, C, json=body)
        while llm.engine.metrics.steps < 20:
            time.sleep(0.005)
        seen, ended = [], []
        with server.http.stream("GET", "/trace/live") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in lines_of(response):
                if not seen:
                    pool.submit(server.http.post, C, json={**body, "max_tokens": 40})
                seen.append(line)
                ended += line.get("finished", [])
                if len(ended) == 2:
                    break
        assert seen[0]["format"] == "minipaged-trace"
        assert seen[1]["events"] == [{"kind": "snapshot"}]
        assert seen[1]["committed"]["tables"], "the running request is not in the snapshot"
        path = tmp_path / "live.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in seen))
        trace = Trace(path)
        records = list(trace)
        final = look(llm.engine.scheduler)
        assert records[-1].committed == final
        known = set(trace.texts)
        assert {t for r in records for table in r.committed.tables.values() for t in table.token_ids} <= known
        wait_until_unwatched(llm)


def wait_until_unwatched(llm) -> None:
    """After the last listener nothing more is recorded."""
    wait_for(lambda: not any("TraceLines" in repr(hook) for hook in llm.engine.on_committed))


def test_a_slow_listener_begins_anew_and_holds_nobody_up(monkeypatch):
    """Catches lines that pile up without end, and a stream with a gap in it."""
    monkeypatch.setattr(live, "MOST_LINES", 5)
    monkeypatch.setattr(live, "QUIET", 3600.0)
    llm = toy(num_blocks=64)
    with running(llm) as server:
        with server.http.stream("GET", "/trace/live") as response:
            incoming = lines_of(response)
            assert next(incoming)["format"]
            stuck = server.service.live._listeners[0]
            assert next(incoming)["events"] == [{"kind": "snapshot"}]
            stuck.news.set = lambda: None  # it is notified of nothing
            for _ in range(4):
                assert server.http.post(C, json={**IDS, "max_tokens": 30}).status_code == 200
            assert len(stuck.lines) <= 5
            del stuck.news.set
            stuck._loop.call_soon_threadsafe(stuck.news.set)
            seen = []
            for line in incoming:
                seen.append(line)
                if "format" in line:
                    break
            assert len(seen) <= 7
            assert next(incoming)["events"] == [{"kind": "snapshot"}]
            server.http.post(C, json={**IDS, "max_tokens": 1})
            assert next(incoming)["scheduled"], "a step that is sent once nothing more happens"
        wait_until_unwatched(llm)


def test_a_listener_that_leaves_with_its_lines_unread_stays_away(monkeypatch):
    """Catches one that starts over after it left: the engine would record for nobody, forever."""
    monkeypatch.setattr(live, "MOST_LINES", 2)
    llm = toy()
    trace = live.LiveTrace(llm, with_tokens=True)

    async def leave() -> None:
        events = trace.listen()
        await anext(events)
        [listener] = trace._listeners
        await events.aclose()
        listener.put("a line of the last step")
        listener.put("another")
        await llm.reset_prefix_cache()  # (after all that the engine's thread was asked for before)

    asyncio.run(leave())
    assert not trace._listeners
    wait_until_unwatched(llm)
    llm.shutdown()


def test_a_request_that_was_aborted_vanishes_without_a_step():
    """Catches blocks that a picture shows as held forever, since no step follows."""
    llm = toy()
    llm.engine.executor.seconds = 0.01
    with running(llm) as server, server.http.stream("GET", "/trace/live") as response:
        incoming = lines_of(response)
        next(incoming)
        with server.http.stream("POST", C, json={**IDS, "max_tokens": 150, "stream": True}) as answer:
            next(answer.iter_bytes())
        idle = next(line for line in incoming if "idle" in [each["kind"] for each in line.get("events", [])])
        assert None in idle["committed"]["tables"].values()


def test_a_prefix_cache_that_is_cleared_is_reported_without_a_step():
    """Catches cached blocks that go free while nothing runs, and nobody is told why."""
    with running(toy()) as server, server.http.stream("GET", "/trace/live") as response:
        incoming = lines_of(response)
        next(incoming)
        server.http.post(C, json={**IDS, "max_tokens": 9})
        cached = next(line for line in incoming if line.get("finished"))["committed"]["evictable"]
        server.http.post("/reset_prefix_cache")
        idle = next(line for line in incoming if line.get("events"))
        assert [event["kind"] for event in idle["events"]] == ["idle", "cleared"]
        assert idle["committed"] == {"not_evictable": cached}


def test_with_several_keys_the_trace_reveals_no_tokens():
    """Catches a tenant who reads another's prompt as it is computed."""
    headers = {"Authorization": "Bearer a"}
    components = Components(drafter=Foresight)
    with running(toy(num_speculative_tokens=3, components=components), api_keys=("a", "b")) as server:
        with server.http.stream("GET", "/trace/live", headers=headers) as response:
            incoming = lines_of(response)
            next(incoming)
            body = {**IDS, "prompt": [41, 42, 43, 44, 45], "max_tokens": 9}
            server.http.post(C, json=body, headers={"Authorization": "Bearer b"})
            seen = []
            for line in incoming:
                seen.append(line)
                if line.get("finished"):
                    break
        text = json.dumps(seen)
        assert '"blocks"' in text
        assert "41, 42" not in text
        assert "token_ids" not in text
        assert '"drafted"' in text
        assert not {"draft", "output"} & {key for line in seen for e in line.get("events", ()) for key in e}


def test_the_trace_of_an_engine_that_has_ended_ends():
    """Catches a page that goes on looking as if nothing happened in the memory."""
    with running(toy()) as server, server.http.stream("GET", "/trace/live") as response:
        incoming = lines_of(response)
        assert next(incoming)["format"]
        assert next(incoming)["events"] == [{"kind": "snapshot"}]
        server.llm.shutdown()
        assert list(incoming) == []


def test_listeners_are_counted(monkeypatch):
    """Catches watchers without end, and one that is counted after leaving."""
    monkeypatch.setattr(live, "MOST_LISTENERS", 1)
    with running(toy()) as server:
        for _ in range(3):
            with server.http.stream("GET", "/trace/live") as response:
                incoming = lines_of(response)  # (kept: when it goes, so does the connection)
                next(incoming)
                assert server.http.get("/trace/live").status_code == 429
            wait_for(lambda: not server.service.live._num_listeners)


def test_the_page_needs_nothing_from_elsewhere():
    """Catches a script or a style that a machine without network does not get, and text put in as markup."""
    with running(toy()) as server:
        answer = server.http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "innerHTML" not in answer.text
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?https?:", answer.text)


@pytest.fixture(autouse=True)
def quiet_httpx(caplog):
    caplog.set_level("WARNING", logger="httpx")
