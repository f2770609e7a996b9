"""Tool calls in texts: divided as they stream, reported as OpenAI's client knows them."""

from __future__ import annotations

import json
import random
import re
import time
from types import SimpleNamespace

import jsonschema
import openai
import pytest
from transformers import AutoTokenizer

from minipaged import AsyncLLM, SamplingParams, pocket_model
from minipaged.prompts import RequestError
from minipaged.serving import responses
from minipaged.serving.generation import Usage
from minipaged.serving.response_items import conversation_of
from minipaged.serving.response_schemas import ResponseItem, ResponsesBody
from minipaged.serving.tool_calls import ToolCallReader
from tests.serving.conftest import OPTIONS, running
from tests.slow import slow_but
from tests.tagged_tokenizer import write_tokenizer

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TIME = '<tool_call>{"name": "time"}</tool_call>'
NO_JSON = ("NaN", "-Infinity")  # what Python reads, and clients do not
IN_STRING = (
    '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>\\"y", "b": [1e2, -0, 1e999]}} </tool_call>'
)

TAGGED = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"
PARAMETER = "<parameter={}>\n{}\n</parameter>\n"
SCHEMAS = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "size": {"type": "number"},
            "is_big": {"type": "boolean"},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "either": {"type": ["string", "null"]},
            "place": {"$ref": "#/$defs/Place"},
            "level": {"enum": [1, 2, "most"]},
            "one": {"const": 1},
            "stars": {"$ref": "#/$defs/Stars"},
            "few": {"allOf": [{"description": "at most 5"}, {"$ref": "#/definitions/Few"}], "default": 1},
            "some": {"anyOf": [{"$ref": "#/$defs/Stars"}, {"type": "null"}]},
            "loop": {"$ref": "#/$defs/Loop"},
            "elsewhere": {"$ref": "https://a/b"},
            "odd": 5,
        },
        "$defs": {"Stars": {"enum": [1, 2, 3]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}] * 100}},
        "definitions": {"Few": {"type": "integer", "maximum": 5}},
    },
    "g": None,
}


def tagged(**arguments: str) -> str:
    """A call with tags around its arguments."""
    return TAGGED.format("".join(PARAMETER.format(*argument) for argument in arguments.items()))


ARGUMENTS = [
    ("text", "Rome", '"Rome"'),
    ("text", " two\n lines\n", '" two\\n lines\\n"'),
    ("text", "5", '"5"'),
    ("text", "null", '"null"'),
    ("text", '</tool_call> "r\u00f4le" <parameter', '"</tool_call> \\"r\u00f4le\\" <parameter"'),
    ("count", "5", "5"),
    ("count", "5.5", '"5.5"'),
    ("count", "five", '"five"'),
    ("count", "True", '"True"'),
    ("size", " 5 ", "5"),
    ("size", "1e999", "1e999"),
    ("size", "NaN", '"NaN"'),
    ("is_big", "True", "true"),
    ("is_big", "false", "false"),
    ("is_big", "1", '"1"'),
    ("maybe", "5", "5"),
    ("maybe", "None", "null"),
    ("either", "null", "null"),
    ("either", "5", '"5"'),
    ("place", '{"city": "Rome"}', '{"city": "Rome"}'),
    ("place", "Rome", '"Rome"'),
    ("place", "[" * 100_000, f'"{"[" * 100_000}"'),
    ("level", "2", "2"),
    ("level", "most", '"most"'),
    ("one", "1", "1"),
    ("stars", "2", "2"),
    ("few", "2", "2"),
    ("some", "2", "2"),
    ("some", "None", "null"),
    ("loop", "5", '"5"'),
    ("elsewhere", "5", '"5"'),
    ("odd", "5", '"5"'),
    ("unknown", "[5, {}]", "[5, {}]"),
    ("unknown", "5", '"5"'),
]

UNCLOSED = tagged(text="a").replace("</function>", "")
UNENDED = '{"text": "a", "count": 1, "size": 2}'

