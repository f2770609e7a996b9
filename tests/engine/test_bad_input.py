"""What a user may type wrong, as one table: each row is answered in one line that names value and fix."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from minipaged import LLM, BeamSearchParams, EngineConfig, SamplingParams
from minipaged.execution.model_runner import ModelRunner
from minipaged.viewer.replay import read_trace
from minipaged.workload import read_workload
from tests.engine.test_cli import call
from tests.engine.toy_model import toy_engine

FIX = re.compile(
    r"\b(give|define|choose|drop|raise|lower|use|set|mean|permit|widen|remove|save|fix|change|read|see|shorten|draw)\b"
)
"""Words with which a message says what to do."""

VOCABULARY = 2048
HUGE = "99999999999999999999999"
NAN, INF = math.nan, math.inf
HEADER = {"format": "minipaged-trace", "version": 2, "block_size": 16, "num_blocks": 4, "num_host_blocks": 0}
STEP = {"step": 0, "num_waiting": 0}
ITEM = {"prompt_token_ids": [5, 6], "max_tokens": 2}


def lines(*objects: Any) -> bytes:
    return "\n".join(o if isinstance(o, str) else json.dumps(o) for o in objects).encode()


def workload(*last: Any) -> bytes:
    """Two good entries, then these."""
    return json.dumps([ITEM, ITEM, *last]).encode()


def change(**fields: Any) -> dict[str, Any]:
    return {**STEP, "planned": {"tables": {"0/0": fields}}}


FILES = {
    "empty": b"",
    "blank": b"\n \n\n",
    "latin1": "caf\xe9\n".encode("latin-1"),
    "utf16": "Once".encode("utf-16"),
    "utf16le": "Once".encode("utf-16-le"),
    "good.json": json.dumps([ITEM]).encode(),
    "cut.json": b'[{"prompt_token_ids": [5',
    "deep.json": b"[" * 100_000,
    "none.json": b"[]",
    "object.json": b"{}",
    "x.txt": b"class A: pass",
    "syntax.py": b"class A(:\n",
    "exits.py": b"import sys\nsys.exit(3)\n",
    "raises.py": b"1 / 0\n",
    "latin1.py": b"class A:\n    'caf\xe9'\n",
    "empty.py": b"",
    "number.py": b"A = 5\n",
    "bare.py": b"class A: pass\n",
}
WORKLOADS: list[tuple[bytes, str]] = [
    (workload(entry), shown)
    for entry, shown in [
        (5, "entry 2 of w.json is 5"),
        (None, "entry 2 of w.json is None"),
        ([5, 6], "entry 2 of w.json is [5, 6]"),
        ({}, "entry 2 of w.json is {}"),
        ({"prompt_token_ids": [5]}, "entry 2"),
        ({**ITEM, "max_tokns": 3}, "entry 2"),
        ({**ITEM, "prompt_token_ids": []}, "prompt_token_ids has []"),
        ({**ITEM, "prompt_token_ids": "abc"}, "prompt_token_ids has 'abc'"),
        ({**ITEM, "prompt_token_ids": None}, "prompt_token_ids has None"),
        ({**ITEM, "prompt_token_ids": [5, 1.5]}, "prompt_token_ids has 1.5"),
        ({**ITEM, "prompt_token_ids": [5, True]}, "prompt_token_ids has True"),
        ({**ITEM, "prompt_token_ids": [[5]]}, "prompt_token_ids has [5]"),
        ({**ITEM, "prompt_token_ids": ["5"]}, "prompt_token_ids has '5'"),
        ({**ITEM, "max_tokens": 0}, "max_tokens is 0"),
        ({**ITEM, "max_tokens": -3}, "max_tokens is -3"),
        ({**ITEM, "max_tokens": True}, "max_tokens is True"),
        ({**ITEM, "max_tokens": 1.5}, "max_tokens is 1.5"),
        ({**ITEM, "max_tokens": "9"}, "max_tokens is '9'"),
        ({**ITEM, "max_tokens": None}, "max_tokens is None"),
    ]
]
WORKLOADS_OF_A_MODEL: list[tuple[bytes, str]] = [
    (workload({**ITEM, "prompt_token_ids": [5, VOCABULARY]}), "entry 2: the prompt has token id 2048"),
    (workload({**ITEM, "prompt_token_ids": [5, -1]}), "entry 2: the prompt has token id -1"),
    (workload({**ITEM, "prompt_token_ids": [5] * 3000}), "entry 2: the prompt has 3000 tokens"),
]
TRACES: list[tuple[bytes, str]] = [
    (b"", "is empty; make a trace with --trace FILE"),
    (b"\xff\xfe", "not text"),
    (lines(HEADER) + b"\n\xff\xfe\n", "not text"),
    (b"[" * 100_000, "line 1 is not JSON"),
    (lines([]), "line 1 is not a JSON object"),
    (lines({}), "not a trace of version 2"),
    (lines({**HEADER, "version": 1}), "not a trace of version 2"),
    (lines({**HEADER, "block_size": 0}), "line 1: block_size is 0"),
    (lines({**HEADER, "block_size": "16"}), "line 1: block_size is '16'"),
    (lines({**HEADER, "num_blocks": None}), "line 1: num_blocks is None"),
    (lines({**HEADER, "num_blocks": True}), "line 1: num_blocks is True"),
    (lines({**HEADER, "num_host_blocks": -1}), "line 1: num_host_blocks is -1"),
    (lines({k: v for k, v in HEADER.items() if k != "num_blocks"}), "line 1: num_blocks is None"),
    *(
        (lines(HEADER, STEP, line), f"line 3 {problem}")
        for problem, bad in {
            "is not JSON": ["{", "nope", "[" * 100_000],
            "is not a JSON object": [[], 5, None, "7"],
            "does not continue": [
                {},
                {"step": 1},
                {**STEP, "texts": []},
                {**STEP, "texts": {"x": "y"}},
                {**STEP, "texts": 5},
                {**STEP, "scheduled": 5},
                {**STEP, "scheduled": [[1]]},
                {**STEP, "copies": [1]},
                {**STEP, "copies": [[1, 2, 3]]},
                {**STEP, "events": 5},
                {**STEP, "waiting": "ab"},
                {**STEP, "waiting": [7]},
                {**STEP, "completions": []},
                {**STEP, "completions": {"0": 5}},
                {**STEP, "planned": 5},
                {**STEP, "planned": {"tables": []}},
                {**STEP, "planned": {"tables": {"0/0": None}}},
                {**STEP, "planned": {"tables": {"nameless": {}}}},
                {**STEP, "planned": {"tables": {"0/0": 5}}},
                {**STEP, "planned": {"evictable": 5}},
                {**STEP, "planned": {"evictable": [4]}},
                {**STEP, "planned": {"evictable": ["a"]}},
                change(unknown=1),
                change(blocks=5),
                change(blocks=[1, []]),
                change(blocks=[0, [4]]),
                change(blocks=[0, [-1]]),
                change(blocks=[0, ["a"]]),
                change(blocks=[0, [0]], on_host=True),
                change(num_tokens="3"),
                change(num_tokens=-3),
                change(num_computed=1.5),
                change(token_ids=[0, [None]]),
                change(token_ids=[-1, [1]]),
            ],
        }.items()
        for line in bad
    ),
]

# -- the command line ----------------------------------------------------------------------------------------

INTEGERS = ["block-size", "num-blocks", "kv-cache-memory", "max-num-seqs", "max-num-batched-tokens"]
COMMAND_LINES: list[tuple[str, str]] = [
    *((f"generate --{flag} {bad}", bad) for flag in [*INTEGERS, "max-model-len", "swap-space"]
      for bad in ("x", "1.5", "1e23", "nan", HUGE)),
    *((f"generate --{flag} {bad}", f"{flag.replace('-', '_')} is {bad}")
      for flag in [*INTEGERS, "max-model-len"] for bad in ("0", "-1")),
    *((f"generate --{flag} ''", f"--{flag}") for flag in ["block-size", "seed", "gpu-memory-utilization"]),
    *((f"generate --{flag} {bad}", bad)
      for flag in ["preemption-mode", "page-growth", "attention-backend", "dtype"]
      for bad in ("maybe", "AUTO")),
    *((f"generate --gpu-memory-utilization {bad}", bad) for bad in ["0", "-1", "1.5", "nan", "inf", "half"]),
    *((f"generate --{flag} {bad}", f"{flag.replace('-', '_')} is {bad}") for flag, values in {
        "temperature": ["-1", "nan", "inf", "1001.0"],
        "top-p": ["0", "-0.5", "1.5", "nan"],
        "top-k": ["-5"],
        "min-p": ["-1", "2", "nan"],
        "n": ["0", "-1", "20000", HUGE],
        "max-tokens": ["0", "-1", HUGE],
    }.items() for bad in values),
    *((f"generate --{flag} x", "x") for flag in
      ["temperature", "top-p", "top-k", "min-p", "n", "max-tokens", "beam-width", "length-penalty"]),
    ("generate --num-speculative-tokens four", "-tokens': give a valid integer (it is 'four')"),
    ("bench --rate x", "'--rate': give a valid number (it is 'x'); see minipaged bench --help"),
    ("generate --swap-space 4", "swap_space is 4 bytes, less than one block of 65536 bytes; give bytes"),
    ("generate --swap-space -1", "swap_space is -1"),
    ("generate --kv-cache-memory 1GB", "'1GB' is not a number; give one such as 4096, 4k (4,000), 4K"),
    ("generate --max-model-len 4kib", "'4kib' is not a number; give one such as"),
    ("generate --swap-space 99999999T", "give at most"),
    ("generate --num-blocks 1000000000000", "num_blocks is 1000000000000"),
    ("generate --block-size 100000 --num-blocks 4", "block_size 100000"),
    ("generate --block-size 1000000000000", "raise kv_cache_memory"),
    ("generate --kv-cache-memory 1000", "1000 bytes for the KV pool cannot hold a block"),
    ("generate --max-model-len 4000", "max_model_len is 4000"),
    # (A prompt and one token of output are two; with learned positions, the model itself was refused.)
    ("generate --max-model-len 1", "max_model_len is 1; give at least 2"),
    # beams
    ("generate --beam-width 0", "beam_width is 0; give an integer of at least 1"),
    ("generate --beam-width -3", "beam_width is -3"),
    ("generate --beam-width 99999", "beam_width is 99999"),
    (f"generate --beam-width {HUGE}", f"beam_width is {HUGE}"),
    ("generate --beam-width 4 --n 5", "n is 5 with beam_width 4"),
    ("generate --beam-width 4 --n 0", "n is 0 with beam_width 4"),
    ("generate --beam-width 4 --top-p 0.5", "contradicts top_p 0.5"),
    ("generate --beam-width 4 --top-k 5", "contradicts top_k 5"),
    ("generate --beam-width 4 --min-p 0.5", "contradicts min_p 0.5"),
    ("generate --beam-width 4 --stream", "--beam-width"),
    ("generate --beam-width 4 --length-penalty nan", "length_penalty is nan"),
    ("generate --beam-width 4 --length-penalty 99", "length_penalty is 99"),
    ("generate --beam-width 300 --max-tokens 2", "the request runs 300 sequences at once"),
    # settings that would change nothing
    ("generate --length-penalty 2", "length_penalty is 2.0 without beams"),
    ("generate --length-penalty 1", "length_penalty is 1.0 without beams"),
    ("generate --top-p 0.9", "top_p is 0.9"),
    ("generate --top-k 40", "top_k is 40"),
    ("generate --min-p 0.1", "min_p is 0.1"),
    ("generate --temperature 0 --top-p 0.9", "top_p is 0.9"),
    ("generate --temperature 1e-300 --top-p 0.9", "greedy; give --temperature 1e-05 or more, or drop top_p"),
    ("generate --n 2 --temperature 0", "temperature is 0.0 with 2 samples"),
    ("generate --stream --json", "--json"),
    ("generate --stream --n 2", "--n"),
    ("generate --stream --prompt a --prompt b", "of one prompt, not of 2"),
    ("bench --workload good.json --users 4", "--users measures a server"),
    ("bench --workload good.json --seconds 1", "--seconds measures a server"),
    ("bench --workload good.json --until-eos", "--until-eos measures a server"),
    ("bench --workload good.json --no-stream", "--no-stream measures a server"),
    ("bench --workload good.json --ttft-target 1", "--ttft-target measures a server"),
    ("bench --workload good.json --itl-target 1", "--itl-target measures a server"),
    ("bench --workload good.json --api-key x", "--api-key measures a server"),
    ("bench --url http://localhost:1 --repeat 3", "--repeat"),
    ("bench --url http://localhost:1 --limits", "--limits"),
    # vLLM's options
    ("serve -tp 2", "No such option: -tp; give --tensor-parallel-size; "),
    ("serve -tp=2", "No such option: -tp; give --tensor-parallel-size; "),
    ("serve --tp 2", "No such option: --tp; give --tensor-parallel-size; "),
    ("serve --enforce-eager", "--enforce-eager; give --no-enable-cuda-graphs; "),
    ("serve --num-gpu-blocks-override 9", "--num-gpu-blocks-override; give --num-blocks; "),
    ("serve --speculative-config={}", "--speculative-config; give --num-speculative-tokens"),
    ("serve --enable-auto-tool-choice", "--enable-auto-tool-choice; drop it: calls"),
    ("serve --reasoning-parser qwen3", "--reasoning-parser; drop it: reasoning between <think>"),
    ("serve --data-parallel-size 2", "--data-parallel-size; give --replicas"),
    ("serve --kv-cache-dtype fp8", "--kv-cache-dtype; drop it; see"),
    ("serve --no-enable-log-requests", "--no-enable-log-requests; drop it; see"),
    ("bench serve --model x", "argument(s) (serve); give --url to measure a server; see"),
    ("bench throughput", "(throughput); give --prompt-tokens and --output-tokens; see"),
    ("serve --disable-uvicorn-access-log", "--disable-uvicorn-access-log; drop it; see"),
    ("serve --lora-modules a=b", "; merge the adapter into the model's weights, and load that model; see"),
    ("serve --ssl-keyfile k", "--ssl-keyfile; put a proxy that speaks TLS in front; see"),
    ("serve --api-server-count 2", "--api-server-count; give --replicas"),
    *((f"{command}chat-template-kwargs {given}", f"chat_template_kwargs {expected}")
      for command in ("chat --", "serve --default-")
      for given, expected in (
          ("enable_thinking=false", "is 'enable_thinking=false'; give a JSON object such as"),
          ("[]", "is '[]'; give a JSON object such as"),
          ("5", "is '5'; give a JSON object such as"),
          ("""'{"tools": []}'""", "has tools, which is not the template's"),
      )),
    ("serve --max-num-partial-prefills 1", "--max-num-partial-prefills; drop it; see"),
    ("serve --served-model-name", "Option '--served-model-name' requires an argument; "),
    ("generate --num-block 9", "--num-block (Possible options: "),
    ("generate -z", "No such option: -z; see"),
    # prompts
    ("generate --prompt ''", "the prompt is empty"),
    ("generate --prompt a --prompt ''", "the prompt is empty"),
    ("generate --prompt 'a\udcff'", "\\udcff"),
    ("generate --stop 'a\udcff'", "\\udcff"),
    ("generate --stop ''", "stop has ''"),
    ("generate --prompt '" + "word " * 5000 + "'", "max_model_len"),
    ("generate --prompt a --num-blocks 1 --block-size 1", "the pool has 1"),
    ("generate --prompt-file missing", "cannot read prompt file missing"),
    ("generate --prompt-file .", "cannot read prompt file ."),
    ("generate --prompt-file ''", "cannot read prompt file"),
    ("generate --prompt-file good.json/x", "cannot read prompt file good.json/x"),
    ("generate --prompt-file empty", "prompt file empty has no prompt"),
    ("generate --prompt-file blank", "prompt file blank has no prompt"),
    ("generate --prompt-file latin1", "prompt file latin1 is not UTF-8 text: byte 0xe9 at position 3"),
    ("generate --prompt-file utf16", "prompt file utf16 is not UTF-8 text"),
    ("generate --prompt-file utf16le", "prompt file utf16le has a null character at position 1"),
    ("generate --prompt-file /dev/zero", "/dev/zero is larger than"),
    # models
    ("generate --model ./no/such/model", "there is no directory ./no/such/model"),
    ("generate --model good.json", "good.json is a file; give a model directory, or a GGUF file"),
    ("generate --model .", "has no config.json"),
    ("generate --model=", "model is ''; give a model directory, a GGUF file or a hub id"),
    # results
    ("generate --trace .", "cannot write trace ."),
    ("generate --trace no/such/trace.jsonl", "cannot write trace no/such/trace.jsonl"),
    ("generate --trace good.json/x", "cannot write trace good.json/x"),
    ("bench --workload good.json --tokens-out .", "cannot write tokens ."),
    ("bench --workload good.json --tokens-out no/such/file", "cannot write tokens no/such/file"),
    # parts of one's own
    ("generate --use x.txt:A", "--use x.txt:A is not CONCEPT=FILE.py:Class"),
    *((f"generate --use {use}", expected) for use, expected in {
        "allocator": "--use allocator is not",
        "=": "--use = is not",
        "allocator=": "is not CONCEPT=FILE.py:Class",
        "allocator=bare.py": "is not CONCEPT=FILE.py:Class",
        "allocator=bare.py:": "names no class",
        "allocator=:A": "there is no file",
        "allocator=x.txt:A": "x.txt is not a Python file",
        "allocator=missing.py:A": "there is no file missing.py",
        "allocator=.:A": "there is no file .",
        "allocator=syntax.py:A": "syntax.py, line 1 cannot be loaded: SyntaxError",
        "allocator=exits.py:A": "exits.py cannot be loaded: SystemExit: 3",
        "allocator=raises.py:A": "raises.py cannot be loaded: ZeroDivisionError",
        "allocator=latin1.py:A": "latin1.py, line 2 cannot be loaded: SyntaxError",
        "allocator=empty.py:A": "empty.py has no A",
        "alocator=bare.py:A": "unknown concept 'alocator'; did you mean allocator",
        "magic=bare.py:A": "unknown concept 'magic'",
    }.items()),
    ("generate --use allocator=bare.py:A --use allocator=bare.py:A", "--use allocator is given twice"),
    # bench
    ("bench", "--workload"),
    *((f"bench --workload good.json --threads {bad}", bad) for bad in ["0", "-1", "x", "100000", HUGE]),
    *((f"bench --workload good.json --rate {bad}", bad) for bad in ["0", "-1", "nan", "inf", "x"]),
    ("bench --workload missing", "cannot read workload missing"),
    ("bench --workload .", "cannot read workload ."),
    ("bench --workload empty", "workload empty is not JSON"),
    ("bench --workload latin1", "workload latin1 is not UTF-8 text"),
    ("bench --workload cut.json", "workload cut.json is not JSON"),
    ("bench --workload deep.json", "workload deep.json is not JSON"),
    ("bench --workload none.json", "workload none.json is empty; give at least one request"),
    ("bench --workload object.json", "workload object.json must be a JSON list"),
    ("bench --workload good.json --block-size 0", "block_size is 0"),
    # commands
    ("frobnicate", "frobnicate"),
    ("simulate frobnicate", "frobnicate"),
    ("generate --blok-size 3", "--blok-size"),
    ("generate --temperature", "requires an argument; see minipaged generate --help"),
    ("learn score --key", "requires an argument; see minipaged learn score --help"),
    ("help", "No such command 'help'; see"),
    ("serve org/model", "unexpected extra argument(s) (org/model); give a model with --model; see"),
    ("chat org/model", "unexpected extra argument(s) (org/model); give a model with --model; see"),
    ("view good.json more", "unexpected extra argument(s) (more); see"),
    ("chat --chat-template blank", "chat template blank is empty; give a Jinja template"),
    ("generate --prompt", "--prompt"),
    ("generate --stream=yes", "--stream"),
    ("learn frobnicate", "frobnicate"),
    ("learn check", "number"),
    *((f"learn {command} {bad}", f"there is no lesson {bad}")
      for command in ("check", "hint", "reset") for bad in ("99", "x", "0.5", "-0")[:3]),
    ("learn check 00", "lesson 00 has no tasks"),
    ("learn reset 00", "lesson 00 has no exercise"),
]  # fmt: skip

# -- Python --------------------------------------------------------------------------------------------------

NO_INTEGERS = ["5", 1.5, True, None, [], NAN]
NO_NUMBERS = ["x", True, None, [], NAN]


class Call(NamedTuple):
    """A call with an argument, and what the message must say of it."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    expected: str

    def __str__(self) -> str:
        return f"{self.function.__name__}({', '.join(f'{k}={v!r:.40}' for k, v in self.arguments.items())})"


