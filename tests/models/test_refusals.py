"""A model that would quietly compute something else is refused before its first token, with the reason."""

from functools import partial

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig

from minipaged.config import ConfigError, EngineConfig
from minipaged.execution.attention import (
    UnsupportedModelError,
    paged_attention_hook,
    set_forward_context,
)
from minipaged.execution.model_runner import ModelRunner
from minipaged.execution.probe import ProbeContext
from minipaged.kernels.metadata import AttentionParameters
from tests.engine.ctrl_c import interrupted_after_call
from tests.models.driver import Driver, greedy, own_logits, random_tokens
from tests.models.survey import build_small
from tests.models.zoo import VOCAB_SIZE, build

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
}


def refusal(model: nn.Module, **settings: object) -> str:
    """The message; the model keeps the attention it came with, so that it still runs elsewhere."""
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModelError) as error:
        ModelRunner(model, EngineConfig(num_blocks=8, **settings), greedy)
    message = str(error.value)
    assert message.startswith(f"{type(model).__name__} is not supported: ")
    assert "\n" not in message
    assert model.config._attn_implementation == before
    return message


@pytest.mark.parametrize(
    ("error", "settings"), [(KeyboardInterrupt, {}), (ConfigError, {"kv_cache_memory": 10})]
)
@pytest.mark.parametrize("name", ["gpt2", "falcon_alibi"])
def test_a_model_still_runs_elsewhere_if_its_runner_was_not_built(name, error, settings) -> None:
    """Catches attention that stays the pool's after a Ctrl-C, or a pool that is too small: each later forward
    pass of the user's model failed."""
    model, tokens = build(name, pad_token_id=3), torch.tensor([[5, 6, 7]])
    before = model(tokens).logits

    def interrupt(*_) -> None:
        if error is KeyboardInterrupt:
            raise KeyboardInterrupt

    hook = model.register_forward_hook(interrupt)
    with pytest.raises(error):
        ModelRunner(model, EngineConfig(**settings), greedy)
    hook.remove()
    assert torch.equal(model(tokens).logits, before)
    assert model.config.pad_token_id == 3


def test_ctrl_c_while_a_model_is_adopted_leaves_it_as_it_was() -> None:
    """Catches a model that is given back only when an interactive session drops the traceback: until then it
    cannot run elsewhere, and then a runner that was built meanwhile loses it."""
    config, modules = EngineConfig(num_blocks=8), ("execution/adoption.py", "/contextlib.py")
    number, found = 1, True
    while found:
        model, kept = build("gpt2"), None
        try:
            found = interrupted_after_call(number, partial(ModelRunner, model, config, greedy), modules)
        except KeyboardInterrupt as error:
            kept = error
            assert model.config._attn_implementation == "eager", number
        del kept
        number += 1
    assert number > 5


@pytest.mark.parametrize("model_type", ["big_bird", "roformer"])
def test_a_model_that_keeps_its_own_attention_is_refused(model_type: str) -> None:
    """transformers logs a warning and stays eager: every decode would see one token."""
    assert "attention interface" in refusal(build_small(model_type))


def test_a_model_with_recurrent_state_is_refused() -> None:
    """Its recurrent layers keep their state to themselves: they would start from nothing at every step."""
    assert "recurrent state" in refusal(build_small("recurrent_gemma"), max_model_len=64)


def test_a_state_that_nobody_declares_is_found() -> None:
    """Its attention layers call the hook, and its others mix tokens: every step would start from nothing."""
    model = build_small("recurrent_gemma")
    type(model)._is_stateful = False
    try:
        assert "other token mixing besides the attention" in refusal(model, max_model_len=64)
    finally:
        type(model)._is_stateful = True


def test_layers_that_never_call_the_hook_are_refused() -> None:
    """Mllama's cross-attention has no picture to attend to, and would be left out."""
    assert "layers [3] keep no K/V" in refusal(build_small("mllama"))


def test_positions_that_do_not_count_from_zero_are_refused() -> None:
    """RoBERTa's begin behind its padding index: other logits, in silence."""
    assert "its positions do not start at 0" in refusal(build_small("roberta"))


def test_a_model_that_chooses_its_tokens_is_refused() -> None:
    """DeepSeek V3.2 needs a mask for that: no `'NoneType' object is not subscriptable` out of its code."""
    assert "attends to the index_topk = 2048 tokens" in refusal(build("deepseek_v32"))


def test_an_error_in_the_code_of_a_model_is_reported_with_its_place() -> None:
    """No traceback, and somewhere to look."""
    model = build("llama")
    model.model.layers[1].mlp.forward = lambda rows: rows[None][2]
    message = refusal(model)
    assert "(perhaps without its own mask or cache), in test_refusals.<lambda>: IndexError" in message