TEXTS = [
    (f"a {tagged(count='1', text='b')} {TIME}", "a", [("f", '{"count": 1, "text": "b"}'), ("time", "{}")]),
    (tagged(), "", [("f", "{}")]),
    ("<tool_call><function=g><parameter=x>1</parameter></function></tool_call>", "", [("g", '{"x": "1"}')]),
    ("<tool_call><function=h></function></tool_call>.", ".", [("h", "{}")]),
    (tagged(text="a", count="1", size="2").replace("</parameter>\n", ""), "", [("f", UNENDED)]),
    (f"<tool_call><function=f></tool_call> {TIME}", "<tool_call><function=f></tool_call>", [("time", "{}")]),
    (UNCLOSED + tagged(count="2"), UNCLOSED, [("f", '{"count": 2}')]),
    (tagged(text="</tool_call>"), "", [("f", '{"text": "</tool_call>"}')]),
    (tagged(text="a")[:-1], tagged(text="a")[:-1], []),
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
    (IN_STRING, "", [("f", '{"a": "x</tool_call>\\"y", "b": [1e2, -0, 1e999]}')]),
    (f'<tool_call>it is "x</tool_call> {TIME}', '<tool_call>it is "x</tool_call>', [("time", "{}")]),
    (f"<tool_call>{CALL}", "<tool_call>", [("weather", '{"city": "Rome"}')]),
    *(
        (f"<tool_call>{wrong}</tool_call>", f"<tool_call>{wrong}</tool_call>", [])
        for wrong in (
            "",
            "{",
            "{}",
            "[]",
            '{"name": 5}',
            '{"name": null}',
            '{"name" "f"}',
            '{"name": "f"',
            '{"name": "f"} {}',
            '{"name": "f",}',
        )
    ),
]


def cut(text: str, count: int, draw: random.Random) -> list[str]:
    """A text in pieces, some of them empty."""
    cuts = sorted(draw.choices(range(len(text) + 1), k=count))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]


def parts_of(pieces: list[str]) -> list:
    """Content and calls in their order."""
    reader, parts = ToolCallReader(SCHEMAS), [""]
    for number, piece in enumerate(pieces, start=1):
        for part in reader.read(piece, is_last=number == len(pieces)):
            if isinstance(part, str):
                parts[-1] += part
            else:
                parts += [part["function"], ""]
    return parts


@pytest.mark.parametrize(("text", "content", "calls"), TEXTS, ids=lambda value: repr(value)[:30])
def test_a_text_is_divided_alike_however_it_is_cut(text, content, calls):
    """Catches half a tag that is shown, a call that depends on where pieces end, text that is lost."""
    draw = random.Random(0)
    for attempt in range(40):
        parts = parts_of(cut(text, attempt, draw))
        assert "".join(part for part in parts if isinstance(part, str)) == content
        assert [(part["name"], part["arguments"]) for part in parts if isinstance(part, dict)] == calls


@pytest.mark.parametrize(("name", "written", "expected"), ARGUMENTS, ids=lambda value: value[:20])
def test_a_tagged_argument_has_a_type_of_its_schema(name, written, expected):
    """Catches a number in a text, a text in a number, and arguments that are not JSON."""
    [_, found, _] = parts_of([tagged(**{name: written})])
    assert found == {"name": "f", "arguments": f'{{"{name}": {expected}}}'}


def test_many_arguments_without_an_end_cost_their_length():
    """Catches an expression that takes the square of a text."""
    text = tagged().replace("\n</function>", "<parameter=text>" * 20_000 + "</function>")
    [call] = ToolCallReader(SCHEMAS).read(text, is_last=True)
    assert len(call["function"]["arguments"]) > 200_000


def test_many_calls_without_an_end_hold_up_nobody():
    """Catches a server that answers nobody for a quarter of a minute, while it divides a text."""
    text, start = "<tool_call><function=f></tool_call>" * 8_000, time.process_time()
    assert ToolCallReader(SCHEMAS).read(text, is_last=True) == [text]
    assert time.process_time() - start < 5


def test_a_long_run_of_spaces_costs_its_length():
    """Catches an expression that takes the square of a text."""
    reader = ToolCallReader({})
    assert reader.read(" " * 200_000, is_last=False) == []
    assert len(reader.read("x", is_last=False)[0]) == 200_001


SCRAPS = [
    *("<tool_call>", "</tool_call>", "<tool", " ", "\\n", "NaN", "tru", "e", "a", "1e9", "-"),
    *('"', "\\\\", '\\\\"', "{", "}", "[", "]", ":", ",", "\\ud800", "\u00e9"),
    *('{"name": "f"}', '{"name": "f", "arguments": {"a": "</tool_call>"}}', '"name"'),
    *(
        TIME,
        CALL,
        tagged(text="a", count="5"),
        "<function=f>",
        "</function>",
        "<parameter=text>",
        "</parameter>",
    ),
]


@pytest.mark.parametrize("seed", range(20))
def test_random_texts_are_divided_alike_however_they_are_cut(seed):
    """Catches what a cut decides: half a word of JSON taken for an error, a space that is lost or kept."""
    draw = random.Random(seed)
    for _ in range(200):
        text = "".join(draw.choices(SCRAPS, k=draw.randrange(12)))
        whole = parts_of([text])
        for _ in range(4):
            assert parts_of(cut(text, draw.randrange(8), draw)) == whole, text


