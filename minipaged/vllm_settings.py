"""vLLM's settings under vLLM's names, so that scripts carry over.

A setting that this engine has under another name is translated. A setting that it does not have is accepted
with values that have no effect, and refused with others, because these would be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minipaged.config import ConfigError

ONLY: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "distributed_executor_backend": (None, "uni"),
    "kv_cache_dtype": ("auto",),
    "load_format": ("auto", "hf", "safetensors"),
    "tokenizer_mode": ("auto", "hf"),
    "skip_tokenizer_init": (False,),
    "tokenizer_revision": (None,),
    "hf_overrides": (None, {}),
    "hf_token": (None, True),
    "task": ("auto", "generate"),
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "model_impl": ("auto", "transformers"),
    "cpu_offload_gb": (0,),
    "enable_lora": (False,),
    "limit_mm_per_prompt": (None, {}),
    "speculative_config": (None,),
    "scheduling_policy": ("fcfs",),
    "logits_processors": (None, []),
}
"""Setting -> the values that ask for nothing."""

ANY = {
    "compilation_config",
    "disable_custom_all_reduce",
    "max_logprobs",
    "max_seq_len_to_capture",
    "structured_outputs_config",
}
"""Settings that change speed or limits of vLLM's own machinery, never a text: ignored."""

RENAMED = {"num_gpu_blocks_override": "num_blocks", "kv_cache_memory_bytes": "kv_cache_memory"}


def own_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as fields of `EngineConfig`; unknown ones stay, to be refused there.

    Raises:
        ConfigError: a setting of vLLM with a value that would have no effect here.
    """
    own: dict[str, Any] = {}
    for name, value in options.items():
        if name in ONLY:
            # (True is 1 to Python, but not to the person who writes it.)
            if not any(
                value == one and isinstance(value, bool) == isinstance(one, bool) for one in ONLY[name]
            ):
                fix = " or ".join(map(repr, ONLY[name]))
                raise ConfigError(f"{name} is {value!r}, which is not supported; give {fix}, or drop it")
        elif name == "enforce_eager":
            own |= {"enable_cuda_graphs": False} if value else {}
        elif name == "generation_config" and value == "vllm":
            own[name] = "none"
        elif name in ("seed", "quantization") and value is None:
            continue
        elif name not in ANY:
            own[RENAMED.get(name, name)] = value
    return own