def sampling(**options: Any) -> None:
    """With an `llm`, because some values are wrong for its vocabulary only."""
    LLMS[0].generate("a", SamplingParams(**{"max_tokens": 2, **options}))


def beams(**options: Any) -> None:
    LLMS[0].generate("a", BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **options}))


def generate(prompts: Any, params: Any = None) -> None:
    LLMS[0].generate(prompts, params)


def chat(messages: Any) -> None:
    LLMS[0].chat(messages)


def stream(**options: Any) -> None:
    next(LLMS[0].stream("a", **options))


def bad(function: Callable[..., Any], name: str, *values: Any) -> list[Call]:
    return [Call(function, {name: value}, f"{name} is {value!r}") for value in values]


def bad_items(function: Callable[..., Any], name: str, *values: Any) -> list[Call]:
    return [Call(function, {name: [value]}, f"{name} has {value!r}") for value in values]


CALLS: list[Call] = [
    *(row for name in ("n", "top_k", "min_tokens") for row in bad(sampling, name, *NO_INTEGERS, 10**30)),
    *(row for name in ("best_of", "logprobs", "prompt_logprobs", "max_tokens")
      for row in bad(sampling, name, *(v for v in NO_INTEGERS if v is not None), 10**30)),
    *bad(sampling, "seed", "5", 1.5, True, [], NAN),
    *bad(sampling, "n", 0, -1, 16385),
    *bad(sampling, "best_of", 0, 16385),
    *bad(sampling, "max_tokens", 0, -1),
    *bad(sampling, "min_tokens", -1, 3),
    *bad(sampling, "logprobs", -2, VOCABULARY + 1),
    *bad(sampling, "prompt_logprobs", -2, VOCABULARY + 1),
    *bad(sampling, "top_k", -2),
    *(row for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
      for row in bad(sampling, name, *NO_NUMBERS, INF, -5)),
    *bad(sampling, "frequency_penalty", *NO_NUMBERS, 3),
    *bad(sampling, "repetition_penalty", 0, 101),
    *bad(sampling, "ignore_eos", 1, "yes", None),
    *bad(sampling, "include_stop_str_in_output", 0, None),
    *bad(sampling, "stop", 5, True, b"x", {"a": 1}),
    *bad_items(sampling, "stop", "", 5, None, b"x"),
    *(Call(sampling, {name: ["\udc80"]}, f"{name} has '\\udc80'") for name in ("stop", "bad_words")),
    *bad(sampling, "stop_token_ids", 5, "abc"),
    *bad_items(sampling, "stop_token_ids", "5", 1.5, True, -1, None),
    Call(sampling, {"stop_token_ids": [VOCABULARY]}, "stop_token_ids has token 2048"),
    *bad(sampling, "bad_words", 5, "abc"),
    *bad_items(sampling, "bad_words", ""),
    Call(sampling, {"bad_words": [[]]}, "bad_words has ()"),
    Call(sampling, {"bad_words": [5]}, "bad_words is 5"),
    Call(sampling, {"bad_words": [[VOCABULARY]]}, "bad_words has token 2048"),
    *bad(sampling, "allowed_token_ids", 5, "abc"),
    Call(sampling, {"allowed_token_ids": []}, "allowed_token_ids is empty"),
    Call(sampling, {"allowed_token_ids": [VOCABULARY]}, "allowed_token_ids has token 2048"),
    *bad(sampling, "logit_bias", 5, [1], "x"),
    *(Call(sampling, {"logit_bias": {5: v}}, f"logit_bias of token 5 is {v!r}")
      for v in ("x", NAN, INF, 101)),
    Call(sampling, {"logit_bias": {"5": 1.0}}, "logit_bias has '5'"),
    Call(sampling, {"logit_bias": {VOCABULARY: 1.0}}, "logit_bias has token 2048"),
    Call(sampling, {"n": 2, "temperature": 0}, "temperature is 0 with 2 samples"),
    Call(sampling, {"n": 3, "best_of": 2}, "best_of is 2, below n = 3"),
    *bad(beams, "beam_width", *NO_INTEGERS, 0, -1, 10**30, VOCABULARY + 1),
    *bad(beams, "length_penalty", *NO_NUMBERS, 51),
    *bad(beams, "early_stopping", "sometimes", 1, None),
    *bad(beams, "num_return_sequences", *NO_INTEGERS, 0, 3),
    *(row for name in ("block_size", "max_num_seqs", "max_num_batched_tokens")
      for row in bad(EngineConfig, name, *NO_INTEGERS, 0, -1, 10**30)),
    *(row for name in ("num_blocks", "kv_cache_memory", "max_model_len")
      for row in bad(EngineConfig, name, "5", 1.5, True, [], 0, -1, 10**30)),
    *bad(EngineConfig, "seed", *NO_INTEGERS),
    *bad(EngineConfig, "swap_space", *NO_INTEGERS, -1, 10**30),
    *bad(EngineConfig, "gpu_memory_utilization", *NO_NUMBERS, 0, 1.01, -1, INF),
    *(row for name in ("preemption_mode", "page_growth", "attention_backend", "dtype")
      for row in bad(EngineConfig, name, "maybe", 5, None)),
    *(row for name in ("enable_chunked_prefill", "enable_prefix_caching", "disable_log_stats")
      for row in bad(EngineConfig, name, 1, "yes", None)),
    Call(LLM, {"tokenizer": "./no/such/one"}, "there is no such directory; give a directory or a hub id"),
    Call(LLM, {"blok_size": 16}, "unknown setting 'blok_size'; did you mean block_size?"),
    Call(LLM, {"kv_cache_memory": "1GiB"}, "kv_cache_memory is '1GiB'; give an integer or None"),
    Call(LLM, {"gpu_memory_utilization": "x"}, "gpu_memory_utilization is 'x'; give a number"),
    Call(LLM, {"zzz": 16}, "unknown setting 'zzz'; drop it"),
    Call(LLM, {"model_name": "m"}, "unknown setting 'model_name'; did you mean model?"),
    Call(LLM, {"swap_space": 4}, "swap_space is 4 bytes"),
    Call(LLM, {"num_blocks": 10**12}, "num_blocks is 1000000000000"),
    Call(LLM, {"model": "a\0b"}, "a"),
    Call(LLM, {"executor": 3}, "executor is 3, which has no block_size"),
    Call(LLM, {"executor": ModelRunner}, "which has no block_size"),
    Call(LLM, {"use": "x"}, "use is 'x'"),
    Call(LLM, {"use": {"alocator": "x.py:A"}}, "unknown concept 'alocator'"),
    Call(LLM, {"use": {"allocator": "x.py"}}, "names no class"),
    Call(LLM, {"use": {"allocator": 5}}, "5"),
    *(Call(generate, {"prompts": value}, f"prompts is {value!r}") for value in (5, None, b"x", 1.5)),
    *(Call(generate, {"prompts": [value]}, f"the prompt is {value!r}")
      for value in (None, b"x", {}, {"text": "x"})),
    Call(generate, {"prompts": [1.5]}, "the prompt is 1.5"),
    Call(generate, {"prompts": [[]]}, "the prompt is empty"),
    Call(generate, {"prompts": [5, "a"]}, "has 'a' as a token id"),
    Call(generate, {"prompts": ["a", 5]}, "the prompt is 5"),
    Call(generate, {"prompts": ""}, "the prompt is empty"),
    Call(generate, {"prompts": ["a", ""]}, "the prompt is empty"),
    Call(generate, {"prompts": "a\udc80"}, "the prompt has '\\udc80' at position 1"),
    *(Call(generate, {"prompts": {"prompt_token_ids": ids}}, expected) for ids, expected in [
        ([], "the prompt is empty"),
        ((), "the prompt is empty"),
        (np.array([], int), "the prompt is empty"),
        ("abc", "token ids are 'abc'"),
        (b"abc", "token ids are b'abc'"),
        (5, "token ids are 5"),
        (None, "token ids are None"),
        ({1: 2}, "token ids are {1: 2}"),
        ([1.5], "has 1.5 as a token id"),
        ([True], "has True as a token id"),
        (["5"], "has '5' as a token id"),
        ([None], "has None as a token id"),
        ([[5]], "has [5] as a token id"),
        (np.array([1.0]), "1.0"),
        ([-1], "has token id -1"),
        ([VOCABULARY], "has token id 2048"),
        ([10**30], f"has token id {10**30}"),
        ([np.int64(5000)], "has token id 5000"),
        ([5] * 3000, "3000 tokens"),
    ]),
    *(Call(generate, {"prompts": {"prompt_token_ids": [5], **extra}}, expected) for extra, expected in [
        ({"cache_slat": "x"}, "the key 'cache_slat'; did you mean cache_salt?"),
        ({"zzz": 1}, "the key 'zzz'"),
        ({5: 1}, "the key 5"),
        ({"cache_salt": 5}, "cache_salt is 5"),
        ({"cache_salt": None}, "cache_salt is None"),
        ({"cache_salt": "a\ud800"}, "cache_salt has '\\ud800' at position 1"),
    ]),
    *(Call(generate, {"prompts": "a", "params": value}, f"params is {value!r}")
      for value in ("x", 5, {}, print)),
    Call(generate, {"prompts": ["a", "b"], "params": [SamplingParams()]}, "1 sampling_params for 2 prompts"),
    Call(generate, {"prompts": ["a"], "params": [None]}, "params is None"),
    *(Call(chat, {"messages": value}, f"messages is {value!r}") for value in ("hi", [], None, 5, {})),
    *(Call(chat, {"messages": [value]}, "messages has")
      for value in ("hi", {}, {"role": "user"}, {"role": "user", "content": 5}, {"role": 5, "content": "x"})),
    Call(chat, {"messages": [{"role": "zzz", "content": "x"}]}, "zzz"),
    Call(chat, {"messages": [{"role": "user", "content": "\udc80"}]}, "\\udc80"),
    Call(stream, {"sampling_params": SamplingParams(n=2)}, "n = 1"),
    Call(stream, {"sampling_params": BeamSearchParams(beam_width=2)}, "n = 1"),
    Call(stream, {"sampling_params": "x"}, "n = 1"),
]  # fmt: skip

