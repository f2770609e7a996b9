"""`LLM(executor=...)`, `use` and `components`: what is given is used, or refused."""

import pytest

from minipaged import LLM
from minipaged.components import Components
from minipaged.config import ConfigError
from minipaged.memory import BlockAllocator
from tests.engine.toy_model import ToyModel


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"num_blocks": 7}, "^num_blocks is 7, but the executor has 64; make an executor that has 7$"),
        ({"max_model_len": 9}, "^max_model_len is 9, but the executor has 200; make an executor that has 9$"),
        ({"tensor_parallel_size": 2}, "^tensor_parallel_size is 2, but an executor of your own is one rank;"),
        ({"pipeline_parallel_size": 3}, "^pipeline_parallel_size is 3, but an executor of your own is one"),
        ({"model": "my/model"}, "^model is 'my/model', but the executor has one; leave it out"),
    ],
)
def test_a_setting_that_the_executor_does_not_have_is_refused(setting, message):
    """Catches a pool of another size than was asked for, ranks that are never started, and a model that is
    never loaded."""
    with pytest.raises(ConfigError, match=message):
        LLM(executor=ToyModel(), block_size=4, **setting)


def test_the_same_settings_as_the_executors_are_fine():
    """Catches a refusal of what is true."""
    llm = LLM(executor=ToyModel(), block_size=4, num_blocks=64, max_model_len=200, tensor_parallel_size=1)
    assert llm.engine.scheduler.kv.allocator.num_blocks == 64


def test_use_and_components_are_not_given_together():
    """Catches components that are silently left out."""
    use, components = {"allocator": type("Mine", (BlockAllocator,), {})}, Components()
    with pytest.raises(ConfigError, match=r"^use and components are both given; give only one of them$"):
        LLM(executor=ToyModel(), block_size=4, use=use, components=components)
    LLM(executor=ToyModel(), block_size=4, use={}, components=components)


def test_components_of_another_kind_are_refused():
    """Catches an AttributeError about `drafter` for the dict that belongs in `use`."""
    with pytest.raises(ConfigError, match=r"^components is {'allocator': .*; give Components"):
        LLM(executor=ToyModel(), block_size=4, components={"allocator": BlockAllocator})


def test_an_llm_is_shut_down_at_the_end_of_its_block():
    """Catches `with LLM(...)` refused, or ranks that outlive the block or an error in it."""
    executor, closed = ToyModel(), []
    executor.close = lambda: closed.append(True)
    with pytest.raises(IndexError), LLM(executor=executor, block_size=4) as llm:
        llm.generate([]).pop()
    assert closed == [True]