def test_parts_come_in_their_order():
    """Catches a text that is sent before the call that it follows."""
    text = f"a {TIME} b {CALL}"
    parts = ToolCallReader({}).read(text, is_last=True)
    assert [part if isinstance(part, str) else part["function"]["name"] for part in parts] == [
        *("a", "time", " b", "weather"),
    ]


def tool(name: str, **more) -> dict:
    """A function, as chats take it."""
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [tool("weather", parameters={"type": "object"})]
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


def test_calls_are_reported_as_the_client_knows_them(server):
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


def test_the_token_ids_of_a_streamed_call_are_reported(server):
    """Catches the tokens of a call lost, because its text waits until it is complete."""
    extra = {"return_token_ids": True, "structured_outputs": {"choice": [f"I look. {CALL}"]}}
    body = {"messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 200, **extra}
    whole = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    ids = []
    for event in server.openai().chat.completions.create(
        model="pocket", messages=ASKED, tools=TOOLS, stream=True, temperature=0, extra_body=extra
    ):
        for choice in event.choices:
            ids += getattr(choice, "token_ids", [])
    assert ids == whole["token_ids"]
    assert len(ids) > 20


def test_the_log_probabilities_of_a_streamed_call_are_reported(server):
    """Catches those of the tokens whose text waits until the call is complete."""
    extra = {"structured_outputs": {"choice": [f"I look. {CALL}"]}}
    values = {"logprobs": True, "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    client = server.openai().chat.completions
    whole = client.create(model="pocket", **values, extra_body=extra).choices[0].logprobs.content
    found = []
    for event in client.create(model="pocket", stream=True, **values, extra_body=extra):
        for choice in event.choices:
            found += choice.logprobs.content if choice.logprobs else []
    assert [one.token for one in found] == [one.token for one in whole]


def test_tools_without_a_place_in_the_template_are_refused_in_the_same_words(server, monkeypatch):
    """Catches tools that `chat` silently drops, although the server refuses them."""
    monkeypatch.setattr(server.llm.get_tokenizer(), "chat_template", "{{ messages[0].content }}")
    with pytest.raises(openai.BadRequestError) as raised:
        ask(server, CALL)
    assert raised.value.param == "tools"
    with pytest.raises(RequestError, match=re.escape(raised.value.body["message"])):
        server.llm.chat_prompt(ASKED, tools=TOOLS)
    assert server.llm.chat_prompt(ASKED, tools=[])["prompt"] == "How is Rome?"
    text = server.llm.chat_prompt(ASKED, tools=TOOLS, chat_template=TEMPLATE)["prompt"]
    assert text.startswith("weather;")


def test_a_function_is_shown_as_llm_chat_shows_it(server, monkeypatch):
    """Catches a description that comes after the parameters: no model has learnt tools so written."""
    monkeypatch.setattr(server.llm.get_tokenizer(), "chat_template", "{{ tools | tojson }}")
    tools = [tool("weather", description="Looks outside.", parameters={"type": "object"}, strict=True)]
    wanted = server.llm.chat_prompt(ASKED, tools=tools)["prompt_token_ids"]
    body = {"messages": ASKED, "tools": tools}
    assert server.http.post("/tokenize", json=body).json()["tokens"] == wanted
    chat = {**body, "max_tokens": 1, "return_token_ids": True}
    assert server.http.post("/v1/chat/completions", json=chat).json()["prompt_token_ids"] == wanted
    flat = {"input": ASKED, "tools": [{"type": "function", **tools[0]["function"]}], "max_output_tokens": 1}
    answer = server.http.post("/v1/responses", json=flat).json()
    assert answer["usage"]["input_tokens"] == len(wanted)
    flat["tools"][0]["description"] = 5
    assert server.http.post("/v1/responses", json=flat).json()["error"]["param"] == "tools.0.description"


def test_tags_may_be_special_tokens(tmp_path):
    """Catches a call without its tags, left in the text: special tokens are left out of texts."""
    folder = write_tokenizer(tmp_path, "tool_call")
    with running(AsyncLLM(tokenizer=folder, **OPTIONS)) as one:
        tokenizer = one.llm.get_tokenizer()
        tokenizer.chat_template = TEMPLATE
        begin, end = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
        grammar = f'start: "I look. " <[{begin}]> "{{\\"name\\": \\"time\\"}}" <[{end}]>'
        body = {"messages": ASKED, "tools": TOOLS, "structured_outputs": {"grammar": grammar}}
        (choice,) = one.http.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["message"]["content"] == "I look."
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["time"]
        del body["structured_outputs"]
        body |= {"tools": [tool("time")], "parallel_tool_calls": False, "return_token_ids": True}
        body |= {"logit_bias": {begin: 100, end: 100}}
        for more in ({"response_format": {"type": "json_object"}}, {"tool_choice": "required"}):
            (choice,) = one.http.post("/v1/chat/completions", json=body | more).json()["choices"]
            assert choice["finish_reason"] == "tool_calls", choice
            assert {begin, end} <= {*choice["token_ids"]}, "the model has learnt to call with these tokens"


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
    with pytest.raises(openai.BadRequestError, match="arguments") as raised:
        ask(server, CALL, messages=[*ASKED, message.model_dump(), result])
    assert raised.value.param == "messages.1.tool_calls"


# -- calls that must be made ---------------------------------------------------------------------

HOUR = {"type": "integer", "minimum": 0, "maximum": 24}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "at": {"$ref": "#/$defs/Hour"}},
    "required": ["city", "at"],
    "$defs": {"Hour": HOUR},
}
FUNCTIONS = {"weather": WEATHER, 'r\u00f4le "x"': None}
TIME_TOOL = tool("time")
CHOOSE_FROM = [tool(name, parameters=schema) for name, schema in FUNCTIONS.items()]


