"""The commonest mistake in an override, a forgotten `return`, is reported as one, whatever the method."""

import inspect

import pytest

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.learn.contracts import CONCEPTS, ContractError
from minipaged.memory import KVManager

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(n=3, seed=4, max_tokens=12),
    BeamSearchParams(beam_width=3, max_tokens=10),
] * 2
PROMPTS = [{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11, 12, 13]}] * len(PARAMS)


def _must_answer(annotation):
    return "None" not in annotation and annotation != "bool"  # (of which None is one)


METHODS = [
    pytest.param(concept.name, own, name, id=f"{own.__name__}.{name}")
    for concept in CONCEPTS.values()
    for own in concept.originals
    if inspect.isclass(own)
    for name, method in inspect.getmembers(own, inspect.isfunction)
    if not name.startswith("_") and _must_answer(method.__annotations__["return"])
]


@pytest.mark.parametrize(("concept", "own", "name"), METHODS)
def test_a_forgotten_return_breaks_the_contract(concept, own, name):
    """Catches "'NoneType' object has no attribute 'step'" from the engine, where no line is the student's."""
    called = []

    def forgets(self, *args, **options):
        getattr(own, name)(self, *args, **options)
        called.append(name)

    mine = type("Mine", (own,), {name: forgets})
    options = {"num_speculative_tokens": 2} if concept == "drafter" else {"preemption_mode": "swap"}
    if concept == "prefill_first":
        options["enable_chunked_prefill"] = False
    llm = LLM(
        use={concept: mine}, num_blocks=20, block_size=4, max_model_len=64, disable_log_stats=True, **options
    )
    breach = ""
    try:
        llm.generate(PROMPTS, PARAMS)
    except ContractError as error:
        breach = str(error)
    if not called:
        pytest.skip(f"nothing calls {name} in this run")
    assert breach.startswith(f"{concept}: ")
    assert name in breach


def test_the_method_that_is_checked_is_the_one_that_is_called():
    """Catches a check that calls the method of a base class, which Python would not."""

    class Odd:
        def num_blocks_of(self, num_tokens):
            return 99

    for bases, blocks in (((KVManager, Odd), 1), ((Odd, KVManager), 99)):
        llm = LLM(use={"kv_manager": type("Mine", bases, {})}, num_blocks=4, disable_log_stats=True)
        assert llm.engine.scheduler.kv.num_blocks_of(5) == blocks


def test_arguments_by_keyword_have_no_order():
    """Catches a constructor that is refused although the engine can call it."""

    class Mine(KVManager):
        def __init__(self, *args, block_table, watermark=0.05):
            super().__init__(*args, block_table=block_table, watermark=watermark)

    CONCEPTS["kv_manager"].check(Mine)
