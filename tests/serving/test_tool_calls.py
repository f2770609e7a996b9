"""Tool calls in texts: divided as they stream, told as OpenAI's client knows them."""

from __future__ import annotations

import json
import random
import re

import openai
import pytest

from minipaged import AsyncLLM
from minipaged.prompts import RequestError
from minipaged.serving.tool_calls import ToolCallReader
from tests.serving.conftest import OPTIONS, running

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TIME = '<tool_call>{"name": "time"}</tool_call>'
NO_JSON = ("NaN", "1e999", "-Infinity", '"\\ud800"')  # what Python reads, and clients do not

TEXTS = [
    ("Hello there.", "Hello there.", []),
    ("", "", []),
    (" \n", " \n", []),
    (CALL, "", [("weather", '{"city": "Rome"}')]),
    (f"I look.\n{CALL}\n", "I look.", [("weather", '{"city": "Rome"}')]),
    (f"{CALL}\n{TIME}", "", [("weather", '{"city": "Rome"}'), ("time", "{}")]),
    (f"a {TIME} b", "a b", [("time", "{}")]),
    ("a < b <tool <tool_cal", "a < b <tool <tool_cal", []),
    ("<tool_call>{broken</tool_call>.", "<tool_call>{broken</tool_call>.", []),
    ('<tool_call>["name"]</tool_call>', '<tool_call>["name"]</tool_call>', []),
    *((wrong, wrong, []) for wrong in (CALL.replace('"Rome"', value) for value in NO_JSON)),
    ('x <tool_call>{"name": "cut off', 'x <tool_call>{"name": "cut off', []),
    ('<tool_call>{"name": "r\u00f4le", "arguments": {}}</tool_call>', "", [("r\u00f4le", "{}")]),
]


@pytest.mark.parametrize(("text", "content", "calls"), TEXTS, ids=lambda value: repr(value)[:30])
def test_a_text_is_divided_alike_however_it_is_cut(text, content, calls):
    """Catches half a tag that is shown, a call that depends on where pieces end, text that is lost."""
    draw = random.Random(0)
    for attempt in range(40):
        reader, found, told = ToolCallReader(), "", []
        cuts = sorted(draw.choices(range(len(text) + 1), k=attempt))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
        for number, piece in enumerate(pieces, start=1):
            more, made = reader.read(piece, is_last=number == len(pieces))
            found, told = found + more, told + made
        assert found == content
        assert [(call["function"]["name"], call["function"]["arguments"]) for call in told] == calls


def test_a_long_run_of_spaces_costs_its_length():
    """Catches an expression that takes the square of a text."""
    reader = ToolCallReader()
    assert reader.read(" " * 200_000, is_last=False) == ("", [])
    assert len(reader.read("x", is_last=False)[0]) == 200_001


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASKED = [{"role": "user", "content": "How is Rome?"}]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def server():
    """The embedded model with a template that has a place for tools."""
    with running(AsyncLLM(**OPTIONS)) as one:
        one.llm.get_tokenizer().chat_template = TEMPLATE
        yield one


def ask(server, text: str, **values):
    """A chat whose answer is forced to be `text`."""
    values = {
        "model": "pocket",
        "messages": ASKED,
        "tools": TOOLS,
        "max_tokens": 200,
        "temperature": 0,
    } | values
    return server.openai().chat.completions.create(
        **values, extra_body={"structured_outputs": {"choice": [text]}}
    )


def test_calls_are_told_as_the_client_knows_them(server):
    """Catches a call that is left in the text, and a reason that says the text is all."""
    (choice,) = ask(server, f"I look. {CALL}").choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert ask(server, CALL).choices[0].message.content is None


def test_calls_stream_with_their_text(server):
    """Catches tags in a stream, a call without its number, another end than the whole answer's."""
    content, calls, reasons = "", [], []
    for event in ask(server, f"I look. {CALL}\n{CALL}", stream=True):
        for choice in event.choices:
            content += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reasons.append(choice.finish_reason)
    assert content == "I look."
    assert [(call.index, call.function.name) for call in calls] == [(0, "weather"), (1, "weather")]
    assert len({call.id for call in calls}) == 2
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


def test_tools_without_a_place_in_the_template_are_refused_in_the_same_words(server, monkeypatch):
    """Catches tools that `chat` drops without a word, although the server refuses them."""
    monkeypatch.setattr(server.llm.get_tokenizer(), "chat_template", "{{ messages[0].content }}")
    with pytest.raises(openai.BadRequestError) as told:
        ask(server, CALL)
    assert told.value.param == "tools"
    with pytest.raises(RequestError, match=re.escape(told.value.body["message"])):
        server.llm.chat_prompt(ASKED, tools=TOOLS)
    assert server.llm.chat_prompt(ASKED, tools=[])["prompt"] == "How is Rome?"
    text = server.llm.chat_prompt(ASKED, tools=TOOLS, chat_template=TEMPLATE)["prompt"]
    assert text.startswith("weather;")


@pytest.mark.parametrize(
    "values", [{"tools": openai.omit}, {"tool_choice": "none"}], ids=["no tools", "no choice"]
)
def test_who_gives_no_tools_gets_the_text(server, values):
    """Catches a text about tool calls that is taken for one."""
    (choice,) = ask(server, CALL, **values).choices
    assert choice.message.content == CALL
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"


def test_a_call_and_its_result_go_back_to_the_template(server):
    """Catches arguments that reach a template as a string, where it expects what the model wrote."""
    message = ask(server, CALL).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    messages = [*ASKED, message.model_dump(), result]
    answer = server.http.post("/tokenize", json={"messages": messages}).json()
    text = server.llm.get_tokenizer().decode(answer["tokens"])
    assert text.endswith("<|assistant|>Rome<|tool|>sunny")
    message.tool_calls[0].function.arguments = ""  # (some clients write no arguments so)
    messages[1] = message.model_dump()
    tokens = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert server.llm.get_tokenizer().decode(tokens).endswith("<|assistant|><|tool|>sunny")
    message.tool_calls[0].function.arguments = "{broken"
    with pytest.raises(openai.BadRequestError, match="arguments") as told:
        ask(server, CALL, messages=[*ASKED, message.model_dump(), result])
    assert told.value.param == "messages.1.tool_calls"
