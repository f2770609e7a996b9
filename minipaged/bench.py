"""`minipaged bench`: a workload file through the engine, and what it took.

A workload is a JSON list of {"prompt_token_ids": [...], "max_tokens": n}, all there at t = 0, decoded
greedily with EOS ignored. Latencies are those of `observability.metrics`; CPU seconds are the process's,
which is the figure that survives a busy machine when one thread is used.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from minipaged.decoding.params import SamplingParams
from minipaged.llm import LLM


class WorkloadError(ValueError):
    """The workload file cannot be used; the message says which entry and why."""


class WorkloadItem(TypedDict):
    """One request of a workload file."""

    prompt_token_ids: list[int]
    max_tokens: int


def read_workload(path: Path) -> list[WorkloadItem]:
    """Read and check a workload file.

    Raises:
        WorkloadError: no such file, no JSON list, or a bad entry.
    """
    try:
        items = json.loads(path.read_text())
    except OSError as error:
        raise WorkloadError(f"cannot read workload {path}: {error.strerror}") from error
    except ValueError as error:
        raise WorkloadError(f"workload {path} is not JSON: {error}") from error
    if not isinstance(items, list) or not items:
        raise WorkloadError(f"workload {path} must be a JSON list with at least one request")
    for number, item in enumerate(items):
        ids = item.get("prompt_token_ids") if isinstance(item, dict) else None
        if not isinstance(ids, list) or not ids or not isinstance(item.get("max_tokens"), int):
            raise WorkloadError(
                f'entry {number} of {path} must be {{"prompt_token_ids": [at least one id], "max_tokens": n}}'
            )
    return items


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed (nearest rank); 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def run_workload(llm: LLM, items: list[WorkloadItem], progress: bool = False) -> dict[str, Any]:
    """Run a workload once.

    Returns:
        The fields of `minipaged bench --json`, and "tokens": the generated ids per request.
    """
    engine = llm.engine
    engine.reset_metrics()
    prompts = [{"prompt_token_ids": item["prompt_token_ids"]} for item in items]
    params = [SamplingParams(temperature=0, max_tokens=item["max_tokens"], ignore_eos=True) for item in items]
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params, progress=progress)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    metrics = engine.metrics
    tokens = [output.outputs[0].token_ids for output in outputs]
    count = sum(map(len, tokens))
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "requests": len(items),
        "prompt_tokens": sum(len(item["prompt_token_ids"]) for item in items),
        "output_tokens": count,
        "out_tok_per_s": count / wall,
        "out_tok_per_cpu_s": count / cpu,
        "steps": metrics.steps,
        "ttft_ms_p50": 1e3 * percentile(metrics.time_to_first_token, 0.5),
        "ttft_ms_p95": 1e3 * percentile(metrics.time_to_first_token, 0.95),
        "itl_ms_p50": 1e3 * percentile(metrics.inter_token_latency, 0.5),
        "itl_ms_p99": 1e3 * percentile(metrics.inter_token_latency, 0.99),
        "preemptions": metrics.num_preemptions,
        "prefix_cache_hit_tokens": metrics.prefix_cache_hits,
        "peak_kv_blocks": metrics.peak_kv_blocks,
        "kv_waste": metrics.kv_waste,
        "tokens": tokens,
    }
