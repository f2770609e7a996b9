"""Layer fusion: layers are replaced where the fused form computes the same, and only there."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm

from minipaged import SamplingParams
from minipaged.execution.accel import fused_layer
from minipaged.execution.accel.fused_layer import FusedLayer, FusedNorm
from minipaged.execution.accel.layer_fusion import EquivalenceContext
from minipaged.execution.accel.packed_linear import PackedLinear, can_pack
from minipaged.execution.accel.plain_linears import stack_linears
from minipaged.execution.attention import set_forward_context
from minipaged.kernels.metadata import AttentionParameters
from tests.machine import in_interpreter, skip_without_compiler
from tests.models.driver import Driver, random_tokens
from tests.models.zoo import FUSED, build
from tests.slow import slow_but


@pytest.fixture(params=["cpp", pytest.param("triton", marks=in_interpreter)])
def backend(request: pytest.FixtureRequest) -> str:
    """Whose operations the layers are fused with."""
    skip_without_compiler(request.param)
    return request.param


def rebuilt(model: nn.Module, backend: str) -> tuple[nn.Module, list[str]]:
    """The model, rebuilt, and the kinds of its fused modules."""
    Driver(model, attention_backend=backend).runner.optimize()
    kinds = [type(m).__name__ for m in model.modules() if isinstance(m, (FusedLayer, FusedNorm))]
    return model, kinds


@pytest.mark.parametrize("name", FUSED)
def test_every_layer_of_the_common_shape_is_fused(name, backend):
    """A speed-up that quietly stopped to happen: attributes renamed by a new version of transformers."""
    model, kinds = rebuilt(build(name), backend)
    assert kinds.count("FusedLayer") == model.config.num_hidden_layers
    assert isinstance(model.model.norm, FusedNorm)
    assert not any(isinstance(module, (LlamaDecoderLayer, LlamaRMSNorm)) for module in model.modules())


@pytest.mark.parametrize(
    "changes", [{"attention_bias": True}, {"mlp_bias": True}, {"num_key_value_heads": 4}]
)
def test_biases_and_heads_of_their_own_are_kept(changes, backend):
    """A bias lost where products are stacked; a model that trains without is no evidence."""
    torch.manual_seed(1)
    models = [build("llama", **changes) for _ in range(2)]
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data = torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(len(name))
                )
    plain, (fused, kinds) = models[0], rebuilt(models[1], backend)
    assert "FusedLayer" in kinds
    rows, positions = torch.arange(9)[None], torch.arange(9)[None]
    answers = []
    for model in (plain, fused):
        # Both with the same simple attention: what is compared is all the rest.
        model.set_attn_implementation("minipaged")
        with torch.inference_mode(), set_forward_context(EquivalenceContext()):
            answers.append(model(input_ids=rows, position_ids=positions, use_cache=False).logits)
    torch.testing.assert_close(answers[1], answers[0], atol=1e-4, rtol=1e-4)


class Impostors:
    """Layers that bear a known name and compute something else, a little louder or in another way."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def louder(self, layer: Any) -> None:
        forward = layer.forward
        layer.forward = lambda *args, **kwargs: forward(*args, **kwargs) * self.factor

    def other_activation(self, layer: Any) -> None:
        layer.mlp.act_fn = nn.GELU()

    def other_keys(self, layer: Any) -> None:
        # Shows in what attention is asked alone: the equivalence check answers with the values.
        keys = layer.self_attn.k_proj
        keys.register_forward_hook(lambda module, arguments, output: output * self.factor)

    def norm_of_another_kind(self, layer: Any) -> None:
        norm = layer.input_layernorm
        norm.forward = lambda rows: nn.functional.layer_norm(rows, rows.shape[-1:], norm.weight)


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.float32, 1.01), (torch.float16, 1.01), (torch.bfloat16, 1.025)]
)
@pytest.mark.parametrize("trick", [name for name in vars(Impostors) if not name.startswith("_")])
def test_a_layer_that_computes_something_else_stays(trick, dtype, factor, backend, caplog):
    """Wrong numbers because of a name."""
    model = build("llama").to(dtype)
    impostor = model.model.layers[1]
    getattr(Impostors(factor), trick)(impostor)
    with caplog.at_level(logging.INFO, logger="minipaged.execution.accel.layer_fusion"):
        rebuilt(model, backend)
    assert model.model.layers[1] is impostor
    assert isinstance(model.model.layers[0], FusedLayer)
    assert "LlamaDecoderLayer is not equivalent to its fused form" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["gelu", "hardswish", "mish"])
