"""Reasoning between `<think>` and `</think>`: apart from the answer, whole and streamed, there and back."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from minipaged import AsyncLLM
from minipaged.serving.reasoning import ReasoningReader, ReasoningTags
from minipaged.serving.response_items import conversation_of
from minipaged.serving.response_schemas import ResponseItem
from tests.serving.conftest import CHAT, OPTIONS, running
from tests.tagged_tokenizer import write_tokenizer

TAGS = ReasoningTags(1, 2)
CALL = '<tool_call>{"name": "time"}</tool_call>'

OUTSIDE = [
    ("Hello.", "", "Hello."),
    ("", "", ""),
    (" \n", "", " \n"),
    (" Hello <think>", "", " Hello <think>"),
    ("<think>Hm.</think>Hello.", "Hm.", "Hello."),
    ("\n<think>\nHm.\n</think>\n\nHello.\n", "Hm.", "Hello.\n"),
    ("<think>\n\n</think>\n\nHello.", "", "Hello."),
    ("<think>a < b </thin b</think>Hello </think>", "a < b </thin b", "Hello </think>"),
    ("<think>cut off </thi", "cut off </thi", ""),
    ("<think>cut off \n", "cut off \n", ""),
    ("<think", "", "<think"),
    ("<think>Hm.</think> \n", "Hm.", ""),
    (f"<think>Hm.{CALL}</think>", f"Hm.{CALL}", ""),
]
INSIDE = [
    ("Hm.</think>Hello.", "Hm.", "Hello."),
    ("\nHm. <think> Hm.\n</think>Hello.", "\nHm. <think> Hm.", "Hello."),
    ("<think>\nHm.</think>Hello.", "Hm.", "Hello."),
    ("cut off", "cut off", ""),
    ("", "", ""),
    ("</think>Hello.", "", "Hello."),
]
WITH_CALLS = [
    (f"<think>Hm.\n{CALL}", "Hm.", CALL),
    (f"<think>Hm.</think>\n{CALL}", "Hm.", CALL),
    ("<think>Hm.\n<tool_call>\n<function=f>", "Hm.", "<tool_call>\n<function=f>"),
    ("<think>a <tool </think>b", "a <tool", "b"),
    ("<think>In <tool_call></tool_call> tags.</think>b", "In <tool_call></tool_call> tags.", "b"),
    ("<think>a <tool_call>\n", "a <tool_call>\n", ""),
]
CASES = [
    *((*case, False, False) for case in OUTSIDE),
    *((*case, True, False) for case in INSIDE),
    *((*case, False, True) for case in WITH_CALLS),
]


@pytest.mark.parametrize(("text", "reasoning", "answer", "is_open", "has_calls"), CASES)
def test_a_text_is_divided_alike_however_it_is_cut(text, reasoning, answer, is_open, has_calls):
    """Catches half a tag that is shown, space that depends on where pieces end, text that is lost."""
    draw = random.Random(0)
    for attempt in range(40):
        cuts = sorted(draw.choices(range(len(text) + 1), k=attempt))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
        reader = ReasoningReader(TAGS, is_open, has_calls)
        parts = [reader.read(piece, i == len(pieces)) for i, piece in enumerate(pieces, start=1)]
        assert tuple(map("".join, zip(*parts))) == (reasoning, answer), pieces


def test_what_is_certain_is_not_held_back():
    """Catches reasoning that comes only once it is complete."""
    reader = ReasoningReader(TAGS, False, False)
    pieces = ["<think>", "One", " two ", "three", "</", "think>", "\n", "Four"]
    expected = [
        ("", ""),
        ("One", ""),
        (" two", ""),
        (" three", ""),
        ("", ""),
        ("", ""),
        ("", ""),
        ("", "Four"),
    ]
    assert [reader.read(piece, False) for piece in pieces] == expected


# -- a server -------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}[{{ message.reasoning_content }}]{% endif %}{{ message.content }}"
    "{% endfor %}{% if is_open %}<think>\n{% elif is_closed %}<think></think>\n{% endif %}"
)
ASKED = [{"role": "user", "content": "How is Rome?"}]
REASONING, ANSWER = "They ask for Rome.", "Rome is fine."


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The embedded model, with a tokenizer that has both tags; they are special tokens."""
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "think")
    with running(AsyncLLM(tokenizer=folder, **OPTIONS)) as one:
        one.llm.get_tokenizer().chat_template = TEMPLATE
        yield one


