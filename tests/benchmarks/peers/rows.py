"""What is compared: one row a line of the table, with its goal where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["greedy", "beam", "sample"]


@dataclass(frozen=True)
class Row:
    """One comparison: the same requests through several engines, in turn.

    Attributes:
        name: for `--rows`.
        title: for people.
        model, workload: names in materials.py.
        goals: peer -> the ratio (its time / ours) to reach; None: compared without a goal, in two rounds.
        pairs: how often each engine runs.
        dtype: of weights and KV cache.
        quantization: the linear layers' weights in 8 bits, by each engine's own method; w8a8: the
            activations, too.
        threads: 1 compares CPU seconds, 2 wall seconds.
        method: greedy, beam search of `width`, or `width` samples at temperature 1.
        max_num_seqs: sequences at a time.
        max_num_batched_tokens: tokens a step.
        num_blocks: size of the KV pool; None: larger than needed.
        block_size: ours; vLLM's kernel for CPUs needs a multiple of 32 and always gets 32.
        prefix_caching: on in both; emptied before each run.
        warm_up: so many of the requests run before the first measured run.
    """

    name: str
    title: str
    model: str
    workload: str
    goals: dict[str, float | None]
    pairs: int = 5
    dtype: str = "float32"
    quantization: Literal["none", "int8", "w8a8"] = "none"
    threads: int = 1
    method: Method = "greedy"
    width: int = 1
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    num_blocks: int | None = None
    block_size: int = 16
    prefix_caching: bool = False
    warm_up: int = 64

    @property
    def figure(self) -> Literal["cpu_s", "wall_s"]:
        """What is compared. CPU seconds survive a busy machine, but waiting threads inflate them."""
        return "cpu_s" if self.threads == 1 else "wall_s"

    @property
    def is_exact(self) -> bool:
        """Whether all engines must give the same tokens."""
        return self.method == "greedy" and self.dtype == "float32" and self.quantization == "none"


EVERY = {"padded": None, "continuous": None}  # transformers, both ways, without a goal
COMPILED = {"vllm-compiled": None}  # vLLM after torch.compile, which takes it about a minute
LARGE = {"pairs": 2, "warm_up": 8}  # a run takes most of a minute
LEVEL = 1.0  # at least as fast
OPENVINO = {"openvino": LEVEL}
ONE_REQUEST = {"openvino": LEVEL, "ort": LEVEL, "llama.cpp": LEVEL}

ROWS = [
    Row("tiny", "mixed, 3.4 M", "tiny", "mixed", {"vllm": 1.25, **COMPILED, **EVERY}),
    Row("tiny-2t", "mixed, 3.4 M", "tiny", "mixed", {"vllm": 1.25, **COMPILED}, threads=2),
    Row(
        "tiny-shared",
        "shared prefix, caching on, 3.4 M",
        "tiny",
        "shared",
        {"vllm": 1.25, **COMPILED, **EVERY},
        prefix_caching=True,
    ),
    Row(
        "tiny-long",
        "long prompts, budget 256, 3.4 M",
        "tiny",
        "long",
        {"vllm": 1.2, **COMPILED, "continuous": None},
        max_num_batched_tokens=256,
    ),
    Row(
        "tiny-pool",
        "mixed in 64 blocks of 32, 3.4 M",
        "tiny",
        "mixed",
        {"vllm": 1.25, **COMPILED},
        num_blocks=64,
        block_size=32,
    ),
    Row(
        "tiny-beam",
        "beam width 4, 32 ragged prompts, 3.4 M",
        "tiny",
        "ragged",
        {"padded": 2.0, "vllm": 3.0},
        pairs=3,
        method="beam",
        width=4,
        max_num_seqs=128,
        prefix_caching=True,
    ),
    Row(
        "tiny-n4",
        "4 samples, 32 ragged prompts, 3.4 M",
        "tiny",
        "ragged",
        {"padded": 2.0, "vllm": None},
        pairs=3,
        method="sample",
        width=4,
        max_num_seqs=128,
        prefix_caching=True,
    ),
    Row(
        "llama19m-2t",
        "uneven outputs, 18.9 M",
        "llama19m",
        "uneven",
        {"continuous": 3.0, "padded": 2.5},
        pairs=3,
        threads=2,
    ),
    Row(
        "m100-shared",
        "shared prefix, caching on, 134 M",
        "m100",
        "shared",
        {"vllm": 1.05, **COMPILED},
        prefix_caching=True,
    ),
    Row("m100", "mixed, 134 M", "m100", "mixed", {"vllm": 1.05, **COMPILED}, **LARGE),
    Row("m100-bf16", "mixed, 134 M", "m100", "mixed", {"vllm": 1.05}, dtype="bfloat16", **LARGE),
    Row("m100-2t", "mixed, 134 M", "m100", "mixed", {"vllm": 1.05}, threads=2, **LARGE),
    Row("tiny-openvino", "mixed, 3.4 M, beside OpenVINO", "tiny", "mixed", OPENVINO, pairs=3),
    Row(
        "tiny-openvino-shared",
        "shared prefix, caching on, 3.4 M, beside OpenVINO",
        "tiny",
        "shared",
        OPENVINO,
        pairs=3,
        prefix_caching=True,
    ),
    Row(
        "m100-openvino-shared",
        "shared prefix, caching on, 134 M, beside OpenVINO",
        "m100",
        "shared",
        OPENVINO,
        pairs=3,
        prefix_caching=True,
    ),
    Row("m100-openvino", "mixed, 134 M, beside OpenVINO", "m100", "mixed", OPENVINO, **LARGE),
    Row(
        "m100-openvino-bf16",
        "mixed, 134 M, beside OpenVINO",
        "m100",
        "mixed",
        OPENVINO,
        dtype="bfloat16",
        **LARGE,
    ),
    Row(
        "m100-openvino-int8",
        "mixed, 134 M, 8-bit weights, beside OpenVINO",
        "m100",
        "mixed",
        OPENVINO,
        quantization="int8",
        **LARGE,
    ),
    Row(
        "m100-openvino-w8a8",
        "mixed, 134 M, W8A8, beside OpenVINO",
        "m100",
        "mixed",
        OPENVINO,
        quantization="w8a8",
        **LARGE,
    ),
    Row(
        "m100-single",
        "one request, 134 M",
        "m100",
        "single",
        ONE_REQUEST,
        pairs=3,
    ),
    Row(
        "m100-single-bf16",
        "one request, 134 M",
        "m100",
        "single",
        {"openvino": LEVEL, "llama.cpp": LEVEL},
        pairs=3,
        dtype="bfloat16",
    ),
    Row(
        "m100-single-int8",
        "one request, 134 M, 8-bit weights",
        "m100",
        "single",
        {"openvino": LEVEL, "ort": LEVEL, "llama.cpp": 0.87},
        pairs=3,
        quantization="int8",
    ),
    Row(
        "m100-single-w8a8",
        "one request, 134 M, W8A8",
        "m100",
        "single",
        ONE_REQUEST,
        pairs=3,
        quantization="w8a8",
    ),
]