def test_weights_that_overflow_are_not_taken_for_another_architecture() -> None:
    """Catches "other token mixing", where float16 was too small for a model."""
    model = build("llama").half()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e4)
        model.model.layers[0].mlp.up_proj.weight.mul_(1e4)
    assert "its logits are not finite: float16 overflows (choose another dtype)" in refusal(model)


def test_a_model_that_computes_the_logits_of_all_rows_is_refused() -> None:
    """Catches an argument that a model drops: logits of a whole prompt, read as those of its last token."""
    model = build("llama")
    forward = model.forward
    model.forward = lambda input_ids, position_ids, use_cache: forward(input_ids, position_ids=position_ids)
    assert "its forward pass takes no logits_to_keep" in refusal(model)


def test_a_model_that_counts_its_rows_is_refused() -> None:
    """Catches a decode that is computed as the first token of its text."""
    model = build("llama")
    forward = model.forward
    model.forward = lambda input_ids, use_cache, logits_to_keep: forward(input_ids)
    assert "its forward pass takes no position_ids" in refusal(model)


@pytest.mark.parametrize("window", [0, -3])
def test_an_impossible_window_is_refused(window: int) -> None:
    """Kernels took it for a length: memory was corrupted."""
    assert f"layer 0 has sliding_window {window}; give at least 1" in refusal(
        build("mistral_sliding", sliding_window=window)
    )


def test_a_model_without_layers_is_refused() -> None:
    """A division by the bytes of a block that has none."""
    assert "num_hidden_layers is 0; give at least 1" in refusal(build("llama", num_hidden_layers=0))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 3), (4, 8), (6, 4)])
def test_kv_heads_that_do_not_divide_the_query_heads_are_refused(num_heads: int, num_kv_heads: int) -> None:
    """Catches "mat1 and mat2 shapes cannot be multiplied" out of layer fusion, or in the first step."""
    sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "hidden_size": 48}
    message = refusal(build("llama", **sizes))
    assert f"layer 0 has {num_heads} query heads, not a multiple of its {num_kv_heads} KV heads" in message


@pytest.mark.parametrize("asked", [None, 8])
def test_a_model_without_positions_is_refused(asked: int | None) -> None:
    """Catches a ZeroDivisionError that was put down to the model's code, or the advice to give at most 0."""
    message = refusal(build("llama", max_position_embeddings=0), max_model_len=asked)
    assert "it was trained for 0 positions; give at least 1" in message


def test_a_model_that_looks_ahead_is_refused() -> None:
    """BERT's layers do call the hook, and causal attention would be wrong for them."""
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    assert "later tokens" in refusal(AutoModelForCausalLM.from_config(config).eval())


def test_rope_that_depends_on_the_longest_request_is_refused() -> None:
    """One long request in the step would change everybody else's tokens."""
    message = refusal(build("llama", rope_parameters=LONGROPE))
    assert "rope type 'longrope'" in message
    assert "set max_model_len to 64 or less" in message


def test_rope_that_is_plain_up_to_the_models_length_needs_no_setting() -> None:
    """Catches a refusal that asks for the length that is the default."""
    for rope in (DYNAMIC, LONGROPE | {"original_max_position_embeddings": 128}):
        runner = ModelRunner(build("llama", rope_parameters=rope), EngineConfig(num_blocks=8), greedy)
        assert runner.max_model_len == 128


@pytest.mark.parametrize(("rope", "exact"), [(DYNAMIC, 128), (LONGROPE, 64)], ids=["dynamic", "longrope"])
def test_such_rope_is_served_up_to_the_length_where_it_is_plain(rope: dict, exact: int) -> None:
    """The bound must be the last length at which no frequency switches: its very last position agrees."""
    driver = Driver(build("llama", rope_parameters=rope), max_model_len=exact)
    token_ids = random_tokens(exact, VOCAB_SIZE, seed=1)
    sequence = driver.add(token_ids)
    computed = [driver.logits([(sequence, count)])[0] for count in (5, exact - 6, 1)]
    expected = own_logits(build("llama", rope_parameters=rope), token_ids)
    torch.testing.assert_close(torch.cat(computed), expected, atol=1e-4, rtol=0)


def test_the_length_that_is_named_suits_every_kind_of_layer_and_the_model() -> None:
    """The advice of the first kind led to a refusal with that of the second."""
    ropes = [LONGROPE | {"original_max_position_embeddings": length} for length in (100, 400, 60)]
    for kinds, named in ((ropes[:2], 100), (ropes[1:], 60)):
        by_kind = dict(zip(("full_attention", "sliding_attention"), kinds))
        model = build("gemma3", head_dim=8, rope_parameters=by_kind)
        assert f"exact up to {named} positions: set max_model_len to {named} or less" in refusal(model)
        ModelRunner(model, EngineConfig(num_blocks=8, max_model_len=named), greedy)


def test_a_block_size_that_cuts_attention_chunks_is_refused() -> None:
    """A block may not belong to two chunks: a table starts at a whole block."""
    message = refusal(build("llama4"), block_size=3)
    assert "block_size 3" in message
    assert "8 tokens" in message
    assert "for example 2" in message


