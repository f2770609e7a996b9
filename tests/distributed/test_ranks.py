"""Two ranks as users start them: the tokens are those of one, and nothing is left behind."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from minipaged import LLM, AsyncLLM, SamplingParams, child_process, pocket_model
from minipaged.config import ConfigError, EngineConfig
from minipaged.execution import loading
from minipaged.execution.attention import UnsupportedModelError
from minipaged.execution.distributed import RankError, start
from minipaged.execution.distributed.group import (
    Group,
    check_free,
    give_up,
    interface_of,
    interface_to,
    one_machine,
)
from minipaged.execution.distributed.launch import Workers
from minipaged.execution.distributed.place import Place
from minipaged.execution.distributed.runner import RankRunner, Report, check_reports
from minipaged.execution.distributed.sharding import check_plan
from minipaged.execution.distributed.threads import SharedThreads
from tests.distributed.models import SIZES
from tests.models.survey import build_small
from tests.models.zoo import VOCAB_SIZE, build
from tests.processes import children, is_alive, needs_proc, wait_until

WORKER = "distributed.worker"
PROMPTS = ["The little robot", "Once upon a time"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}
SMALL = {"num_blocks": 64, "attention_backend": "torch", "disable_log_stats": True}


@pytest.fixture
def eight_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@needs_proc
def test_two_ranks_give_the_tokens_of_one_and_survive_ctrl_c_but_not_a_killed_worker(
    eight_threads, monkeypatch
):
    """Catches a wrong split, sum or message; ranks out of step after Ctrl-C, or ended by a signal to all of
    them or by an error of the sampler; a run that hangs when a worker dies, leaves one alive, or stands in
    the way of the next. (One test, for it takes seconds to start a rank.)"""
    alone = LLM(**SMALL)
    expected = tokens(alone.generate(PROMPTS, GREEDY))
    llm = LLM(**SMALL, tensor_parallel_size=2)
    try:
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
        assert llm.engine.executor.block_bytes * 2 == alone.engine.executor.block_bytes
        with pytest.raises(ConfigError, match="runs on one rank"):
            llm.engine.executor.use_attention(None)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.executor, "sample", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                llm.generate(PROMPTS, GREEDY)
        for delay in (0.01, 0.05, 0.1):
            threading.Timer(delay, signal.raise_signal, [signal.SIGINT]).start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS * 8, SamplingParams(max_tokens=500, ignore_eos=True))
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
        (worker,) = children(WORKER)
        for number in (signal.SIGINT, signal.SIGTERM):  # as a terminal and systemd do: to the whole group
            os.kill(worker, number)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == expected
        os.kill(worker, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            llm.generate(PROMPTS, GREEDY)
        assert time.monotonic() - began < 20  # and not minutes, when the collective gives up
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL"):
            llm.generate(PROMPTS, GREEDY)
        assert not children(WORKER)
        anew = LLM(**SMALL, tensor_parallel_size=2)  # (while the lost one is still there)
        assert torch.get_num_threads() == 4
        assert tokens(anew.generate(PROMPTS, GREEDY)) == expected
        assert tokens(anew.generate(PROMPTS, GREEDY)) == expected
        anew.shutdown()
        assert not torch.distributed.is_initialized()
        llm.shutdown()
        assert torch.get_num_threads() == 8
        assert not children(WORKER)
        with pytest.raises(RankError, match="is shut down; build a new one"):
            anew.generate(PROMPTS, GREEDY)
    finally:
        llm.shutdown()


@needs_proc
@pytest.mark.slow
def test_a_start_that_fails_gives_threads_and_connections_back(monkeypatch, eight_threads):
    """Catches a refusal of everything that comes after a failed start, or with ever fewer threads, and
    workers that wait for their group as long as the traceback lives."""

    def differ(*reports):
        raise RankError("rank 1 differs from rank 0 in its weather")

    monkeypatch.setattr("minipaged.execution.distributed.runner.check_reports", differ)
    kept = []
    for _ in range(2):
        with pytest.raises(RankError, match="weather") as error:
            LLM(**SMALL, tensor_parallel_size=2)
        kept.append(error)  # with its traceback, which holds the group
        assert not torch.distributed.is_initialized()
        assert torch.get_num_threads() == 8
        assert not children(WORKER)


@needs_proc
@pytest.mark.slow
def test_an_llm_that_fails_after_its_ranks_have_started_ends_them(eight_threads):
    """Catches ranks that live as long as an interactive session keeps the error: the next LLM was refused."""
    with pytest.raises(ConfigError, match="runs on one rank") as kept:
        LLM(**SMALL, tensor_parallel_size=2, use={"paged_attention": lambda *given, **more: None})
    check_free()
    assert torch.get_num_threads() == 8
    assert not children(WORKER)
    del kept


@pytest.mark.parametrize("variables", [{}, TORCHRUN], ids=["alone", "torchrun"])
def test_a_second_llm_with_ranks_is_refused_before_anything_is_started(variables, monkeypatch):
    """Catches a refusal, or PyTorch's own error, that comes when the weights are loaded, and ranks started
    only to be ended."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "Workers", None)
    monkeypatch.setattr(start, "RankRunner", None)
    with pytest.raises(ConfigError, match=r"another LLM .* exists .*; shut it down first"):
        LLM(**SMALL, tensor_parallel_size=2)


