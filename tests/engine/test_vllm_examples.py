"""What scripts written for vLLM do, with the import changed and the embedded model: every call carries over.

Written anew after what vLLM's examples for offline inference show: basic, chat, structured outputs, prefix
caching, n and beams. A name that is missing or an argument that is refused fails here.
"""

import json
import re
from enum import StrEnum

import pytest

from minipaged import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
    pocket_model,
)
from minipaged.prompts import RequestError

MODEL = str(pocket_model.PATH)


@pytest.fixture(scope="module")
def llm():
    return LLM(model=MODEL, max_model_len=512, enforce_eager=True, gpu_memory_utilization=0.9, dtype="auto")


def test_basic(llm):
    """Prompts and SamplingParams in, `output.prompt` and `output.outputs[0].text` out."""
    prompts = ["Once upon a time", "The little robot", "The sun", "One day Tom"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    outputs = llm.generate(prompts, sampling_params)
    assert [output.prompt for output in outputs] == prompts
    assert all(output.outputs[0].finished() for output in outputs)
    assert all(output.outputs[0].text for output in outputs)
    assert all(output.finished for output in outputs)


def test_default_sampling_params_are_taken_and_changed(llm):
    """The model's defaults, a copy with a change, one request and a list of parameters."""
    sampling_params = llm.get_default_sampling_params().clone(max_tokens=4)
    first, second = llm.generate(
        ["The sun", "The moon"], [sampling_params, SamplingParams(temperature=0.0, max_tokens=3)]
    )
    assert len(first.outputs[0].token_ids) <= 4
    assert len(second.outputs[0].token_ids) <= 3


def test_generation_flags(llm):
    """What a script on the command line sets one by one."""
    values = {"max_tokens": 8, "temperature": 0.5, "top_p": 0.9, "top_k": 20}
    sampling_params = SamplingParams(
        **values, min_p=0.05, repetition_penalty=1.1, stop=["\n"], stop_token_ids=[1]
    )
    [output] = llm.generate("The sun", sampling_params=sampling_params, use_tqdm=False)
    assert output.outputs[0].finish_reason in ("stop", "length")


def test_chat(llm):
    """One conversation, then a batch of them with a progress bar, then another template."""
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "Tell me a story."},
    ]
    sampling_params = llm.get_default_sampling_params()
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
    assert outputs[0].outputs[0].text
    assert "Hello! How can I assist" in outputs[0].prompt
    outputs = llm.chat(messages=[conversation] * 3, sampling_params=sampling_params, use_tqdm=True)
    assert len(outputs) == 3
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    outputs = llm.chat(conversation, sampling_params, use_tqdm=False, chat_template=template)
    assert outputs[0].prompt.startswith("You are a helpful assistant Hello ")