def test_the_block_size_that_is_named_divides_the_chunk() -> None:
    """For a chunk of 8 tokens and blocks of 16, the advice was to choose 16."""
    message = refusal(build("llama4"), block_size=16)
    named = int(message.split()[-1])
    assert (
        ModelRunner(build("llama4"), EngineConfig(num_blocks=64, block_size=named), greedy).block_size
        == named
    )


def test_a_length_the_model_cannot_reach_is_a_config_error() -> None:
    """Positions past the table of learned positions crash in the middle of a request."""
    with pytest.raises(ConfigError, match="max_model_len is 129; the model was trained for 128 positions"):
        ModelRunner(build("opt"), EngineConfig(num_blocks=8, max_model_len=129), greedy)


class TestProbe:
    """What the probe refuses layer by layer, on a hand-made module."""

    class Layer(nn.Module):
        def __init__(self, layer_idx: int = 0) -> None:
            super().__init__()
            self.layer_idx = layer_idx

    class Config:
        layer_types = ("sliding_attention", "full_attention", "linear_attention")

    def call(
        self, layer: int, mask: torch.Tensor | None = None, times: int = 1, **options: object
    ) -> ProbeContext:
        probe, rows = ProbeContext(self.Config(), 128), torch.zeros(1, 2, 3, 4)
        with set_forward_context(probe):
            for _ in range(times):
                paged_attention_hook(self.Layer(layer), rows, rows, rows, mask, **options)
        return probe

    def test_a_full_attention_layer_passes(self) -> None:
        """Or the refusals below would prove nothing."""
        probe = self.call(1, use_cache=False, position_bias=None)
        assert list(probe.specs) == [1]

    def test_a_mask_is_refused(self) -> None:
        """Padding or prefix masks would be ignored."""
        with pytest.raises(UnsupportedModelError, match="builds its own mask"):
            self.call(1, torch.zeros(1, 1, 3, 3))

    def test_an_unknown_argument_is_refused(self) -> None:
        """A position bias (T5) or chosen indices (sparse attention) would be ignored."""
        with pytest.raises(UnsupportedModelError, match="'position_bias'"):
            self.call(1, position_bias=torch.zeros(3))

    def test_a_sliding_layer_without_a_window_is_refused(self) -> None:
        """It would attend to everything."""
        with pytest.raises(UnsupportedModelError, match="sliding window"):
            self.call(0)

    def test_a_window_that_is_only_in_the_configuration_is_refused(self) -> None:
        """PhiMoE puts it into its mask, of which the hook sees nothing."""
        message = refusal(build("phimoe", sliding_window=6))
        assert "sliding window" in message
        for harmless in (None, 128):
            ModelRunner(build("phimoe", sliding_window=harmless), EngineConfig(num_blocks=8), greedy)

    def test_a_window_of_a_model_with_its_own_code_counts(self) -> None:
        """Catches full attention in a model whose configuration sets its window in a constructor."""
        model = build("phimoe", sliding_window=6)
        model.config.__class__ = type("Own", (type(model.config),), {"__module__": "own_code"})
        type(model.config).__dataclass_fields__ = {}
        assert "sliding window" in refusal(model)

    def test_a_window_that_the_model_does_not_know_is_none(self) -> None:
        """Catches a refusal because of a key that was left in a config.json and has no effect."""
        runner = ModelRunner(build("llama", sliding_window=6), EngineConfig(num_blocks=8), greedy)
        assert runner.vocab_size == VOCAB_SIZE

    def test_an_unknown_kind_of_layer_is_refused(self) -> None:
        """It would be taken for full attention."""
        with pytest.raises(UnsupportedModelError, match="'linear_attention'"):
            self.call(2)

    def test_a_layer_that_attends_twice_is_refused(self) -> None:
        """The second call would overwrite the first one's keys."""
        with pytest.raises(UnsupportedModelError, match="twice"):
            self.call(1, times=2)


def test_a_switched_model_run_by_somebody_else_says_so() -> None:
    """Without a step there is no pool; plain attention instead would hide the mistake."""
    model = build("llama")
    ModelRunner(model, EngineConfig(num_blocks=8), greedy)
    with pytest.raises(RuntimeError, match="set_forward_context"):
        model(torch.tensor([[1, 2]]))


def test_default_scale_is_one_over_the_root_of_the_head_size() -> None:
    """What transformers' own functions do when a model names no scale."""
    seen: list[AttentionParameters] = []

    class Recorder:
        def attend(self, module, query, key, value, parameters):
            seen.append(parameters)
            return query

    rows = torch.zeros(1, 2, 3, 16)
    with set_forward_context(Recorder()):
        paged_attention_hook(nn.Module(), rows, rows, rows, None)
    assert seen == [AttentionParameters(0.25)]
