"""Models as GGUF files, written with llama.cpp's own package as its converter writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
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
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


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
    is_llama = config.model_type == "llama"
    writer = gguf.GGUFWriter(path, architecture or config.model_type)
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
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if is_llama:
        writer.add_rope_dimension_count(head_size)
    else:
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer, way)
    else:
        writer.add_tokenizer_model("no_vocab")
    rope = config.rope_parameters
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, head_size, 2) / head_size)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        module, suffix = name.rsplit(".", 1)
        if module.startswith("model.layers."):
            _, _, layer, rest = module.split(".", 3)
            target = f"blk.{layer}.{LAYER[rest]}"
        else:
            target = WHOLE[module]
        data = weight.detach().float().numpy()
        stored = kind if data.ndim == 2 else Kind.F32
        count = heads.get(module.rsplit(".", 1)[-1]) if is_llama else None
        if count:  # llama.cpp rotates neighbours (0, 1), transformers halves (0, size / 2)
            data = data.reshape(count, 2, head_size // 2, -1).swapaxes(1, 2).reshape(data.shape)
        blocks = gguf.quants.quantize(data, stored)
        writer.add_tensor(f"{target}.{suffix}", blocks, raw_dtype=stored)
        values = gguf.quants.dequantize(blocks, stored)
        if count:
            values = values.reshape(count, head_size // 2, 2, -1).swapaxes(1, 2).reshape(data.shape)
        weight.data.copy_(weight.new_tensor(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
