"""What the commands show: texts and a short account of what memory they took, the figures of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from minipaged.engine import Engine
from minipaged.outputs import RequestOutput


def stats(engine: Engine) -> dict[str, Any]:
    """Memory and speed of everything the engine has run."""
    metrics, kv = engine.metrics, engine.scheduler.kv
    seconds = max(metrics.e2e_request_latency, default=0.0)
    return {
        "prompt_tokens": metrics.prompt_tokens,
        "output_tokens": metrics.generation_tokens,
        "seconds": seconds,
        "out_tok_per_s": metrics.generation_tokens / seconds if seconds else 0.0,
        "steps": metrics.steps,
        "block_size": kv.block_size,
        "num_blocks": kv.allocator.num_blocks,
        "peak_kv_blocks": metrics.peak_kv_blocks,
        "kv_waste": metrics.kv_waste,
        "sharing_saving": metrics.sharing_saving,
        "blocks_copied": metrics.blocks_copied,
        "prefix_cache_hit_tokens": metrics.prefix_cache_hits,
        "preemptions": metrics.num_preemptions,
    }


def outputs_json(outputs: Sequence[RequestOutput], engine: Engine) -> dict[str, Any]:
    """The object that `minipaged generate --json` prints."""
    return {
        "outputs": [
            {
                "prompt": output.prompt,
                "prompt_token_ids": output.prompt_token_ids,
                "completions": [
                    {
                        "text": completion.text,
                        "token_ids": completion.token_ids,
                        "finish_reason": completion.finish_reason,
                        "cumulative_logprob": completion.cumulative_logprob,
                    }
                    for completion in output.outputs
                ],
            }
            for output in outputs
        ],
        "stats": stats(engine),
    }


def print_outputs(outputs: Sequence[RequestOutput], engine: Engine) -> None:
    """Print texts and the account of memory."""
    console = Console(highlight=False)
    for output in outputs:
        for completion in output.outputs:
            number = f" {completion.index + 1}" if len(output.outputs) > 1 else ""
            score = "" if completion.score is None else f", score {completion.score:.3f}"
            console.print(
                Panel(
                    f"[bold]{escape(output.prompt or '')}[/bold]{escape(completion.text)}",
                    subtitle=f"completion{number}, {completion.finish_reason}{score}",
                    subtitle_align="right",
                )
            )
    account = stats(engine)
    lines = [
        f"[bold]{account['peak_kv_blocks']}[/bold] of {account['num_blocks']:,} KV blocks of "
        f"{account['block_size']} tokens at peak, {account['kv_waste']:.1%} of their slots empty",
        f"[bold]{account['output_tokens']}[/bold] tokens in {account['seconds']:.2f} s, "
        f"{account['out_tok_per_s']:.0f} tokens/s, {account['preemptions']} preemptions",
    ]
    if account["sharing_saving"] > 0:
        lines.append(
            f"sharing saved [bold]{account['sharing_saving']:.1%}[/bold] of the blocks "
            f"({account['blocks_copied']} copied on write)"
        )
    for line in lines:
        console.print(line)


def print_figures(title: str, figures: Mapping[str, float], seconds_of_parts: Mapping[str, float]) -> None:
    """Print what `minipaged bench` measured and, if there are any, the parts of a step, longest first."""
    table = Table("figure", "value", title=title)
    for name, value in figures.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
    if seconds_of_parts:
        table = Table("part of a step", "CPU s", "share")
        total = sum(seconds_of_parts.values())
        for part, seconds in sorted(seconds_of_parts.items(), key=lambda item: -item[1]):
            table.add_row(part, f"{seconds:.3f}", f"{seconds / total:.1%}")
        Console().print(table)