def test_a_layer_with_another_activation_stays(activation, dtype, backend):
    """Catches Mish for SiLU: the same rows to 2 %, beside large ones that the layer only passes on."""
    model = build("llama", hidden_act=activation).to(dtype)
    model.model.embed_tokens.weight.data[:, 0] = 1e4
    _, kinds = rebuilt(model, backend)
    assert "FusedLayer" not in kinds


@pytest.mark.parametrize("activation", ["prelu", "xielu"])
def test_a_layer_stays_whose_activation_has_weights(activation, backend):
    """A model that cannot be loaded in 16 bits or on a GPU: its weights are asked for float32 on the CPU."""
    model = build("llama", hidden_act=activation).to(torch.bfloat16)
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_pre_hook(of_the_weights_kind)
    _, kinds = rebuilt(model, backend)
    assert "FusedLayer" not in kinds


def of_the_weights_kind(activation: nn.Module, arguments: tuple[Tensor]) -> None:
    """As on a GPU, where the check's numbers would have to be moved, too."""
    assert arguments[0].dtype == next(activation.parameters()).dtype


class Elsewhere(nn.Linear):
    """Weights that only it can read, such as quantized ones."""

    @property
    def out_features(self) -> int:
        raise RuntimeError("not a plain layer")

    @out_features.setter
    def out_features(self, value: int) -> None: ...


def test_a_layer_over_products_of_another_kind_stays(backend):
    """A model with quantized or adapted products that cannot be loaded because of a speed-up."""
    model = build("llama")
    unusual = model.model.layers[1]
    other = Elsewhere(32, 32, bias=False)
    other.weight = unusual.self_attn.q_proj.weight
    unusual.self_attn.q_proj = other
    rebuilt(model, backend)
    assert model.model.layers[1] is unusual
    assert isinstance(model.model.layers[0], FusedLayer)


def test_layers_of_other_names_stay(backend):
    """Mixtral's have experts; its norms are like any other."""
    model, kinds = rebuilt(build("mixtral"), backend)
    assert kinds == ["FusedNorm"] * (2 * model.config.num_hidden_layers + 1)


class Limited(LlamaDecoderLayer):
    """Limits its rows, but not those of the equivalence check."""

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        return super().forward(hidden_states.clamp(-100, 100), **others)


class Attention(LlamaAttention):
    """Limits its rows in the same way."""

    def forward(self, hidden_states: Tensor, **others: Any) -> Any:
        return super().forward(hidden_states.clamp(-100, 100), **others)


