"""Chips, models and constants: every number that the cost model uses, with its source.

A decode step is memory-bound (all weights, and the KV cache of the batch), a prefill compute-bound. So a chip
is a few rates (bytes/s, FLOP/s, links) and a model a few sizes (parameters, KV bytes per token). All figures
use the same `CONSTANTS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

GB = 10**9
GIB = 2**30

T = TypeVar("T")


class UnknownNameError(ValueError):
    """A name that is not in a table; the message lists the names that are."""


class DoesNotFitError(ValueError):
    """The model does not fit on the chips; the message has the numbers."""


@dataclass(frozen=True)
class Chip:
    """One accelerator, and where the numbers are from."""

    name: str
    memory: int  # bytes
    bandwidth: float  # of its memory, bytes/s
    flops: float  # dense 16-bit multiply-add peak, FLOP/s
    host_link: float  # to host memory, bytes/s one way
    peer_link: float  # to the other chips, bytes/s one way; 0 if it cannot be joined with others
    source: str


_CHIPS = (
    Chip("a100-40gb", 40 * GB, 1.555e12, 312e12, 25e9, 300e9, "NVIDIA A100 data sheet, SXM 40 GB"),
    Chip("a100-80gb", 80 * GB, 2.039e12, 312e12, 25e9, 300e9, "NVIDIA A100 data sheet, SXM 80 GB"),
    Chip("h100", 80 * GB, 3.35e12, 989e12, 50e9, 450e9, "NVIDIA H100 data sheet, SXM, dense"),
    Chip("h200", 141 * GB, 4.8e12, 989e12, 50e9, 450e9, "NVIDIA H200 data sheet, SXM, dense"),
    Chip("a10g", 24 * GB, 600e9, 70e12, 25e9, 0, "AWS G5 (A10G): 24 GB, 600 GB/s, 70 TFLOP/s"),
    Chip("laptop", 16 * GB, 40e9, 0.2e12, 40e9, 0, "two DDR4-3200 channels less losses; AVX2, 4 cores"),
)
CHIPS = {chip.name: chip for chip in _CHIPS}


@dataclass(frozen=True)
class Model:
    """A decoder; `max_model_len` is the longest sequence it was trained for, in tokens."""

    name: str
    num_parameters: float
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    source: str

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights, 16 bit each."""
        return 2 * self.num_parameters

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of one token in all layers, 16 bit each (OPT-13B: 800 KiB)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2


_MODELS = (
    Model("opt-13b", 13e9, 40, 5120, 40, 40, 128, 2048, "OPT paper, table 1; 26 GB in paper table 1"),
    Model("opt-66b", 66e9, 64, 9216, 72, 72, 128, 2048, "OPT paper, table 1; 132 GB in paper table 1"),
    Model("opt-175b", 173e9, 96, 12288, 96, 96, 128, 2048, "OPT paper, table 1; 346 GB in paper table 1"),
    Model("llama-13b", 13e9, 40, 5120, 40, 40, 128, 2048, "LLaMA paper, table 2"),
    Model("llama-3-8b", 8.03e9, 32, 4096, 32, 8, 128, 8192, "Llama 3 model card and config.json"),
    Model("llama-3-70b", 70.6e9, 80, 8192, 64, 8, 128, 8192, "Llama 3 model card and config.json"),
)
MODELS = {model.name: model for model in _MODELS}


def _from(value: float, source: str) -> float:
    return cast(float, field(default=value, metadata={"source": source}))


@dataclass(frozen=True)
class Constants:
    """Values that no data sheet gives: seconds, shares and tokens. The metadata give the source of each."""

    bandwidth_efficiency: float = _from(0.80, "assumed: the share of the bandwidth that large reads reach")
    flops_efficiency: float = _from(
        0.70, "assumed: the share of the peak that large 16-bit matrix multiplications reach"
    )
    step_seconds: float = _from(
        0.011,
        "fitted once, to the knee of Orca (Max) in Fig. 12 a: 7 requests x 338 tokens at 0.5 to 0.6 req/s is "
        "35 to 41 ms a step; the host time of a step (Python, launches) of a 2023 engine",
    )
    sequence_seconds: float = _from(
        80e-6,
        "fitted once, to Fig. 14 and 16: host time of a step for each sequence in it (input, block table, "
        "sample, text, in Python)",
    )
    worker_seconds: float = _from(
        0.006,
        "fitted once, to the range of Fig. 12 c: host time of a step for each additional chip, a remote call "
        "with the plan and its answer; `minipaged simulate` leaves it out",
    )
    paged_read_tokens: float = _from(
        3.5,
        "from Fig. 18 a: looking up a KV block costs as much as reading this many of its tokens, 22 % at "
        "block size 16 (published: 20 to 26 %)",
    )
    transfer_seconds: float = _from(
        6e-6, "assumed: one asynchronous copy; a block moves as 2 x layers copies"
    )
    all_reduce_seconds: float = _from(
        25e-6, "assumed: the latency of a small all-reduce among 8 chips on NVLink"
    )


CONSTANTS = Constants()


@dataclass(frozen=True)
class Deployment:
    """A model on one or more chips, tensor parallel."""

    model: Model
    chip: Chip
    num_chips: int = 1
    constants: Constants = CONSTANTS

    def __post_init__(self) -> None:
        if self.num_chips < 1 or self.model.num_kv_heads % self.num_chips:
            heads = self.model.num_kv_heads
            shares = [str(n) for n in range(1, heads + 1) if heads % n == 0]
            raise ValueError(
                f"num_chips is {self.num_chips}; the {heads} KV heads of {self.model.name} can be "
                f"divided among {', '.join(shares[:-1])} or {shares[-1]} chips"
            )
        if self.num_chips > 1 and not self.chip.peer_link:
            raise DoesNotFitError(f"{self.chip.name} has no link to other chips; use only 1")
        if self.model.weight_bytes > self.memory:
            raise DoesNotFitError(
                f"{self.model.name} needs {self.model.weight_bytes / GB:.3g} GB for its weights, but "
                f"{self.num_chips} x {self.chip.name} has {self.memory / GB:.3g} GB; use more or larger chips"
            )

    @property
    def memory(self) -> int:
        """Bytes on all chips together."""
        return self.num_chips * self.chip.memory

    def num_kv_slots(self, utilization: float = 0.9) -> int:
        """Tokens whose K and V fit beside the weights in this share of memory; `DoesNotFitError` if none."""
        slots = int((self.memory * utilization - self.model.weight_bytes) // self.model.kv_bytes)
        if slots < 1:
            raise DoesNotFitError(
                f"the weights of {self.model.name} ({self.model.weight_bytes / GB:.0f} GB) leave no room for "
                f"a KV cache in {utilization:.0%} of {self.memory / GB:.0f} GB; raise "
                "gpu_memory_utilization or use more chips"
            )
        return slots


def find(kind: str, table: Mapping[str, T], name: str, hint: str = "") -> T:
    """The entry of that name, or `UnknownNameError` with the known names and a hint."""
    if name not in table:
        raise UnknownNameError(f"unknown {kind} {name!r}; choose one of {', '.join(table)}{hint}")
    return table[name]
