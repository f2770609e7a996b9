"""What users give to `generate` and `chat`: every kind of prompt, conversations, parameters."""

import json

import numpy as np
import pytest
import torch

from minipaged import LLM, BeamSearchParams, SamplingParams, TextPrompt, TokensPrompt
from minipaged.engine import RequestError
from minipaged.prompts import check_token_ids, read_prompts, shortened
from tests.checked import checked
from tests.engine.conftest import make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=6)
IDS = [468, 304, 378]
HELLO = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def llm():
    return checked(LLM(num_blocks=128, max_model_len=256, disable_log_stats=True))


@pytest.mark.parametrize(
    "prompt",
    [
        IDS,
        tuple(IDS),
        np.array(IDS),
        np.array(IDS, np.uint8 if max(IDS) < 256 else np.int32),
        torch.tensor(IDS),
        [np.int64(i) for i in IDS],
        [torch.tensor(i) for i in IDS],
        {"prompt_token_ids": torch.tensor(IDS)},
        TokensPrompt(prompt_token_ids=IDS),
        torch.tensor([IDS]),
        np.array([IDS]),
        [IDS],
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_token_ids_of_every_kind_are_one_prompt(llm, prompt):
    """Catches a list of ids taken for several prompts, and tensors that are refused."""
    [output] = llm.generate(prompt, GREEDY)
    assert output.prompt_token_ids == IDS
    assert all(type(token) is int for token in output.prompt_token_ids)
    assert output.prompt is None


def test_texts_ids_and_mappings_mix_and_keep_their_order(llm):
    """Catches a kind that is decided for all prompts by the first."""
    mixed = [
        "The sun",
        {"prompt": "The sun"},
        IDS,
        np.array(IDS),
        TextPrompt(prompt="The moon"),
        {"prompt": "The sun", "prompt_token_ids": IDS},
    ]
    outputs = llm.generate(mixed, sampling_params=GREEDY, use_tqdm=True)
    assert [o.prompt for o in outputs] == ["The sun", "The sun", None, None, "The moon", "The sun"]
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids != IDS
    assert outputs[2].prompt_token_ids == outputs[3].prompt_token_ids == outputs[5].prompt_token_ids == IDS
    assert len(llm.generate(torch.tensor([IDS, IDS]), GREEDY)) == 2
    assert llm.generate([], GREEDY) == []


def test_the_token_ids_of_a_request_are_a_list_of_its_own():
    """Catches a prompt that changes when its caller reuses the list, and a tuple in an output."""
    own = check_token_ids(IDS, 2048)
    assert own == IDS
    assert own is not IDS
    assert check_token_ids(tuple(IDS), 2048) == IDS


def test_prompts_may_come_from_a_generator():
    """Catches one that is taken for a single prompt, or indexed."""
    assert read_prompts(text for text in ("a", "b")) == ["a", "b"]
    assert read_prompts(iter(IDS)) == [IDS]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (torch.tensor([1.5, 2.5]), "the prompt is 1.5"),
        ([torch.tensor([1.5])], "1.5"),
        ([True], "has True as a token id"),
        ({"prompt": 5}, "the prompt's text is 5; give a string"),
        ({"prompt": None}, "the prompt's text is None; give a string"),
        ({"prompt": "a", "prompt_token_ids": None}, "token ids are None; give"),
        ({"input_ids": IDS}, "prompt_token_ids"),
        ({"prompt": "a", "promt_token_ids": IDS}, "did you mean prompt_token_ids"),
        (
            {"prompt_token_ids": IDS, "token_type_ids": [0, 0]},
            "'token_type_ids'; give prompt, prompt_token_ids",
        ),
        ([IDS, [IDS]], "has [468, 304, 378] as a token id"),
        (torch.tensor(5), "prompts is 5"),
    ],
    ids=str,
)
def test_an_invalid_prompt_is_refused_in_one_line(llm, prompts, expected):
    """Catches a stack trace from deep inside, or a message without what is taken."""
    with pytest.raises(RequestError) as error:
        llm.generate(prompts, GREEDY)
    assert expected in str(error.value)
    assert "give" in str(error.value) or "did you mean" in str(error.value)
    assert "\n" not in str(error.value)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [("", "the prompt is empty"), ([5000], "the prompt has token id 5"), ([5] * 300, "the prompt has 300")],
)
def test_an_error_names_which_of_several_prompts_it_is_about(llm, wrong, expected):
    """Catches a list of a thousand prompts of which one, nobody knows which, is too long."""
    with pytest.raises(ValueError, match=rf"^prompts\[2\]: {expected}"):
        llm.generate(["a", "b", wrong, "c"], GREEDY)
    with pytest.raises(ValueError, match=f"^{expected}"):
        llm.generate([wrong], GREEDY)
    assert not llm.engine.has_unfinished