def test_heads_that_do_not_divide_are_refused_with_the_numbers():
    """Catches a model that fails in the middle of its first step, or far from the cause."""
    model = build("llama", **SIZES)
    heads = "is 3, which does not divide the 8 query and 4 K/V heads of LlamaForCausalLM; give 1 or 2 or 4"
    with pytest.raises(ConfigError, match=f"{heads}, or use pipeline_parallel_size$"):
        check_plan(model, 3)
    model.config.num_kv_shared_layers = 2  # which stages do not follow
    with pytest.raises(ConfigError, match=f"{heads}$"):
        check_plan(model, 3)


def test_heads_are_counted_in_every_layer():
    """Catches transformers' own error, or half a head: Gemma 4 has fewer K/V heads in its global layers."""
    layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 0}
    of_two_kinds = {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "global_head_dim": 16}
    own = {"vocab_size_per_layer_input": 2049, "hidden_size_per_layer_input": 0}
    config = CONFIG_MAPPING["gemma4_text"](**SIZES, **layers, **of_two_kinds, **own)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"divide the 8 query and 2 K/V heads of .*; give 1 or 2"):
        check_plan(model, 4)
    check_plan(model, 2)


def test_an_llm_that_nothing_refers_to_stands_in_nobodys_way(monkeypatch):
    """Catches `llm = LLM(...)` run twice in a notebook: the first refers to itself until it is collected."""

    class Dropped:
        pass

    gc.disable()
    try:
        dropped = Dropped()
        dropped.itself = dropped
        alive = ref(dropped)
        del dropped
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: alive() is not None)
        check_free()
    finally:
        gc.enable()


def test_ranks_wait_for_a_plan_as_long_as_it_takes_but_for_each_other_only_minutes():
    """Catches a server that has lost its ranks after an idle night, and one that hangs with a rank."""
    with one_machine():
        group = Group(Place(0, 1, 1), torch.distributed.HashStore(), torch.device("cpu"))
    try:
        groups = group._control, torch.distributed.group.WORLD
        timeouts = [each._get_backend(torch.device("cpu")).options._timeout for each in groups]
        assert timeouts == [timedelta(days=3650), timedelta(minutes=10)]
    finally:
        group.close()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("before", [None, "eth7"])