class Renamed(LlamaDecoderLayer):
    """Has another name for its MLP."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.feed_forward = self.mlp
        del self.mlp

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=hidden_states, **others)
        return hidden_states + self.feed_forward(attended)


@pytest.mark.parametrize("kind", [Limited, Renamed])
def test_layers_of_a_models_own_code_stay_whatever_their_name(kind, backend):
    """Catches wrong logits, or a model that cannot be loaded, because of a name."""
    model = build("llama")
    own = type("LlamaDecoderLayer", (kind,), {"__module__": "transformers_modules.own"})(model.config, 1)
    model.model.layers[1] = own
    rebuilt(model, backend)
    assert model.model.layers[1] is own
    assert isinstance(model.model.layers[0], FusedLayer)


def test_attention_of_a_models_own_code_stays(backend):
    """Catches wrong logits where own code replaces only a part of a layer."""
    model = build("llama")
    layer = model.model.layers[1]
    layer.self_attn = Attention(model.config, 1)
    rebuilt(model, backend)
    assert model.model.layers[1] is layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_around_zero_is_taken_for_what_it_is(dtype, backend):
    """Gemma multiplies by 1 + weight in float32; rounded to 16 bits, it would lose the weight's last bits."""
    model = build("gemma3").to(dtype)
    exact = [1 + module.weight.float() for module in model.modules() if isinstance(module, Gemma3RMSNorm)]
    rebuilt(model, backend)
    found = [module.weight for module in model.modules() if isinstance(module, FusedNorm)]
    assert len(found) == len(exact) == 6 * model.config.num_hidden_layers + 1
    for weight in found:
        assert weight.dtype == torch.float32
        assert any(torch.equal(weight, one) for one in exact if one.shape == weight.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_fused_too(dtype, backend):
    """Half of the models there are left behind."""
    _, kinds = rebuilt(build("llama").to(dtype), backend)
    assert kinds.count("FusedLayer") == 2


def test_a_norm_that_widens_its_rows_stays(backend):
    """Rows in bfloat16 where the model goes on in float32: the same numbers, another type."""
    model = build("llama").bfloat16()
    norm = model.model.norm
    forward = norm.forward
    norm.forward = lambda rows: forward(rows).float()
    model.lm_head.float()
    rebuilt(model, backend)
    assert model.model.norm is norm


def test_without_operations_for_layers_a_model_stays_as_it_is():
    """A PyTorch backend, chosen or fallen back to, that computes with the kernels of another."""
    _, kinds = rebuilt(build("llama"), "torch")
    assert kinds == []


def test_a_layers_weights_are_freed_before_the_next_layers_are_stacked(backend, monkeypatch):
    """Catches an iterator that keeps the originals: all weights twice, on a card that the pool has filled."""
    model = build("llama", num_hidden_layers=4)
    weights = [ref(layer.mlp.gate_proj.weight) for layer in model.model.layers]
    alive = []

    def stack(*linears: nn.Linear) -> nn.Linear:
        alive.append(sum(weight() is not None for weight in weights))
        return stack_linears(*linears)

    monkeypatch.setattr(fused_layer, "stack_linears", stack)
    Driver(model, attention_backend=backend).runner.optimize()
    assert alive == [4, 4, 3, 3, 2, 2, 1, 1]


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def aliases_of(operation: Any) -> list[Any]:
    return [result.alias_info for result in operation._schema.returns]


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch: operations of PyTorch that compute, and Triton kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        given = {storage_of(argument) for argument in arguments if isinstance(argument, torch.Tensor)}
        result = operation(*arguments, **keywords or {})
        first = result if isinstance(result, torch.Tensor) else result[0]
        writes = any(alias is not None and alias.is_write for alias in aliases_of(operation))
        if (writes or storage_of(first) not in given) and "empty" not in operation.name():
            self.names[operation.name()] += 1
        return result

    def __enter__(self):
        from triton.runtime.interpreter import GridExecutor

        self._run = run = GridExecutor.__call__

        def noted(executor, *arguments, **options):
            self.names[executor.fn.__name__] += 1
            with _disable_current_modes():  # the interpreter's own copies are no launches
                return run(executor, *arguments, **options)

        GridExecutor.__call__ = noted
        return super().__enter__()

    def __exit__(self, *reason):
        from triton.runtime.interpreter import GridExecutor

        GridExecutor.__call__ = self._run
        return super().__exit__(*reason)


@pytest.mark.parametrize(
    ("name", "plain", "fused"),
    slow_but([("llama", 39, 11)], [("llama", 39, 11), ("qwen3", 55, 13), ("gemma3", 83, 15)]),
)
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=in_interpreter)])
def test_a_fused_layer_launches_a_quarter_of_what_the_plain_one_does(name, plain, fused, backend):
    """A fusion that saves no launches. Counted: a decode in half precision, write and attention included."""
    found = []
    for optimized in (False, True):
        driver = Driver(build(name).half(), attention_backend=backend)
        if optimized:
            driver.runner.optimize()
        sequence, layer = driver.add(random_tokens(5, 101, seed=1)), driver.runner.model.model.layers[0]
        driver.execute([(sequence, 5)])
        launches, forward = Launches(), layer.forward

        def counted(*arguments, launches=launches, forward=forward, **keywords):
            with launches:
                return forward(*arguments, **keywords)

        layer.forward = counted
        driver.execute([(sequence, 1)])
        found.append(launches.names)
    assert [names.total() for names in found] == [plain, fused], found


def test_the_last_layer_computes_only_rows_that_matter(backend):
    """A quarter of a prompt's work in four layers wasted; log-probabilities of rows never computed."""
    driver = Driver(build("llama"), attention_backend=backend)
    driver.runner.optimize()
    num_rows: list[list[int]] = []
    for layer in driver.runner.model.model.layers:
        num_rows.append([])
        layer.mlp_output.register_forward_hook(
            lambda module, arguments, output, seen=num_rows[-1]: seen.append(len(output))
        )
    prompt, other, asking = (driver.add(random_tokens(9, 101, seed)) for seed in range(3))
    asking.request.params = SamplingParams(prompt_logprobs=2)
    driver.execute([(prompt, 9)])
    driver.execute([(prompt, 1), (other, 4)])  # a decode, and a prompt that goes on
    driver.execute([(other, 3)])
    driver.execute([(prompt, 1)])
    driver.execute([(prompt, 1), (asking, 9)])
    assert num_rows == [[9, 5, 3, 1, 10], [1, 1, 0, 1, 10]]