@pytest.mark.parametrize("is_open", [False, True], ids=["the model begins", "the template begins"])
def test_a_chat_has_its_reasoning_apart(server, writes, is_open):
    """Catches tags in a content, reasoning that is lost, other parts in a stream than in a whole answer."""
    writes(f"{'' if is_open else '<think>'}{REASONING}</think>\n\n{ANSWER}")
    body = {"messages": ASKED, "n": 2, "chat_template_kwargs": {"is_open": is_open}}
    answer = server.http.post(CHAT, json=body).json()
    for choice in answer["choices"]:
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == (REASONING, ANSWER)
        assert choice["finish_reason"] == "stop"
    client = server.openai()
    reasoning, content = ["", ""], ["", ""]
    for event in client.chat.completions.create(
        model="pocket",
        messages=ASKED,
        n=2,
        stream=True,
        extra_body={"chat_template_kwargs": {"is_open": is_open}},
    ):
        for choice in event.choices:
            piece = getattr(choice.delta, "reasoning", "")
            reasoning[choice.index] += piece
            content[choice.index] += choice.delta.content or ""
            assert not (piece and choice.delta.content == ""), (
                "a client would think that the answer has begun"
            )
    assert (reasoning, content) == ([REASONING] * 2, [ANSWER] * 2)


def test_no_event_has_empty_content_in_the_middle_of_a_thought(server, writes):
    """Catches a client that thinks the answer has begun, because a piece with its tokens has no text yet."""
    writes(f"<think>{REASONING}</think>\n\n{ANSWER}")
    events = server.openai().chat.completions.create(
        model="pocket", messages=ASKED, stream=True, logprobs=True, extra_body={"return_token_ids": True}
    )
    deltas = [choice.delta for event in events for choice in event.choices]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    contents = [delta.content for delta in deltas[1:] if delta.content is not None]
    assert "".join(contents) == ANSWER
    assert "" not in contents


