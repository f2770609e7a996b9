"""Every setting of the engine in one frozen dataclass, validated when it is built.

The command line and `LLM(...)` take exactly these fields; the help text of a field is its
`metadata["help"]`. A config never changes afterwards. No torch.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal, get_args, get_type_hints

PageGrowthName = Literal["on_demand", "chunked", "reserve"]
PreemptionMode = Literal["auto", "recompute", "swap"]
AttentionBackend = Literal["auto", "torch", "cpp", "triton"]
Device = Literal["auto", "cpu", "cuda", "mps"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "int8", "int4", "w8a8"]
SHORT_DTYPES = {"float": "float32", "half": "float16"}


class ConfigError(ValueError):
    """A setting has a value that cannot work; the message names the field, the value and the fix."""


DRAFT_ROWS = 16
"""Drafts fill a step up to so many rows; with more, it becomes compute-bound."""

MOST = 2**63 - 1
"""The largest count or number of bytes: a 64-bit integer holds no more."""


def _option(default: Any, help: str, least: int | None = None, most: int = MOST) -> Any:
    return field(default=default, metadata={"help": help, "least": least, "most": most})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine; raises ConfigError for a value out of its range."""

    block_size: int = _option(16, "Tokens in a KV block.", least=1)
    num_blocks: int | None = _option(None, "KV blocks in the pool; overrides kv_cache_memory.", least=1)
    kv_cache_memory: int | None = _option(
        None, "Bytes for the KV pool. Default: 1 GiB on a CPU; on a GPU see gpu_memory_utilization.", least=1
    )
    gpu_memory_utilization: float = _option(
        0.9, "Share of the GPU's memory for weights, activations and the KV pool together."
    )
    max_num_seqs: int = _option(256, "Sequences that may hold blocks at the same time.", least=1)
    max_num_batched_tokens: int = _option(2048, "Maximum number of tokens that one step computes.", least=1)
    max_model_len: int | None = _option(
        None,
        "Longest sequence, prompt and output together. Default: the length the model was trained for.",
        least=2,
    )
    enable_chunked_prefill: bool = _option(
        True,
        "Mix prompts, cut to the token budget, with decodes. When off, prefills run first, on their own.",
    )
    enable_prefix_caching: bool = _option(
        True, "Keep full blocks and share them between prompts with equal prefixes."
    )
    preemption_mode: PreemptionMode = _option(
        "auto", "What happens to the blocks of a preempted request; auto picks the cheaper option."
    )
    swap_space: int = _option(
        4 << 30,
        "Maximum bytes of host memory for swapped-out blocks (never more than the pool has).",
        least=0,
    )
    page_growth: PageGrowthName = _option(
        "on_demand",
        "How a request gets its blocks: as its tokens need them, in grants of 16, or all at admission.",
    )
    num_speculative_tokens: int = _option(
        0,
        "Draft tokens that a step verifies (15 at most); 0: no speculative decoding. Texts stay the same.",
        least=0,
        most=DRAFT_ROWS - 1,
    )
    speculative_model: str | None = _option(
        None,
        "Draft model: a smaller model with the same vocabulary. Default: none, but prompt lookup (n-gram).",
    )
    tensor_parallel_size: int = _option(1, "Ranks that share the heads and MLPs of every layer.", least=1)
    pipeline_parallel_size: int = _option(
        1, "Stages that share the layers. The number of ranks is this times tensor_parallel_size.", least=1
    )
    attention_backend: AttentionBackend = _option(
        "auto",
        "Kernels to use. auto means triton on a GPU, cpp on a CPU with a compiler, and torch otherwise.",
    )
    enable_cuda_graphs: bool = _option(
        True, "Replay decode steps as CUDA graphs. This has no effect on a CPU."
    )
    async_scheduling: bool = _option(
        True,
        "With CUDA graphs, begin the next decode step before the host has read the tokens of the last one. "
        "This has no effect on a CPU, with several ranks, or with draft tokens.",
    )
    device: Device = _option(
        "auto", "Where the model runs. auto means cuda if there is a GPU, and cpu otherwise."
    )
    dtype: DType = _option(
        "auto", "Data type of the weights and the KV cache. auto means the checkpoint's type."
    )
    quantization: Quantization = _option(
        "none", "Quantise the weights of linear layers (CPU only); w8a8: 8-bit activations, too."
    )
    revision: str | None = _option(None, "Branch, tag or commit of a model on the hub. Default: main.")
    generation_config: Literal["auto", "none"] = _option(
        "auto", "Whether the model's generation_config.json supplies default sampling and end tokens."
    )
    trust_remote_code: bool = _option(False, "Run the code that comes with the model's files, if any.")
    seed: int = _option(0, "Seed for requests that do not set one.")
    disable_log_stats: bool = _option(False, "Turn the periodic log line off.")

    def __post_init__(self) -> None:
        dtype: Any = (
            str(self.dtype).removeprefix("torch.") if type(self.dtype).__name__ == "dtype" else self.dtype
        )
        if isinstance(dtype, str):
            object.__setattr__(self, "dtype", SHORT_DTYPES.get(dtype, dtype))
        if isinstance(self.speculative_model, PathLike):
            object.__setattr__(self, "speculative_model", str(self.speculative_model))
        hints = get_type_hints(type(self))
        for option in fields(self):
            name, value = option.name, getattr(self, option.name)
            if isinstance(value, Real) and not isinstance(value, bool | int | float):  # NumPy's numbers
                value = int(value) if isinstance(value, Integral) else float(value)
                object.__setattr__(self, name, value)
            _check_type(name, value, hints[name])
            least, most = option.metadata["least"], option.metadata["most"]
            if least is not None and value is not None and not least <= value <= most:
                bound = f"at least {least}" if value < least else f"at most {most}"
                raise ConfigError(f"{name} is {value}; give {bound}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; give a share in (0, 1]"
            )
        if self.speculative_model == "":
            raise ConfigError("speculative_model is ''; give a model directory or a hub id")
        if self.speculative_model is not None and not self.num_speculative_tokens:
            raise ConfigError(
                f"speculative_model is {self.speculative_model!r}, but num_speculative_tokens is 0; "
                "give how many tokens it drafts at once, e.g. 4"
            )

    def check_states(self) -> None:
        """Raise ConfigError if these settings do not go with layers that keep a recurrent state."""
        if self.num_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, but layers with a recurrent state "
                "cannot take a wrong token back; give 0"
            )

    @property
    def max_sampling_rows(self) -> int:
        """The most rows of a step that need logits for sampling."""
        most = max(self.max_num_seqs, DRAFT_ROWS if self.num_speculative_tokens else 0)
        return min(most, self.max_num_batched_tokens)

    @property
    def num_ranks(self) -> int:
        """Processes that compute a step."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


def config_from(options: dict[str, Any]) -> EngineConfig:
    """Build a config from keyword arguments; for an unknown key, ConfigError names the nearest field."""
    known = [option.name for option in fields(EngineConfig)]
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, [*known, "model", "tokenizer"], n=1)
            hint = f"did you mean {near[0]}?" if near else "drop it"
            raise ConfigError(f"unknown setting {key!r}; {hint}")
    return EngineConfig(**options)


def _check_type(name: str, value: Any, hint: Any) -> None:
    choices = get_args(hint)
    if choices and all(isinstance(choice, str) for choice in choices):
        if value not in choices:
            raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
        return
    allowed = choices or (hint,)
    # bool is an int to Python, but `block_size=True` is a mistake.
    is_bool = isinstance(value, bool)
    accepted = (*allowed, int) if float in allowed else allowed
    if (is_bool and bool not in allowed) or not isinstance(value, accepted):
        kinds = {int: "an integer", float: "a number", str: "a string", bool: "True or False"}
        raise ConfigError(f"{name} is {value!r}; give {' or '.join(kinds.get(t, 'None') for t in allowed)}")
