"""Answers divided as the `response_template` of a tokenizer says: any format, whole and streamed."""

from __future__ import annotations

import json
import logging
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minipaged import AsyncLLM
from minipaged.serving.response_templates import LONGEST, TemplateReader, begun_answer, template_of
from tests.serving.conftest import CHAT, OPTIONS, running
from tests.tagged_tokenizer import write_tokenizer

ROOT = Path(__file__).parents[2]

CHANNELS = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {
            "open": "<|channel|>analysis<|message|>",
            "close": "<|end|>",
            "repeats": True,
            "join": " ",
        },
        "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+)<\|message\|>",
            "close": "<|call|>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
"""As gpt-oss writes. A text outside of its channels is no part of the answer."""

LISTS = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<|tool_call_start|>",
            "close": "<|tool_call_end|>",
            "content": "python-call-list",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
            "transform_each": True,
        },
        "content": {},
        "note": {"open": "<note>", "close": "</note>"},
    },
}
"""As LFM2 writes."""

KEPT = {
    "start_anchor": "(answer)",
    "fields": {
        "reasoning": {"open": "<a>", "close": "</a>", "repeats": True, "join": ""},
        "content": {
            "open": "<b>",
            "close": "</b>",
            "join": "",
            "repeats": True,
            "content_args": {"strip": False},
        },
    },
}
GEMMA = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<|tool_response>"]},
    },
}
"""As Gemma 4 writes."""

UNNAMED = {"start_anchor": "(answer)", "fields": {"thinking": {"open": "<a>", "close": "</a>"}}}

TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"properties": {"day": {"type": "integer"}}}},
    }
    for name in ("f", "g")
]
THOUGHT, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f<|message|>{"city": "R\u00f4me", "day": "5"}'
CALLED = ("f", {"city": "R\u00f4me", "day": 5})
LIST = "<|tool_call_start|>[f(city='Rome', days=[1, None]), g()]<|tool_call_end|>"
LISTED = [("f", {"city": "Rome", "days": [1, None]}), ("g", {})]
WRONG = [
    '<|channel|>commentary to=functions.f<|message|>{"city": }<|call|>',
    '<|channel|>commentary to=functions.f<|message|>{"city": "\\ud800"}<|call|>',
    '<|channel|>commentary to=functions.f<|message|>{"day": NaN}<|call|>',
    '<|channel|>commentary to=functions.f<|message|>["Rome"]<|call|>',
    CALL[:-1],
]
WHOLE = [
    (f"{THOUGHT}Hm. <|end|><|start|>assistant{FINAL}\nHello. ", "Hm.", "Hello.", []),
    (f"{THOUGHT}Hm.<|end|>{THOUGHT}So.<|end|>{FINAL}Hello.<|end|>", "Hm. So.", "Hello.", []),
    (f"{THOUGHT}Hm.<|end|>{CALL}<|call|>{CALL}", "Hm.", "", [CALLED, CALLED]),
    (f"{FINAL}I look.<|end|>{CALL}<|call|>{FINAL}Done.", "", "I look.\nDone.", [CALLED]),
    (f"{THOUGHT}cut o", "cut o", "", []),
    *((text, "", text, []) for text in WRONG),
]
IMPLICIT = [
    ("", "", "", []),
    (" Hello <world>. \n", "", "Hello <world>.", []),
    (f"<think>Hm.</think>\n\nI look.\n{LIST}\n", "Hm.", "I look.", LISTED),
    (f"<think>Hm.</think>{LIST}\n\nDone.<think>So.</think> Yes.", "Hm.\nSo.", "Done. Yes.", LISTED),
    ("One. <|tool_call_start|>[f(1)]<|tool_call_end|> Two.",) * 2,
    (f"I <note>not for you</note>look.{LIST[:30]}", "", f"I look.{LIST[:30]}", []),
]
IMPLICIT[4] = (IMPLICIT[4][0], "", IMPLICIT[4][1], [])
GEMMA_CALL = '<|tool_call>call:g{}<tool_call|><|tool_call>call:f{city:<|"|>R\u00f4me<|"|>,day:5}<tool_call|>'
DETAILS = [
    (KEPT, "<a> Hm. </a><a> So.</a><b> I</b><b>\n am\n</b>fine", "Hm.So.", " I\n am\n", []),
    (GEMMA, "<|channel>thought\nHm.<channel|>" + GEMMA_CALL + " Done.", "Hm.", "Done.", [("g", {}), CALLED]),
    (UNNAMED, "<a>Hm.</a> Hello.", "Hm.", "Hello.", []),
]


