"""Tiny random models of many architectures: `build(name)` gives the same weights every time.

The weights are larger than at initialisation, so that attention is far from uniform, logits differ by several
units and greedy decoding does not settle on one token: a forgotten scale, softcap, sink or window shows.
"""

import math

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

VOCAB_SIZE = 101

_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_WIDE_HEADS = {**_SMALL, "head_dim": 16}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GPT = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_GPTJ = {**_GPT, "rotary_dim": 4}
_FALCON = {name: value for name, value in _SMALL.items() if name != "num_key_value_heads"}
_BLOOM = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 4,
    "seq_length": 128,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_MPT = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "n_layers": 3,
    "n_heads": 4,
    "max_seq_len": 128,
    "tie_word_embeddings": False,
}
_SIX_HEADS = {"num_attention_heads": 6, "hidden_size": 48}  # slopes that are not powers of two
_FOUR_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

# name -> (model type of transformers, its configuration)
SUPPORTED = {
    "llama": ("llama", _SMALL),
    "llama_llama3_rope": ("llama", {**_SMALL, "rope_parameters": _LLAMA3}),
    "llama_yarn_rope": ("llama", {**_SMALL, "rope_parameters": _YARN}),
    "opt": (
        "opt",
        {**_SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": 4},
    ),
    "gpt2": ("gpt2", {**_GPT, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", _SMALL),
    "qwen3": ("qwen3", _WIDE_HEADS),
    "mistral_sliding": ("mistral", {**_SMALL, "sliding_window": 6}),
    "gemma": ("gemma", _WIDE_HEADS),
    "gemma2": (
        "gemma2",
        {**_WIDE_HEADS, "sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 20},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_WIDE_HEADS,
            "num_hidden_layers": 3,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma4": (  # the two kinds of layers have different head sizes, the last two no K/V weights of their own
        "gemma4_text",
        {
            **_WIDE_HEADS,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "phi3": ("phi3", _SMALL),
    "phi4_mini": (
        "phi3",
        {
            **_SMALL,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
        },
    ),
    "smollm3": ("smollm3", {**_SMALL, "num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "gpt_neox": ("gpt_neox", {**_SMALL, "rotary_pct": 0.5}),
    "mixtral": ("mixtral", {**_SMALL, "num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", {**_WIDE_HEADS, **_FOUR_EXPERTS, "num_experts": 4, "norm_topk_prob": True}),
    "gpt_oss": (
        "gpt_oss",
        {
            **_WIDE_HEADS,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_SMALL,
            **_FOUR_EXPERTS,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 12,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
        },
    ),
    "olmo2": ("olmo2", _SMALL),
    "cohere": ("cohere", {**_SMALL, "use_qk_norm": True, "logit_scale": 1.0}),
    "stablelm": ("stablelm", {**_SMALL, "partial_rotary_factor": 0.5}),
    "nemotron": ("nemotron", {**_SMALL, "partial_rotary_factor": 0.5}),
    "granite": (
        "granite",
        {
            **_SMALL,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 1.7,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.6,
        },
    ),
    "starcoder2": ("starcoder2", {**_SMALL, "sliding_window": 7}),
    "llama4": (
        "llama4_text",
        {
            **_WIDE_HEADS,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 1, 1, 0],
            "attn_temperature_tuning": True,
            "floor_scale": 4,
            "attn_scale": 0.5,
        },
    ),
    "gpt_neo": (  # no scale; a local layer's token sees 6 tokens
        "gpt_neo",
        {
            **_SMALL,
            "num_hidden_layers": 4,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 6,
        },
    ),
    "gptj": ("gptj", _GPTJ),
    "codegen": ("codegen", _GPTJ),
    "openai_gpt": ("openai-gpt", {**_GPT, "n_layer": 2, "tie_word_embeddings": False}),
    "xglm": (
        "xglm",
        {
            **{"vocab_size": VOCAB_SIZE, "d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4},
            **{"max_position_embeddings": 128, "eos_token_id": None, "tie_word_embeddings": False},
        },
    ),
    "gpt_neox_japanese": ("gpt_neox_japanese", {**_SMALL, "rotary_emb_base": 100.0}),
    "falcon": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon_multi_query": ("falcon", {**_FALCON, "bias": True}),
    "falcon_all_heads": ("falcon", {**_FALCON, "multi_query": False, "parallel_attn": False}),
    "falcon_alibi": (
        "falcon",
        {**_FALCON, **_SIX_HEADS, "alibi": True, "multi_query": False, "parallel_attn": False},
    ),
    "falcon_alibi_grouped": (
        "falcon",
        {**_FALCON, "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon_alibi_multi_query": ("falcon", {**_FALCON, "alibi": True}),
    "bloom": ("bloom", {**_BLOOM, "apply_residual_connection_post_layernorm": True}),
    "bloom_six_heads": ("bloom", {**_BLOOM, "n_head": 6, "hidden_size": 48}),
    "mpt": ("mpt", _MPT),
    "mpt_six_heads": (
        "mpt",
        {**_MPT, "n_heads": 6, "d_model": 48, "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.5}},
    ),
}

FUSED = [
    *("llama", "llama_yarn_rope", "mistral_sliding", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"),
    *("phi3", "phi4_mini", "smollm3", "granite"),
]
"""Their layers are fused, and computed in one call when they decode on a CPU."""

# For the tests of refusals.
OTHERS = {
    "deepseek_v32": ("deepseek_v32", SUPPORTED["deepseek_v3"][1]),
    "phimoe": ("phimoe", {**_SMALL, "num_local_experts": 4}),
}


def build(name: str, **changes: object) -> nn.Module:
    """The model called `name`, eager attention, fp32, eval mode; `changes` go into its configuration."""
    model_type, options = {**SUPPORTED, **OTHERS}[name]
    config = CONFIG_MAPPING[model_type](**{**options, **changes})
    # (Eager attention of transformers' Falcon adds its biases twice.)
    attention = "sdpa" if getattr(config, "alibi", False) else "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    enlarge_weights(model)
    return model


def enlarge_weights(model: nn.Module) -> None:
    """Draw all parameters anew: embeddings of size 1, matrices that double what they multiply."""
    generator = torch.Generator().manual_seed(0)
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter is embeddings or name.endswith("sinks"):
                parameter.copy_(noise)
            elif parameter.dim() >= 2:
                parameter.copy_(2 * noise / math.sqrt(min(parameter.shape[-2:])))
            else:  # norms and biases
                parameter.add_(0.2 * noise)
