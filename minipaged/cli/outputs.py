"""What `generate` prints: texts, with their log-probabilities, and what they cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table

from minipaged.decoding.params import BeamSearchParams, DecodingParams, SamplingParams
from minipaged.metrics import draft_summary
from minipaged.text_io import counted, without_controls

if TYPE_CHECKING:
    from minipaged.engine import Engine
    from minipaged.outputs import CompletionOutput, RequestOutput


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
        "draft_tokens": metrics.draft_tokens,
        "accepted_tokens": metrics.accepted_tokens,
        "prefix_cache_hit_tokens": metrics.prefix_cache_hits,
        "preemptions": metrics.num_preemptions,
    }


def outputs_json(outputs: Sequence[RequestOutput], engine: Engine) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "outputs": [
            {
                "prompt": output.prompt,
                "prompt_token_ids": output.prompt_token_ids,
                "completions": [_completion_json(completion) for completion in output.outputs],
                **({} if output.error is None else {"error": output.error}),
            }
            for output in outputs
        ],
        "stats": stats(engine),
    }


def _completion_json(completion: CompletionOutput) -> dict[str, Any]:
    always = ("text", "token_ids", "finish_reason", "cumulative_logprob")
    fields = {name: getattr(completion, name) for name in (*always, "stop_reason", "score")}
    fields["logprobs"] = None if completion.logprobs is None else token_logprobs(completion)
    return {name: value for name, value in fields.items() if name in always or value is not None}


def token_logprobs(completion: CompletionOutput) -> list[dict[str, Any]]:
    """Each token's id, text, log-probability and rank; under "top", the likeliest and itself."""
    rows = []
    for token_id, among in zip(completion.token_ids, completion.logprobs or ()):
        entries: dict[int, dict[str, Any]] = {
            number: {"token_id": number, "token": own.decoded_token, "logprob": own.logprob, "rank": own.rank}
            for number, own in among.items()
        }
        rows.append(entries[token_id] | {"top": sorted(entries.values(), key=lambda entry: entry["rank"])})
    return rows


def print_outputs(outputs: Sequence[RequestOutput], engine: Engine, params: DecodingParams) -> None:
    """Print texts and their memory use: in boxes on a terminal, otherwise only the plain texts."""
    if sys.stdout.isatty():
        console = Console(highlight=False, emoji=False)
        for completion, prompt, subtitle in _completions(outputs, params):
            before, after = (escape(without_controls(part)) for part in (prompt, completion.text))
            console.print(Panel(f"[bold]{before}[/bold]{after}", subtitle=subtitle, subtitle_align="right"))
            if completion.logprobs is not None:
                console.print(_logprobs_table(completion, "  " if console.width >= 60 else "\n"))
    else:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        # (What reads JSON, or a choice, from a pipe has no use for the prompt before it.)
        is_plain = params.structured_outputs is None
        for number, (completion, prompt, subtitle) in enumerate(_completions(outputs, params)):
            print("\n" * bool(number) + (prompt if is_plain else "") + completion.text)
            for row in _logprobs_rows(completion, "  "):
                print("\t".join(row))
            console.print(subtitle)
    print_account(engine, params, console)


def print_account(engine: Engine, params: DecodingParams, console: Console) -> None:
    """Memory and speed in words."""
    account = stats(engine)
    of = " of all beams, kept or dropped," if isinstance(params, BeamSearchParams) else ""
    console.print(
        f"[bold]{account['peak_kv_blocks']}[/bold] of {account['num_blocks']:,} KV blocks of "
        f"{counted(account['block_size'], 'token')} at peak; "
        f"on average {account['kv_waste']:.1%} of the held slots were empty"
    )
    console.print(
        f"[bold]{counted(account['output_tokens'], 'token')}[/bold]{of} in {account['seconds']:.2f} s, "
        f"{account['out_tok_per_s']:.0f} tokens/s, {counted(account['preemptions'], 'preemption')}"
    )
    if account["sharing_saving"] > 0:
        console.print(
            f"sharing saved [bold]{account['sharing_saving']:.1%}[/bold] of the blocks "
            f"({account['blocks_copied']} copied on write)"
        )
    if engine.config.num_speculative_tokens:
        drafts = draft_summary(account["accepted_tokens"], account["draft_tokens"])
        if not isinstance(params, SamplingParams) or params.num_samples > 1:
            drafts += ", which only --n 1 without beams gets"
        console.print(f"{drafts}; {counted(account['steps'], 'step')}")


def _completions(
    outputs: Sequence[RequestOutput], params: DecodingParams
) -> Iterator[tuple[CompletionOutput, str, str]]:
    """Each completion, its prompt, and how it ended."""
    for output in outputs:
        for completion in output.outputs:
            number = f" {completion.index + 1}" if len(output.outputs) > 1 else ""
            score = "" if completion.score is None else f", score {completion.score:.3f}"
            end, count = str(completion.finish_reason), len(completion.token_ids)
            if end == "length" and count == params.max_tokens:
                end = f"stopped at {counted(count, 'token')} (--max-tokens)"
            yield completion, output.prompt or "", f"completion{number}, {end}{score}"


def _logprobs_rows(completion: CompletionOutput, apart: str) -> Iterator[tuple[str, str, str, str]]:
    """For each token: itself, log-probability, rank and the likeliest tokens, as text."""
    for entry in token_logprobs(completion):
        top = apart.join(f"{_quoted(other)} {other['logprob']:.2f}" for other in entry["top"])
        yield _quoted(entry), f"{entry['logprob']:.4f}", f"{entry['rank']}", top


def _quoted(entry: dict[str, Any]) -> str:
    return json.dumps(entry["token_id"] if entry["token"] is None else entry["token"], ensure_ascii=False)


def _logprobs_table(completion: CompletionOutput, apart: str) -> Table:
    numbers = (Column(name, justify="right") for name in ("logprob", "rank"))
    table = Table("token", *numbers, "likeliest", box=None)
    for row in _logprobs_rows(completion, apart):
        table.add_row(*(escape(without_controls(cell)) for cell in row))
    return table