def force(server, choice, **values):
    """A chat that must call a function, drawn at random."""
    values = {"model": "pocket", "messages": ASKED, "tools": CHOOSE_FROM, "max_tokens": 300} | values
    return server.openai().chat.completions.create(tool_choice=choice, **values)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "choice", ["required", tool("weather"), tool('r\u00f4le "x"'), {"function": {"name": "weather"}}], ids=str
)
def test_a_call_that_must_be_made_is_made(server, choice, seed):
    """Catches text in place of a call, another function, arguments that do not fit, more calls than one, a
    choice that is refused because it leaves out its type, which can be no other."""
    answer = force(server, choice, seed=seed, temperature=1, parallel_tool_calls=False).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    (call,) = answer.message.tool_calls
    assert call.function.name in ([*FUNCTIONS] if choice == "required" else [choice["function"]["name"]])
    arguments = json.loads(call.function.arguments)
    if FUNCTIONS[call.function.name] is None:
        assert arguments == {}
    else:
        jsonschema.validate(arguments, {**WEATHER, "additionalProperties": False})


def test_a_schema_decides_about_its_whitespace(server):
    """Catches a schema's own setting lost: one space between tokens is only the default."""
    schema = {"properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    found = set()
    for own in ({}, {"x-guidance": {"whitespace_pattern": ""}}):
        tools = [tool("f", parameters=schema | own)]
        bias = {str(server.llm.get_tokenizer().encode(" ", add_special_tokens=False)[0]): 20}
        choice = force(server, "required", tools=tools, logit_bias=bias, parallel_tool_calls=False)
        found.add(choice.choices[0].message.tool_calls[0].function.arguments)
    assert found == {'{ "city" : "Rome" }', '{"city":"Rome"}'}


def allowed(mode: str, *names: str):
    """The choice among some of the functions, as in chats and as in responses."""
    flat = [{"type": "function", "name": name} for name in names]
    chat = {"mode": mode, "tools": [tool(name) for name in names]}
    return {"type": "allowed_tools", "allowed_tools": chat}, {
        "type": "allowed_tools",
        "mode": mode,
        "tools": flat,
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_of_the_functions_only_those_allowed_are_called(server, path):
    """Catches a call of another, and a prompt that changes with what is allowed although it need not."""
    is_chat = path == "/v1/chat/completions"
    given = {"messages": ASKED, "max_tokens": 100} if is_chat else {"input": ASKED, "max_output_tokens": 100}
    flat = [tool["function"] | {"type": "function"} for tool in [*CHOOSE_FROM, TIME_TOOL]]
    given |= {"tools": [*CHOOSE_FROM, TIME_TOOL] if is_chat else flat, "parallel_tool_calls": False}

    def ask_with(choice, **values):
        answer = server.http.post(path, json=given | {"tool_choice": choice} | values).json()
        return answer, answer["usage"]["prompt_tokens" if is_chat else "input_tokens"]

    _, whole = ask_with("required")
    for seed in range(3):
        answer, length = ask_with(allowed("required", "time")[not is_chat], seed=seed)
        if is_chat:
            (call,) = answer["choices"][0]["message"]["tool_calls"]
            assert call["function"]["name"] == "time"
        else:
            assert [item["name"] for item in answer["output"]] == ["time"]
            assert answer["tool_choice"] == allowed("required", "time")[1]
        assert length == whole, "the beginning of the prompt is no longer that of the cache"
    _, shorter = ask_with(allowed("auto", "time")[not is_chat])
    assert shorter < whole, "nothing keeps the model from calling what it is shown"


def test_who_may_call_several_functions_may(server):
    """Catches a grammar that ends after the first call, or goes on after the only one."""
    bias = {str(server.llm.get_tokenizer().eos_token_id): -100}
    calls = force(server, "required", tools=[TIME_TOOL], logit_bias=bias, max_tokens=150, temperature=0)
    assert len(calls.choices[0].message.tool_calls) > 1
    calls = force(server, tool("time"), tools=[TIME_TOOL], logit_bias=bias, max_tokens=150, temperature=0)
    assert len(calls.choices[0].message.tool_calls) == 1
    one = {"parallel_tool_calls": False}
    calls = force(
        server, "required", tools=[TIME_TOOL], logit_bias=bias, max_tokens=150, temperature=0, **one
    )
    assert len(calls.choices[0].message.tool_calls) == 1


PET = {"type": "object", "properties": {"barks": {"type": "boolean"}}, "required": ["barks"]}
PRICE = {"type": "object", "properties": {"price": {"type": "number"}}, "required": ["price"]}
ENDLESS = [
    {"type": "object", "properties": {"pet": PET}, "required": ["pet"]},
    {
        "type": "object",
        "properties": {"pets": {"type": "array", "items": PET, "maxItems": 2}},
        "required": ["pets"],
    },
    {"anyOf": [PET, PRICE]},
    {
        "type": "object",
        "properties": {"pet": {"$ref": "#/$defs/Pet"}},
        "required": ["pet"],
        "$defs": {"Pet": PET},
    },
    {"$ref": "#/$defs/Pet", "$defs": {"Pet": PET}},
    {"type": "object", "properties": {"a": {"const": "see </tool_call> here"}}, "required": ["a"]},
]


@pytest.mark.parametrize("schema", ENDLESS, ids=lambda schema: json.dumps(schema)[:60])
def test_objects_have_the_keys_that_they_name(server, schema):
    """Catches a model that goes on with keys of its own, inside of an object or a reference, for ever."""
    for seed in range(3):
        tools = [tool("f", parameters=schema)]
        choice = force(server, "required", tools=tools, seed=seed, temperature=1, parallel_tool_calls=False)
        (call,) = choice.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert not [*jsonschema.Draft202012Validator(schema).iter_errors(arguments)]


def test_what_speaks_of_more_keys_is_left_as_it_is(server):
    """Catches a schema that excludes its own keys, and then has no text at all."""
    part = {"properties": {"a": {"const": 1}}, "required": ["a"]}
    other = {"properties": {"b": {"const": 2}}, "required": ["b"]}
    defs = {"$defs": {"A": part}}
    schemas = [
        {"allOf": [part, other]},
        {**part, "anyOf": [other]},
        {**part, "additionalProperties": other},
        {"required": ["b"], **part},
        {"required": ["k"], "anyOf": [part, other]},
        {"properties": {"x": {"$ref": "#/$defs/A", "required": ["z"]}}, "required": ["x"], **defs},
        {"properties": {"x": {"$ref": "#/$defs/A", **other}}, "required": ["x"], **defs},
        {"properties": {"x": {"properties": {}, "const": {"k": 1}}}, "required": ["x"]},
    ]
    for schema in schemas:
        asked = {"messages": ASKED, "tools": [tool("f", parameters=schema)], "tool_choice": "required"}
        answer = server.http.post("/v1/chat/completions", json=asked | {"max_tokens": 2})
        assert answer.status_code == 200, f"{schema}: {answer.text}"


def test_alternatives_that_overlap_are_refused(server):
    """Catches a call that fits two of them, which closed objects would hide."""
    alternatives = {"oneOf": [{"properties": {"a": HOUR}}, {"properties": {"a": HOUR, "b": HOUR}}]}
    with pytest.raises(openai.BadRequestError, match="oneOf"):
        force(server, "required", tools=[tool("f", parameters=alternatives)])


@pytest.mark.parametrize("seed", range(6))
def test_a_number_is_reported_as_it_is_written(server, seed):
    """Catches a call that is lost because a number has too large an exponent for Python."""
    values = {"seed": seed, "temperature": 1, "logit_bias": {}, "parallel_tool_calls": False}
    choice = force(server, "required", tools=[tool("f", parameters=PRICE)], **values).choices[0]
    if choice.finish_reason != "length":
        assert "price" in json.loads(choice.message.tool_calls[0].function.arguments)


def test_a_format_for_text_does_not_matter_to_a_call(server):
    """Catches a refusal of what some clients send together: the format of an answer that has no text."""
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": HOUR}}
    (call,) = force(server, "required", response_format=wanted, temperature=0).choices[0].message.tool_calls
    assert call.function.name in FUNCTIONS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_tools_may_be_called_before_an_answer_that_has_a_format(server, path):
    """Catches an agent that never calls its tools, because only the format of its answer is allowed."""
    begin = server.llm.get_tokenizer().convert_tokens_to_ids("<")
    tools = [tool("weather", parameters=WEATHER)]
    answer = {"type": "object", "properties": {"hour": HOUR}, "required": ["hour"]}
    schema = {"name": "hour", "schema": answer}
    if path == "/v1/responses":
        flat = [{"type": "function", **tools[0]["function"]}]
        body = {"input": ASKED, "tools": flat, "text": {"format": {"type": "json_schema", **schema}}}
    else:
        wanted = {"type": "json_schema", "json_schema": schema}
        body = {"messages": ASKED, "tools": tools, "response_format": wanted}
    body |= {"temperature": 0, "parallel_tool_calls": False}

    def ask_with(bias):
        answer = server.http.post(path, json=body | {"logit_bias": {str(begin): bias}}).json()
        if path != "/v1/responses":
            message = answer["choices"][0]["message"]
            return message["content"], [call["function"] for call in message.get("tool_calls", ())]
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        return None if calls else answer["output"][0]["content"][0]["text"], calls

    content, calls = ask_with(20)
    assert (content, [call["name"] for call in calls]) == (None, ["weather"])
    jsonschema.validate(json.loads(calls[0]["arguments"]), WEATHER)
    content, calls = ask_with(-100)
    assert (json.loads(content).keys(), calls) == ({"hour"}, [])
    unlike = {"tool_choice": "none", "logit_bias": {str(begin): 20}}
    assert "<tool_call>" not in server.http.post(path, json=body | unlike).text


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_has_a_format_may_quote_a_call(server, is_streamed):
    """Catches JSON with a hole, where one of its strings was taken for a call."""
    wanted = {"text": "Write <tool_call><function=weather></function></tool_call>."}
    schema = {"type": "object", "properties": {"text": {"const": wanted["text"]}}, "required": ["text"]}
    body = {"messages": ASKED, "tools": [tool("weather")], "stream": is_streamed}
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body["logit_bias"] = {str(server.llm.get_tokenizer().convert_tokens_to_ids("{")): 100}
    text, found = server.http.post("/v1/chat/completions", json=body).text, ""
    for line in text.removeprefix("data: ").split("data: "):
        if line.startswith("{"):
            (choice,) = json.loads(line)["choices"]
            found += choice["delta" if is_streamed else "message"].get("content") or ""
    assert (json.loads(found), choice["finish_reason"]) == (wanted, "stop")


def test_a_call_may_take_a_path(server):
    """Catches a function refused for a format that any text has."""
    path = {"type": "object", "properties": {"path": {"type": "string", "format": "path", "maxLength": 4}}}
    tools = [tool("read", parameters={**path, "required": ["path"]})]
    (call,) = force(server, tool("read"), tools=tools, temperature=0).choices[0].message.tool_calls
    assert [*json.loads(call.function.arguments)] == ["path"]


def test_forced_calls_stream_as_others_do(server):
    """Catches a stream that shows the text of the call."""
    calls, content = [], ""
    for event in force(server, tool("weather"), stream=True, temperature=0):
        for choice in event.choices:
            content += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reason = choice.finish_reason
    assert (content, reason, [call.function.name for call in calls]) == ("", "tool_calls", ["weather"])


def test_a_template_without_a_place_for_tools_can_be_forced_to_call_them(server, monkeypatch):
    """Catches a refusal where the model need not know the functions: the grammar does, as with a schema."""
    monkeypatch.setattr(server.llm.get_tokenizer(), "chat_template", "{{ messages[0].content }}")
    (call,) = force(server, tool("weather"), temperature=0).choices[0].message.tool_calls
    assert call.function.name == "weather"


UNIQUE = {"uniqueItems": True}
LARGE = {"properties": {"a": {"enum": ["a" * 1000] * 100}}}
WRONG = [
    (
        {"tool_choice": "required", "tools": [tool(f"f{i}", parameters=LARGE) for i in range(3)]},
        "tools", "tools: the grammar of their calls is",
    ),
    ({"tool_choice": tool("time")}, "tool_choice", "names 'time', which is not in tools; add it"),
    ({"tool_choice": allowed("auto", "weather", "time")[0]}, "tool_choice", "names 'time', which is not in"),
    ({"tool_choice": allowed("required")[0]}, "tool_choice", "there are no tools; give some"),
    (
        {"tool_choice": {"type": "allowed_tools"}},
        "tool_choice.allowed_tools", "tool_choice.allowed_tools is missing; give it",
    ),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "is 'required', but there are no tools"),
    ({"tool_choice": "required", "use_beam_search": True, "n": 2}, "tool_choice", "use_beam_search"),
    ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice", "structured_outputs"),
    (
        {"tool_choice": "required", "tools": [tool("f", parameters={"properties": {"a": UNIQUE}})]},
        "tools", "tools: parameters of 'f' is",
    ),
    (
        {"tool_choice": "required", "tools": [tool("f", parameters={"type": "string"})]},
        "tools", "tools: parameters of 'f' have the type 'string'; give 'object'",
    ),
    (
        {"tool_choice": "auto", "tools": [tool("f", parameters={"maximum": float("inf")})]},
        "tools", "a number that is not JSON's",
    ),
    (
        {"tool_choice": "auto", "tools": [tool("\ud800")]},
        "messages", "which is no Unicode character",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("values", "param", "expected"), WRONG, ids=lambda value: str(value)[:40])
def test_a_call_that_cannot_be_forced_is_refused(server, values, param, expected):
    """Catches a choice that is ignored, and an error that speaks of a grammar that nobody gave."""
    body = {"messages": ASKED, "tools": CHOOSE_FROM, **values}
    content, kind = json.dumps(body), {"content-type": "application/json"}
    answer = server.http.post("/v1/chat/completions", content=content, headers=kind)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert expected in answer.json()["error"]["message"]


@pytest.mark.parametrize("step", slow_but([20], [20, 1]))
def test_nested_parameters_are_refused_at_any_depth(server, step):
    """Catches a failure of the server between what a grammar may nest and what a body may."""
    for depth in range(900, 1000, step):
        parameters = '{"items": ' * depth + "{}" + "}" * depth
        tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {parameters}}}}}'
        body = f'{{"messages": {json.dumps(ASKED)}, "tool_choice": "required", "tools": [{tool}]}}'
        kind = {"content-type": "application/json"}
        answer = server.http.post("/v1/chat/completions", content=body, headers=kind)
        assert answer.status_code == 400, depth