@pytest.mark.parametrize("is_open", [False, True], ids=["the model begins", "the template begins"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_tokens_of_reasoning_are_counted(server, writes, is_open, is_streamed):
    """Catches a count of zero, and one that includes the answer."""
    script = writes(f"{'' if is_open else '<think>'}{REASONING}</think>{ANSWER}")
    wanted = script.index(server.llm.get_tokenizer().convert_tokens_to_ids("</think>")) + 1
    body = {"messages": ASKED, "chat_template_kwargs": {"is_open": is_open}}
    extra = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
    answer = server.http.post(CHAT, json=body | extra)
    if is_streamed:
        assert f'"reasoning_tokens": {wanted}}}' in answer.text
    else:
        usage = answer.json()["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == wanted
        assert usage["completion_tokens"] == len(script)


def test_reasoning_that_is_cut_off_leaves_no_content(server, writes):
    """Catches half a thought as the answer."""
    writes(f"<think>{REASONING}</think>{ANSWER}")
    (choice,) = server.http.post(CHAT, json={"messages": ASKED, "max_tokens": 4}).json()["choices"]
    assert REASONING.startswith(choice["message"]["reasoning"])
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")


def test_reasoning_that_is_cut_off_may_be_sent_back(server, writes):
    """Catches a server that refuses what it has written itself, because the message has no content."""
    writes(f"<think>{REASONING}</think>{ANSWER}")
    body = {"messages": ASKED, "max_tokens": 4}
    (choice,) = server.http.post(CHAT, json=body).json()["choices"]
    messages = [*ASKED, choice["message"], {"role": "user", "content": "Go on."}]
    answer = server.http.post("/tokenize", json={"messages": messages}).json()
    reasoning = choice["message"]["reasoning"]
    text = server.llm.get_tokenizer().decode(answer["tokens"])
    assert text.endswith(f"<|assistant|>[{reasoning}]<|user|>Go on.")


@pytest.mark.parametrize(
    ("begun", "reasoning"), [("<think>They", " ask."), ("<think>They ask.</think>", None), ("So: ", None)]
)
def test_a_message_with_a_format_goes_on_where_it_ends(server, writes, begun, reasoning):
    """Catches a schema that applies to the rest of a thought, and thoughts in the middle of an answer."""
    messages = [*ASKED, {"role": "assistant", "content": begun}]
    think = server.llm.get_tokenizer().convert_tokens_to_ids("<think>")
    body = {"messages": messages, "continue_final_message": True, "response_format": FORMAT}
    if reasoning is None:
        body |= {"logit_bias": {str(think): 100}, "max_tokens": 100}
    else:
        writes(f'{reasoning}</think>{{"city": "Rome"}}')
    (choice,) = server.http.post(CHAT, json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"].get("reasoning") == reasoning
    assert json.loads(choice["message"]["content"])["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("begun", "reasoning", "answer"),
    [
        ("<think>They", " ask.", "Fine."),
        ([{"type": "text", "text": "<think>They"}], " ask.", "Fine."),
        ("<think>They ask.</think>Rome", "", " ask.</think>Fine."),
    ],
    ids=["a thought", "a thought as a part", "an answer"],
)
def test_a_message_goes_on_where_it_ends(server, writes, begun, reasoning, answer, is_streamed):
    """Catches the rest of a thought as the answer, and a word that loses the space before it."""
    writes(" ask.</think>Fine.")
    messages = [*ASKED, {"role": "assistant", "content": begun}]
    body = {"messages": messages, "continue_final_message": True, "stream": is_streamed}
    text = server.http.post(CHAT, json=body).text
    found = {"reasoning": "", "content": ""}
    for line in text.removeprefix("data: ").split("data: "):
        if line.startswith("{"):
            (choice,) = json.loads(line)["choices"]
            for name, piece in choice.get("delta" if is_streamed else "message", {}).items():
                found |= {name: found[name] + piece} if name in found else {}
    assert found == {"reasoning": reasoning, "content": answer}


def test_an_answer_without_reasoning_is_as_ever(server, writes):
    """Catches a field that is always there, and content that loses its space."""
    writes(f" {ANSWER}")
    (choice,) = server.http.post(CHAT, json={"messages": ASKED}).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": f" {ANSWER}", "refusal": None}


def test_the_server_has_variables_for_the_template(server, writes, monkeypatch):
    """Catches --default-chat-template-kwargs without effect on an endpoint, or over a request's own."""
    settings = replace(
        server.service.settings, default_chat_template_kwargs={"is_open": True, "is_closed": True}
    )
    monkeypatch.setattr(server.service, "settings", settings)
    writes(f"{REASONING}</think>{ANSWER}")
    for own, reasoning in (({}, REASONING), ({"mood": 1}, REASONING), ({"is_open": False}, None)):
        body = {"messages": ASKED, "chat_template_kwargs": own} if own else {"messages": ASKED}
        (choice,) = server.http.post(CHAT, json=body).json()["choices"]
        assert choice["message"].get("reasoning") == reasoning
    response = server.http.post("/v1/responses", json={"input": "How is Rome?"}).json()
    assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
    token_ids = server.http.post("/tokenize", json={"messages": ASKED}).json()["tokens"]
    assert "<think>" in server.llm.get_tokenizer().decode(token_ids)


SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}


@pytest.mark.parametrize("is_open", [False, True], ids=["the model begins", "the template begins"])
def test_a_structured_answer_comes_after_the_thoughts(server, writes, is_open):
    """Catches thoughts that must follow the schema, and JSON that is taken for a thought."""
    writes(f"{'' if is_open else '<think>'}{REASONING}</think>" + '{"city": "Rome"}')
    kwargs = {"is_open": is_open}
    body = {"messages": ASKED, "chat_template_kwargs": kwargs, "response_format": FORMAT}
    (choice,) = server.http.post(CHAT, json=body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (REASONING, '{"city": "Rome"}')


def test_a_forced_call_comes_after_the_thoughts(server, writes):
    """Catches a call that has to be the first thought."""
    writes(f'<think>{REASONING}</think><tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>')
    tools = [{"type": "function", "function": {"name": "time"}}]
    body = {"messages": ASKED, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    (choice,) = server.http.post(CHAT, json=body).json()["choices"]
    assert (choice["message"]["reasoning"], choice["finish_reason"]) == (REASONING, "tool_calls")
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "time"


def test_a_thought_may_mention_a_call_before_a_structured_answer(server, writes, monkeypatch):
    """Catches a call that was only a thought: the model could not end there, so it has not called."""
    monkeypatch.setattr(server.llm.get_tokenizer(), "chat_template", TEMPLATE + "{% if tools %} {% endif %}")
    thought = f"I could {CALL}."
    writes(f"<think>{thought}</think>" + '{"city": "Rome"}')
    tools = [{"type": "function", "function": {"name": "time"}}]
    body = {"messages": ASKED, "tools": tools, "response_format": FORMAT}
    (choice,) = server.http.post(CHAT, json=body).json()["choices"]
    wanted = {"role": "assistant", "content": '{"city": "Rome"}', "refusal": None, "reasoning": thought}
    assert (choice["message"], choice["finish_reason"]) == (wanted, "stop")


@pytest.mark.parametrize(
    ("kwargs", "thinks"),
    [({}, {False, True}), ({"is_open": True}, {True}), ({"is_closed": True}, {False})],
    ids=["free", "open", "closed"],
)
def test_whatever_the_thoughts_the_answer_follows_its_schema(server, kwargs, thinks):
    """Catches a model that ends in its thoughts, or that avoids the schema because it does not think."""
    think, end = server.llm.get_tokenizer().convert_tokens_to_ids(["<think>", "</think>"])
    found = set()
    for seed in range(12):
        biases = {str(end): 29, str(think): 30 if seed % 2 else -30}
        body = {"messages": ASKED, "chat_template_kwargs": kwargs, "response_format": FORMAT, "seed": seed}
        answer = server.http.post(CHAT, json=body | {"logit_bias": biases, "max_tokens": 300}).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        assert json.loads(choice["message"]["content"])["city"] in ("Rome", "Oslo")
        found.add(answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0)
    assert found == thinks


def test_who_leaves_special_tokens_out_gets_the_text(server, writes):
    """Catches a text that is all reasoning, because its end is left out."""
    writes(f"<think>{REASONING}</think>{ANSWER}")
    body = {"messages": ASKED, "skip_special_tokens": True}
    (choice,) = server.http.post(CHAT, json=body).json()["choices"]
    assert choice["message"]["content"] == REASONING + ANSWER


def test_a_response_has_reasoning_as_an_item(server, writes):
    """Catches events that the client cannot put together, and items that differ from the whole response's."""
    writes(f"<think>{REASONING}</think>{ANSWER}")
    client = server.openai()
    whole = client.responses.create(model="pocket", input="How is Rome?")
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output[0].content[0].text == REASONING
    assert whole.output_text == ANSWER
    assert whole.usage.output_tokens_details.reasoning_tokens > 3
    texts = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
    with client.responses.stream(model="pocket", input="How is Rome?") as events:
        for event in events:
            if event.type in texts:
                texts[event.type] += event.delta
        final = events.get_final_response()
    assert [*texts.values()] == [REASONING, ANSWER]
    assert [item.type for item in final.output] == ["reasoning", "message"]
    assert final.output[0].content == whole.output[0].content
    assert final.output[0].id != whole.output[0].id


def test_a_response_has_options_of_the_template(server, writes):
    """Catches reasoning that only chats can turn on or off."""
    writes(f"{REASONING}</think>{ANSWER}")
    body = {"input": "How is Rome?", "chat_template_kwargs": {"is_open": True}}
    output = server.http.post("/v1/responses", json=body).json()["output"]
    assert [item["content"][0]["text"] for item in output] == [REASONING, ANSWER]
    body["chat_template_kwargs"] = {"messages": []}
    error = server.http.post("/v1/responses", json=body).json()["error"]
    assert error["param"] == "chat_template_kwargs"


def test_a_response_that_is_cut_in_its_reasoning_has_no_text(server, writes):
    """Catches an empty message after a thought that has not ended."""
    writes(f"<think>{REASONING}</think>{ANSWER}")
    response = server.openai().responses.create(model="pocket", input="How is Rome?", max_output_tokens=4)
    (item,) = response.output
    assert (response.status, item.type, item.status) == ("incomplete", "reasoning", "incomplete")


def test_reasoning_goes_back_to_the_template(server, writes):
    """Catches reasoning that a model does not see again, between a call and its next answer."""
    writes(f"<think>{REASONING}</think>{ANSWER}")
    client, tokenizer = server.openai(), server.llm.get_tokenizer()
    message = client.chat.completions.create(model="pocket", messages=ASKED).choices[0].message
    messages = [*ASKED, message.model_dump()]
    tokens = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert tokenizer.decode(tokens).endswith(f"<|assistant|>[{REASONING}]{ANSWER}")
    response = client.responses.create(model="pocket", input=ASKED)
    again = client.responses.create(model="pocket", input=[*ASKED, *response.output], max_output_tokens=1)
    assert again.usage.input_tokens == len(tokens)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_the_name_that_a_template_knows(server, monkeypatch, name):
    """Catches reasoning that reaches only templates with one of its two names."""
    tokenizer = server.llm.get_tokenizer()
    monkeypatch.setattr(tokenizer, "chat_template", f"{{{{ messages[-1].{name} }}}}")
    wanted = tokenizer.encode(REASONING, add_special_tokens=False)
    said = {"role": "assistant", "content": ANSWER}
    messages = [said | {"reasoning": REASONING}]
    assert server.http.post("/tokenize", json={"messages": messages}).json()["tokens"] == wanted
    items = [{"type": "reasoning", "summary": [], "content": REASONING}, said]
    answer = server.http.post("/v1/responses", json={"input": items, "max_output_tokens": 1}).json()
    assert answer["usage"]["input_tokens"] == len(wanted)


def test_reasoning_belongs_to_the_message_that_follows():
    """Catches reasoning that is lost, comes too late, or joins two answers."""
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    said = {"role": "assistant", "content": "I look."}

    def messages(*items):
        return [
            (message.get("reasoning_content"), len(message.get("tool_calls", ())))
            for message in conversation_of([ResponseItem(**item) for item in items])
        ]

    assert messages(thought, said, call) == [("Hm.", 1)]
    assert messages(thought, call, call) == [("Hm.", 2)]
    assert messages(said, thought, call) == [(None, 0), ("Hm.", 1)]
    assert messages(thought, {"role": "user", "content": "a"}, said) == [(None, 0), (None, 0)]
    assert messages({"type": "reasoning", "summary": [], "encrypted_content": "x"}, said) == [(None, 0)]