def test_a_message_shows_at_most_80_characters_of_a_value():
    """Catches a whole book in an error, and an end that is cut off to say that it is."""
    assert shortened("x" * 78) == repr("x" * 78)
    assert shortened("x" * 79) == "'" + "x" * 76 + "..."


def test_an_engine_refuses_parameters_of_another_type(llm):
    """Catches an AttributeError of the engine's own."""
    for wrong in (None, "x", {"temperature": 0}, SamplingParams):
        with pytest.raises(
            RequestError, match=r"sampling_params is .*; give SamplingParams or BeamSearchParams"
        ):
            llm.engine.add_request("x", IDS, wrong)


@pytest.mark.parametrize(("keep", "left"), [(1, 1), (5, 5), (1000, 40), (-1, 40)])
def test_a_prompt_is_cut_to_its_end(llm, keep, left):
    """Catches the beginning kept in place of the end, for texts or for ids."""
    ids = list(range(100, 140))
    params = SamplingParams(temperature=0, max_tokens=1, truncate_prompt_tokens=keep)
    assert llm.generate(ids, params)[0].prompt_token_ids == ids[-left:]
    text = llm.tokenizer.decode(ids)
    whole = llm.tokenizer.encode(text)
    assert llm.generate(text, params)[0].prompt_token_ids == whole[-keep if keep > 0 else 0 :]


def test_a_prompt_is_cut_to_what_the_model_has_room_for(llm):
    """Catches a prompt as long as the model, which leaves no room for a token."""
    params = SamplingParams(temperature=0, max_tokens=10, truncate_prompt_tokens=-1, ignore_eos=True)
    [output] = llm.generate([5] * 2000, params)
    assert len(output.prompt_token_ids) == 246
    assert len(output.outputs[0].token_ids) == 10


def test_special_tokens_are_shown_on_request(llm):
    """Catches a setting that is taken and ignored, or that changes what other requests see."""
    forced = {"max_tokens": 3, "temperature": 0, "allowed_token_ids": [llm.tokenizer.pad_token_id]}
    shown, hidden = llm.generate(
        ["The sun", "The sun"], [SamplingParams(**forced, skip_special_tokens=skip) for skip in (False, True)]
    )
    assert shown.outputs[0].text == "<|pad|>" * 3
    assert hidden.outputs[0].text == ""
    assert (
        "".join(llm.stream("The sun", SamplingParams(**forced, skip_special_tokens=False))) == "<|pad|>" * 3
    )
    assert shown.outputs[0].token_ids == hidden.outputs[0].token_ids


def test_without_detokenize_there_are_tokens_and_no_text(llm):
    """Catches text that is made although nobody wants it, and stop strings that never come."""
    [plain] = llm.generate("The sun", GREEDY)
    [bare] = llm.generate("The sun", GREEDY.clone(detokenize=False, logprobs=0))
    assert bare.outputs[0].text == ""
    assert bare.outputs[0].token_ids == plain.outputs[0].token_ids
    assert {entry.decoded_token for top in bare.outputs[0].logprobs for entry in top.values()} == {None}
    with pytest.raises(ValueError, match=r"stop is .*detokenize is False"):
        SamplingParams(stop=["x"], detokenize=False)
    with pytest.raises(RequestError, match="detokenize is False"):
        next(llm.stream("The sun", SamplingParams(detokenize=False)))


def test_all_log_probabilities_are_reported_on_request(llm):
    """Catches -1 taken for a count."""
    [output] = llm.generate("The sun", SamplingParams(max_tokens=2, logprobs=-1, prompt_logprobs=-1))
    for top in [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]:
        assert len(top) == llm.engine.executor.vocab_size
        assert sorted(entry.rank for entry in top.values()) == list(range(1, len(top) + 1))
        assert sum(np.exp(entry.logprob) for entry in top.values()) == pytest.approx(1, abs=1e-3)


