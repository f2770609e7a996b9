"""What cannot be served gets a 4xx, OpenAI's error object and the field's name; never a 500."""

from __future__ import annotations

import gzip
import json

import pytest
from pydantic import ValidationError

from minipaged.serving import schemas
from tests.serving.conftest import CHAT, JSON, C, connect, request_of, running
from tests.serving.toys import IDS, toy

HELLO = [{"role": "user", "content": "Hello"}]
TEXT = {"type": "text", "text": "Hello"}
PROMPT = {"prompt": "Once"}
DEEP = "[" * 100_000

# Field -> bad values, for both endpoints: types, ranges, what JSON allows and numbers do not.
BOTH = {
    "temperature": ["hot", -1, 1001, [0], True],
    "top_p": [0, -0.1, 1.5, "1"],
    "top_k": [-2, 1.5, "5", 2**70],
    "min_p": [-0.1, 1.1, {}],
    "n": [0, -1, 1.5, "2", True, 20_000, 300, 2**70],
    "best_of": [0, "2", 100_000],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-3, 3, []],
    "repetition_penalty": [0, 101, "1"],
    "logit_bias": [
        {str(i): 1 for i in range(1025)},
        [],
        {"a": 1},
        {"1": 101},
        {"1": "2"},
        {"99999": 1},
        {"-1": 1},
        {"²": 1},
    ],
    "bad_words": ["the", [""], [1], ["a"] * 513],
    "allowed_token_ids": [[1] * 65_537, [], [99_999], [-1], ["1"], 5],
    "seed": ["1", 1.5, True],
    "stop": [5, [""], "", [1], {"a": "b"}, ["a"] * 65],
    "stop_token_ids": [[1] * 1025, [-1], [2048], ["1"], 7],
    "include_stop_str_in_output": ["yes", 1],
    "ignore_eos": ["yes", 1],
    "min_tokens": [-1, "3", 17_000],
    "max_tokens": [0, -5, "10", 1.5, 2**70],
    "prompt_logprobs": [-1, 21, "1", True],
    "truncate_prompt_tokens": [0, -2, "3", 1.5],
    "stream": ["true", 1],
    "stream_options": [{"include_usage": True}, "all", 5],
    "response_format": [
        "json",
        {"type": "xml"},
        {},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
    ],
    "structured_outputs": [
        {},
        {"regex": "("},
        {"choice": []},
        {"choice": [1]},
        {"choice": ["a"] * 1025},
        {"regex": "a", "choice": ["b"]},
        {"grammar": "start: nothing"},
        {"regexp": "a"},
        "a",
    ],
    "use_beam_search": ["yes", 4],
    "beam_width": [4],
    "length_penalty": [1.0],
    "early_stopping": [True],
    "cache_salt": [5, []],
    "return_token_ids": ["yes", 1],
    "model": [5, ["pocket"]],
    "metadata": ["a", {"a": 1}],
}
ONE = {
    C: {
        "prompt": [
            5,
            None,
            "",
            [],
            [[]],
            ["a", ""],
            [1.5],
            [True],
            [99_999],
            [-1],
            [[1], [99_999]],
            {},
            [None],
            ["a", 5],
            "\ud800",
            [5] * 5000,
            "word " * 5000,
            ["a"] * 257,
        ],
        "logprobs": [-1, 21, True, "2"],
        "echo": ["yes", 1],
        "suffix": ["the end"],
    },
    CHAT: {
        "messages": [
            None,
            "Hello",
            [],
            [{}],
            [{"role": "user", "content": 5}],
            [{"role": 5, "content": "a"}],
            [{"content": "a"}],
            [{"role": "user"}],
            [{"role": "user", "content": None}],
            [{"role": "nobody", "content": "a"}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": ["a"]}],
            [{"role": "user", "content": "\ud800"}],
            [{"role": "user", "content": "word " * 5000}],
            ["a"],
        ],
        "logprobs": [5, "true"],
        "top_logprobs": [2, "2", -1, 21],
        "max_completion_tokens": [0, "5", 2**63],
        "tools": [
            *("a", [5], [{}], [{"type": "function"}], [{"type": "function", "function": {}}]),
            [{"type": "web_search", "function": {"name": "f"}}],
            [{"type": "function", "function": {"name": 5}}],
            [{"type": "function", "function": {"name": "f", "parameters": "none"}}],
            [{"type": "function", "function": {"name": "f"}}],
        ],
        "chat_template_kwargs": ["a", {"tokenize": True}, {"messages": []}, {"add_generation_prompt": True}],
        "add_generation_prompt": ["yes", 1],
        "continue_final_message": ["yes", 1],
        "tool_choice": [
            "required",
            "any",
            {"type": "function"},
            {"type": "function", "function": {"name": "f"}},
        ],
    },
}
BASE = {C: PROMPT, CHAT: {"messages": HELLO}}
TABLE = [
    (path, {**BASE[path], field: value}, field)
    for path in (C, CHAT)
    for field, values in (BOTH | ONE[path]).items()
    for value in values
]
TABLE += [(C, {**PROMPT, "bad_words": ["word " * 400] * 9}, "bad_words")]
# Combinations, and the field that is to be named.
BEAM = {"use_beam_search": True, "n": 2}
TABLE += [
    (C, {**PROMPT, "temperature": 0, "n": 2}, "temperature"),
    (C, {**PROMPT, "n": 3, "best_of": 2, "temperature": 1}, "best_of"),
    (C, {**PROMPT, "min_tokens": 5, "max_tokens": 2}, "min_tokens"),
    (C, {**PROMPT, **BEAM, "temperature": -1}, "temperature"),
    (C, {**PROMPT, **BEAM, "logprobs": 21}, "logprobs"),
    (C, {**PROMPT, **BEAM, "logprobs": 2, "echo": True}, "echo"),
    (C, {**PROMPT, **BEAM, "stop": [""]}, "stop"),
    (C, {**PROMPT, **BEAM, "top_k": 5}, "top_k"),
    (C, {**PROMPT, **BEAM, "beam_width": 1}, "n"),
    (C, {**PROMPT, **BEAM, "beam_width": 5000}, "beam_width"),
    (C, {**PROMPT, **BEAM, "length_penalty": 90}, "length_penalty"),
    (C, {**PROMPT, **BEAM, "early_stopping": "now"}, "early_stopping"),
    (C, {**PROMPT, "logprobs": 1, "echo": True, "stream": True}, "echo"),
    (C, {**PROMPT, "echo": True, "max_tokens": 0, "min_tokens": 1}, "max_tokens"),
    (C, {**PROMPT, "echo": True, "max_tokens": -1}, "max_tokens"),
    (C, {**PROMPT, "temprature": 1}, "temprature"),
    (C, {**PROMPT, "a": None}, "a"),
    (C, {**PROMPT, "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    (
        C,
        {**PROMPT, "structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}},
        "structured_outputs",
    ),
    (C, {**PROMPT, "structured_outputs": {"regex": "a"}, "allowed_token_ids": [900], "min_tokens": 1}, None),
    (CHAT, {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    (CHAT, {"messages": HELLO, "prompt": "Once"}, "prompt"),
    (
        CHAT,
        {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    (C, {}, "prompt"),
    (CHAT, {}, "messages"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
    ("/tokenize", {"prompt": ""}, "prompt"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 5}, "add_special_tokens"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [2**40]}, "tokens"),
    ("/detokenize", {"tokens": [2048]}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
]


def test_the_table_is_long_enough():
    """Catches a table that lost its rows."""
    assert len(TABLE) > 240


def check_refused(answer, field) -> None:
    """A 4xx in OpenAI's shape that names the field."""
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert 10 < len(error["message"]) < 400
    if field is not None:
        assert error["param"] is not None, error
        assert error["param"].split(".")[0] == field.split(".")[0], error
        assert field.split(".")[0] in error["message"], error


def test_bad_bodies_are_refused_by_name_and_nothing_is_held(server):
    """Catches a 500, a value taken silently, a message without the field, blocks or requests left behind."""
    wrong = []
    for path, body, field in TABLE:
        answer = server.http.post(path, content=json.dumps(body), headers=JSON)
        try:
            check_refused(answer, field)
        except AssertionError as error:
            wrong.append(f"{path} {json.dumps(body)[:120]}: {answer.status_code} {str(error)[:300]}")
    assert not wrong, f"{len(wrong)} of {len(TABLE)}\n" + "\n".join(wrong)
    server.assert_released()


@pytest.mark.parametrize(
    ("content", "kind", "status", "expected"),
    [
        (b"", "application/json", 400, "body"),
        (b"{", "application/json", 400, "not JSON"),
        (b"null", "application/json", 400, "JSON object"),
        (b"[]", "application/json", 400, "JSON object"),
        (b"5", "application/json", 400, "JSON object"),
        (DEEP.encode(), "application/json", 400, "nested too deeply"),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", 400, "temperature"),
        (b'{"prompt": "a", "temperature": Infinity}', "application/json", 400, "temperature"),
        (b'{"prompt": "a", "n": 1' + b"0" * 5000 + b"}", "application/json", 400, "more than 4,300 digits"),
        (b'{"prompt": "\xff"}', "application/json", 400, "byte 0xff at position 12"),
        (b'{"prompt": "a", "\\ud800": 1}', "application/json", 400, "no field \\ud800"),
        (b'{"prompt": "a"}', "text/plain", 400, "Content-Type is text/plain; "),
        (b'{"prompt": "a"}', "", 400, "Content-Type is missing; "),
        (
            b'{"prompt": "a"}',
            "application/x-www-form-urlencoded",
            400,
            "Content-Type is application/x-www-form-urlencoded; send it as application/json",
        ),
        (b'{"prompt": "' + b"a" * (5 << 20) + b'"}', "application/json", 413, "--max-body-bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bodies_that_are_not_json_are_refused(server, content, kind, status, expected):
    """Catches a parser's exception that becomes a 500, and a body without end."""
    answer = server.http.post(C, content=content, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    assert expected in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [C, "/reset_prefix_cache"])
def test_a_body_without_a_length_is_cut_off_too(server, path):
    """Catches a limit that only Content-Length has; 499 to a client that is there."""
    chunks = (b"a" * 65536 for _ in range(100))
    answer = server.http.post(path, content=chunks, headers=JSON)
    assert answer.status_code == 413


def test_a_body_that_is_announced_as_too_long_is_not_waited_for(server):
    """Catches a limit that counts only what has come."""
    with connect(server.http) as client:
        client.settimeout(30)
        client.sendall(request_of(b"{", length=10**11))
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_compressed_body_is_refused_as_such(server):
    """Catches "not UTF-8: byte 0x8b" for a client that compresses."""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = server.http.post(C, content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    assert answer.status_code == 415
    assert "Content-Encoding is gzip; send the body uncompressed" in answer.json()["error"]["message"]


def test_names_of_encodings_have_no_case(server):
    """Catches "Identity", which is no compression, refused as one."""
    headers = {"content-encoding": "Identity"}
    assert server.http.post("/tokenize", json={"prompt": "a"}, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", CHAT),
        ("POST", "/completions", C),
        ("POST", "/v1/v1/responses", "/v1/responses"),
        ("POST", f"{CHAT}/chat/completions", CHAT),
        ("POST", f"{CHAT}/", CHAT),
        ("GET", "/models", "/v1/models"),
        ("GET", "/v1/embeddings", None),
        ("GET", "/mycompletions", None),
    ],
)
def test_a_base_address_without_its_version_is_noticed(server, method, path, meant):
    """Catches a client whose base address lacks /v1, or has it twice, sent to read a schema."""
    answer = server.http.request(method, path)
    hint = "see /openapi.json for what there is" if meant is None else f"did you mean {meant}?"
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == f"there is no {path} here; {hint}"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2", 404),
        ("GET", C, 405),
        ("DELETE", CHAT, 405),
        ("POST", "/health", 405),
        ("POST", "/v1/models/", 405),
        ("GET", "/docs", 404),
    ],
)
def test_unknown_paths_and_methods_have_openais_shape(server, method, path, status):
    """Catches the framework's own error format."""
    answer = server.http.request(method, path)
    assert answer.status_code == status
    assert path in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (C, {"prompt": [1, "a"]}, 'prompt.1 is "a"; give an integer'),
        (C, {"prompt": ["a", 1]}, "prompt.1 is 1; give a string"),
        (C, {"prompt": [1, 2, "a"]}, 'prompt.2 is "a"; give an integer'),
        (C, {"prompt": [[1, "a"]]}, 'prompt.0.1 is "a"; give an integer'),
        (C, {**PROMPT, "temperature": "hot"}, 'temperature is "hot"; give a number'),
        (C, {**PROMPT, "echo": "yes"}, 'echo is "yes"; give true or false'),
        (C, {**PROMPT, "stream_options": [True, None]}, "stream_options is [true, null]; give an object"),
        (C, {**PROMPT, "bad_words": {}}, "bad_words is {}; give a list"),
        (C, {**PROMPT, "stop": 5}, "stop is 5; give a string or a list"),
        (C, {"prompt": 5}, "prompt is 5; give a string or a list"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content is 5; give a string or a list",
        ),
        (C, {**PROMPT, "response_format": {"type": "xml"}}, "give 'text', 'json_object' or 'json_schema'"),
        (
            C,
            {**PROMPT, "structured_outputs": {"json_object": True}},
            'structured_outputs.json_object; give "json": {"type": "object"}',
        ),
        (
            C,
            {**PROMPT, "structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
            'whitespace_pattern; give the schema "x-guidance": {"whitespace_pattern": ...}',
        ),
        (C, {**PROMPT, "structured_outputs": {"choice": ["a"] * 1025}}, "give at most 1024 entries"),
        (C, {**PROMPT, "metadata": {"a" * i: "a" for i in range(1025)}}, "give at most 1024 entries"),
        (CHAT, {"messages": HELLO * 10_001}, "at most 10000 entries"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [TEXT] * 10_001}]},
            "at most 10000 entries",
        ),
        (CHAT, {"messages": [HELLO[0] | dict.fromkeys(map(str, range(1025)))]}, "give at most 1024 entries"),
        ("/tokenize", {"messages": HELLO * 10_001}, "at most 10000 entries"),
        ("/detokenize", {"tokens": [1] * 262_145}, "give at most 262144 entries"),
        ("/v1/responses", {"input": HELLO * 10_001}, "at most 10000 entries"),
        (
            "/v1/responses",
            {"input": [HELLO[0] | dict.fromkeys(map(str, range(1025)))]},
            "give at most 1024 entries",
        ),
        ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "is 0; give a number from 1"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": 5}]},
            "input.0.content is 5; give a string or a list",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [5]}]},
            "input.0.content.0 is 5; give an object",
        ),
        (
            "/v1/responses",
            {"input": "a", "tool_choice": {"name": 5, "mode": 5}},
            "give 'auto', 'none' or 'required'",
        ),
        (
            "/v1/responses",
            {"input": "a", "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "there is no field tool_choice.function; did you mean name?",
        ),
        (
            CHAT,
            {"messages": HELLO, "tool_choice": {"type": "function", "name": "f"}},
            "there is no field tool_choice.name; did you mean function?",
        ),
        ("/v1/responses", {"input": "a", "background": True}, "background is true; give false"),
        (
            "/v1/responses",
            {"input": "a", "previous_response_id": "resp_1"},
            'is "resp_1"; give null, and the earlier items as input: the server keeps none',
        ),
        ("/v1/responses", {"input": "a", "conversation": {"id": "c"}}, "the earlier items as input"),
        ("/v1/responses", {"input": "a", "prompt": {"id": "p"}}, "give null, or leave it out"),
        (
            "/v1/responses",
            {"input": "a", "top_logprobs": 2},
            "top_logprobs is 2; give 0, or ask for a chat completion, which can have log-probabilities",
        ),
        (
            "/v1/responses",
            {"input": "a", "include": ["message.output_text.logprobs"]},
            "give another value, or ask for a chat completion, which can have log-probabilities",
        ),
        ("/v1/responses", {"input": "a", "max_token": 5}, "did you mean max_output_tokens?"),
        ("/v1/responses", {"input": "a", "max_tokens": 5}, "did you mean max_output_tokens?"),
        ("/v1/responses", {"input": "a", "n": 2}, "there is no field n; leave it out"),
        ("/v1/responses", {"input": "a", "response_format": {"type": "text"}}, "did you mean text?"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "web_search"}]}, "give 'function'"),
        ("/v1/responses", {"messages": HELLO}, "did you mean input?"),
        ("/v1/responses", {"input": [{"content": "a"}]}, "input.0.role is missing; give it"),
        (
            "/v1/responses",
            {"input": [{"type": "item_reference", "id": "a"}]},
            "has type 'item_reference'; give",
        ),
        ("/v1/responses", {"input": [{"type": "function_call"}]}, "input.0.call_id is missing; give it"),
        (C, {"messages": HELLO}, "did you mean /v1/chat/completions?"),
        (C, {**PROMPT, "guided_json": {}}, "did you mean structured_outputs?"),
        ("/v1/responses", {"input": "a", "guided_json": {}}, "did you mean text?"),
        (
            CHAT,
            {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}] * 129},
            "give at most 128 entries",
        ),
        (C, {**PROMPT, "suffix": "the end"}, "give null, or leave it out"),
        (
            C,
            {**PROMPT, "max_tokens": 2**63},
            "max_tokens is 9223372036854775808; give an integer below 2**63",
        ),
        (C, {"prompt": [5] * 17_000}, "the prompt is too long: it has 17000 tokens; give at most"),
        (C, {"prompt": ["a", "b " * 9000]}, "prompt[1]: the prompt is too long: it has 9"),
        (C, {"prompt": ["a", ""]}, "prompt[1]: the prompt is empty; give"),
        (C, {"prompt": [[5], [6], [-1]]}, "prompt[2]: the prompt has token id -1; give one"),
        (CHAT, {"messages": HELLO, "functions": []}, "did you mean tools?"),
        (CHAT, {"prompt": "a"}, "did you mean /v1/completions?"),
        (CHAT, {"messages": HELLO, "add_special_tokens": False}, "no field add_special_tokens; leave it out"),
        (C, {**PROMPT, "structured_outputs": {"choice": ["\ud800"]}}, "'\\ud800' at position 0"),
        (C, {**PROMPT, "structured_outputs": {"regex": "\ud800"}}, "'\\ud800' at position 0"),
        ("/v1/responses", {"input": ""}, "input is ''; give a text or at least one message"),
        ("/v1/responses", {"input": []}, "input is []; give a text or at least one message"),
    ],
)
def test_the_message_is_about_the_value_that_is_wrong(server, path, body, expected):
    """Catches a message about another value, or in a library's words."""
    content = json.dumps(body)
    answer = server.http.post(path, content=content, headers=JSON)
    assert answer.status_code == 400
    assert expected in answer.json()["error"]["message"]


