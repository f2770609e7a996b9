"""Every causal model type that the installed transformers knows, as a tiny random model: `build_small(type)`.

`SIZES` makes a default configuration small; `SPECIAL` holds what a single type needs besides.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minipaged.execution import loading, model_config
from minipaged.execution.attention import UnsupportedModelError
from minipaged.execution.load_errors import in_one_line
from tests.models.driver import CUTS, Driver, logits_in_cuts, own_logits
from tests.models.zoo import VOCAB_SIZE, enlarge_weights

TOLERANCE = 1e-4
TOLERANCE_WITH_STATES = 1e-3
"""transformers' own layers round as differently when they compute chunks and single tokens."""

CAUSAL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

IMAGE_TEXT_TYPES = (
    "internvl",
    "llava",
    "mistral3",
    "paligemma",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "smolvlm",
)
"""Models for images and text that are not listed as causal."""

_WIDTHS = "hidden_size d_model n_embd emb_dim embedding_size word_embed_proj_dim input_embedding_size"
_DEPTHS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers "
    "num_decoder_layers"
)
_HEADS = (
    "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
    "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"
)
_INNER = (
    "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dff d_inner dim_ff ffn_hidden_size "
    "moe_intermediate_size shared_expert_intermediate_size intermediate_size_mlp expert_ffn_hidden_size "
    "ffn_hidden_size moe_shared_expert_intermediate_size shared_intermediate_size"
)
_LENGTHS = "max_position_embeddings n_positions n_ctx max_seq_len context_length max_sequence_length"
_EXPERTS = "num_experts n_routed_experts num_local_experts moe_num_experts"
_ACTIVE_EXPERTS = "num_experts_per_tok num_experts_per_token moe_topk moe_k"

SIZES: dict[str, int] = {
    **dict.fromkeys(_WIDTHS.split(), 32),
    **dict.fromkeys(_DEPTHS.split(), 4),
    **dict.fromkeys(_HEADS.split(), 4),
    **dict.fromkeys(_INNER.split(), 48),
    **dict.fromkeys(_LENGTHS.split(), 128),
    **dict.fromkeys(_EXPERTS.split(), 4),
    **dict.fromkeys(_ACTIVE_EXPERTS.split(), 2),
    "vocab_size": VOCAB_SIZE,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "sliding_window": 6,
    "attention_chunk_size": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "is_decoder": True,
    "depth": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
}
"""Name of a setting -> small value, wherever a configuration has that setting."""

_HALF = {"head_dim": 8}
_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_ROPE_OF_THREE = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
_LATENT = {"num_key_value_heads": 4}
_ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2}
_PART_ROTATED = {"rotary_dim": 4}
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bailing_hybrid": {**_LATENT, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "codegen": _PART_ROTATED,
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE),
    },
    "deepseek_v2": {**_LATENT, "topk_method": "greedy", "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": _LATENT,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 100.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8},
    "glm4_moe_lite": _LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 6},
    "gptj": _PART_ROTATED,
    "granitemoehybrid": _ALTERNATING,
    "hunyuan_v1_dense": _HALF,
    "hunyuan_v1_moe": _HALF,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_ALTERNATING, **_LATENT},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": _LATENT,
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "minicpm3": _LATENT,
    "ministral": _HALF,
    "nemotron": {**_HALF, "num_key_value_heads": 2},
    "qwen3_next": _ALTERNATING,
    "qwen2_5_vl_text": _ROPE_OF_THREE,
    "qwen2_vl_text": _ROPE_OF_THREE,
    "reformer": {"axial_pos_embds": False, "is_decoder": True},
    "sarvam_mla": _LATENT,
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "youtu": _LATENT,
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
}
"""Model type -> settings of its own."""


def small_config(model_type: str) -> PreTrainedConfig:
    """The type's default configuration with small sizes, in its parts, too."""
    cls = CONFIG_MAPPING[model_type]
    return cls(**_small(cls()))


def _small(config: PreTrainedConfig) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            options[name] = type(value)(**_small(value))
        elif name in SIZES and (value is not None or name.endswith("intermediate_size")):
            options[name] = SIZES[name]
        elif name in ("bos_token_id", "decoder_start_token_id") and value is not None:
            options[name] = 1
        elif name == "pad_token_id" and value is not None:
            options[name] = 0
        elif name == "eos_token_id":
            options[name] = None
    return {**options, **SPECIAL.get(config.model_type, {})}


def build_small(model_type: str) -> nn.Module:
    """A model of this type with large random weights: equal ones every time."""
    config = small_config(model_type)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        auto = loading.auto_class(config)
        model = auto.from_config(config, attn_implementation="eager").float().eval()
    enlarge_weights(model)
    return model


class Verdict(NamedTuple):
    """What became of a type: it runs, or else `reason`."""

    outcome: Literal["runs", "refused", "not built", "differs"]
    reason: str = ""


@torch.inference_mode()
def judge(model_type: str) -> Verdict:
    """Compare it with eager attention, on the block pool, with fused layers and repacked weights."""
    try:
        reference, model = build_small(model_type), build_small(model_type)
    except Exception as error:  # configurations and models refuse small sizes in many ways
        return Verdict("not built", in_one_line(error))
    has_limit = model_config.trained_length(model_config.text_config(model)) is not None
    try:
        driver = Driver(model, **({} if has_limit else {"max_model_len": 64}))
    except UnsupportedModelError as error:
        return Verdict("refused", str(error).partition(" is not supported: ")[2])
    driver.runner.optimize()
    for ids, computed in logits_in_cuts(driver, CUTS):
        expected = own_logits(reference, ids)
        error = (computed - expected).abs().max() / expected.abs().max()
        tolerance = TOLERANCE if driver.runner.kept_states is None else TOLERANCE_WITH_STATES
        if not error < tolerance:
            return Verdict("differs", f"by {error:.1e} of the largest logit")
    return Verdict("runs")