def test_ranks_on_one_machine_connect_over_loopback_unless_the_user_names_an_interface(before, monkeypatch):
    """Catches an interface that is overruled, and one that stays for what the process connects later."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if before:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", before)
    with one_machine():
        assert os.environ["GLOO_SOCKET_IFNAME"] == (before or "lo")
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3, which does not divide"),
        ({"pipeline_parallel_size": 5000}, "pipeline_parallel_size is 5000, but .* has only"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_before_anything_is_started(sizes, message, monkeypatch):
    """Catches thousands of processes that are started only to be ended."""
    monkeypatch.setattr(start, "Workers", None)
    with pytest.raises(ConfigError, match=message):
        LLM(**SMALL, **sizes)


@pytest.mark.parametrize("name", ["opt", "gpt2", "phi3", "llama4"])
def test_a_model_without_a_plan_for_its_heads_is_refused(name):
    """Catches weights that stay whole, or are cut in a way that this code does not follow."""
    with pytest.raises(UnsupportedModelError, match="tensor_parallel_size is 2, but"):
        check_plan(build(name), 2)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("falcon", "give 1"), ("opt", "give 1"), ("phi3", "use pipeline"), ("longcat", ".*use pipeline")],
)
def test_another_split_is_recommended_only_where_there_is_one(name, advice):
    """Catches two messages that each recommend the other."""
    with pytest.raises(UnsupportedModelError, match=f"of .*; {advice}"):
        check_plan(build_small("longcat_flash") if name == "longcat" else build(name), 2)


def test_a_model_with_recurrent_layers_is_refused(monkeypatch):
    """Catches ranks whose sequences are others in every step: no state would be found again."""
    monkeypatch.setattr(loading, "load_model", lambda *_: build_small("lfm2"))
    config = EngineConfig(pipeline_parallel_size=2)
    with pytest.raises(UnsupportedModelError, match="one rank only; set tensor_parallel_size and pipeline"):
        RankRunner("lfm2", config, Place.of(0, config), torch.device("cpu"))


def test_a_first_stage_may_have_wider_rows_than_there_are_tokens(monkeypatch):
    """Catches a probe with the token after the last: this stage has no head that shows how many there are."""
    monkeypatch.setattr(loading, "load_model", lambda *_: build("llama", hidden_size=128))
    config = EngineConfig(pipeline_parallel_size=2, num_blocks=8)
    assert RankRunner("llama", config, Place.of(0, config), torch.device("cpu")).vocab_size == VOCAB_SIZE


def test_all_ranks_have_the_pools_of_the_one_that_can_hold_the_least(monkeypatch):
    """Catches block ids that another rank does not have: GPUs differ in what is free."""
    monkeypatch.setattr(loading, "load_model", lambda *_: build("llama", **SIZES))
    config = EngineConfig(tensor_parallel_size=2, num_blocks=8)
    runner = RankRunner("llama", config, Place.of(0, config), torch.device("cpu"))

    def gather(report):
        assert {"torch", "transformers", "block_size", "weights", "attention backend"} < set(report.same)
        return [report, report._replace(num_blocks=5, num_host_blocks=9)]

    runner.connect(SimpleNamespace(gather=gather, add_up=None))
    assert (runner.num_blocks, runner.num_host_blocks) == (5, 8)
    assert {len(keys) for _, keys, _ in runner.cache.pools.values()} == {5}


def test_a_plan_that_forgets_a_weight_of_every_head_is_refused():
    """Catches the error of a tensor operation, far from the cause: Cohere has such norms."""
    with pytest.raises(UnsupportedModelError, match=r"q_norm\.weight whole"):
        check_plan(build("cohere"), 2)
    check_plan(build("cohere", use_qk_norm=False), 2)


def report(layers=("FusedLayer",), **changes):
    return Report({"torch": "2.13", "block_size": 16, **changes}, list(layers), 8, 8)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (report(torch="2.12"), "rank 1 differs from rank 0 in torch: 2.12 instead of 2.13"),
        (report(block_size=8), "rank 1 differs from rank 0 in block_size: 8 instead of 16; make all ranks"),
        (report(layers=["LlamaDecoderLayer"]), "rank 1 computes with different layers from rank 0"),
    ],
)
def test_ranks_that_would_not_compute_the_same_are_refused(other, message):
    """Catches sums over ranks of which one runs another version, or with other settings."""
    with pytest.raises(RankError, match=message):
        check_reports([report(), other], tensor_size=2)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)])
def test_ranks_that_split_the_model_differently_are_refused_before_they_wait_in_groups(sizes, monkeypatch):
    """Catches --tensor-parallel-size 2 on one machine and --pipeline-parallel-size 2 on the other, which
    waited ten minutes for each other's groups."""
    monkeypatch.setattr(Group, "gather", lambda group, place: [place, Place(1, *sizes)])
    with one_machine(), pytest.raises(RankError, match=r"in (tensor|pipeline)_parallel_size: 2 instead of 1"):
        Group(Place(0, 1, 1), torch.distributed.HashStore(), torch.device("cpu"))
    give_up()


def test_stages_may_have_other_layers():
    """Catches a refusal of pipelines, whose stages have layers of their own."""
    check_reports([report(), report(layers=["StandIn"])], tensor_size=1)