class Reading:
    """What a reader makes of pieces."""

    def __init__(self, spec: dict[str, Any], prompt: str = "", tools: Any = TOOLS) -> None:
        tokenizer = SimpleNamespace(
            response_template=spec, decode=lambda token_ids, **options: bytes(token_ids).decode()
        )
        template = template_of(tokenizer)
        assert template is not None
        begun = begun_answer(template, tokenizer, list(prompt.encode()))
        self.counted: list[str] = []
        self.reader = TemplateReader(template, begun, tools, self.counted.append)
        self.reasoning, self.content = "", ""
        self.calls: list[tuple[str, Any]] = []

    def read(self, piece: str, is_last: bool) -> None:
        completion = SimpleNamespace(text=piece, token_ids=[], finish_reason="stop" if is_last else None)
        reasoning, parts = self.reader.read(completion)
        self.reasoning += reasoning
        self.content += "".join(part for part in parts if isinstance(part, str))
        calls = [part["function"] for part in parts if isinstance(part, dict)]
        self.calls += [(call["name"], json.loads(call["arguments"])) for call in calls]


@pytest.mark.parametrize(
    ("spec", "text", "reasoning", "content", "calls"),
    [*((CHANNELS, *case) for case in WHOLE), *((LISTS, *case) for case in IMPLICIT), *DETAILS],
)
def test_a_text_is_divided_alike_however_it_is_cut(spec, text, reasoning, content, calls):
    """Catches half a delimiter that is shown, a broken call that is lost, other parts in a stream."""
    draw = random.Random(0)
    for attempt in range(40):
        cuts = sorted(draw.choices(range(len(text) + 1), k=attempt))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
        reading = Reading(spec)
        for i, piece in enumerate(pieces, start=1):
            reading.read(piece, i == len(pieces))
        assert (reading.reasoning, reading.content, reading.calls) == (reasoning, content, calls), pieces
        assert reading.reader.num_calls == len(calls)
        assert reading.counted == [reasoning]


@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "content"),
    [
        ("<|im_start|>user\n<think><|im_start|>assistant\n", "Hello.", "", "Hello."),
        ("<|im_start|>assistant\n<think>\n", "Hm.</think>Hello.", "Hm.", "Hello."),
        ("<|im_start|>assistant\n<think>They ask ", "for Rome.</think> Hello.", "for Rome.", "Hello."),
        ("<|im_start|>assistant\n<think>They", " ask.</think>Hello.", " ask.", "Hello."),
        ("<|im_start|>assistant\n<think></think>Rome is", " fine.", "", " fine."),
        ("no anchor <think>", "Hello.", "", "Hello."),
        ("<|im_start|>assistant\nOne <", "two", "", "two"),
        ("<|im_start|>assistant\nOne <", "think>Hm.</think>", "Hm.", ""),
        ("<|im_start|>assistant\n<|tool_call_start|>[f(", "oh)]", "", "oh)]"),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ends(prompt, text, reasoning, content):
    """Catches thoughts that the template began as the answer, a prompt that is repeated, a lost space."""
    reading = Reading(LISTS, prompt)
    reading.read(text, is_last=True)
    assert (reading.reasoning, reading.content) == (reasoning, content)


def test_calls_that_the_prompt_has_are_not_counted() -> None:
    """Catches a first call with the index 1, and an answer without calls that ends for them."""
    reading = Reading(LISTS, f"<|im_start|>assistant\n{LIST}")
    assert reading.reader.num_calls == 0


@pytest.mark.parametrize(
    ("spec", "thought", "call"),
    [(LISTS, "<think>Hm.</think>", LIST), (CHANNELS, f"{THOUGHT}Hm.<|end|>", f"{CALL}<|call|>")],
)
def test_without_tools_calls_are_text(spec, thought, call) -> None:
    """Catches calls for a client that has nothing to call, and a call that nobody gets."""
    reading = Reading(spec, tools=[])
    reading.read(thought + call, is_last=True)
    assert (reading.reasoning, reading.content, reading.calls) == ("Hm.", call, [])


ONLY_CALLS = {"tool_calls": {"content": "json", "transform": {"type": "function", "function": "{content}"}}}
NOTHING_OPENS = {
    "content": {},
    "tool_calls": {"open_pattern": "x*", "close_pattern": "y*", "content": "json"},
}
NOTHING_CLOSES = {"content": {"close_pattern": "(?=<x>)"}}


@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "no tools"])
@pytest.mark.parametrize("fields", [ONLY_CALLS, NOTHING_OPENS, NOTHING_CLOSES])
def test_a_sloppy_template_neither_stops_the_server_nor_loses_text(fields, tools) -> None:
    """Catches an endless loop, an exception, and text after a delimiter that has no characters."""
    for size in (1, 3, 100):
        reading = Reading({"start_anchor": "(answer)", "fields": fields}, tools=tools)
        text = "One <x> two."
        for start in range(0, len(text), size):
            reading.read(text[start : start + size], start + size >= len(text))
        assert (reading.content, reading.calls) == (text, [])


