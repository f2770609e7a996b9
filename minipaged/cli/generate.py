"""`minipaged generate`: texts, and a short account of the memory they took."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from typer import Exit, Option

from minipaged.cli.options import AsJson, Model, Use, load
from minipaged.cli.streams import read_standard_input
from minipaged.decoding.params import BeamSearchParams, DecodingParams, ParamsError, SamplingParams
from minipaged.decoding.structured import StructuredOutputsParams
from minipaged.prompts import split_prompt
from minipaged.text_io import check_writable, read_text

if TYPE_CHECKING:
    from minipaged.engine import Engine
    from minipaged.outputs import RequestOutput

DEFAULT_PROMPT = "Once upon a time"

ACCOUNT = (
    "[bold]{peak_kv_blocks}[/bold] of {num_blocks:,} KV blocks of {block_size} tokens at peak, "
    "{kv_waste:.1%} of their slots empty",
    "[bold]{output_tokens}[/bold] tokens in {seconds:.2f} s, {out_tok_per_s:.0f} tokens/s, "
    "{preemptions} preemptions",
    "sharing saved [bold]{sharing_saving:.1%}[/bold] of the blocks ({blocks_copied} copied on write)",
)


def generate(
    prompt: Annotated[list[str] | None, Option(help="A prompt; may be given several times.")] = None,
    prompt_file: Annotated[
        str | None, Option(help="A file, a prompt a line; - reads standard input.")
    ] = None,
    model: Model = None,
    max_tokens: Annotated[int, Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float | None, Option(help="0 is greedy. [default: 0; 1 if --n > 1]")] = None,
    top_p: Annotated[float, Option(help="Sample from the likeliest tokens with this probability.")] = 1.0,
    top_k: Annotated[int, Option(help="Sample from so many likeliest tokens; 0: all.")] = 0,
    min_p: Annotated[float, Option(help="Drop tokens below this share of the likeliest.")] = 0.0,
    n: Annotated[int, Option("--n", help="Completions per prompt.")] = 1,
    beam_width: Annotated[int | None, Option(help="Beam search with so many beams.")] = None,
    length_penalty: Annotated[
        float | None, Option(help="Beam search: above 0 favours long texts. [default: 1]")
    ] = None,
    stop: Annotated[list[str] | None, Option(help="Text that ends a completion.")] = None,
    json_schema: Annotated[str | None, Option(help="JSON schema to follow: a file, or the schema.")] = None,
    regex: Annotated[str | None, Option(help="Regular expression to match as a whole.")] = None,
    choice: Annotated[list[str] | None, Option(help="A text to choose; give it for each.")] = None,
    stream: Annotated[bool, Option("--stream", help="Print the text of one prompt as it comes.")] = False,
    as_json: AsJson = False,
    trace: Annotated[Path | None, Option(help="Write what each step did to this file.")] = None,
    show_blocks: Annotated[
        bool, Option("--show-blocks", help="Show the KV pool at its fullest and where the tokens lay.")
    ] = False,
    use: Use = None,
    options: dict[str, Any] = {},  # noqa: B006 (filled by the decorator)
) -> None:
    """Complete prompts."""
    prompts = list(prompt or ())
    if prompt_file is not None:
        prompts += _read_prompts(prompt_file)
    prompts = prompts or [DEFAULT_PROMPT]
    for text in prompts:
        split_prompt(text)
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_p": top_p if top_p != 1 else None,
        "top_k": top_k if top_k not in (0, -1) else None,
        "min_p": min_p or None,
        "stop": tuple(stop or ()) or None,
        "structured_outputs": _structured(json_schema, regex, choice),
    }
    sampling = {name: value for name, value in sampling.items() if value is not None}
    params: DecodingParams
    if beam_width is not None:
        params = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens)
        params = replace(params, length_penalty=1.0 if length_penalty is None else length_penalty)
        for name, value in sampling.items():
            raise ParamsError(
                f"beam_width is {beam_width}, which contradicts {name} {value}; drop one of them"
            )
        if not 1 <= n <= beam_width:
            raise ParamsError(
                f"n is {n} with beam_width {beam_width}; give 1 to {beam_width} completions to return"
            )
        params = replace(params, num_return_sequences=n)
    else:
        default = 1.0 if n > 1 else 0.0
        params = SamplingParams(**{"temperature": default, **sampling}, n=n, max_tokens=max_tokens)
        for name in ("top_p", "top_k", "min_p"):
            if params.is_greedy and name in sampling:
                raise ParamsError(
                    f"{name} is {sampling[name]}, but temperature {params.temperature} is greedy; "
                    "give --temperature above 0, or drop it"
                )
        if length_penalty is not None:
            raise ParamsError(
                f"length_penalty is {length_penalty} without beams; give --beam-width, or drop it"
            )
    if stream:
        given = {"--json": as_json, "--beam-width": beam_width is not None, "--n": n != 1}
        for flag in (flag for flag, there in given.items() if there):
            raise ParamsError(f"--stream prints one completion as it comes, {flag} more; drop one of them")
        if len(prompts) != 1:
            raise ParamsError(f"--stream prints one prompt's text, not that of {len(prompts)}; drop it")
    check_writable("trace", trace)
    llm = load(model, options, use)
    from minipaged.viewer.highlights import Highlights
    from minipaged.viewer.terminal import print_blocks
    from minipaged.viewer.trace import TraceWriter

    writer = TraceWriter(trace, llm.engine) if trace is not None else None
    seen = Highlights(llm.engine) if show_blocks else None
    outputs: list[RequestOutput] = []
    if isinstance(params, SamplingParams) and stream:
        for piece in llm.stream(prompts[0], params):
            print(piece, end="", flush=True)
        print()
    else:
        outputs = llm.generate(prompts, params, use_tqdm=not as_json)
        if as_json:
            print(json.dumps(outputs_json(outputs, llm.engine), indent=2))
        else:
            print_outputs(outputs, llm.engine)
    if seen is not None:
        print_blocks(seen, outputs, Console(stderr=as_json, highlight=False))
    if writer is not None:
        writer.close()
    failed = [(output.request_id, output.error) for output in outputs if output.error is not None]
    for request_id, reason in failed:
        print(f"minipaged: request {request_id} failed: {reason}", file=sys.stderr)
    if failed:
        raise Exit(1)


def _structured(
    json_schema: str | None, regex: str | None, choice: list[str] | None
) -> StructuredOutputsParams | None:
    if json_schema is None and regex is None and choice is None:
        return None
    if json_schema is not None and not json_schema.lstrip().startswith("{"):
        json_schema = read_text("JSON schema", json_schema)
    return StructuredOutputsParams(json=json_schema, regex=regex, choice=choice)


def _read_prompts(name: str) -> list[str]:
    text = read_standard_input() if name == "-" else read_text("prompt file", name)
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"prompt file {name} has no prompt; give one a line")
    return prompts


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
    """What `--json` prints."""
    shown = ("text", "token_ids", "finish_reason", "cumulative_logprob")
    return {
        "outputs": [
            {
                "prompt": output.prompt,
                "prompt_token_ids": output.prompt_token_ids,
                "completions": [{name: getattr(done, name) for name in shown} for done in output.outputs],
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
            text = f"[bold]{escape(output.prompt or '')}[/bold]{escape(completion.text)}"
            subtitle = f"completion{number}, {completion.finish_reason}{score}"
            console.print(Panel(text, subtitle=subtitle, subtitle_align="right"))
    account = stats(engine)
    for line in ACCOUNT[: 3 if account["sharing_saving"] > 0 else 2]:
        console.print(line.format_map(account))