@pytest.mark.parametrize(("size", "started"), [(2, 4), (4, 2)])
def test_other_ranks_than_torchrun_started_are_refused(size, started, monkeypatch):
    """Catches ranks that wait for others that nobody starts."""
    monkeypatch.setenv("WORLD_SIZE", str(started))
    with pytest.raises(ConfigError, match=f"is {size} ranks, but torchrun started {started}"):
        start.load("nowhere", EngineConfig(tensor_parallel_size=size))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is no number; .* or unset WORLD_SIZE"),
        ({"RANK": None}, "RANK is not set; start all ranks with torchrun, or unset WORLD_SIZE"),
        ({"RANK": "2"}, "RANK is 2; number the 2 ranks from 0 to 1"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set; start all ranks with torchrun"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR is not set; start all ranks with torchrun"),
    ],
)
def test_an_environment_that_torchrun_would_not_set_is_refused(variables, message, monkeypatch):
    """Catches a KeyError, and a rank that waits minutes for a place that nobody gives."""
    for name, value in (TORCHRUN | variables).items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "RankRunner", None)
    with pytest.raises(ConfigError, match=message):
        start.load("nowhere", EngineConfig(tensor_parallel_size=2))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_meet_the_others_says_where_it_was(rank, monkeypatch):
    """Catches a traceback of torch where a port is in use, or a rank is missing."""
    monkeypatch.setattr("minipaged.execution.distributed.group.STEP_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(start, "RankRunner", lambda *_: None)
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        for name, value in (TORCHRUN | {"RANK": str(rank), "MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        if rank == 0:
            taken.listen()
        where = rf"rank {rank} cannot meet the others at 127\.0\.0\.1, port {port} \(Dist.*free MASTER_PORT"
        with pytest.raises(RankError, match=where):
            start.load("nowhere", EngineConfig(tensor_parallel_size=2))
    assert not torch.distributed.is_initialized()


def test_ranks_on_several_machines_connect_over_the_interface_that_leads_to_rank_0(monkeypatch):
    """Catches ranks that give each other 127.0.1.1, which is what many machines call themselves."""
    seen = []

    def connect(place, store, device):
        seen.append(os.environ.get("GLOO_SOCKET_IFNAME"))
        raise KeyboardInterrupt

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(start, "RankRunner", lambda *_: None)
    monkeypatch.setattr(start, "interface_to", {"127.0.0.1": "eth7"}.get)
    monkeypatch.setattr(start, "Group", connect)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KeyboardInterrupt):
        start.load("nowhere", EngineConfig(tensor_parallel_size=2))
    assert seen == ["eth7"]
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_a_master_address_that_does_not_resolve_is_named(monkeypatch, caplog):
    """Catches a rank that waits ten minutes for a host that is misspelt, without a word."""
    monkeypatch.setattr(start, "RankRunner", lambda *_: None)
    monkeypatch.setattr(start, "Group", lambda *_: 1 / 0)
    for name, value in (TORCHRUN | {"MASTER_ADDR": "no.such.host.invalid"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ZeroDivisionError):
        start.load("nowhere", EngineConfig(tensor_parallel_size=2))
    assert "MASTER_ADDR no.such.host.invalid has no address yet" in caplog.text


def test_a_rank_of_torchrun_leaves_ctrl_c_and_sigterm_to_rank_0(monkeypatch):
    """Catches requests that torchrun's Ctrl-C fails, though rank 0 would let them finish."""
    seen = []
    runner = SimpleNamespace(
        connect=lambda *_, **__: None,
        block_size=16,
        follow=lambda _: seen.extend(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))),
    )
    monkeypatch.setattr(start, "RankRunner", lambda *_: runner)
    monkeypatch.setattr(start, "Group", lambda *_: None)
    for name, value in (TORCHRUN | {"RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with pytest.raises(SystemExit):
            start.load("nowhere", EngineConfig(tensor_parallel_size=2))
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    assert seen == [signal.SIG_IGN] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, gloo chooses")
def test_an_interface_is_found_by_its_address():
    """Catches an error where there is none, and loopback for a host of which no more is known."""
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None
    assert interface_to("localhost") is None
    assert interface_to("no.such.host.invalid") is None


def test_a_rank_of_torchrun_takes_its_share_of_its_own_machine(monkeypatch, eight_threads):
    """Catches a second machine whose ranks ask for GPUs 2 and 3 of two, and a thread for each 4 ranks."""
    places = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    for name, value in (TORCHRUN | places).items():
        monkeypatch.setenv(name, value)
    found = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", lambda number: found.append(number))

    def load(name, config, place, device):
        found.extend((place.rank, device, torch.get_num_threads()))
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "RankRunner", load)
    with pytest.raises(KeyboardInterrupt):
        start.load("nowhere", EngineConfig(tensor_parallel_size=4))
    assert found == [1, 3, torch.device("cuda", 1), 4]


def test_more_ranks_than_threads_have_one_each():
    """Catches PyTorch's error for a number of 0 threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        threads = SharedThreads(4)
        assert threads.count == 1
        threads.give_back()
    finally:
        torch.set_num_threads(before)


def test_more_ranks_than_gpus_are_refused_with_the_numbers(monkeypatch):
    """Catches two ranks that share a GPU without anybody knowing."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match="4 of them on this machine, which has 2 GPUs"):
        start.load("nowhere", EngineConfig(tensor_parallel_size=4))


def test_ranks_are_on_the_device_that_is_asked_for(monkeypatch):
    """Catches device="cpu" that takes the GPUs, and device="cuda" that silently runs on a CPU."""
    config = EngineConfig(tensor_parallel_size=4, device="cuda")
    with pytest.raises(ConfigError, match="device is 'cuda', which torch does not find here"):
        start.load("nowhere", config)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert start._device(0, 4, replace(config, device="cpu"), "") == torch.device("cpu")


def test_ranks_on_mps_are_refused(monkeypatch):
    """Catches device="mps" that silently runs on a CPU."""
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    with pytest.raises(ConfigError, match="device is 'mps', but ranks run on cuda or cpu"):
        start.load("nowhere", EngineConfig(tensor_parallel_size=2, device="mps"))


def test_ranks_set_no_memory_aside_for_graphs():
    """Catches a smaller pool on each GPU, for graphs that no rank captures."""
    assert not RankRunner._can_capture


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(size):
    """Catches sizes that are only multiplied."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        with pytest.raises(ConfigError, match=f"{name} is {size}; give at least 1"):
            EngineConfig(**{name: size})


def command(*arguments):
    return [sys.executable, "-m", "minipaged", *arguments]


QUICK = ["--attention-backend", "torch", "--num-blocks", "64", "--disable-log-stats"]


@needs_proc
@pytest.mark.slow
def test_ranks_end_with_their_async_llm_and_one_that_dies_is_noticed_while_nothing_runs(eight_threads):
    """Catches ranks that stand in the way of the next AsyncLLM, and a request that has to find out."""

    async def serve(is_killed):
        async with AsyncLLM(**SMALL, tensor_parallel_size=2) as llm:
            outputs = [output async for output in llm.generate(PROMPTS[0], GREEDY)]
            assert outputs[-1].finished
            assert torch.get_num_threads() == 4
            if is_killed:
                os.kill(*children(WORKER), signal.SIGKILL)
                wait_until(lambda: not llm.is_running, 20, "the loss")
                assert "rank 1 was killed by SIGKILL" in llm.stopped
        assert not children(WORKER)
        assert torch.get_num_threads() == 8

    for is_killed in (False, True, False):
        asyncio.run(serve(is_killed))


FORK = """
import json, os, signal, sys
from minipaged import LLM, SamplingParams

def tokens():
    return llm.generate("a", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].token_ids

if __name__ == "__main__":
    llm = LLM(tensor_parallel_size=2, num_blocks=64, attention_backend="torch", disable_log_stats=True)
    found = [tokens()]
    statuses = []
    for way in ("exit", "shutdown"):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            if way == "shutdown":
                llm.shutdown()
            sys.exit(0)
        statuses.append(os.waitpid(child, 0)[1])
        found.append(tokens())
    print(json.dumps([statuses, found]))
"""


@pytest.mark.slow
def test_a_fork_ends_without_the_ranks_and_leaves_them_alone():
    """Catches a child that waits forever for ranks which are its parent's, or ends them."""
    run = subprocess.run([sys.executable, "-c", FORK], timeout=120, check=True, capture_output=True)
    statuses, found = json.loads(run.stdout.splitlines()[-1])
    assert statuses == [0, 0]
    assert len(found[0]) == 8
    assert found == [found[0]] * 3


@pytest.mark.slow
def test_torchrun_ranks_give_the_tokens_of_one_process_and_end_with_rank_0():
    """Catches workers that generate on their own, or go on when rank 0 is done."""
    arguments = ["generate", "--prompt", PROMPTS[0], "--max-tokens", "8", "--json", *QUICK]
    alone = subprocess.run(command(*arguments), capture_output=True, timeout=60, check=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    together = subprocess.run(
        [*torchrun, "-m", "minipaged", *arguments, "--tensor-parallel-size", "2"],
        capture_output=True,
        timeout=90,
    )
    assert together.returncode == 0, together.stderr.decode()[-2000:]
    found = [json.loads(run.stdout)["outputs"][0]["completions"][0] for run in (alone, together)]
    assert found[0]["token_ids"] == found[1]["token_ids"]


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_process_is_left_when_rank_0_is_ended(name, tmp_path):
    """Catches workers and files that outlive Ctrl-C, a termination or a crash of rank 0."""
    trace, files = tmp_path / "trace", tmp_path / "files"
    files.mkdir()
    arguments = ["generate", "--max-tokens", "2000", "--n", "40", "--trace", str(trace), *QUICK]
    process = subprocess.Popen(
        command(*arguments, "--tensor-parallel-size", "2"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(files)},
    )
    wait_until(lambda: children(WORKER, process.pid), 30, "the worker")
    (worker,) = children(WORKER, process.pid)
    wait_until(lambda: trace.exists() and trace.stat().st_size > 1000, 60, "the first steps")
    if name == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to both
    else:
        process.send_signal(getattr(signal, name))
    process.wait(timeout=60)
    assert process.returncode != 0
    wait_until(lambda: not is_alive(worker), 60, "the end of the worker")
    assert not list(files.glob("minipaged-*"))


@pytest.mark.slow
def test_ranks_with_other_weights_are_refused_at_the_start(tmp_path):
    """Catches sums over parts of two models: they look like text."""
    for seed, folder in enumerate(("one", "other")):
        model = build("llama", **SIZES)
        model.lm_head.weight.data[7] += seed
        model.save_pretrained(tmp_path / folder)
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29614"}
    script = (
        "import sys; from minipaged import LLM;"
        "LLM(sys.argv[1], tensor_parallel_size=2, num_blocks=64, attention_backend='torch')"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank, folder in enumerate(("one", "other"))
    ]
    errors = [rank.communicate(timeout=60)[1].decode() for rank in ranks]
    assert all(rank.returncode for rank in ranks)
    assert "RankError: rank 1 differs from rank 0 in weights" in errors[0]


@pytest.mark.slow
def test_a_worker_that_cannot_start_is_reported_with_its_last_lines(tmp_path, monkeypatch):
    """Catches a rank 0 that waits for a worker which has ended."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'distributed.worker' in ' '.join(sys.orig_argv): sys.exit('no room on this disk')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(RankError, match=r"rank 1 ended with code 1: .*no room on this disk"):
        LLM(**SMALL, tensor_parallel_size=2)


@pytest.mark.slow
def test_a_worker_that_dies_while_the_ranks_connect_is_reported_at_once(monkeypatch):
    """Catches a rank 0 that waits ten minutes for the address of a worker which has ended."""
    monkeypatch.setattr("minipaged.execution.distributed.group.STEP_TIMEOUT", timedelta(seconds=120))
    source = (
        "import json; from torch.distributed import FileStore; job = json.loads(input());"
        "FileStore(job['store'], 2).set('rank 1 has loaded', ''); raise SystemExit('no memory')"
    )
    popen = subprocess.Popen
    began = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(start, "RankRunner", lambda *_: SimpleNamespace(connect=None))
        patched.setattr(
            "minipaged.child_process.subprocess.Popen",
            lambda command, **options: popen([sys.executable, "-c", source], **options),
        )
        with pytest.raises(RankError, match="rank 1 ended with code 1: no memory"):
            start.load(str(pocket_model.PATH), EngineConfig(tensor_parallel_size=2))
    with LLM(**SMALL, tensor_parallel_size=2) as llm:  # (its groups have the numbers of its workers)
        assert llm.generate("Once", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    assert time.monotonic() - began < 100  # (that is: nobody waited for the timeout)


def test_a_ctrl_c_when_the_ranks_have_just_met_is_raised_as_it_is(monkeypatch):
    """Catches PyTorch's "trying to initialize the default process group twice" in its place."""
    init = torch.distributed.init_process_group

    def interrupted(*args, **options):
        init(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.distributed.init_process_group", interrupted)
    try:
        with one_machine(), pytest.raises(KeyboardInterrupt):
            Group(Place(0, 1, 1), torch.distributed.HashStore(), torch.device("cpu"))
    finally:
        give_up()


def test_a_worker_imports_nothing_from_the_working_directory(tmp_path, monkeypatch):
    """Catches ranks that cannot start beside a file of the user's own, where one process can."""
    (tmp_path / "random.py").write_text("raise SystemExit('not the standard library')")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "job.py").write_text("import random")
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    process = child_process.start("job", {}, environment, stderr=subprocess.PIPE)
    assert process.communicate(timeout=60)[1].decode() == ""
    assert process.returncode == 0


def test_a_worker_that_dies_before_it_reads_its_job_is_reported_and_leaves_nothing(monkeypatch):
    """Catches a BrokenPipeError when its input is closed, in place of which rank it was."""
    popen = subprocess.Popen

    def start_dead(command, **options):
        process = popen([sys.executable, "-c", "raise SystemExit(3)"], **options)
        process.wait()
        return process

    monkeypatch.setattr("minipaged.child_process.subprocess.Popen", start_dead)
    workers = Workers(1, {}, threads=1)
    with pytest.raises(RankError, match="rank 1 ended with code 3"):
        workers.check()
    assert not workers.folder.exists()


@pytest.fixture
def dummies(monkeypatch):
    """Python code of each worker -> `Workers` that run it."""
    popen = subprocess.Popen

    def start_them(*codes, **options):
        sources = iter(codes)
        fake = lambda command, **more: popen([sys.executable, "-c", next(sources)], **more)  # noqa: E731
        monkeypatch.setattr("minipaged.child_process.subprocess.Popen", fake)
        return Workers(len(codes), {"model": "a"}, **{"threads": 3} | options)

    return start_them


def test_every_worker_knows_its_rank_and_its_threads(dummies):
    """Catches two workers that both are rank 1, and ranks that take all cores each."""
    source = "import os; print(input(), os.environ['OMP_NUM_THREADS'])"
    workers = dummies(source, source)
    for rank, process in enumerate(workers._processes, 1):
        process.wait(timeout=60)
        job, _, threads = workers._log(rank).read_text().rpartition(" ")
        store = str(workers.store_file)
        assert json.loads(job) == {"model": "a", "rank": rank, "store": store, "threads": 3}
        assert int(threads) == 3
    workers.stop()


def test_a_worker_that_only_lost_another_is_not_blamed(dummies, caplog):
    """Catches "rank 1 lost the others" in place of why rank 2 died, which may take a moment to be seen."""
    workers = dummies("raise SystemExit(75)", "input(); input(); raise SystemExit('no memory')")
    lost, dying = workers._processes
    lost.wait(timeout=60)
    assert workers.loss is None
    dying.stdin.write(b"\n")
    dying.stdin.flush()
    error = workers.failure("connection closed")
    fix = "create a new LLM or restart the server"
    assert str(error) == f"rank 2 ended with code 1: no memory; the run is lost: {fix}"
    assert caplog.messages == ["rank 2: no memory"]


def test_a_start_that_fails_halfway_leaves_nothing(monkeypatch, tmp_path):
    """Catches ranks that wait for those that the system refused, as long as the traceback lives."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("minipaged.child_process.subprocess.Popen", None)
    with pytest.raises(TypeError) as error:
        Workers(1, {}, threads=1)
    assert not list(tmp_path.iterdir()), error  # (which is still there)


def test_a_worker_that_does_not_listen_is_killed(dummies, monkeypatch):
    """Catches a shutdown that leaves a rank which hangs, with its memory, or waits for it forever."""
    monkeypatch.setattr("minipaged.execution.distributed.launch.PATIENCE", 0.1)
    workers = dummies("import time; time.sleep(60)")
    workers.stop()
    assert workers._processes[0].returncode == -signal.SIGKILL