# -- /v1/responses -------------------------------------------------------------------------------

FLAT = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
RESPONSE = {"model": "pocket", "input": "How is Rome?", "tools": FLAT}
CHOICE = {"type": "function", "name": "weather"}


def respond(server, **values):
    """A response, with a function that may be called."""
    return server.openai().responses.create(**RESPONSE | {"temperature": 0} | values)


def test_a_response_may_call_a_function_and_be_told_what_it_returned(server):
    """Catches a call that is left in the text, and items that do not become the template's messages."""
    response = respond(server, tool_choice=CHOICE)
    (item,) = response.output
    assert (response.status, item.type, item.name, item.status) == (
        "completed", "function_call", "weather", "completed",
    )  # fmt: skip
    jsonschema.validate(json.loads(item.arguments), WEATHER)
    assert response.tools[0].name == response.tool_choice.name == "weather"
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "sunny"}
    items = [{"role": "user", "content": "How is Rome?"}, *response.output, result]
    more = respond(server, input=items, tool_choice="none", max_output_tokens=2)
    answered = respond(server, input=items, max_output_tokens=2)
    assert answered.usage.input_tokens > more.usage.input_tokens, "the template does not get the functions"
    assert more.tools
    arguments = json.loads(item.arguments)
    text = f"<|user|>How is Rome?<|assistant|>{arguments['city']}<|tool|>sunny"
    ids = server.llm.get_tokenizer().encode(text, add_special_tokens=False)
    assert more.usage.input_tokens == len(ids)