ROWS = [*COMMAND_LINES, *WORKLOADS, *WORKLOADS_OF_A_MODEL, *TRACES, *CALLS]
LLMS: list[LLM] = []


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A folder with the files of the table to stand in, and the embedded model loaded once for all rows."""
    path = tmp_path_factory.mktemp("bad")
    for name, data in FILES.items():
        (path / name).write_bytes(data)
    before = os.getcwd()
    os.chdir(path)
    load, pocket = ModelRunner.load.__func__, []

    def load_once(cls, name, config):
        if "pocket_model" not in name:
            return load(cls, name, config)
        if not pocket:
            pocket.append(load(cls, name, EngineConfig(num_blocks=64)).model)
        return cls(pocket[0], config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "load", classmethod(load_once))
        LLMS.append(LLM(num_blocks=64, disable_log_stats=True))
        yield path
    LLMS.clear()
    os.chdir(before)


def test_the_table_has_at_least_300_rows():
    """Catches a table that shrinks, and a row that stands there twice."""
    assert len(ROWS) >= 300
    assert len(set(COMMAND_LINES)) == len(COMMAND_LINES)


def check(message: str, expected: str) -> None:
    assert "\n" not in message
    assert expected in message
    assert FIX.search(message), f"no word says what to do: {message}"


@pytest.mark.parametrize(("line", "expected"), COMMAND_LINES, ids=lambda text: ascii(text)[:60])
def test_a_command_line(line, expected, capsys, monkeypatch):
    """Catches a traceback, a crash, a hang, a mistake that is accepted, or a message that does not help."""
    code, out, err = call(capsys, monkeypatch, *shlex.split(line))
    assert "Traceback" not in out + err
    (message,) = (line for line in err.splitlines() if line.startswith("minipaged: "))
    assert code == 2
    assert not out
    check(message, expected)


@pytest.mark.parametrize(("data", "expected"), WORKLOADS, ids=lambda value: repr(value)[:60])
def test_a_workload(data, expected, folder):
    """Catches an error without the number of the entry, or one in the middle of the run."""
    (folder / "w.json").write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(expected)) as error:
        read_workload(type(folder)("w.json"))
    check(str(error.value), expected)


@pytest.mark.parametrize(("data", "expected"), WORKLOADS_OF_A_MODEL, ids=lambda value: repr(value)[:60])
def test_a_workload_for_this_model(data, expected, folder, capsys, monkeypatch):
    """Catches an entry that the model cannot run and that is found minutes later."""
    (folder / "w.json").write_bytes(data)
    code, out, err = call(capsys, monkeypatch, "bench", "--workload", "w.json", "--num-blocks", "64")
    assert (code, out) == (2, "")
    check(err.splitlines()[-1], expected)


@pytest.mark.parametrize(("data", "expected"), TRACES, ids=lambda value: repr(value)[-60:])
def test_a_trace(data, expected, folder):
    """Catches a trace that is drawn wrong, or ends in a KeyError."""
    path = folder / "trace.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(expected)) as error:
        list(read_trace(path))
    assert "\n" not in str(error.value)
    assert "trace.jsonl" in str(error.value)


@pytest.mark.parametrize("row", CALLS, ids=str)
def test_a_call(row):
    """Catches a TypeError from deep inside, or a value that is taken for another."""
    with pytest.raises(ValueError, match=re.escape(row.expected)) as error:
        row.function(**row.arguments)
    check(str(error.value), row.expected)


def test_an_id_is_refused_by_the_engine_while_it_is_in_use():
    """Catches a request that takes the place of another, which then cannot be aborted any more."""
    engine = toy_engine()
    first = engine.add_request("a", [1], SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match=r"^request_id 'a' is in use; give each request its own$"):
        engine.add_request("a", [2], SamplingParams(max_tokens=4))
    engine.abort("a")
    assert first.is_finished
    engine.add_request("a", [2], SamplingParams(max_tokens=4))


def test_what_can_never_run_is_refused_before_it_is_queued():
    """Catches a refusal that comes in the engine's thread, after the caller was told that all is well."""
    engine = toy_engine()
    with pytest.raises(ValueError, match="the prompt has 200 tokens"):
        engine.make_request("a", [1] * 200, SamplingParams(max_tokens=4))
    assert not engine.has_unfinished
