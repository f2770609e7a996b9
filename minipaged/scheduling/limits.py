"""Requests that can never run are refused, with the numbers; preemptions and early ends are logged.

The warnings name the settings to change, as the tuning guide of vLLM does ("Optimization and tuning").
"""

from __future__ import annotations

import logging
from typing import Protocol

from minipaged.memory import KVManager
from minipaged.scheduling.request import Request

logger = logging.getLogger(__name__)

ADVICE = (
    "This can affect the end-to-end performance. Increase num_blocks or kv_cache_memory (on GPUs, "
    "gpu_memory_utilization, tensor_parallel_size or pipeline_parallel_size), or decrease max_num_seqs or "
    "max_num_batched_tokens. "
)


class Limits(Protocol):
    """What the check reads of a scheduler."""

    kv: KVManager
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class RequestTooLongError(ValueError):
    """The request can never run; the message has the numbers."""


def check_can_ever_run(request: Request, limits: Limits) -> None:
    """Raise RequestTooLongError if the request could not run even alone in an empty pool."""
    prompt, width = len(request.prompt_token_ids), request.method.num_sequences
    if prompt >= limits.max_model_len:
        raise RequestTooLongError(
            f"the prompt has {prompt} tokens, but prompt and output together may have "
            f"{limits.max_model_len} (max_model_len), and at least 1 must be output; shorten the prompt"
        )
    needed = limits.kv.blocks_for_admission(prompt, request.max_num_tokens)
    pool = limits.kv.allocator.num_blocks
    if needed > pool:
        raise RequestTooLongError(
            f"the request needs {needed} KV blocks of {limits.kv.block_size} tokens to be admitted "
            f"(prompt of {prompt} tokens, at most {request.max_num_tokens} with output), but the "
            f"pool has {pool}; raise num_blocks or kv_cache_memory, or ask for less"
        )
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if width > (most := getattr(limits, name)):
            raise RequestTooLongError(
                f"the request runs {width} sequences at once, more than {name} {most} allows; raise it, or "
                "ask for fewer"
            )


def warn_preempted(request: Request, mode: str, reason: str, total: int) -> None:
    """Log a preemption; `total` is the cumulative count. The first comes with advice."""
    logger.warning(
        "Request %s is preempted by %s because there is not enough KV cache space (%s). %s"
        "total_cumulative_preemption_cnt=%d",
        request.request_id,
        mode,
        reason,
        ADVICE if total == 1 else "",
        total,
    )


def warn_failed(request: Request) -> None:
    """Log that a request has no valid next token."""
    logger.warning("Request %s ends with finish reason error: %s", request.request_id, request.error)


def warn_outgrown(request: Request, kv: KVManager) -> None:
    """Log that a request which ran alone ends early."""
    lengths = [len(sequence.token_ids) for sequence in request.sequences]
    logger.warning(
        "Request %s ends with finish reason length: its %s tokens need more than the pool's %d KV blocks of "
        "%d tokens. Raise num_blocks or kv_cache_memory (on a GPU, gpu_memory_utilization).",
        request.request_id,
        # (Not the sum: what they share takes its blocks once.)
        f"{len(lengths)} sequences of up to {max(lengths)}" if len(lengths) > 1 else max(lengths),
        kv.allocator.num_blocks,
        kv.block_size,
    )