ANY = {
    **{"prompt_cache_key": "a", "prompt_cache_retention": "24h", "safety_identifier": "b", "store": False},
    **{"service_tier": "auto", "user": "c"},
}
WITHOUT_EFFECT = [
    (C, {**PROMPT, **ANY, "suffix": None}),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 2}),
    (CHAT, {"messages": HELLO, **ANY, "reasoning_effort": "low", "verbosity": "low", "modalities": ["text"]}),
    (CHAT, {"messages": HELLO, "functions": None, "function_call": None}),
    (CHAT, {"messages": HELLO, "prediction": {"type": "content", "content": "a"}}),
    (CHAT, {"messages": HELLO, "logprobs": False, "top_logprobs": 0}),
    (CHAT, {"messages": HELLO, "stream": True, "stream_options": {"include_obfuscation": False}}),
    ("/v1/responses", {"input": "a", **ANY, "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}),
    ("/v1/responses", {"input": "a", "include": ["reasoning.encrypted_content"], "top_logprobs": 0}),
    ("/v1/responses", {"input": "a", "stream": True, "stream_options": {"include_obfuscation": False}}),
]


@pytest.mark.parametrize(("path", "body"), WITHOUT_EFFECT)
def test_what_openais_clients_send_and_no_text_depends_on_is_taken(server, path, body):
    """Catches a client library that cannot be used, for the sake of a hint to OpenAI's caches or billing."""
    answer = server.http.post(
        path, json={**body, "max_output_tokens" if "input" in body else "max_tokens": 2}
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (schemas.CompletionBody, {"prompt": [None] * 1000}),
        (schemas.CompletionBody, {"prompt": [[]] * 1000 + [1]}),
        (schemas.CompletionBody, {**PROMPT, "logit_bias": {str(i): "x" for i in range(100_000)}}),
        (schemas.ChatBody, {"messages": [0] * 1000}),
        (schemas.ChatBody, {"messages": HELLO, "tools": [0] * 1000}),
        (schemas.DetokenizeBody, {"tokens": [""] * 1000}),
    ],
)
def test_of_many_wrong_entries_one_is_described(model, body):
    """Catches a body of 4 MB that holds up every stream for a minute."""
    with pytest.raises(ValidationError) as error:
        model.model_validate(body)
    assert error.value.error_count() <= 6, "one for each type that the field may have"