def test_chat_with_tools(llm):
    """Tools reach the template; the answer and the tool's result go back as messages."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": "How is the weather?"}]
    template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    template += "{% for message in messages %}{{ message.content }} {% endfor %}"
    options = {"tools": tools, "chat_template": template}
    (answer,) = llm.chat(messages, SamplingParams(max_tokens=8, temperature=0), **options)
    assert answer.prompt.startswith("weather ")
    messages.append({"role": "assistant", "content": answer.outputs[0].text})
    assert llm.chat(messages, SamplingParams(max_tokens=8), **options)[0].outputs


class Colour(StrEnum):
    """A choice in a schema."""

    red = "red"
    blue = "blue"


def test_structured_outputs(llm):
    """Choice, regular expression, JSON of a pydantic model and grammar, each in SamplingParams."""
    pydantic = pytest.importorskip("pydantic", reason="the JSON schema comes from a pydantic model")
    strict = pydantic.ConfigDict(extra="forbid")
    brand = (str, pydantic.Field(max_length=8))
    car = pydantic.create_model("Car", __config__=strict, brand=brand, colour=(Colour, ...))

    def follow(**what):
        structured_outputs_params = StructuredOutputsParams(**what)
        return SamplingParams(structured_outputs=structured_outputs_params, max_tokens=60, temperature=0)

    prompts = "Classify: the sun is wonderful!"
    text = (
        llm.generate(prompts=prompts, sampling_params=follow(choice=["Positive", "Negative"]))[0]
        .outputs[0]
        .text
    )
    assert text in ("Positive", "Negative")
    text = llm.generate(prompts, follow(regex=r"[a-z]{1,8}@[a-z]{1,8}\.com"))[0].outputs[0].text
    assert text.endswith(".com")
    text = llm.generate(prompts, follow(json=car.model_json_schema()))[0].outputs[0].text
    assert json.loads(text)["colour"] in ("red", "blue")
    grammar = 'root ::= "SELECT " column " FROM cars"\ncolumn ::= "brand" | "colour"'
    text = llm.generate(prompts, follow(grammar=grammar))[0].outputs[0].text
    assert text in ("SELECT brand FROM cars", "SELECT colour FROM cars")


def test_prefix_caching():
    """The same texts with and without the cache, which is warmed by the first prompt."""
    prefix = (
        "Once upon a time, there was a little boy named Otto. He lived in a valley between two mountains. "
    )
    prompts = [prefix + end for end in ("He had a dog.", "One day", "His friend")]
    sampling_params = SamplingParams(temperature=0.0)
    options = {"model": MODEL, "max_model_len": 512, "num_blocks": 64}
    regular = LLM(enable_prefix_caching=False, **options)
    caching = LLM(enable_prefix_caching=True, **options)
    expected = [output.outputs[0].text for output in regular.generate(prompts, sampling_params)]
    caching.generate(prompts[0], sampling_params)
    outputs = caching.generate(prompts, sampling_params)
    assert [output.outputs[0].text for output in outputs] == expected
    assert all(output.num_cached_tokens >= 16 for output in outputs)
    assert caching.reset_prefix_cache()
    assert caching.generate(prompts[0], sampling_params)[0].num_cached_tokens == 0
    assert regular.reset_prefix_cache()


def test_several_samples_and_their_log_probabilities(llm):
    """`n`, `logprobs`, `prompt_logprobs`, and the fields of what comes back."""
    sampling_params = SamplingParams(n=3, temperature=0.8, top_p=0.95, logprobs=2, prompt_logprobs=1, seed=3)
    [output] = llm.generate("Once upon a time", sampling_params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    for completion in output.outputs:
        for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
            assert entries[token_id].decoded_token is not None
            assert entries[token_id].rank >= 1
            assert entries[token_id].logprob <= 0
        assert completion.finish_reason in ("stop", "length")
        assert isinstance(completion.stop_reason, int | str | None)
    assert output.prompt_logprobs[0] is None


def test_prompts_say_that_they_have_no_images(llm):
    """Scripts for models of images, too, give these keys with None; anything else would be ignored."""
    params = SamplingParams(temperature=0, max_tokens=4)
    none = dict.fromkeys(("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"))
    [output] = llm.generate({"prompt": "The sun", **none}, params)
    assert output.outputs[0].text == llm.generate("The sun", params)[0].outputs[0].text
    with pytest.raises(RequestError, match="has the key 'multi_modal_data'; give prompt, "):
        llm.generate({"prompt": "The sun", "multi_modal_data": {"image": [0]}}, params)


def test_beam_search(llm):
    """`beam_search` with its parameters; sequences have tokens, text and cum_logprob."""
    params = BeamSearchParams(
        beam_width=4, max_tokens=12, temperature=0.0, length_penalty=1.0, ignore_eos=False
    )
    outputs = llm.beam_search([{"prompt": "Once upon a time"}, TokensPrompt(prompt_token_ids=[5, 6])], params)
    assert [len(output.sequences) for output in outputs] == [4, 4]
    best = outputs[0].sequences[0]
    assert best.text.startswith("Once upon a time")
    assert llm.get_tokenizer().decode(best.tokens, skip_special_tokens=True) == best.text
    assert best.cum_logprob == max(beam.cum_logprob for beam in outputs[0].sequences)


def test_token_prompts_and_a_logits_processor(llm):
    """`prompt_token_ids` of the tokenizer, and a function that edits the logits of one request."""
    tokenizer = llm.get_tokenizer()
    banned = tokenizer.encode(" rises", add_special_tokens=False)[0]

    def ban(token_ids, logits):
        logits[banned] = float("-inf")
        return logits

    ids = tokenizer.encode("The sun")
    greedy = SamplingParams(temperature=0, max_tokens=8)
    both = [greedy, SamplingParams(temperature=0, max_tokens=8, logits_processors=[ban])]
    plain, banning = llm.generate([{"prompt_token_ids": ids}, ids], both)
    assert banned in plain.outputs[0].token_ids
    assert banned not in banning.outputs[0].token_ids


def test_async_streaming():
    """`async for output in engine.generate(request_id=..., prompt=..., sampling_params=...)`, deltas."""
    import asyncio

    async def stream() -> str:
        async with AsyncLLM(model=MODEL, enforce_eager=True, num_blocks=64) as engine:
            sampling_params = SamplingParams(
                max_tokens=12, temperature=0, output_kind=RequestOutputKind.DELTA
            )
            text = ""
            async for output in engine.generate(
                request_id="stream-1", prompt="The sun", sampling_params=sampling_params
            ):
                text += output.outputs[0].text
            assert output.finished
            return text

    assert asyncio.run(stream()).startswith(" rises")


@pytest.mark.parametrize(
    ("name", "own"), [("EngineArgs", "LLM"), ("AsyncEngineArgs", "AsyncLLM"), ("LLMEngine", "LLM")]
)
def test_a_class_that_is_not_here_is_refused_with_the_one_that_is(name, own):
    """Catches "cannot import name", which says nothing of what to do."""
    with pytest.raises(ImportError, match=f"minipaged has no {name}; give the settings to {own}"):
        __import__("minipaged", fromlist=[name])


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("GuidedDecodingParams", "StructuredOutputsParams"),
        ("PoolingParams", "generates text"),
        ("EmbeddingRequestOutput", "generates text"),
        ("LoRARequest", "merge the adapter into the model's weights"),
        ("LogitsProcessor", "give functions in SamplingParams"),
        ("ModelRegistry", "register the model with transformers"),
        ("PromptType", "use minipaged.prompts.Prompt"),
    ],
)
def test_what_is_not_here_is_refused_with_what_is(name, way):
    """Catches "cannot import name" for what older scripts import."""
    with pytest.raises(ImportError, match=f"minipaged has no {name}; .*{way}"):
        __import__("minipaged", fromlist=[name])


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("embed", "minipaged only generates text"),
        ("score", "minipaged only generates text"),
        ("sleep", "drop it"),
        ("llm_engine", "use llm.engine"),
        ("get_metrics", "use llm.engine.metrics"),
        ("check_health", "use is_running"),
        ("errored", "use is_running"),
        ("dead_error", "use stopped"),
        ("add_lora", "merge the adapter into the model's weights"),
        ("set_tokenizer", "give tokenizer to LLM"),
        ("model_config", "use llm.engine.config"),
        ("wait_for_completion", "use AsyncLLM"),
        ("preprocess_chat", "use chat_prompt"),
        ("reset_mm_cache", "drop it"),
    ],
)
@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_a_method_that_is_not_here_is_refused_with_what_is(kind, name, way):
    """Catches an AttributeError that says nothing of what to do."""
    missing = object.__new__(kind)
    with pytest.raises(AttributeError, match=f"'{kind.__name__}' object has no attribute '{name}'; .*{way}"):
        getattr(missing, name)
    assert not hasattr(missing, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'generat'$"):
        missing.generat()


def test_the_embedded_model_has_the_name_that_its_server_shows(llm, tmp_path, monkeypatch):
    """Catches a look-up on the hub for the model that the server calls "pocket"."""
    params = SamplingParams(temperature=0, max_tokens=8)
    [named] = LLM("pocket", num_blocks=16).generate("The sun", params)
    assert named.outputs[0].text == llm.generate("The sun", params)[0].outputs[0].text
    assert pocket_model.located(None) == pocket_model.located("pocket") == str(pocket_model.PATH)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pocket").mkdir()
    assert pocket_model.located("pocket") == "pocket"


def test_the_best_samples_are_numbered_from_zero(llm):
    """Catches indices of samples that were drawn and not returned."""
    params = SamplingParams(n=3, best_of=5, seed=1, max_tokens=8)
    best = llm.generate("The sun", params)[0].outputs
    assert [output.index for output in best] == [0, 1, 2]
    likelihoods = [output.cumulative_logprob for output in best]
    assert likelihoods == sorted(likelihoods, reverse=True)


@pytest.mark.parametrize(
    ("name", "value", "way"),
    [
        ("lora_request", "adapter", "merge the adapter into the model's weights"),
        ("priority", [1, 2], "in order of arrival"),
        ("tokenization_kwargs", {"truncation": True}, "give token ids"),
        ("mm_processor_kwargs", {"num_crops": 4}, "only generates text"),
        ("prompt_token_ids", [[5, 6]], 'give prompts={"prompt_token_ids": [...]}'),
        ("chat_template_content_format", "openai", "joined by newlines"),
        ("concurrency_limit", 4, "give max_num_seqs to LLM"),
        ("trace_headers", {"traceparent": "00"}, "drop it"),
    ],
)
def test_an_argument_that_is_not_here_is_refused_with_what_to_do(llm, name, value, way):
    """Catches "unexpected keyword argument", which says nothing of what to do."""
    message = f"{re.escape(name)} is .*, which is not supported; .*{re.escape(way)}"
    with pytest.raises(RequestError, match=message):
        llm.generate("The sun", **{name: value})
    with pytest.raises(RequestError, match=message):
        llm.chat([{"role": "user", "content": "Hello"}], **{name: value})
    with pytest.raises(RequestError, match=message):
        llm.beam_search("The sun", BeamSearchParams(beam_width=2), **{name: value})
    with pytest.raises(RequestError, match=message):
        AsyncLLM.generate(object.__new__(AsyncLLM), "The sun", **{name: value})
    with pytest.raises(TypeError, match="promts"):
        llm.generate(promts="The sun")


def test_of_several_arguments_the_same_one_is_reported_in_every_run(llm):
    """Catches a message that depends on the hashes of strings, which differ from process to process."""
    with pytest.raises(RequestError, match="priority is 1"):
        llm.generate("The sun", priority=1, lora_request="a")
    with pytest.raises(RequestError, match="lora_request is 'a'"):
        llm.generate("The sun", lora_request="a", priority=1)


def test_arguments_that_ask_for_nothing_are_accepted(llm):
    """Catches scripts that pass vLLM's arguments with their defaults, such as `lora_request=None`."""
    greedy = SamplingParams(temperature=0, max_tokens=4)
    plain = llm.generate("The sun", greedy)[0].outputs[0].text
    same = llm.generate("The sun", greedy, lora_request=None, priority=None, tokenization_kwargs=None)
    assert same[0].outputs[0].text == plain
    messages = [{"role": "user", "content": "Hello"}]
    outputs = llm.chat(messages, greedy, lora_request=None, chat_template_content_format="auto")
    assert outputs[0].outputs[0].text == llm.chat(messages, greedy)[0].outputs[0].text
    beams = BeamSearchParams(beam_width=2, max_tokens=4)
    found = llm.beam_search(["The sun"], beams, lora_request=None, concurrency_limit=None)
    assert found == llm.beam_search(["The sun"], beams)
    assert llm.reset_prefix_cache(reset_running_requests=False, reset_connector=False)
    with pytest.raises(RequestError, match="reset_running_requests is True, which is not supported; drop it"):
        llm.reset_prefix_cache(reset_running_requests=True)