def test_what_may_begin_a_delimiter_is_held_back_only_so_long() -> None:
    """Catches a pattern that begins with any space, and a model that writes only line breaks: the time for
    these grew with the square of their number."""
    fields = {"content": {}, "tool_calls": {"open_pattern": "-*<call>", "close": "</call>"}}
    reading = Reading({"start_anchor": "(answer)", "fields": fields})
    reading.read(5000 * "-", is_last=False)
    assert len(reading.content) >= 5000 - LONGEST
    reading.read("One.", is_last=True)
    assert reading.content == 5000 * "-" + "One."


def test_what_is_certain_is_not_held_back() -> None:
    """Catches an answer that comes only once it is complete."""
    reading = Reading(CHANNELS)
    for piece, reasoning, content in [
        (THOUGHT, "", ""),
        ("One", "One", ""),
        (" two<", "One two", ""),
        ("|end|>", "One two", ""),
        (FINAL + "Three", "One two", "Three"),
    ]:
        reading.read(piece, is_last=False)
        assert (reading.reasoning, reading.content) == (reasoning, content)


def test_the_guides_templates_read_what_their_models_write() -> None:
    """Catches an example with a mistake."""
    guide = (ROOT / "docs/guides/serving.md").read_text()
    blocks = re.findall(r"```json\n(.*?)```", guide.partition("### Other formats")[2], re.S)
    llama, lists = (json.loads(block)["response_template"] for block in blocks[:2])
    call = '{"name": "f", "parameters": {"city": "R\u00f4me", "day": "5"}}'
    for spec, text, content, calls in [
        (llama, call, "", [CALLED]),
        (llama, f"<|python_tag|>{call}", "", [CALLED]),
        (llama, f"I look.\n{call}", "I look.", [CALLED]),
        (llama, '{"name": "Rome"}', '{"name": "Rome"}', []),
        (lists, f"I look.{LIST}", "I look.", LISTED),
    ]:
        for size in (1, 3, len(text)):
            reading = Reading(spec)
            for start in range(0, len(text), size):
                reading.read(text[start : start + size], start + size >= len(text))
            assert (reading.content, reading.calls) == (content, calls)


