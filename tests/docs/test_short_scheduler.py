"""The page "A short scheduler": it plans what the real one plans; what the page says of both is so."""

import ast
import importlib.util
import random
import re
import subprocess
import sys

import pytest

from minipaged import LLM, SamplingParams
from minipaged.decoding.speculation import SpeculativeScheduler
from minipaged.memory import KVManager, PageGrowth, prefix_hits
from minipaged.scheduling import (
    BatchPolicy,
    FCFSScheduler,
    PreemptionPolicy,
    RequestTooLongError,
    limits,
    plan,
)
from tests.checked import checked
from tests.docs.site import ROOT
from tests.toy import ToyEngine, alone, samples, toy_scheduler

FILE = ROOT / "docs/examples/short_scheduler.py"
PAGE = ROOT / "docs/guides/short-scheduler.md"
PROMPTS = ["The little robot found a", "Once upon a time", "The old clock", "In the garden there was a"]


@pytest.fixture(scope="module")
def short():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("short_scheduler", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class UncutPrompts:
    """Chunked prefill in which a long prompt leaves nothing of the budget to those behind it."""

    def fill(self, plan, scheduler):
        budget = scheduler.max_num_batched_tokens
        budget -= scheduler.plan_decodes(plan, budget)
        budget -= scheduler.continue_prefills(plan, budget)
        scheduler.admit_waiting(plan, budget)


def toy_engine(make, *args, **options) -> ToyEngine:
    """A toy engine on the scheduler that `make` makes of the parts of the real one."""
    real = toy_scheduler(*args, policy=UncutPrompts(), **options)
    fields = (real.kv, real.policy, real.preemption, real.max_num_seqs, real.max_num_batched_tokens)
    return ToyEngine(make(*fields, real.max_model_len))


def decided(plan) -> tuple:
    """What a plan says, without the objects."""
    computed = [(s.request.request_id, *rest, list(s.table.blocks)) for s, *rest in plan.scheduled]
    return computed, [r.request_id for r in plan.sampling], plan.num_preempted


@pytest.mark.parametrize("seed", range(20))
def test_each_step_is_the_one_that_the_real_scheduler_plans(short, seed):
    """Catches another order of admission, another victim, and a budget that is spent otherwise."""
    rng = random.Random(seed)
    sizes = {"budget": rng.choice([3, 8, 64]), "max_num_seqs": rng.choice([2, 5, 64])}
    num_blocks = rng.choice([12, 20, 64])
    mine = toy_engine(short.ShortScheduler, num_blocks, 4, **sizes)
    theirs = toy_engine(FCFSScheduler, num_blocks, 4, **sizes)
    wanted = [(rng.choices(range(50), k=rng.randint(1, 20)), rng.randint(1, 16)) for _ in range(12)]
    for prompt, max_tokens in wanted:
        plans = []
        for engine in (mine, theirs):
            engine.add(prompt, max_tokens)
            plans.append(decided(engine.step()))
        assert plans[0] == plans[1]
    while theirs.scheduler.has_unfinished:
        assert decided(mine.step()) == decided(theirs.step())
    assert mine.run() == [alone(*request, samples()) for request in wanted]


def test_the_random_runs_preempt_and_cut_prompts(short):
    """Catches pools and budgets that are never short, in which any order passes."""
    engine = toy_engine(short.ShortScheduler, 12, 4, budget=8)
    for _ in range(6):
        engine.add(range(14), 16)
    engine.run()
    assert sum(plan.num_preempted for plan in engine.plans) >= 3
    assert any(s.num_candidates == 0 for plan in engine.plans for s in plan.scheduled)


@pytest.mark.parametrize("temperature", [0, 0.8])
@pytest.mark.parametrize("caching", [False, True], ids=["no_cache", "cache"])
@pytest.mark.parametrize("chunked", [False, True], ids=["prefill_first", "chunked"])
@pytest.mark.parametrize("num_blocks", [64, 13], ids=["roomy", "tight"])
def test_the_embedded_model_writes_the_same_texts(short, num_blocks, chunked, caching, temperature):
    """Catches a scheduler that only the toy executor understands. Its contract is checked at each step."""
    params = SamplingParams(temperature=temperature, seed=7, max_tokens=20)
    settings = {
        "block_size": 4,
        "num_blocks": num_blocks,
        "max_num_batched_tokens": 10,
        "enable_prefix_caching": caching,
        "enable_chunked_prefill": chunked,
        "disable_log_stats": True,
    }
    texts = []
    for use in ({}, {"scheduler": f"{FILE}:ShortScheduler"}):
        llm = checked(LLM(use=use, **settings))
        texts.append([output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)])
    assert texts[0] == texts[1]
    assert (llm.engine.metrics.num_preemptions > 0) == (num_blocks == 13)


def test_a_request_that_outgrows_the_pool_ends_with_the_text_so_far(short):
    """Catches a request that preempts itself forever."""
    ends = []
    for make in (short.ShortScheduler, FCFSScheduler):
        engine = toy_engine(make, 5, 4)
        engine.add(range(10), 100)
        engine.add(range(3), 2)
        ends.append(engine.run())
        assert [r.completions[0].finish_reason for r in engine.requests] == ["length", "length"]
    assert ends[0] == ends[1]


