"""The official `openai` client against the running server: every answer equals `LLM.generate`'s."""

from __future__ import annotations

import json
import math
from dataclasses import fields

import openai
import pytest

from minipaged import BeamSearchParams, SamplingParams, StructuredOutputsParams
from minipaged.outputs import CompletionOutput, Logprob, RequestOutput
from minipaged.serving import logprobs
from minipaged.serving.body_params import COMMON, OF_SAMPLES
from minipaged.serving.schemas import GenerationBody

PROMPT = "Once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 24}


def assert_same(choices, output) -> None:
    """Choices of a response are the completions of an output."""
    assert [choice.text for choice in choices] == [completion.text for completion in output.outputs]
    reasons = [choice.finish_reason for choice in choices]
    assert reasons == [completion.finish_reason for completion in output.outputs]


def test_a_completion_is_that_of_generate(client, offline):
    """Catches a parameter that is lost on its way to the engine."""
    [right] = offline.generate(PROMPT, SamplingParams(**GREEDY))
    answer = client.completions.create(model="pocket", prompt=PROMPT, **GREEDY)
    assert_same(answer.choices, right)
    assert answer.usage.prompt_tokens == len(right.prompt_token_ids)
    assert answer.usage.completion_tokens == len(right.outputs[0].token_ids) == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    again = client.completions.create(model="pocket", prompt=PROMPT * 8, **GREEDY)
    again = client.completions.create(model="pocket", prompt=PROMPT * 8, **GREEDY)
    assert again.usage.prompt_tokens_details.cached_tokens > 16


@pytest.mark.parametrize(("prompts", "has_timing"), [([PROMPT], True), ([PROMPT, "The"], False)])
def test_the_timing_is_reported_of_a_single_prompt_alone(client, prompts, has_timing):
    """Catches the last prompt's time reported as everybody's."""
    answer = client.completions.create(model="pocket", prompt=prompts, max_tokens=2)
    assert hasattr(answer, "timing") == has_timing


PARAMS = [
    {"temperature": 0.9, "seed": 4, "n": 3, "max_tokens": 12},
    {"temperature": 0.7, "seed": 1, "top_p": 0.8, "max_tokens": 12, "presence_penalty": 0.5},
    {"temperature": 0, "frequency_penalty": 1.5, "max_tokens": 20, "logit_bias": {"300": 5}},
    {"temperature": 0, "max_tokens": 40, "stop": [" the ", "was"]},
    {"temperature": 1.0, "seed": 2, "n": 2, "best_of": 4, "max_tokens": 8},
]