# -- a server -------------------------------------------------------------------------------------

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if tools %} {% endif %}{% if not is_bare %}(answer){% endif %}{% if is_open %}<note>\n{% endif %}"
)
DECLARED = {
    "start_anchor": "(answer)",
    "fields": {
        "thinking": {"open": "<note>", "close": "</note>"},
        "content": {},
        "tool_calls": {
            "open_pattern": r"\s*\(call (?P<name>\w+)\)",
            "close": "(end)",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
ASKED = [{"role": "user", "content": "How is Rome?"}]
TEXT = 'They ask for Rome.</note>\n\nI look.\n(call f){"city": "Rome", "day": "5"}(end)\n(call g){}(end)'
FUNCTIONS = [{"name": "f", "arguments": '{"city": "Rome", "day": 5}'}, {"name": "g", "arguments": "{}"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The embedded model, with a tokenizer that declares its tags; those of thoughts are special tokens."""
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "note")
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"response_template": DECLARED}))
    with running(AsyncLLM(tokenizer=folder, **OPTIONS)) as one:
        one.llm.get_tokenizer().chat_template = CHAT_TEMPLATE
        yield one


@pytest.mark.parametrize("is_open", [False, True], ids=["the model begins", "the template begins"])
def test_a_chat_has_the_parts_that_the_tokenizer_declares(server, writes, is_open):
    """Catches tags in a content, calls that stay text, other parts in a stream than in a whole answer."""
    writes(TEXT if is_open else f"<note>{TEXT}")
    body = {"messages": ASKED, "tools": TOOLS, "chat_template_kwargs": {"is_open": is_open}}
    answer = server.http.post(CHAT, json=body).json()
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["reasoning"], message["content"]) == ("They ask for Rome.", "I look.")
    assert [call["function"] for call in message["tool_calls"]] == FUNCTIONS
    assert choice["finish_reason"] == "tool_calls"
    tokens = server.llm.get_tokenizer().encode("They ask for Rome.", add_special_tokens=False)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(tokens)

    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for event in server.openai().chat.completions.create(
        model="pocket",
        messages=ASKED,
        tools=TOOLS,
        stream=True,
        extra_body={"chat_template_kwargs": {"is_open": is_open}},
    ):
        (choice,) = event.choices
        found["reasoning"] += getattr(choice.delta, "reasoning", "")
        found["content"] += choice.delta.content or ""
        found["calls"] += [call.function.model_dump() for call in choice.delta.tool_calls or ()]
    assert found == {"reasoning": "They ask for Rome.", "content": "I look.", "calls": FUNCTIONS}
    assert choice.finish_reason == "tool_calls"


def test_a_response_has_them_as_items(server, writes):
    """Catches a second API that reads answers in another way."""
    writes(f"<note>{TEXT}")
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    response = server.openai().responses.create(model="pocket", input="How is Rome?", tools=tools)
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response.output_text == "I look."
    assert response.output[2].arguments == FUNCTIONS[0]["arguments"]


def test_what_has_a_format_of_its_own_is_read_by_it(server, writes):
    """Catches a forced call that stays text, and JSON that loses a part that looks like a tag."""
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = server.http.post(CHAT, json=body | {"max_tokens": 300, "seed": 1}).json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] in "fg"
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    text = '{"a": "(call f){}(end)"}'
    writes(text)
    body = {
        "messages": ASKED,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    (choice,) = server.http.post(CHAT, json=body).json()["choices"]
    assert choice["message"]["content"] == text


def test_earlier_turns_are_no_beginning_of_the_answer(server, writes):
    """Catches a tag in a message of the user that makes the whole answer a thought."""
    writes("Rome is fine.")
    messages = [{"role": "user", "content": "(answer)Hi. What does <note> mean?"}]
    body = {"messages": messages, "add_generation_prompt": False, "chat_template_kwargs": {"is_bare": True}}
    (choice,) = server.http.post(CHAT, json=body).json()["choices"]
    assert (choice["message"]["content"], choice["message"].get("reasoning")) == ("Rome is fine.", None)


@pytest.mark.parametrize(
    ("extra", "content"),
    [
        ({"skip_special_tokens": True, "tools": TOOLS}, "They ask for Rome." + TEXT.partition("</note>")[2]),
        ({"tool_choice": "none", "tools": TOOLS}, TEXT.partition("</note>\n\n")[2]),
        ({}, TEXT.partition("</note>\n\n")[2]),
    ],
    ids=["without special tokens", "no choice", "no tools"],
)
def test_who_wants_no_calls_gets_text(server, writes, extra, content):
    """Catches calls that nobody asked for, and tags that are read though they were left out."""
    writes(f"<note>{TEXT}")
    (choice,) = server.http.post(CHAT, json={"messages": ASKED, **extra}).json()["choices"]
    assert choice["message"]["content"] == content
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("wrong", [{"open": 1}, {"content_args": None}])
def test_a_declaration_that_cannot_be_used_is_left_out_with_a_warning(caplog, monkeypatch, wrong):
    """Catches a server that answers nobody because a model's file has a mistake."""
    monkeypatch.setattr(logging.getLogger("minipaged"), "level", logging.INFO)
    spec = {"start_anchor": "(answer)", "fields": {"content": wrong}}
    assert template_of(SimpleNamespace(response_template=spec)) is None
    assert "response_template is left out: " in caplog.text
