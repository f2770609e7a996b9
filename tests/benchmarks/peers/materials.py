"""Random models and random requests, the same on every machine: made once, then read from a folder.

Token ids of the requests lie in [3, 1000), so that one workload fits every vocabulary here.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

# Weights are larger than usual: at 0.02 a random model repeats one token, and any engine gets that right.
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "initializer_range": 0.06,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1024,
    },
    "llama19m": {
        "initializer_range": 0.05,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1152,
    },
    "m100": {
        "initializer_range": 0.04,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 32000,
    },
}


def model_directory(name: str, folder: Path) -> Path:
    """The checkpoint `folder/name`; it is made if there is none."""
    path = folder / name
    if not (path / "config.json").exists():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = LlamaConfig(
            max_position_embeddings=8192, tie_word_embeddings=False, **special, **MODELS[name]
        )
        LlamaForCausalLM(config).save_pretrained(path)
        _byte_tokenizer().save_pretrained(path)
    return path


def _byte_tokenizer() -> Any:
    """A token a byte: nothing here reads text, but vLLM's beam search asks for a tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def workload(name: str, folder: Path | None) -> list[dict[str, Any]]:
    """The requests of `workload_NAME.json` in the folder, or drawn here: those of the published tables."""
    if folder is not None and (path := folder / f"workload_{name}.json").exists():
        return json.loads(path.read_text())
    rng = random.Random({"mixed": 20230917, "shared": 7, "long": 11}.get(name, name))
    prefix = [] if name in ("mixed", "long") else _ids(rng, 256)  # (shared by the prompts of "shared" only)
    match name:
        case "mixed":
            return [_request(_ids(rng, rng.randint(16, 256)), rng.randint(8, 128)) for _ in range(64)]
        case "shared":
            return [_request(prefix + _ids(rng, rng.randint(8, 32)), rng.randint(8, 16)) for _ in range(64)]
        case "long":
            return [
                _request(_ids(rng, 1500 if number % 8 == 0 else rng.randint(16, 64)), 64)
                for number in range(32)
            ]
        case "single":
            sizes = [(64, 256)]
        case "ragged":
            sizes = [(rng.randint(16, 256), 32) for _ in range(32)]
        case "uneven":
            sizes = [(rng.randint(16, 200), rng.randint(32, 128)) for _ in range(32)]
        case _:
            raise ValueError(f"there is no workload {name!r}; see rows.py")
    return [_request(_ids(rng, prompt), output) for prompt, output in sizes]


def _request(prompt_token_ids: list[int], max_tokens: int) -> dict[str, Any]:
    return {"prompt_token_ids": prompt_token_ids, "max_tokens": max_tokens}


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 1000) for _ in range(count)]