@pytest.mark.parametrize("values", PARAMS, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_parameters_change_a_completion_as_they_do_offline(client, offline, values, stream):
    """Catches a field that the server reads and drops; streamed pieces that do not join to the text."""
    bias = {"logit_bias": {300: 5}} if "logit_bias" in values else {}
    [right] = offline.generate(PROMPT, SamplingParams(**values | bias))
    if not stream:
        assert_same(client.completions.create(model="pocket", prompt=PROMPT, **values).choices, right)
        return
    texts, reasons = {}, {}
    for event in client.completions.create(model="pocket", prompt=PROMPT, stream=True, **values):
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert [texts[i] for i in sorted(texts)] == [completion.text for completion in right.outputs]
    assert [reasons[i] for i in sorted(texts)] == [completion.finish_reason for completion in right.outputs]


def test_the_engines_own_parameters_are_extra_fields(client, offline):
    """Catches vLLM's names refused or ignored: top_k, ignore_eos, beam search, structured outputs."""

    def ask(values, **extra):
        return client.completions.create(model="pocket", prompt=PROMPT, **values, extra_body=extra).choices

    values = {"temperature": 1.0, "seed": 5, "max_tokens": 10}
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.3, "min_tokens": 4, "ignore_eos": True}
    [right] = offline.generate(PROMPT, SamplingParams(**values, **extra))
    assert_same(ask(values, **extra), right)
    beams = BeamSearchParams(beam_width=4, num_return_sequences=2, max_tokens=10, length_penalty=0.5)
    [right] = offline.generate(PROMPT, beams)
    found = ask({"n": 2, "max_tokens": 10}, use_beam_search=True, beam_width=4, length_penalty=0.5)
    assert_same(found, right)
    followed = SamplingParams(**GREEDY, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    [right] = offline.generate(PROMPT, followed)
    assert_same(ask(GREEDY, structured_outputs={"choice": ["yes", "no"]}), right)
    assert right.outputs[0].text in ("yes", "no")


def test_beams_take_what_beam_search_params_take(client, offline):
    """Catches a field that beams support in Python, and that the server says they do not."""
    values = {"max_tokens": 20, "temperature": 2.0, "stop": [" He"], "logprobs": 2}
    own = {"include_stop_str_in_output": True, "min_tokens": 3}
    params = BeamSearchParams(beam_width=2, num_return_sequences=2, **values, **own)
    [right] = offline.generate(PROMPT, params)
    beams = {"model": "pocket", "n": 2, "extra_body": {"use_beam_search": True, **own}}
    found = client.completions.create(prompt=PROMPT, **beams, **values).choices
    assert_same(found, right)
    assert right.outputs[0].text.endswith(" He")
    for choice, completion in zip(found, right.outputs):
        chosen = [top[token].logprob for token, top in zip(completion.token_ids, completion.logprobs)]
        assert choice.logprobs.token_logprobs == pytest.approx(chosen)
        assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs)
    hello = [{"role": "user", "content": "Hello"}]
    asked = {"messages": hello, "logprobs": True, "top_logprobs": 2, "max_tokens": 4}
    [choice, _] = client.chat.completions.create(**beams, **asked).choices
    assert [len(entry.top_logprobs) for entry in choice.logprobs.content] == [2] * 4


def test_several_prompts_and_token_ids_are_answered_in_their_order(client, offline):
    """Catches choices of one prompt given to another."""
    prompts = ["Once upon a time", "The little robot", "One day Tom"]
    rights = offline.generate(prompts, SamplingParams(**GREEDY))
    answer = client.completions.create(model="pocket", prompt=prompts, **GREEDY)
    assert [choice.text for choice in answer.choices] == [right.outputs[0].text for right in rights]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = {}
    for event in client.completions.create(model="pocket", prompt=prompts, stream=True, **GREEDY):
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {i: right.outputs[0].text for i, right in enumerate(rights)}
    several = {"model": "pocket", "prompt": prompts, "n": 2, "seed": 3, "temperature": 1, "max_tokens": 24}
    several["stop"] = ["w"]  # (one sample ends before the other)
    right = client.completions.create(**several)
    texts = [""] * 6
    for event in client.completions.create(stream=True, **several):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in right.choices]
    ids = [right.prompt_token_ids for right in rights]
    answer = client.completions.create(model="pocket", prompt=ids, **GREEDY)
    assert [choice.text for choice in answer.choices] == [right.outputs[0].text for right in rights]
    answer = client.completions.create(model="pocket", prompt=ids[1], **GREEDY)
    assert answer.choices[0].text == rights[1].outputs[0].text


def test_logprobs_and_echo_have_openais_form(client, offline):
    """Catches offsets, tokens and values that do not belong together."""
    params = SamplingParams(**GREEDY, logprobs=3, prompt_logprobs=3)
    [right] = offline.generate(PROMPT, params)
    answer = client.completions.create(model="pocket", prompt=PROMPT, logprobs=3, echo=True, **GREEDY)
    choice, found = answer.choices[0], answer.choices[0].logprobs
    assert choice.text == PROMPT + right.outputs[0].text
    tokens = len(right.prompt_token_ids) + 24
    assert {len(found.tokens), len(found.token_logprobs), len(found.text_offset)} == {tokens}
    assert found.token_logprobs[0] is None
    chosen = [top[i].logprob for i, top in zip(right.outputs[0].token_ids, right.outputs[0].logprobs)]
    assert found.token_logprobs[-24:] == pytest.approx(chosen, abs=1e-4)
    assert all(len(top) >= 3 for top in found.top_logprobs[1:])
    for token, value, top in zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:]):
        assert top[token] == value, "the chosen token is reported, even if it is none of the likeliest"
    alone = client.completions.create(model="pocket", prompt=PROMPT, logprobs=0, **GREEDY).choices[0].logprobs
    assert alone.top_logprobs == [{token: value} for token, value in zip(alone.tokens, alone.token_logprobs)]
    assert found.text_offset[0] == 0  # (its token starts the text and is none of it)
    for token, offset in zip(found.tokens[1:], found.text_offset[1:], strict=True):
        assert choice.text[offset : offset + len(token)] == token