def test_who_chooses_no_function_gets_the_text():
    """Catches a text about calls that is taken for one."""
    (item,) = writer(tool_choice="none").whole([one_output(CALL, "stop")])["output"]
    assert item["content"][0]["text"] == CALL


def test_a_response_can_be_forced_where_the_template_has_no_place_for_tools(server, monkeypatch):
    """Catches a refusal that a chat does not have."""
    monkeypatch.setattr(server.llm.get_tokenizer(), "chat_template", "{{ messages[0].content }}")
    assert respond(server, tool_choice=CHOICE).output[0].name == "weather"
    monkeypatch.setattr(server.llm.get_tokenizer(), "chat_template", None)
    with pytest.raises(openai.BadRequestError, match="the model's tokenizer has no chat template"):
        respond(server, tool_choice=CHOICE)


WRONG_ITEMS = [
    ({"type": "function_call_output", "call_id": "c", "output": [1]}, "input.4.output"),
    (
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]},
        "input.4.output.0",
    ),
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{broken"}, "input.4.arguments"),
    ({"type": "function_call", "call_id": "c", "name": "f"}, "input.4.arguments"),
    ({"role": "user", "content": [{"type": "input_image"}]}, "input.4.content.0"),
    ({"type": "item_reference", "id": "i"}, "input.4"),
    ({"type": "reasoning", "summary": [], "content": [{"type": "input_image"}]}, "input.4.content.0"),
]