@pytest.mark.parametrize("num_sampling", slow_but([1], [0, 1, 2]))
def test_the_last_layer_may_attend_in_chunks(num_sampling, backend):
    """Catches a last layer that computes few rows, but in the pieces of the layers before: a crash."""
    chunks, logits = {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": 8}, []
    for optimized in (False, True):
        driver = Driver(build("llama", **chunks), attention_backend=backend)
        if optimized:
            driver.runner.optimize()
        prompts = [driver.add(random_tokens(17, 101, seed)) for seed in range(2)]
        parts = [(prompt, 17 if i < num_sampling else 12) for i, prompt in enumerate(prompts)]
        with torch.inference_mode():
            logits.append(driver.runner.forward(driver.runner.builder.build(driver.scheduled(parts))))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


def test_a_step_that_leaves_rows_out_asks_the_device_for_nothing(backend, monkeypatch):
    """On a GPU the host would wait for all layers before it launches the end of the step."""
    driver = Driver(build("llama"), attention_backend=backend)
    driver.runner.optimize()
    parts = [(driver.add(random_tokens(9, 101, seed=1)), 9), (driver.add(random_tokens(9, 101, seed=2)), 4)]
    batch = driver.runner.builder.build(driver.scheduled(parts))
    asked: list[str] = []
    for name in ("tolist", "item", "__bool__", "__int__"):
        ask = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda tensor, ask=ask, name=name: asked.append(name) or ask(tensor)
        )
    with torch.inference_mode():
        logits = driver.runner.forward(batch)
    assert asked == []
    assert logits.shape == (1, 101)


@pytest.mark.parametrize("name", slow_but(["qwen3"], ["mistral_sliding", "qwen3"]))
def test_fused_layers_give_the_tokens_and_logits_of_plain_ones(name, backend):
    """A pass between two products that computes something else in a prompt, a chunk or a decode."""
    prompts = [random_tokens(length, 101, seed=length) for length in (9, 4)]
    tokens, logits = [], []
    for optimized in (False, True):
        driver = Driver(build(name), attention_backend=backend)
        if optimized:
            driver.runner.optimize()
        sequences = [driver.add(prompt) for prompt in prompts]
        for cut in (5, 4, 1, 1, 1):
            driver.execute([(s, min(s.num_uncomputed_tokens, cut)) for s in sequences])
        tokens.append([s.output_token_ids for s in sequences])
        logits.append(torch.cat(driver.logits([(s, 1) for s in sequences])))
    assert tokens[1] == tokens[0]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["cpp"], indirect=True)
def test_tokens_do_not_depend_on_where_prompts_are_cut(backend):
    """A last row taken from another sequence, keys and values of the last layer not written."""
    prompts = [random_tokens(length, 101, seed=length) for length in (11, 6, 17)]
    answers = []
    for cuts in ([11, 6, 17], [4, 4, 4], [5, 1, 8]):
        driver = Driver(build("qwen3"), attention_backend=backend)
        driver.runner.optimize()
        sequences = [driver.add(prompt) for prompt in prompts]
        while any(sequence.num_generated_tokens < 6 for sequence in sequences):
            driver.execute([(s, min(s.num_uncomputed_tokens, cut)) for s, cut in zip(sequences, cuts)])
        answers.append([s.output_token_ids[:6] for s in sequences])
    assert answers[1:] == answers[:1] * 2


def test_the_check_records_queries_and_keys_before_they_are_overwritten():
    """Keys and queries are views into a buffer that the layer goes on to use."""
    context, rows = EquivalenceContext(), torch.ones(2, 3, 4)
    module = nn.Module()
    module.layer_idx = 0
    context.attend(module, rows, rows, rows, AttentionParameters(1.0))
    rows.zero_()
    assert context.calls[0][0].eq(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 1100])
def test_a_packed_layer_still_shows_its_weight(width, dtype):
    """Routers and adapters read it, or its type: no attribute `weight` at the first token."""
    if not can_pack(dtype):
        pytest.skip(f"oneDNN has no packed products in {dtype} here")
    linear = nn.Linear(width, 1000, dtype=dtype)
    assert torch.equal(PackedLinear(linear).weight, linear.weight)