def test_a_prompt_may_be_without_special_tokens(client, offline):
    """Catches a harness that counts tokens of its own, and finds one more in the answer."""
    body = {"add_special_tokens": False}
    answer = client.completions.create(model="pocket", prompt=PROMPT, extra_body=body, **GREEDY)
    ids = offline.get_tokenizer().encode(PROMPT, add_special_tokens=False)
    assert answer.usage.prompt_tokens == len(ids) == len(offline.get_tokenizer().encode(PROMPT)) - 1
    [right] = offline.generate({"prompt_token_ids": ids}, SamplingParams(**GREEDY))
    assert answer.choices[0].text == right.outputs[0].text


@pytest.mark.parametrize("prompt", [[5], "Once upon a time", ["Once upon", "a time, a fox"]], ids=str)
def test_echo_without_tokens_scores_the_prompt(client, offline, prompt):
    """Catches a token that is generated all the same and shown or counted: evaluations send max_tokens 0."""
    options = {"model": "pocket", "prompt": prompt, "echo": True, "max_tokens": 0}
    answer = client.completions.create(**options, n=2, temperature=1, logprobs=0)
    rights = offline.generate(
        [{"prompt_token_ids": prompt}] if prompt == [5] else prompt,
        SamplingParams(prompt_logprobs=0, max_tokens=1),
    )
    assert len(answer.choices) == 2 * len(rights)
    for choice in answer.choices:
        right = rights[choice.index // 2]
        assert choice.finish_reason == "length"
        assert choice.text == offline.get_tokenizer().decode(right.prompt_token_ids, skip_special_tokens=True)
        wanted = [
            None if top is None else top[token].logprob
            for token, top in zip(right.prompt_token_ids, right.prompt_logprobs)
        ]
        assert choice.logprobs.token_logprobs == pytest.approx(wanted, abs=1e-4)
    assert answer.usage.completion_tokens == 0
    assert answer.usage.prompt_tokens == sum(len(right.prompt_token_ids) for right in rights)
    texts = {}
    for event in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
        usage = event.usage
    assert [texts[i] for i in range(len(rights))] == [choice.text for choice in answer.choices[::2]]
    assert usage.completion_tokens == 0
    beams = client.completions.create(**options, n=2, extra_body={"use_beam_search": True})
    assert [choice.text for choice in beams.choices] == [choice.text for choice in answer.choices]


def test_streamed_offsets_are_those_of_the_whole_answer(client):
    """Catches an offset that counts the text shown so far: some of it waits, it may begin a stop string."""
    options = {**GREEDY, "model": "pocket", "prompt": PROMPT, "logprobs": 0}
    whole = client.completions.create(**options).choices[0]
    stop = [whole.text[9:14] + "#", *(f"{letter}#" for letter in sorted(set(whole.text)))]
    offsets = [
        offset
        for event in client.completions.create(**options, stop=stop, stream=True)
        for choice in event.choices
        if choice.logprobs is not None
        for offset in choice.logprobs.text_offset
    ]
    assert offsets == whole.logprobs.text_offset


SPLIT = "日本 🦊 fox"  # most of its tokens are parts of characters


def test_parts_of_characters_have_their_bytes_and_offsets(client, offline):
    """Catches bytes of U+FFFD, a part that counts as a character, and parts that share one key."""
    ids = offline.get_tokenizer().encode(SPLIT, add_special_tokens=False)
    spell = {"extra_body": {"structured_outputs": {"choice": [SPLIT]}}, "max_tokens": 40, "temperature": 0}
    chat = client.chat.completions.create(model="pocket", messages=MESSAGES, logprobs=True, **spell)
    assert chat.choices[0].message.content == SPLIT
    assert b"".join(bytes(one.bytes) for one in chat.choices[0].logprobs.content[:-1]) == SPLIT.encode()
    answer = client.completions.create(model="pocket", prompt=ids, logprobs=20, echo=True, **spell)
    choice, found = answer.choices[0], answer.choices[0].logprobs
    assert choice.text == SPLIT + SPLIT
    starts = []
    for token, offset in zip(found.tokens, found.text_offset):
        starts.append(offset)
        if not token.startswith(("bytes:", "<|")):
            assert choice.text[offset : offset + len(token)] == token
    assert sorted(starts) == starts
    assert starts[len(ids)] == len(SPLIT)
    assert found.tokens[0] == r"bytes:\xe6"
    assert starts[:4] == [0, 0, 0, 1]
    assert max(map(len, found.top_logprobs[1:])) >= 20


def test_offsets_count_special_tokens_that_are_shown(client):
    """Catches an offset behind a special token that is part of the text."""
    options = {"max_tokens": 6, "temperature": 0, "logprobs": 0, "model": "pocket", "prompt": PROMPT}
    shown = {"skip_special_tokens": False, "structured_outputs": None, "allowed_token_ids": [0, 964]}
    choice = client.completions.create(**options, extra_body={**shown, "logit_bias": {"0": 1}}).choices[0]
    found = choice.logprobs
    assert "<|begin|>" in choice.text
    for token, offset in zip(found.tokens, found.text_offset):
        assert choice.text[offset : offset + len(token)] == token


@pytest.mark.parametrize("prompt", [PROMPT, [0, 964, 0, 964]], ids=["text", "token ids"])
def test_offsets_in_an_echo_do_not_count_special_tokens(client, prompt):
    """Catches offsets past the text: an echo is without special tokens, even if the answer shows its own."""
    shown = {"skip_special_tokens": False}
    options = {"model": "pocket", "prompt": prompt, "logprobs": 0, "echo": True, **GREEDY}
    choice = client.completions.create(**options, extra_body=shown).choices[0]
    found = choice.logprobs
    for token, offset in zip(found.tokens, found.text_offset):
        if token != "<|begin|>":
            assert choice.text[offset : offset + len(token)] == token


MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]