@pytest.mark.parametrize(("item", "place"), WRONG_ITEMS, ids=str)
def test_a_wrong_item_is_blamed_under_its_own_number(server, item, place):
    """Catches the number of the message that several items become, and a library's own words."""
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"} for i in range(3)]
    items = [{"role": "user", "content": "a"}, *calls, item]
    error = server.http.post("/v1/responses", json={"input": items}).json()["error"]
    assert error["param"].startswith(place)
    assert error["message"].startswith(place)
    assert "\n" not in error["message"]


def test_items_become_messages():
    """Catches a call that loses the text before it, or the call beside it."""
    items = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
    ]
    messages = conversation_of([ResponseItem(**item) for item in items])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert messages[1]["content"] == "I look."
    calls = [(call["id"], call["function"]["arguments"]) for call in messages[1]["tool_calls"]]
    assert calls == [("c1", {}), ("c2", {"x": 1})]
    assert [message["tool_call_id"] for message in messages[2:4]] == ["c1", "c2"]
    assert messages[4]["tool_calls"][0]["id"] == "c3"


def test_a_call_streams_in_the_clients_events(server):
    """Catches an event that the client does not know, and a stream that ends as another response."""
    events = list(respond(server, tool_choice=CHOICE, stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(7))
    assert events[3].delta == events[4].arguments == events[5].item.arguments
    assert events[-1].response.output == [events[5].item]
    with server.openai().responses.stream(**RESPONSE, tool_choice=CHOICE, temperature=0) as stream:
        assert [item.type for item in stream.get_final_response().output] == ["function_call"]


def test_text_and_calls_are_items_in_their_order():
    """Catches a text that is sent after the call that follows it, or twice, or otherwise in a stream."""
    text = f"Let me look. {CALL}\n{TIME}Done."
    draw = random.Random(1)
    for attempt in range(40):
        events = stream(cut(text, attempt, draw), "length")
        output = events[-1]["response"]["output"]
        assert [item["type"] for item in output] == ["message", "function_call", "function_call", "message"]
        assert [output[i]["content"][0]["text"] for i in (0, 3)] == ["Let me look.", "Done."]
        assert [item["status"] for item in output] == ["completed"] * 3 + ["incomplete"]
        done = [event for event in events if event["type"] == "response.output_item.done"]
        assert [event["output_index"] for event in done] == [0, 1, 2, 3]
        assert [event["item"] for event in done] == output
        assert len({item["id"] for item in output}) == 4
        whole = writer().whole([one_output(text, "length")])["output"]
        unlike = {"id", "call_id"}
        assert [{k: v for k, v in item.items() if k not in unlike} for item in whole] == [
            {k: v for k, v in item.items() if k not in unlike} for item in output
        ]
    assert [item["content"][0]["text"] for item in writer().whole([one_output("", "stop")])["output"]] == [""]


def writer(**values):
    """Of a response that may call functions."""
    generation = SimpleNamespace(request_id="resp_1", usage=Usage(), prompts=[[1]], params=SamplingParams())
    service = SimpleNamespace(model_name="pocket", tokenizer=AutoTokenizer.from_pretrained(pocket_model.PATH))
    return responses._Writer(service, ResponsesBody.model_validate(RESPONSE | values), generation)


def one_output(text: str, reason: str | None):
    """An output with this text."""
    return SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason=reason)])


