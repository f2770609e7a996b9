"""`minipaged generate`: texts, and a summary of the memory they took."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from typer import Argument, Exit, Option

from minipaged.cli import sampling
from minipaged.cli.options import AsJson, Model, Use, files_of, load
from minipaged.cli.streams import has_unread_input, held_log, read_standard_input
from minipaged.cli.wrapping import wrap_for_output
from minipaged.decoding.params import BeamSearchParams, DecodingParams, ParamsError, SamplingParams
from minipaged.metrics import draft_summary
from minipaged.prompts import named, split_prompt
from minipaged.text_io import check_writable, counted, read_text, without_controls

if TYPE_CHECKING:
    from minipaged.engine import Engine
    from minipaged.outputs import CompletionOutput, RequestOutput
    from minipaged.scheduling import Request

DEFAULT_PROMPT = "Once upon a time"


def generate(
    options: dict[str, Any],
    texts: Annotated[
        list[str] | None, Argument(metavar="[PROMPT]...", help=f"Prompts. [default: {DEFAULT_PROMPT}]")
    ] = None,
    prompt: Annotated[list[str] | None, Option(help="A prompt; may be repeated.")] = None,
    prompt_file: Annotated[
        str | None, Option(help="A file with one prompt per line; - reads standard input.")
    ] = None,
    model: Model = None,
    max_tokens: Annotated[int, Option(help="Maximum number of tokens to generate.")] = 64,
    temperature: Annotated[
        float | None, Option(help="0 means greedy decoding. [default: 0; 1 if --n > 1]")
    ] = None,
    top_p: sampling.TopP = 1.0,
    top_k: sampling.TopK = 0,
    min_p: sampling.MinP = 0.0,
    repetition_penalty: sampling.RepetitionPenalty = 1.0,
    presence_penalty: sampling.PresencePenalty = 0.0,
    frequency_penalty: sampling.FrequencyPenalty = 0.0,
    n: Annotated[int, Option("--n", help="Completions per prompt.")] = 1,
    beam_width: Annotated[int | None, Option(help="Use beam search with this many beams.")] = None,
    length_penalty: Annotated[
        float | None, Option(help="For beam search: values above 0 favour long texts. [default: 1]")
    ] = None,
    stop: sampling.Stop = None,
    stop_token_id: sampling.StopTokenId = None,
    min_tokens: sampling.MinTokens = 0,
    ignore_eos: sampling.IgnoreEos = False,
    logprobs: Annotated[
        int | None, Option(help="Show each token's log-probability, and those of this many likeliest tokens.")
    ] = None,
    json_schema: Annotated[
        str | None, Option(help="JSON schema that the text must follow, given as a file or as text.")
    ] = None,
    regex: Annotated[str | None, Option(help="Regular expression that the whole text must match.")] = None,
    choice: Annotated[
        list[str] | None, Option(help="An allowed text; repeat the option for each one.")
    ] = None,
    stream: Annotated[
        bool, Option("--stream", help="Print the text of one prompt as it is generated.")
    ] = False,
    as_json: AsJson = False,
    trace: Annotated[Path | None, Option(help="Write a trace of every step to this file.")] = None,
    show_blocks: Annotated[
        bool, Option("--show-blocks", help="Show the KV pool at its fullest, and where the tokens were.")
    ] = False,
    use: Use = None,
) -> None:
    """Complete prompts."""
    prompts = [*(texts or ()), *(prompt or ())]
    if prompt_file is not None:
        prompts += _read_prompts(prompt_file)
    if not prompts:
        prompts = [DEFAULT_PROMPT]
        if has_unread_input():
            fix = "to read prompts from standard input, give --prompt-file -"
            print(f"minipaged: completing {DEFAULT_PROMPT!r}; {fix}", file=sys.stderr)
    for index, text in enumerate(prompts):
        with named(index, prompts):
            split_prompt(text)
    given = sampling.set_values(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=stop,
        stop_token_ids=stop_token_id,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        structured_outputs=sampling.structured(json_schema, regex, choice),
    )
    params = sampling.decoding_params(given, n, beam_width, length_penalty)
    if stream:
        several = {
            "--json": as_json,
            "--beam-width": beam_width is not None,
            "--n": n != 1,
            "--logprobs": logprobs is not None,
        }
        if flag := next((flag for flag, is_given in several.items() if is_given), None):
            raise ParamsError(
                f"--stream prints one completion as it comes, but {flag} gives more; drop one of them"
            )
        if len(prompts) != 1:
            raise ParamsError(f"--stream prints the text of one prompt, not of {len(prompts)}; drop --stream")
    check_writable("trace", trace, prompt_file, json_schema, *files_of(use))
    # (A line of statistics would land in the middle of the text.)
    llm = load(model, {"disable_log_stats": True, **options} if stream else options, use)
    from minipaged.viewer.highlights import Highlights
    from minipaged.viewer.terminal import print_blocks
    from minipaged.viewer.trace import TraceWriter

    writer = TraceWriter(trace, llm.engine) if trace is not None else None
    seen = Highlights(llm.engine) if show_blocks else None
    if isinstance(params, SamplingParams) and stream:
        touched: list[Request] = []  # in each step the one request, which `stream` does not return
        llm.engine.on_committed.append(lambda plan, result, requests: touched.extend(requests))
        with held_log():
            _print_pieces(llm.stream(prompts[0], params))
        outputs = [llm.engine.output(touched[-1])]
        console = Console(stderr=not sys.stdout.isatty(), highlight=False, soft_wrap=True)
        print_account(llm.engine, params, console)
    else:
        outputs = llm.generate(prompts, params)
        if as_json:
            print(json.dumps(outputs_json(outputs, llm.engine), indent=2))
        else:
            print_outputs(outputs, llm.engine, params)
    if seen is not None:
        print_blocks(seen, outputs, Console(stderr=as_json, highlight=False))
    if writer is not None:
        writer.close()
    num_cut = sum(end.finish_reason == "length" for output in outputs for end in output.outputs)
    if num_cut and params.structured_outputs is not None:
        fix = f"raise --max-tokens (it is {max_tokens})"
        print(f"minipaged: {counted(num_cut, 'text')} cut off before the end; {fix}", file=sys.stderr)
    failed = [(output.request_id, output.error) for output in outputs if output.error is not None]
    for request_id, reason in failed:
        said = without_controls(reason, sys.stderr.isatty())
        print(f"minipaged: request {request_id} failed: {said}", file=sys.stderr)
    if failed:
        raise Exit(1)


def _read_prompts(name: str) -> list[str]:
    text = read_standard_input() if name == "-" else read_text("prompt file", name)
    # (Not `splitlines`, which also ends a line at form feeds and at Unicode's separators.)
    prompts = [line.rstrip("\n") for line in io.StringIO(text, newline=None) if line.strip()]
    if not prompts:
        what = "standard input" if name == "-" else f"prompt file {name}"
        raise ValueError(f"{what} has no prompt; give one per line")
    return prompts


def _print_pieces(pieces: Iterable[str]) -> None:
    wrap = wrap_for_output()
    try:
        for piece in pieces:
            print(wrap.feed(piece), end="", flush=True)
    finally:  # (a word that was held back is shown however the text ends)
        print(wrap.rest(), flush=True)


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
    table = Table("token", box=None)
    table.add_column("logprob", justify="right")
    table.add_column("rank", justify="right")
    table.add_column("likeliest")
    for row in _logprobs_rows(completion, apart):
        table.add_row(*(escape(without_controls(cell)) for cell in row))
    return table