def test_a_chat_is_that_of_llm_chat(client, offline):
    """Catches a template applied otherwise, whole and streamed, with usage at the end."""
    [right] = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=60))
    values = {"model": "pocket", "messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    answer = client.chat.completions.create(**values)
    assert answer.choices[0].message.content == right.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    stream = client.chat.completions.create(**values, stream=True, stream_options={"include_usage": True})
    events = list(stream)
    assert (events[0].choices[0].delta.role, events[0].choices[0].delta.content) == ("assistant", "")
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == right.outputs[0].text
    assert [event.usage is None for event in events] == [True] * (len(events) - 1) + [False]
    assert events[-1].usage.completion_tokens == len(right.outputs[0].token_ids)
    assert len(events) > 20, "the text came in one piece"
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    assert client.chat.completions.create(**values | {"messages": parts}).choices == answer.choices


def test_a_chat_goes_on_until_it_ends_by_itself(client, offline):
    """Catches completions' limit of 16 tokens on an answer that nobody limited."""
    [right] = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=None))
    answer = client.chat.completions.create(model="pocket", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == right.outputs[0].text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 16
    short = client.chat.completions.create(
        model="pocket", messages=MESSAGES, temperature=0, max_completion_tokens=5
    )
    assert short.usage.completion_tokens == 5


def test_chat_logprobs_have_openais_form(client):
    """Catches a token without its bytes, or alternatives that are not the likeliest."""
    answer = client.chat.completions.create(
        model="pocket", messages=MESSAGES, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 6
    for token in content:
        assert bytes(token.bytes).decode() == token.token
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == token.logprob >= token.top_logprobs[1].logprob
    assert "".join(token.token for token in content) == answer.choices[0].message.content


def test_alternatives_in_a_chat_are_the_likeliest_in_their_order(client):
    """Catches the chosen token among them, or before them, where it is none of the likeliest."""
    spell = {"extra_body": {"structured_outputs": {"choice": [SPLIT]}}, "max_tokens": 40, "temperature": 0}
    asked = {"model": "pocket", "messages": MESSAGES, "logprobs": True, **spell}
    for count in (0, 3, 20):
        content = client.chat.completions.create(**asked, top_logprobs=count).choices[0].logprobs.content
        for token in content:
            values = [one.logprob for one in token.top_logprobs]
            assert (len(values), values) == (count, sorted(values, reverse=True))
            assert token.logprob in values or token.logprob <= min(values, default=0)


def test_impossible_tokens_are_written_as_json(offline):
    """Catches -Infinity, which no JSON parser but Python's takes, in a format of its own."""
    never = {5: Logprob(-math.inf, 1, "a")}
    tokenizer = offline.get_tokenizer()
    completion = CompletionOutput(0, "a", [5], -math.inf, "length", [never])
    prompt = RequestOutput("id", None, [4, 5], prompt_logprobs=[None, never])
    found = [
        logprobs.completion_logprobs(tokenizer, [never], [5], [0], 1),
        logprobs.chat_logprobs(tokenizer, completion, 1),
        logprobs.prompt_logprobs(prompt, 1),
    ]
    assert json.dumps(found, allow_nan=False).count("-9999.0") == 5


def test_every_parameter_of_a_sample_that_a_body_has_is_read():
    """Catches a field that the server takes and drops."""
    others = {"n", "logprobs", "logit_bias", "structured_outputs"}  # (read each in a way of its own)
    known = {field.name for field in fields(SamplingParams)} & GenerationBody.model_fields.keys()
    assert known - others == {*COMMON, *OF_SAMPLES}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_stopped_an_answer_is_reported(server, path):
    """Catches vLLM's stop_reason missing, in a whole answer or in the last event of a stream."""
    body = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    body |= {**GREEDY, "stop": ["#", "e"]}
    [whole] = server.http.post(path, json=body).json()["choices"]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", "e")
    last = [choice for event in streamed(server, path, body) for choice in event["choices"]][-1]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "e")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_proxy_is_told_not_to_keep_a_stream(server, path):
    """Catches a text that arrives all at once behind nginx, which gathers what it is not told to pass on."""
    body = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    headers = server.http.post(path, json={**body, "max_tokens": 1, "stream": True}).headers
    assert headers["content-type"].startswith("text/event-stream")
    assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-cache")


def test_a_response_format_is_followed(client):
    """Catches a JSON schema that the engine never hears of."""
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["age"],
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    for stream in (False, True):
        answer = client.chat.completions.create(
            model="pocket", messages=MESSAGES, max_tokens=40, seed=1, response_format=wanted, stream=stream
        )
        if stream:
            text = "".join(event.choices[0].delta.content or "" for event in answer)
        else:
            text = answer.choices[0].message.content
        assert list(json.loads(text)) == ["age"]
    values = {**GREEDY, "response_format": {"type": "json_object"}}
    answer = client.chat.completions.create(model="pocket", messages=MESSAGES, **values)
    assert answer.choices[0].message.content.startswith("{")


def test_errors_raise_the_clients_exceptions(client):
    """Catches statuses and bodies that the client does not understand."""
    with pytest.raises(openai.BadRequestError, match="temperature is 2000") as raised:
        client.completions.create(model="pocket", prompt=PROMPT, temperature=2000)
    assert raised.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-4'") as missing:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="at most 2047, to leave room") as long:
        client.completions.create(model="pocket", prompt=[5] * 5000)
    assert long.value.code == "context_length_exceeded"


def test_models_are_listed(client):
    """Catches a client that looks for the model before it asks."""
    assert [model.id for model in client.models.list()] == ["pocket"]
    assert client.models.retrieve("pocket").id == "pocket"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_tokens_and_texts_convert_both_ways(server, offline):
    """Catches special tokens that only one way has."""
    tokens = server.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert tokens == offline.tokenizer.encode(PROMPT)
    assert server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"].endswith(PROMPT)
    chat = server.http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == offline.chat_prompt(MESSAGES)["prompt_token_ids"]
    assert chat["count"] == len(chat["tokens"])
    assert chat["max_model_len"] == 2048
    answer = server.http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert answer["token_strs"] == offline.tokenizer.convert_ids_to_tokens(tokens)
    assert "token_strs" not in chat


def test_parts_of_a_message_are_joined_as_llm_chat_does(server, offline):
    """Catches words that run together where two parts meet, and parts that each side joins in its own way."""
    texts = [{"type": "text", "text": "Tell me a story"}, {"type": "text", "text": "about a fox."}]
    messages = [{"role": "user", "content": texts}]
    token_ids = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert token_ids == offline.chat_prompt(messages)["prompt_token_ids"]
    assert "story\nabout" in offline.tokenizer.decode(token_ids)
    messages[0]["content"] = []
    assert "messages.0.content is [];" in server.http.post("/tokenize", json={"messages": messages}).text
    messages[0]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert server.http.post("/tokenize", json={"messages": messages}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_options_of_the_template_are_those_of_llm_chat(server, offline, monkeypatch, path):
    """Catches an option that is read and dropped."""
    template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
    )
    monkeypatch.setattr(server.llm.get_tokenizer(), "chat_template", template)
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    kwargs = {"chat_template_kwargs": {"mood": "glad"}}
    for options in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}, kwargs):
        right = offline.chat_prompt(messages, chat_template=template, **options)["prompt_token_ids"]
        body = {"messages": messages, **options, **({} if path == "/tokenize" else GREEDY)}
        answer = server.http.post(path, json=body).json()
        if path == "/tokenize":
            assert answer["tokens"] == right
        else:
            assert answer["usage"]["prompt_tokens"] == len(right)
            [text] = offline.generate([{"prompt_token_ids": right}], SamplingParams(**GREEDY))
            assert answer["choices"][0]["message"]["content"] == text.outputs[0].text


