"""`minipaged generate`: texts, and a summary of the memory they took."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Argument, Exit, Option

from minipaged.cli import sampling
from minipaged.cli.options import AsJson, Model, Use, files_of, load
from minipaged.cli.outputs import outputs_json, print_account, print_outputs
from minipaged.cli.streams import has_unread_input, held_log, read_standard_input
from minipaged.cli.wrapping import wrap_for_output
from minipaged.decoding.params import ParamsError, SamplingParams
from minipaged.prompts import named, split_prompt
from minipaged.text_io import check_writable, counted, read_text, without_controls

if TYPE_CHECKING:
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