def test_what_is_misspelt_beyond_recognition_gets_no_guess(server):
    """Catches a hint at a field that has nothing to do with it, and a name of 100 kB printed twice."""
    for field in ("reasoning_effort", "web_search_options", "x" * 100_000):
        error = server.http.post(C, json={**PROMPT, field: 1}).json()["error"]
        assert "leave it out" in error["message"]
        assert len(error["message"]) < 200


def test_no_endpoint_takes_another_models_name(server):
    """Catches the tokens of one model taken for those of another."""
    bodies = {C: PROMPT, CHAT: {"messages": HELLO}, "/v1/responses": {"input": "a"}}
    for path, body in {**bodies, "/tokenize": PROMPT, "/detokenize": {"tokens": [5]}}.items():
        answer = server.http.post(path, json={**body, "model": "another"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found"), path


def test_an_address_with_a_slash_too_many_leads_nowhere_else(server):
    """Catches a redirection to an address that only the server knows."""
    assert server.http.post(f"{C}/", json=PROMPT).status_code == 404


def test_text_after_the_body_is_reported_with_its_place(server):
    """Catches "Extra data" somewhere in four megabytes."""
    error = server.http.post(C, content='{"prompt": "a"} x', headers=JSON).json()["error"]
    assert error["message"] == "the body is not JSON: Extra data at position 16"


def test_a_model_without_a_tokenizer_cannot_echo():
    """Catches token ids that are computed, and then refused with the advice to give token ids."""
    with running(toy()) as one:
        for stream in (False, True):
            answer = one.http.post(C, json={**IDS, "max_tokens": 2, "echo": True, "stream": stream})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "echo"
            assert "echo needs a tokenizer" in answer.json()["error"]["message"]
        assert one.llm.engine.scheduler.num_arrived == 0
