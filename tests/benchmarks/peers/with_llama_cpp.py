"""llama.cpp as a driver, in an environment of its own: one request after another. See serve.py.

The environment needs `llama-cpp-python`, built on this machine, and `gguf` and `safetensors` to convert a
checkpoint the first time.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import llama_cpp
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file
from serve import Stopwatch, serve

KIND = {
    ("float32", "none"): Kind.F32,
    ("bfloat16", "none"): Kind.BF16,
    ("float32", "int8"): Kind.Q8_0,  # quantizes the rows, too
    ("float32", "w8a8"): Kind.Q8_0,
}

LAYER = {  # transformers' name -> llama.cpp's
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def start(task: SimpleNamespace) -> Any:
    """Load the model; one run per call."""
    kind = KIND[task.dtype, task.quantization]
    cache = llama_cpp.GGML_TYPE_F32 if kind is Kind.F32 else llama_cpp.GGML_TYPE_F16
    model = llama_cpp.Llama(
        str(converted(Path(task.model), kind)),
        n_ctx=max(len(one.prompt_token_ids) + one.max_tokens for one in task.requests),
        n_threads=task.threads,
        n_threads_batch=task.threads,
        type_k=cache,
        type_v=cache,
        flash_attn=False,  # it would change float32 tokens
        verbose=False,
    )

    def run(requests: list[Any] = task.requests) -> dict[str, Any]:
        tokens = []
        with Stopwatch() as watch:
            for one in requests:
                model.reset()
                answer = model.generate(one.prompt_token_ids, top_k=1, temp=0.0, repeat_penalty=1.0)
                tokens.append([int(token) for token in islice(answer, one.max_tokens)])
        return watch.figures(tokens)

    run(task.requests[: task.warm_up])
    return run, {"versions": {"llama-cpp-python": llama_cpp.__version__}}


def converted(checkpoint: Path, kind: Kind) -> Path:
    """The checkpoint, a Llama without a tokenizer, as GGUF beside it; made if there is none."""
    path = checkpoint.with_name(f"{checkpoint.name}-{kind.name.lower()}.gguf")
    if path.exists():
        return path
    config = json.loads((checkpoint / "config.json").read_text())
    weights = load_file(checkpoint / "model.safetensors")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    head_size = config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads["q_proj"])
    writer.add_head_count_kv(heads["k_proj"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, source: str) -> None:
        data = weights[source]
        if count := heads.get(source.split(".")[-2]):
            # llama.cpp rotates neighbours (0, 1), transformers halves (0, size / 2).
            data = data.reshape(count, 2, head_size // 2, -1).swapaxes(1, 2).reshape(data.shape)
        stored = kind if data.ndim == 2 else Kind.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(data, stored), raw_dtype=stored)

    add("token_embd", "model.embed_tokens.weight")
    add("output_norm", "model.norm.weight")
    add("output", "lm_head.weight")
    for layer in range(config["num_hidden_layers"]):
        for theirs, ours in LAYER.items():
            add(f"blk.{layer}.{ours}", f"model.layers.{layer}.{theirs}.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


if __name__ == "__main__":
    serve(start)