def test_a_clone_is_equal_and_may_change():
    """Catches a copy that loses a setting, and a change without its check."""
    params = SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.0}, seed=4)
    assert params.clone() == params
    assert params.clone(seed=5) == SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.0}, seed=5)
    with pytest.raises(ValueError, match="temperature is -1"):
        params.clone(temperature=-1)


# -- chat ----------------------------------------------------------------------------------------------------


def test_one_or_several_conversations_are_answered_in_their_order(llm):
    """Catches a list of conversations taken for one, and answers out of order."""
    other = [*HELLO, {"role": "assistant", "content": "Why?"}, {"role": "user", "content": "I am sad."}]
    alone = [llm.chat(messages, GREEDY)[0].outputs[0].token_ids for messages in (HELLO, other)]
    together = llm.chat([HELLO, other], GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together] == alone
    assert together[0].prompt == "<|begin|><|user|>Tell me a story.<|end|><|assistant|>"


def test_a_message_may_come_in_parts_or_with_tool_calls(llm):
    """Catches parts written out as Python's lists, and tool calls refused for want of a text."""
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "more."}]}
    ]
    assert llm.chat_prompt(parts)["prompt"] == "<|begin|><|user|>Tell me\nmore.<|end|><|assistant|>"
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f"}}],
    }
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.tool_calls | length }};{% endfor %}"
    prompt = llm.chat_prompt([{**HELLO[0], "tool_calls": []}, call], chat_template=template)
    assert prompt["prompt"] == "user:Tell me a story.:0;assistant::1;"
    call["content"] = "Let me see."
    prompt = llm.chat_prompt([call], chat_template=template)
    assert prompt["prompt"] == "assistant:Let me see.:1;"


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_the_arguments_of_a_call_reach_the_template_as_an_object(llm, arguments):
    """Catches OpenAI's form, JSON in a string, that a template writes into another string."""
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    assert llm.chat_prompt(messages, chat_template=template)["prompt"] == '{"city": "Rome"}'
    assert call["function"]["arguments"] == arguments  # the caller's own is left alone
    without = {"function": {"name": "weather", "arguments": ""}}  # (some clients write no arguments so)
    messages[1] = {"role": "assistant", "tool_calls": (call for call in [without])}
    assert llm.chat_prompt(messages, chat_template=template)["prompt"] == "{}"
    flat = {"name": "weather", "arguments": {"city": "Rome"}}  # (as some templates take it, too)
    messages[1] = {"role": "assistant", "tool_calls": [flat]}
    template = "{{ messages[1].tool_calls[0].arguments.city }}"
    assert llm.chat_prompt(messages, chat_template=template)["prompt"] == "Rome"


def test_the_template_may_be_another_and_gets_tools_and_variables(llm):
    """Catches arguments that never reach the template."""

    def weather(city: str) -> str:
        """How the weather is.

        Args:
            city: where.
        """
        return city

    schema = {"type": "function", "function": {"name": "time", "description": "now", "parameters": {}}}
    template = (
        "{{ tools | tojson }}|{{ mood }}|{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    )
    [output] = llm.chat(
        HELLO, GREEDY, chat_template=template, tools=[schema, weather], chat_template_kwargs={"mood": "calm"}
    )
    tools, mood, rest = output.prompt.split("|")
    assert [tool["function"]["name"] for tool in json.loads(tools)] == ["time", "weather"]
    assert (mood, rest) == ("calm", "Tell me a story.>")
    assert llm.chat_prompt(HELLO, chat_template=template, add_generation_prompt=False)["prompt"].endswith(
        "story."
    )


LOOP = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endfor %}"
)
FIRST = "{% for message in messages %}<{{ message.role }}>{{ message['content'][0]['text'] }}{% endfor %}"


