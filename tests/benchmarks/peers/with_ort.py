"""ONNX Runtime GenAI as a driver, in an environment of its own: one request after another. See serve.py.

The environment needs `onnxruntime-genai`, and torch, transformers and `onnx-ir` to convert a checkpoint the
first time. Its batches are padded and its paged attention refuses CPUs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnxruntime_genai
from serve import Stopwatch, serve

PRECISION = {"none": "fp32", "int8": "int8", "w8a8": "int8"}  # int8 quantizes the rows, too
END_TOKEN = 1023  # some token has to end a text; should it be generated, `run` notices


def start(task: SimpleNamespace) -> Any:
    """Load the model; one run per call."""
    if task.dtype != "float32":
        raise ValueError(f"dtype is {task.dtype}; on a CPU ONNX Runtime GenAI computes in float32")
    config = onnxruntime_genai.Config(str(converted(Path(task.model), PRECISION[task.quantization])))
    options = {"session_options": {"intra_op_num_threads": task.threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    model = onnxruntime_genai.Model(config)

    def run(requests: list[Any] = task.requests) -> dict[str, Any]:
        tokens = []
        with Stopwatch() as watch:
            for one in requests:
                prompt = one.prompt_token_ids
                params = onnxruntime_genai.GeneratorParams(model)
                params.set_search_options(max_length=len(prompt) + one.max_tokens, do_sample=False)
                generator = onnxruntime_genai.Generator(model, params)
                generator.append_tokens(prompt)
                while not generator.is_done():
                    generator.generate_next_token()
                tokens.append([int(token) for token in generator.get_sequence(0)[len(prompt) :]])
                assert len(tokens[-1]) == one.max_tokens, f"token {END_TOKEN} was generated"
        return watch.figures(tokens)

    run(task.requests[: task.warm_up])
    return run, {"versions": {"onnxruntime-genai": onnxruntime_genai.__version__}}


def converted(checkpoint: Path, precision: str) -> Path:
    """The checkpoint as ONNX, beside it; made if there is none."""
    path = checkpoint.with_name(f"{checkpoint.name}-ort-{precision}")
    if not (path / "genai_config.json").exists():
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        subprocess.run(
            [*builder, "-i", checkpoint, "-o", path, "-p", precision, "-e", "cpu"],
            check=True,
            stdin=subprocess.DEVNULL,
        )
        config = path / "genai_config.json"
        fields = json.loads(config.read_text())
        fields["model"]["eos_token_id"] = END_TOKEN
        config.write_text(json.dumps(fields))
    return path


if __name__ == "__main__":
    serve(start)
