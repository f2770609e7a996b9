"""OpenVINO GenAI's continuous batching as a driver, in an environment of its own. See serve.py.

The environment needs `openvino-genai`, and `optimum-intel` to convert a checkpoint the first time. Tokens go
in and out as numbers, so that no tokenizer is converted.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import openvino
import openvino_genai
from serve import Stopwatch, serve

PRECISION = {"float32": "f32", "bfloat16": "bf16"}
WEIGHTS = {"none": "fp32", "int8": "int8", "w8a8": "int8"}
ROW_GROUP = {"none": 0, "int8": 0, "w8a8": 32}
"""Elements of a row that share a scale with 8-bit weights; 0: the row keeps its precision."""


def start(task: SimpleNamespace) -> Any:
    """Load the model; one run per call, with a pipeline of its own: its prefix cache cannot be emptied."""
    limits = openvino_genai.SchedulerConfig()
    limits.max_num_seqs = task.max_num_seqs
    limits.max_num_batched_tokens = task.max_num_batched_tokens
    limits.enable_prefix_caching = task.prefix_caching
    limits.cache_size = 1  # GB
    precision = PRECISION[task.dtype]
    settings = {
        "INFERENCE_NUM_THREADS": task.threads,
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": ROW_GROUP[task.quantization],
    }
    model = converted(Path(task.model), WEIGHTS[task.quantization])

    def params_of(request: Any) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.do_sample = False
        config.eos_token_id = -1  # none
        config.ignore_eos = True
        return config

    def pipeline() -> Any:
        return openvino_genai.ContinuousBatchingPipeline(str(model), limits, "CPU", settings)

    def run(requests: list[Any] = task.requests, pipe: Any = None) -> dict[str, Any]:
        pipe = pipe or (pipeline() if task.prefix_caching else warm)
        times: list[list[float]] = [[] for _ in requests]
        tokens: list[list[int]] = [[] for _ in requests]
        with Stopwatch() as watch:
            handles = []
            for number, one in enumerate(requests):
                ids = openvino.Tensor(numpy.array([one.prompt_token_ids], numpy.int64))
                handles.append(pipe.add_request(number, ids, params_of(one)))
                if number == 0 and task.prefix_caching:
                    pipe.step()  # prompts that are added at once find nothing in the cache
            while pipe.has_non_finished_requests():
                pipe.step()
                now = time.perf_counter()
                for number, handle in enumerate(handles):
                    if handle.can_read():
                        new = handle.read()[0].generated_ids
                        tokens[number] += new
                        times[number] += [now] * len(new)
        return watch.figures([[int(token) for token in row] for row in tokens], times)

    warm = pipeline()
    run(task.requests[: task.warm_up], warm)
    return run, {"versions": {"openvino-genai": openvino_genai.__version__}}


def converted(checkpoint: Path, weights: str) -> Path:
    """The checkpoint in OpenVINO's form, beside it; made if there is none."""
    path = checkpoint.with_name(f"{checkpoint.name}-openvino-{weights}")
    if not (path / "openvino_model.xml").exists():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"]
        options = ["--task", "text-generation-with-past", "--disable-convert-tokenizer"]
        subprocess.run(
            [*command, "-m", checkpoint, "--weight-format", weights, *options, path],
            check=True,
            stdin=subprocess.DEVNULL,
        )
    return path


if __name__ == "__main__":
    serve(start)