def test_a_failed_step_is_computed_again(short):
    """Catches tokens that are counted before they are computed."""
    engine = toy_engine(short.ShortScheduler, 12, 4, budget=8)
    wanted = [(range(14), 12), (range(9), 12)]
    for request in wanted:
        engine.add(*request)
    rng = random.Random(0)
    while engine.scheduler.has_unfinished:
        if rng.random() < 0.5:
            engine.executor.fail(engine.scheduler.schedule())  # as in the engine: there is no commit
            assert engine.scheduler.in_flight is None  # and nothing to roll back
        else:
            engine.step()
    assert engine.run() == [alone(*request, samples()) for request in wanted]


def test_several_sequences_are_refused(short):
    """Catches a second sample that is never scheduled."""
    engine = toy_engine(short.ShortScheduler)
    with pytest.raises(RequestTooLongError, match="request r0 has 3 sequences; give n=1"):
        engine.add([1, 2], method=samples(3))
    assert not engine.scheduler.has_unfinished


def test_what_runs_of_the_real_scheduler_is_what_the_page_says(short):
    """Catches a scheduler that is short because the long one does its work."""
    engine = toy_engine(short.ShortScheduler, 12, 4, budget=8)
    seen = set()

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename == sys.modules[FCFSScheduler.__module__].__file__:
            seen.add(frame.f_code.co_qualname.removeprefix("FCFSScheduler."))

    sys.setprofile(profile)
    try:
        for _ in range(6):
            engine.add(range(14), 16)
        while engine.scheduler.has_unfinished:
            engine.scheduler.commit(plan := engine.scheduler.schedule(), engine.executor.execute(plan))
    finally:
        sys.setprofile(None)
    assert seen == {"add", "end", "_leave_queue", "has_unfinished"}
    said = re.search(r"the class inherits (.*?)\.", PAGE.read_text(), re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", said)) == seen - {"_leave_queue"}


def test_the_way_from_schedule_to_the_prefix_cache_is_as_long_as_the_page_says():
    """Catches a path that has changed since it was counted."""
    seen = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_qualname == "PrefixCache.match":
            while not seen or seen[-1][0] != "schedule":
                seen.append((frame.f_code.co_name, frame.f_code.co_filename))
                frame = frame.f_back

    engine = ToyEngine(toy_scheduler(caching=True))
    engine.add(range(9))
    sys.setprofile(profile)
    try:
        engine.scheduler.schedule()
    finally:
        sys.setprofile(None)
    seen = [(name, file) for name, file in seen if name != "<listcomp>"]  # (before Python 3.12)
    said = re.search(r"eight functions in five files\s\((.*?)\)", PAGE.read_text(), re.DOTALL)[1]
    assert re.findall(r"`(\w+)`", said) == [name for name, _ in reversed(seen)]
    assert (len(seen), len({file for _, file in seen})) == (8, 5)


def scheduler_class() -> ast.ClassDef:
    """The class, parsed."""
    return next(node for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.ClassDef))


def test_the_class_has_as_many_lines_of_code_as_the_page_says():
    """Catches a short scheduler that grows."""
    node = scheduler_class()
    lines = dict(enumerate(FILE.read_text().splitlines()[node.lineno - 1 : node.end_lineno], node.lineno))
    for inner in ast.walk(node):
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):  # a docstring
            for line in range(inner.lineno, inner.end_lineno + 1):
                del lines[line]
    code = [line for line in lines.values() if line.strip() and not line.strip().startswith("#")]
    assert 40 <= len(code) <= 60
    assert f"{len(code)} lines of code" in " ".join(PAGE.read_text().split())


def test_the_page_shows_every_method():
    """Catches a method that was added and is not explained."""
    shown = re.findall(
        r'--8<-- "code/docs/examples/short_scheduler.py/ShortScheduler\.(\w+)\.py"', PAGE.read_text()
    )
    methods = [node.name for node in scheduler_class().body if isinstance(node, ast.FunctionDef)]
    assert sorted(shown) == sorted(methods)


@pytest.mark.slow
def test_the_page_shows_what_the_example_prints():
    """Catches a step on the page that was never planned."""
    [shown] = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    ran = subprocess.run([sys.executable, FILE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert shown == ran.stdout


def test_every_function_in_the_tables_exists():
    """Catches a row that sends its reader to a function that was renamed."""
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("| ") and "`" in row]
    assert len(rows) >= 20
    homes = {
        "": FCFSScheduler,
        "kv": KVManager,
        "growth": PageGrowth,
        "policy": BatchPolicy,
        "preemption": PreemptionPolicy,
        "SpeculativeScheduler": SpeculativeScheduler,
    }
    homes |= {module.__name__.rpartition(".")[2]: module for module in (limits, plan, prefix_hits)}
    for row in rows:
        names = re.findall(r"`([\w.]+)`", row.split("|")[2])
        assert names, row
        for name in names:
            owner, _, function = name.rpartition(".")
            assert hasattr(homes[owner], function), name