def test_a_developer_is_the_system(server):
    """Catches instructions under OpenAI's newer name that a template refuses, or drops."""
    tokens = []
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "Be brief."}, *MESSAGES]
        tokens.append(server.http.post("/tokenize", json={"messages": messages}).json()["tokens"])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_may_report_its_usage_in_every_event(server, path):
    """Catches a count that runs behind, or is reported only at the end."""
    given = {"prompt": PROMPT} if path.endswith("v1/completions") else {"messages": MESSAGES}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**given, **GREEDY, "stream": True, "stream_options": options}
    events = server.http.post(path, json=body).text.split("\n\n")
    usages = [
        json.loads(event.removeprefix("data: "))["usage"]
        for event in events
        if "[DONE]" not in event
        if event
    ]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert len(set(counts)) == counts[-1] == 24
    assert usages[-1] == usages[-2]
    body["stream_options"] = {"continuous_usage_stats": True}
    assert '"usage"' not in server.http.post(path, json=body).text


@pytest.mark.parametrize("path", ["/", "/health", "/metrics"])
def test_a_head_is_a_get_without_its_body(server, path):
    """Catches a monitor that asks for the head alone, and hears that the server is ill."""
    answer = server.http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_the_document_knows_no_other_errors_than_are_sent(server):
    """Catches FastAPI's own 422, which no path sends."""
    for path in server.http.get("/openapi.json").json()["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]


def test_a_prompt_logprob_of_nothing_is_json(server):
    """Catches NaN and -Infinity, which no JSON parser but Python's takes."""
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "prompt_logprobs": 1, "logprobs": 2}
    text = server.http.post("/v1/completions", json=body).text

    def refuse(name: str) -> float:
        raise AssertionError(name)

    found = json.loads(text, parse_constant=refuse)["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert all(math.isfinite(one["logprob"]) for top in found[1:] for one in top.values())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_echo_reports_as_much_of_its_prompt_as_was_asked_for(server, offline, count):
    """Catches `prompt_logprobs` with as many of the likeliest tokens as `logprobs` asks for, and without the
    prompt's own token where that is none of the likeliest."""
    body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": count}
    ids = offline.get_tokenizer().encode(PROMPT)
    for more in ({}, {"echo": True, "logprobs": 1}):
        answer = server.http.post("/v1/completions", json={**body, **more}).json()
        found = answer["choices"][0]["prompt_logprobs"]
        assert found[0] is None
        for token_id, top in zip(ids[1:], found[1:], strict=True):
            own = top[str(token_id)]["rank"]
            assert {one["rank"] for one in top.values()} == {own, *range(1, count + 1)}


def streamed(server, path: str, body) -> list[dict]:
    """The events of a stream, without its end."""
    found = server.http.post(path, json={**body, "stream": True}).text.split("\n\n")
    assert found[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in found[:-2]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_reports_the_logprobs_of_its_prompt_once(server, path):
    """Catches a chat that computes and drops them, and a long prompt's that come again with every token."""
    body = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    body |= {"max_tokens": 4, "prompt_logprobs": 1}
    whole = server.http.post(path, json=body).json()
    logprobs = [
        found["prompt_logprobs"]
        for event in streamed(server, path, body)
        for found in (event, *event["choices"])
        if "prompt_logprobs" in found
    ]
    assert logprobs == [whole.get("prompt_logprobs") or whole["choices"][0]["prompt_logprobs"]]
    for event in streamed(server, path, {**body, "n": 2})[2:]:
        assert "prompt_logprobs" not in json.dumps(event)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "options", [{}, {"n": 2, "temperature": 1, "seed": 3}, {"stop": ["the", "a", "w"]}], ids=str
)
def test_token_ids_are_reported_if_requested(server, offline, path, options):
    """Catches ids that stay behind with a text that waits for its end, and those of another choice."""
    is_chat = path == "/v1/chat/completions"
    body = {"messages": MESSAGES} if is_chat else {"prompt": PROMPT}
    body |= {**GREEDY, **options}
    prompt = offline.chat_prompt(MESSAGES) if is_chat else PROMPT
    [right] = offline.generate([prompt], SamplingParams(**GREEDY | options))
    body["return_token_ids"] = True
    whole = server.http.post(path, json=body).json()
    assert [choice["token_ids"] for choice in whole["choices"]] == [each.token_ids for each in right.outputs]
    assert (whole if is_chat else whole["choices"][-1])["prompt_token_ids"] == right.prompt_token_ids
    ids = {}
    for event in streamed(server, path, body):
        for choice in event["choices"]:
            is_first = choice["index"] not in ids
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
            prompt_ids = (event if is_chat else choice).get("prompt_token_ids")
            assert prompt_ids == (
                right.prompt_token_ids if is_first and not (is_chat and choice["index"]) else None
            )
    assert [ids[i] for i in sorted(ids)] == [each.token_ids for each in right.outputs]
    del body["return_token_ids"]
    assert "token_ids" not in server.http.post(path, json=body).text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("count", [3, -1])
def test_a_prompt_that_is_too_long_may_lose_its_beginning(server, offline, path, count):
    """Catches a whole prompt that is checked or echoed, and the end that is cut in place of the beginning."""
    text = "a fox " * 1500
    messages = [{"role": "user", "content": text}]
    values = {**GREEDY, "truncate_prompt_tokens": count}
    is_chat = path == "/v1/chat/completions"
    [right] = offline.generate([offline.chat_prompt(messages) if is_chat else text], SamplingParams(**values))
    body = {"messages": messages} if is_chat else {"prompt": text, "echo": True}
    answer = server.http.post(path, json={**body, **values}).json()
    assert answer["usage"]["prompt_tokens"] == len(right.prompt_token_ids) == (3 if count == 3 else 2048 - 24)
    if is_chat:
        assert answer["choices"][0]["message"]["content"] == right.outputs[0].text
    else:
        kept = offline.tokenizer.decode(right.prompt_token_ids, skip_special_tokens=True)
        assert answer["choices"][0]["text"] == kept + right.outputs[0].text
