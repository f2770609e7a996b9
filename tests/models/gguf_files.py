"""Models as GGUF files, written with llama.cpp's own package as its converter writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import nn

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
SCALES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,),
}
"""Where a block has its scales, in half precision, if gguf can read this kind and not write it."""


def write_gguf(
    model: nn.Module,
    path: Path,
    kind: Kind = Kind.F32,
    tokenizer: Any = None,
    way: str = "gpt-2",
    add: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    architecture: str = "",
) -> None:
    """Matrices are of the kind, the rest is in F32; the model gets the values that are stored.

    Args:
        tokenizer: a byte-level one; `way` is how it splits texts.
        add: adds more fields.
        architecture: another one than the model's.
    """
    config = model.config
    architecture = architecture or config.model_type.removesuffix("_text")
    is_llama, is_gemma = config.model_type == "llama", config.model_type.startswith("gemma")
    writer = gguf.GGUFWriter(path, architecture)
    add(writer)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    if architecture != "gemma2":
        writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if is_llama or architecture == "phi3":
        writer.add_rope_dimension_count(head_size)
    else:
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.max_position_embeddings)
    if is_gemma or architecture == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, way)
    elif "tokenizer.ggml.model" not in writer.kv_data[0]:
        writer.add_tokenizer_model("no_vocab")
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, head_size, 2) / head_size)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        module, suffix = name.rsplit(".", 1)
        if module.startswith("model.layers."):
            _, _, layer, rest = module.split(".", 3)
            target = f"blk.{layer}.{({**LAYER, **GEMMA} if is_gemma else LAYER)[rest]}"
        else:
            target = WHOLE[module]
        data = weight.detach().float().numpy()
        stored = kind if data.ndim == 2 else Kind.F32
        offset = 1 if is_gemma and data.ndim == 1 else 0  # Gemma multiplies by 1 + weight
        count = heads.get(module.rsplit(".", 1)[-1]) if is_llama else None
        if count:  # llama.cpp rotates neighbours (0, 1), transformers halves (0, size / 2)
            data = data.reshape(count, 2, head_size // 2, -1).swapaxes(1, 2).reshape(data.shape)
        blocks = (
            _random_blocks(data.shape, stored)
            if stored in SCALES
            else gguf.quants.quantize(data + offset, stored)
        )
        writer.add_tensor(f"{target}.{suffix}", blocks, raw_dtype=stored)
        values = gguf.quants.dequantize(blocks, stored) - offset
        if count:
            values = values.reshape(count, head_size // 2, 2, -1).swapaxes(1, 2).reshape(data.shape)
        weight.data.copy_(weight.new_tensor(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _random_blocks(shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    *rows, size = gguf.quants.quant_shape_to_byte_shape(shape, kind)
    size_of_block = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = np.random.default_rng(size).integers(0, 256, (*rows, size), np.uint8)
    for start in SCALES[kind]:
        scales = blocks.reshape(-1, size_of_block)[:, start : start + 2]
        scales[:] = np.frombuffer(np.float16(0.0001).tobytes(), np.uint8)
    return blocks


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, way: str) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(way)
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    )
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    writer.add_add_bos_token(True)
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