def stream(pieces: list[str], reason: str) -> list[dict]:
    """The events of a response that comes in these pieces."""
    one = writer()
    text = one.begin()
    for number, piece in enumerate(pieces, start=1):
        text += one.events(0, one_output(piece, reason if number == len(pieces) else None))
    text += one.end()
    return [json.loads(event.split("data: ")[1]) for event in text.split("\n\n")[:-1]]


def test_an_error_in_a_stream_is_an_event_that_the_client_knows():
    """Catches an error that clients take for an event without a type, and [DONE], which is none here."""
    llm = AsyncLLM(**OPTIONS)
    with running(llm, request_timeout=1) as slow:
        slow.http.post("/v1/responses", json={"input": "a", "max_output_tokens": 1})  # what is first is slow
        llm.engine.executor.forward = lambda *args, forward=llm.engine.executor.forward: (
            time.sleep(0.02) or forward(*args)
        )
        body = {"input": "Once upon a time", "stream": True, "ignore_eos": True}
        text = slow.http.post("/v1/responses", json=body).text
    kind, _, data = text.removesuffix("\n\n").rpartition("\n\n")[2].partition("\n")
    error = json.loads(data.removeprefix("data: "))
    assert kind == "event: error"
    assert (error["type"], error["code"]) == ("error", "timeout")
    assert error["sequence_number"] == text.count("\n\n") - 1
