"""`quantization`: the same model in fewer bits, or one line that says why not."""

from __future__ import annotations

import math
import random

import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.config import ConfigError, config_from
from minipaged.execution.model_runner import ModelRunner
from minipaged.kernels.dispatch import why_not_cpp
from minipaged.pocket_model.stories import story
from tests.models.driver import Driver, random_tokens
from tests.models.survey import build_small
from tests.models.zoo import build

if missing := why_not_cpp(torch.device("cpu")):
    pytest.skip(missing, allow_module_level=True)

from minipaged.execution.accel.panel_linear import PanelLinear

TEXT = story(random.Random(0))
"""The embedded model knows such stories; what it says of other texts changes with any rounding."""


def perplexity(**options):
    llm = LLM(disable_log_stats=True, num_blocks=50, **options)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([TEXT], params)
    logprobs = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs if entry]
    return math.exp(-sum(logprobs) / len(logprobs))


@pytest.mark.parametrize(("quantization", "most"), [("int8", 1.002), ("w8a8", 1.002), ("int4", 1.01)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_embedded_model_is_as_good_in_fewer_bits(quantization, most, dtype):
    """Catches a layer whose scales or order are wrong: every later one makes noise of it."""
    plain, quantized = perplexity(dtype=dtype), perplexity(dtype=dtype, quantization=quantization)
    assert plain / most < quantized < plain * most
    assert quantized != plain


def quantized(name, quantization="int8", **options):
    config = config_from({"num_blocks": 20, "quantization": quantization, **options})
    runner = ModelRunner(build(name), config)
    runner.optimize()
    return runner.model


def test_linear_layers_are_quantized_and_nothing_else():
    """Catches a layer left out, and embeddings or norms taken along; the output layer keeps 8 bits."""
    model = quantized("llama", "int4")
    formats = {name: m._format for name, m in model.named_modules() if isinstance(m, PanelLinear)}
    assert formats.pop("lm_head") == "int8"
    assert set(formats.values()) == {"int4"}
    assert len(formats) == 4 * model.config.num_hidden_layers  # query-key-value, output, gate-up, down
    assert isinstance(model.model.embed_tokens, torch.nn.Embedding)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "gpt_oss", "deepseek_v3"])
def test_transposed_layers_and_experts_are_quantized(name):
    """Catches experts left as they are, matrices packed the wrong way around, and mixed-up biases."""
    token_ids = random_tokens(40, 90, seed=0)
    rows = []
    for quantization in ("none", "int8"):
        driver = Driver(build(name), quantization=quantization)
        driver.runner.optimize()
        rows += driver.logits([(driver.add(token_ids), len(token_ids))])
        matrices = [path for path, weight in driver.runner.model.named_parameters() if weight.ndim == 3]
        assert matrices == []
    assert torch.cosine_similarity(*rows).mean() > 0.99  # of each row; a few choose another expert
    assert not torch.equal(*rows)


@pytest.mark.parametrize("name", ["dbrx", "jetmoe"])
def test_a_model_whose_layers_are_not_linear_is_refused(name):
    """Catches a flag that changes nothing in silence."""
    with pytest.raises(
        ConfigError,
        match=r"quantization is int8, but .* is not a linear layer.*; give another model, or drop q",
    ):
        ModelRunner(build_small(name), config_from({"num_blocks": 8, "quantization": "int8"})).optimize()


def test_falcons_own_linear_layers_are_quantized():
    """Catches a flag that changes nothing: its layers are a class of their own, which adds the bias apart."""
    model = quantized("falcon_multi_query", "int8")
    left = [module for module in model.modules() if type(module).__name__ == "FalconLinear"]
    assert left == []


def test_the_matrices_of_all_layers_count():
    """Catches a sum in which one layer, whose own matrix is small, stands for all."""

    class Mixer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(32, 32))

    model = build("llama")
    model.model.mixers = torch.nn.ModuleList(Mixer() for _ in range(8))
    with pytest.raises(ConfigError, match="quantization is int8, but Mixer"):
        ModelRunner(model, config_from({"num_blocks": 8, "quantization": "int8"})).optimize()


def test_without_the_kernels_it_is_refused():
    """Catches a setting that another backend ignores."""
    with pytest.raises(ConfigError, match="quantization is int4, which needs the C\\+\\+ kernels"):
        quantized("llama", "int4", attention_backend="torch")


def test_weights_in_double_precision_are_refused():
    """Catches KeyError: torch.float64."""
    runner = ModelRunner(build("llama").double(), config_from({"num_blocks": 8, "quantization": "int8"}))
    with pytest.raises(ConfigError, match=r"quantization is int8, but the weights are torch\.float64"):
        runner.optimize()


def test_a_format_that_is_not_here_is_refused():
    """Catches a model that runs unquantized where a script asked for another library's format."""
    with pytest.raises(ConfigError, match="quantization is 'awq'; choose one of none, int8, int4, w8a8"):
        LLM(quantization="awq")