@pytest.mark.parametrize("template", [LOOP, FIRST], ids=["loop", "first part"])
def test_a_template_that_reads_only_parts_gets_parts(llm, template):
    """Catches a prompt without its messages: a loop over the letters of a text finds no parts."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi! "}]
    assert llm.chat_prompt(messages, chat_template=template)["prompt"] == "<system>Be brief.<user> Hi! "
    short = llm.chat_prompt([{"role": "user", "content": "s"}], chat_template=template)["prompt"]
    assert short == "<user>s"  # (and not "<user>", which has the letter, too)
    called = [*messages, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    assert " Hi! <assistant>" in llm.chat_prompt(called, chat_template=template)["prompt"]
    (*_, last), several = messages, [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    found = llm.chat_prompt([last | {"content": several}], chat_template=template)["prompt"]
    assert found == ("<user>Onetwo" if template == LOOP else "<user>One")
    begun = [*messages, {"role": "assistant", "content": "It"}]
    found = llm.chat_prompt(begun, chat_template=template + "<end>", continue_final_message=True)["prompt"]
    assert found.endswith("<assistant>It")


def test_a_template_that_reads_texts_gets_texts(llm):
    """Catches parts where a template shows both, and a second try that hides why it refuses."""
    both = "{{ messages[0].content if messages[0].content is string else messages[0].content[0].text ~ '!' }}"
    assert llm.chat_prompt([{"role": "user", "content": "Hi"}], chat_template=both)["prompt"] == "Hi"
    shown = "{{ messages[0].content | upper }}"
    assert llm.chat_prompt([{"role": "user", "content": "Hi"}], chat_template=shown)["prompt"] == "HI"
    refusing = "{{ raise_exception('no ' ~ messages[0].content) if messages[0].content is string }}"
    with pytest.raises(RequestError, match="no Hi"):
        llm.chat_prompt([{"role": "user", "content": "Hi"}], chat_template=refusing)


def test_a_final_message_is_continued_where_it_stops(llm):
    """Catches an answer that begins anew, or after an end token."""
    begun = [*HELLO, {"role": "assistant", "content": "Once upon a"}]
    [output] = llm.chat(begun, GREEDY, continue_final_message=True)
    assert output.prompt.endswith("<|assistant|>Once upon a")
    assert output.outputs[0].text.startswith(" ")


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([{"role": "user"}], {}, "messages has {'role': 'user'}"),
        ([{"role": "user", "content": None}], {}, "'content': None"),
        ([{"role": "user", "content": []}], {}, "'content': []"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], {}, "give parts"),
        ([{"role": "user", "content": ["a"]}], {}, "give parts"),
        (HELLO, {"chat_template": "{# #}\ud800"}, "the text of the messages has '\\ud800' at position 0"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], {}, "are not JSON"),
        ([{"role": "assistant", "tool_calls": ["f"]}], {}, "tool_calls has a call"),
        ([[]], {}, "messages is []"),
        ([HELLO, "hi"], {}, "conversation[1]: messages is 'hi'"),
        ([HELLO, HELLO, [{"role": "user"}]], {}, "conversation[2]: messages has {'role': 'user'}"),
        (HELLO, {"tools": "x"}, "tools is 'x'"),
        (HELLO, {"chat_template": 5}, "chat_template is 5"),
        (
            HELLO,
            {"chat_template": "chatml.jinja"},
            "chat_template is 'chatml.jinja', which reads no message; ",
        ),
        (HELLO, {"chat_template": ""}, "chat_template is '', which reads no message; "),
        (
            HELLO,
            {"chat_template": "{% if"},
            "the chat template is wrong in line 1: unexpected 'end of template'; ",
        ),
        (HELLO, {"chat_template_kwargs": 5}, "chat_template_kwargs is 5"),
        (HELLO, {"add_generation_prompt": True, "continue_final_message": True}, "both True"),
        (HELLO, {"use_tqdm": 5}, "use_tqdm is 5"),
    ],
    ids=str,
)
def test_a_conversation_that_cannot_be_is_refused_in_one_line(llm, messages, options, expected):
    """Catches an error of the template's language in place of the message that is wrong."""
    with pytest.raises(RequestError) as error:
        llm.chat(messages, GREEDY, **options)
    assert expected in str(error.value)
    assert "; " in str(error.value)
    assert "\n" not in str(error.value)


def test_without_a_tokenizer_a_chat_says_so(model):
    """Catches an AttributeError about None."""
    with pytest.raises(RequestError, match="no chat template"):
        make_llm(model).chat(HELLO)


def test_beams_answer_a_chat(llm):
    """Catches a decoding method that only `generate` takes."""
    [output] = llm.chat(HELLO, BeamSearchParams(beam_width=2, max_tokens=4))
    assert output.outputs[0].score is not None
