"""`/v1/responses` with the official client: create, stream, instructions, earlier turns, a schema."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest

from minipaged import SamplingParams

MODEL = {"model": "pocket"}
ASKED = [{"role": "user", "content": "What is a block table?"}]
GREEDY = {"temperature": 0, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def right(offline):
    """What a chat says to `ASKED`."""
    return offline.chat(ASKED, SamplingParams(temperature=0, max_tokens=12))[0]


def test_a_response_is_what_a_chat_answers(client, right):
    """Catches a prompt without its template, and counts of another request."""
    response = client.responses.create(**MODEL, input=ASKED[0]["content"], **GREEDY)
    assert response.output_text == right.outputs[0].text
    assert (response.status, response.object, response.model) == ("incomplete", "response", "pocket")
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.input_tokens == len(right.prompt_token_ids)
    assert response.usage.output_tokens == 12
    assert response.usage.total_tokens == response.usage.input_tokens + 12
    again = client.responses.create(**MODEL, input=ASKED[0]["content"] * 8, **GREEDY)
    again = client.responses.create(**MODEL, input=ASKED[0]["content"] * 8, **GREEDY)
    assert again.usage.input_tokens_details.cached_tokens > 16


def test_instructions_and_earlier_turns_come_before_the_input(client, offline):
    """Catches instructions that are dropped, and an output that cannot be given back as input."""
    first = client.responses.create(**MODEL, input=ASKED, instructions="Be brief.", **GREEDY)
    begun = [{"role": "system", "content": "Be brief."}, *ASKED]
    params = SamplingParams(temperature=0, max_tokens=12)
    assert first.output_text == offline.chat(begun, params)[0].outputs[0].text
    then = {"role": "user", "content": [{"type": "input_text", "text": "And then?"}]}
    more = [*ASKED, *first.output, then]
    second = client.responses.create(**MODEL, input=more, instructions="Be brief.", **GREEDY)
    messages = [
        *begun,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And then?"},
    ]
    assert second.output_text == offline.chat(messages, params)[0].outputs[0].text


def test_a_stream_has_the_clients_events(client, right):
    """Catches an event that the client does not know, pieces that do not join, a stream without its end."""
    events = list(client.responses.create(**MODEL, input=ASKED, stream=True, **GREEDY))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added"),
    ]
    assert kinds[-4:] == [
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.incomplete"),
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == right.outputs[0].text
    assert events[-1].response.output_text == events[-4].text == right.outputs[0].text
    assert events[-1].response.usage.output_tokens == 12
    with client.responses.stream(**MODEL, input=ASKED, **GREEDY) as stream:
        assert (
            "".join(e.delta for e in stream if e.type == "response.output_text.delta")
            == right.outputs[0].text
        )


def test_a_stream_that_fails_ends_with_an_error(server, monkeypatch):
    """Catches a stream that ends as if nothing were missing, and an event without its number."""

    def fail(plan):
        raise RuntimeError("on fire")

    monkeypatch.setattr(server.llm.engine.executor, "execute", fail)
    text = server.http.post("/v1/responses", json={"input": "Hello", "stream": True}).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "request_failed")
    assert "on fire" in events[-1]["message"]


def test_an_answer_that_ends_by_itself_is_completed(client):
    """Catches every answer reported as cut off."""
    values = {"temperature": 0, "extra_body": {"stop": [" "]}}
    response = client.responses.create(**MODEL, input=ASKED, **values)
    assert (response.status, response.incomplete_details) == ("completed", None)
    *_, last = client.responses.create(**MODEL, input=ASKED, stream=True, **values)
    assert last.type == "response.completed"


def test_a_text_format_is_followed(client):
    """Catches a schema that is read and dropped."""

    class Answer(pydantic.BaseModel):
        sure: bool

    response = client.responses.parse(**MODEL, input=ASKED, text_format=Answer, temperature=0)
    assert response.output_parsed in (Answer(sure=True), Answer(sure=False))
    wanted = {"format": {"type": "json_object"}}
    assert client.responses.create(**MODEL, input=ASKED, text=wanted, **GREEDY).output_text.startswith("{")


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        (None, {"format": {"type": "text"}}),
        ({"verbosity": "low"}, {"format": {"type": "text"}, "verbosity": "low"}),
        ({"format": {"type": "json_object"}},) * 2,
        (
            {"format": {"type": "json_schema", "name": "a", "schema": {"default": None}, "strict": None}},
            {"format": {"type": "json_schema", "name": "a", "schema": {"default": None}}},
        ),
    ],
)
def test_a_response_says_what_its_text_is(client, given, echoed):
    """Catches a stream whose answer LangChain does not parse: it looks here for the schema."""
    values = {**MODEL, **GREEDY, "input": ASKED, "text": given}
    events = client.responses.create(**values, stream=True)
    streamed = [event.response for event in events if hasattr(event, "response")]
    for response in (client.responses.create(**values), *streamed):
        assert response.to_dict()["text"] == echoed


BAD = [
    ({"input": []}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "a", "tools": [{"type": "web_search"}]}, "tools"),
    ({"input": "a", "background": True}, "background"),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text"),
    ({"input": "a", "extra_body": {"n": 2}}, "n"),
    ({"input": "a", "extra_body": {"max_tokens": 2}}, "max_tokens"),
    ({}, "input"),
]


@pytest.mark.parametrize(("values", "name"), BAD, ids=str)
def test_what_cannot_be_done_is_refused_by_name(client, values, name):
    """Catches a field that is ignored, and so another answer than was asked for."""
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**MODEL, **values)
    assert raised.value.param is not None
    assert raised.value.param.split(".")[0] == name


def test_what_clients_send_to_say_nothing_is_taken(client, right):
    """Catches a client that names what it does not want, and is refused."""
    nothing = {"include": [], "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    more = {"truncation": "disabled", "background": False, "previous_response_id": None, "reasoning": None}
    keys = {"prompt_cache_key": "a", "safety_identifier": "b", "store": False}
    response = client.responses.create(**MODEL, input=ASKED, **GREEDY, **nothing, **more, **keys)
    assert response.output_text == right.outputs[0].text


def test_a_response_says_what_it_was_asked_for(client):
    """Catches a field that clients read back, and that the answer has lost."""
    asked = {"instructions": "Be brief.", "metadata": {"a": "b"}, "parallel_tool_calls": False, **GREEDY}
    whole = client.responses.create(**MODEL, input=ASKED, **asked)
    *_, last = client.responses.create(**MODEL, input=ASKED, stream=True, **asked)
    for response in (whole, last.response):
        assert {name: getattr(response, name) for name in asked} == asked


def test_a_wrong_length_is_reported_under_its_own_name(server):
    """Catches an error about `max_tokens`, which the body does not have."""
    error = server.http.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 2**63}).json()[
        "error"
    ]
    assert error["param"] == "max_output_tokens"
    assert error["message"].startswith("max_output_tokens is 9223372036854775808")


def test_a_part_is_blamed_under_its_own_number(server):
    """Catches instructions counted as the first item of the input."""
    items = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    for more in ({}, {"instructions": "Be brief."}):
        error = server.http.post("/v1/responses", json={"input": items, **more}).json()["error"]
        assert error["param"] == "input.0.content.0"


@pytest.mark.parametrize(
    ("item", "param", "message"),
    [
        ({"role": "user"}, "input.1.content", "input.1.content is null; give a text"),
        ({"role": "user", "content": []}, "input.1.content", "input.1.content is []; give a text"),
        ({"role": "user", "content": "\ud800"}, "input.1.content", "input.1.content has '\\ud800' at "),
        (
            {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "b\ud800")]},
            "input.1.content.1",
            "input.1.content.1 has '\\ud800' at position 1",
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": []},
            "input.1.output",
            "input.1.output is []; give a text",
        ),
    ],
)
def test_an_item_without_a_text_is_named(server, item, param, message):
    """Catches an error about `messages`, which the body does not have, and a search among a hundred items."""
    body = json.dumps({"input": [{"role": "user", "content": "Hello"}, item]})
    answer = server.http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(message)


@pytest.mark.parametrize("field", ["input", "instructions"])
def test_a_text_that_is_not_unicode_is_named(server, field):
    """Catches instructions that are called input, and a position in the whole conversation."""
    body = json.dumps({"input": "Hello", field: "a\ud800"})
    answer = server.http.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(f"{field} has '\\ud800' at position 1")
