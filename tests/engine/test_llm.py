"""Text in, text out: `generate`, `stream`, `chat`, and what happens when something is wrong."""

from __future__ import annotations

import copy
import pickle

import pytest

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.config import ConfigError
from minipaged.decoding.params import ParamsError
from minipaged.engine import RequestError
from minipaged.prompts import FailedRequestError
from minipaged.scheduling import Request, RequestTooLongError
from tests.engine.conftest import make_llm
from tests.engine.toy_model import ToyModel
from tests.models.zoo import build


def test_text_of_the_embedded_model_continues_the_prompt(llm):
    """A tokenizer or detokenizer that loses spaces or words."""
    output = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=40))[0]
    text = output.outputs[0].text
    assert output.prompt == "Once upon a time"
    assert len(text.split()) > 20
    assert llm.tokenizer.decode(output.outputs[0].token_ids) == text


def test_streamed_pieces_join_to_the_generated_text(llm):
    """A piece lost, yielded twice, or yielded before a stop string was ruled out."""
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=60, stop=(" the ",))
    text = llm.generate("The little robot", params)[0].outputs[0].text
    pieces = list(llm.stream("The little robot", params))
    assert "".join(pieces) == text
    assert " the " not in text
    assert len(pieces) > 3


def test_a_stream_whose_request_fails_raises_the_reason(llm):
    """Catches a text that is cut off as if it had ended."""

    def wrong(generated, logits):
        raise OSError("no table")

    with pytest.raises(FailedRequestError, match="no table"):
        list(llm.stream("Once upon a time", SamplingParams(logits_processors=[wrong])))
    assert not llm.engine.has_unfinished


def test_a_bad_word_is_in_no_text(llm):
    """Catches words that are never turned into tokens, and so forbid nothing."""
    params = SamplingParams(temperature=0, max_tokens=30)
    word = llm.generate("Once upon a time", params)[0].outputs[0].text.split()[1]
    text = llm.generate("Once upon a time", params.clone(bad_words=[word]))[0].outputs[0].text
    assert text
    assert word not in text.split()


def test_a_stream_that_is_dropped_gives_its_blocks_back(llm):
    """An abandoned generator that holds blocks forever."""
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=50))
    next(stream)
    assert llm.engine.scheduler.kv.num_used > 0
    stream.close()
    assert llm.engine.scheduler.kv.num_used == 0


def test_chat_uses_the_template(llm):
    """Sending the bare text without roles."""
    prompt = llm.chat_prompt([{"role": "user", "content": "Tell me a story."}])
    text = llm.tokenizer.decode(prompt["prompt_token_ids"])
    assert "Tell me a story." in text
    assert len(prompt["prompt_token_ids"]) > len(llm.tokenizer.encode("Tell me a story."))
    [output] = llm.chat([{"role": "user", "content": "Tell me a story."}], SamplingParams(max_tokens=8))
    assert output.outputs[0].token_ids


def test_chat_without_a_template_says_so(model):
    """A stack trace from inside the tokenizer."""
    with pytest.raises(RequestError, match="no chat template"):
        make_llm(model).chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ("", None, RequestError, "prompt is empty"),
        ({"prompt_token_ids": []}, None, RequestError, "prompt is empty"),
        ({"prompt_token_ids": [10**6]}, None, RequestError, "token id 1000000"),
        ({"prompt_token_ids": [-1]}, None, RequestError, "token id -1"),
        (17, None, RequestError, "the prompt is 17"),
        ({"prompt_token_ids": [3] * 512}, None, RequestTooLongError, "512 tokens.*max_model_len"),
        ("hi", SamplingParams(logprobs=10**6), ParamsError, "logprobs is 1000000"),
        ("hi", BeamSearchParams(beam_width=10**6), ParamsError, "beam_width is 1000000"),
        ("hi", SamplingParams(n=300), RequestTooLongError, "300 sequences"),
    ],
)
def test_a_bad_request_is_refused_and_the_good_one_before_it_leaves_nothing_behind(
    llm, prompt, params, error, message
):
    """Half a batch admitted, or blocks held by a request that was never started."""
    prompts = ["Once upon a time", prompt]
    with pytest.raises(error, match=message):
        llm.generate(prompts, [SamplingParams(), params or SamplingParams()])
    assert not llm.engine.has_unfinished
    llm.engine.check_invariants()


def test_unknown_settings_name_the_nearest_one():
    """A typo that is silently ignored."""
    with pytest.raises(ConfigError, match="did you mean block_size"):
        LLM(blok_size=8)


def test_a_request_that_needs_more_than_the_pool_is_refused_with_the_numbers(model):
    """A request that waits forever."""
    llm = make_llm(model, num_blocks=4, block_size=4)
    with pytest.raises(RequestTooLongError, match=r"needs 6 KV blocks of 4 tokens .* the pool has 4"):
        llm.generate({"prompt_token_ids": list(range(3, 24))})


def test_a_lone_request_that_outgrows_the_pool_ends_with_length_and_others_go_on(model, caplog):
    """An assertion that kills every request (peers' users hit it), or a hang at the retry."""
    llm = make_llm(model, num_blocks=4, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    first, second = llm.generate([{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [8, 9]}], params)
    for output in (first, second):
        assert output.outputs[0].finish_reason == "length"
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 17
    assert "need more than the pool's 4 KV blocks" in caplog.text
    llm.engine.check_invariants()


def test_logprobs_cover_every_generated_token(llm):
    """Log-probabilities that are lost when sequences fork."""
    params = SamplingParams(n=2, seed=1, logprobs=3, max_tokens=5, ignore_eos=True)
    for completion in llm.generate("The sun", params)[0].outputs:
        assert len(completion.logprobs) == 5
        for token_id, top in zip(completion.token_ids, completion.logprobs):
            assert token_id in top
            assert len(top) in (3, 4)
        total = sum(top[t].logprob for t, top in zip(completion.token_ids, completion.logprobs))
        assert total == pytest.approx(completion.cumulative_logprob, abs=1e-4)


def test_prompt_logprobs_are_complete_with_a_warm_prefix_cache(llm):
    """Cached positions without logits."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    prompt = (
        "Once upon a time, there was a little boy named Otto. He lived in a valley between two mountains."
    )
    llm.generate(prompt, SamplingParams(max_tokens=1))
    first, second = (llm.generate(prompt, params)[0] for _ in range(2))
    assert first.prompt_logprobs[0] is None
    assert all(first.prompt_logprobs[1:])
    assert len(first.prompt_logprobs) == len(first.prompt_token_ids)
    assert first.prompt_logprobs == second.prompt_logprobs


def test_a_failed_step_is_raised_and_the_next_step_recomputes(model, prompts, expected):
    """A step that fails and leaves registered garbage, lost blocks or skipped tokens."""
    llm = make_llm(model, block_size=4)
    execute, calls = llm.engine.executor.execute, []

    def failing(plan):
        calls.append(plan)
        if len(calls) in (2, 9):
            raise RuntimeError("out of luck")
        return execute(plan)

    llm.engine.executor.execute = failing
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    requests = [llm.engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts[:5])]
    failures = 0
    while llm.engine.has_unfinished:
        try:
            llm.engine.step()
        except RuntimeError:
            failures += 1
        llm.engine.check_invariants()
    assert failures == 2
    assert [llm.engine.output(r).outputs[0].token_ids for r in requests] == expected[:5]


def test_generate_that_fails_leaves_nothing_behind(model, prompts):
    """An exception out of `generate` after which the engine still holds its requests."""
    llm = make_llm(model)
    execute = llm.engine.executor.execute
    llm.engine.executor.execute = lambda plan: (_ for _ in ()).throw(RuntimeError("out of luck"))
    with pytest.raises(RuntimeError, match="out of luck"):
        llm.generate({"prompt_token_ids": prompts[0]})
    assert not llm.engine.has_unfinished
    llm.engine.check_invariants()
    llm.engine.executor.execute = execute
    assert llm.generate({"prompt_token_ids": prompts[0]})[0].finished


def test_a_model_without_a_tokenizer_takes_token_ids_and_says_so_for_text(tmp_path):
    """A stack trace from the tokenizer loader, or a tokenizer made up from nothing."""
    build("llama").save_pretrained(tmp_path)
    llm = LLM(tmp_path, num_blocks=32, disable_log_stats=True)
    assert llm.generate({"prompt_token_ids": [5, 6]})[0].outputs[0].token_ids
    with pytest.raises(RequestError, match="no tokenizer"):
        llm.generate("Once upon a time")
    with pytest.raises(RequestError, match="no tokenizer"):
        next(llm.stream({"prompt_token_ids": [5, 6]}))


def test_a_decoding_method_that_fails_leaves_a_step_that_can_be_repeated(model, prompts, expected):
    """Tokens counted as computed and never sampled, blocks of a request that is neither here nor there."""
    llm = make_llm(model, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    requests = [llm.engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts[:3])]
    advance, calls = requests[1].method.advance, []

    def failing(request, samples):
        calls.append(request)
        if len(calls) == 3:
            raise ZeroDivisionError("a bug in a method")
        return advance(request, samples)

    requests[1].method.advance = failing
    llm.engine.step()
    llm.engine.step()
    with pytest.raises(ZeroDivisionError):
        llm.engine.step()
    llm.engine.check_invariants()
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert [llm.engine.output(r).outputs[0].token_ids for r in requests] == expected[:3]


def test_an_id_is_free_again_when_its_request_is_aborted_in_a_step_that_fails(model, prompts):
    """A request that ended unseen and whose id stays in use forever."""
    llm = make_llm(model)
    engine, execute = llm.engine, llm.engine.executor.execute

    def failing(plan):
        engine.abort("a")
        raise RuntimeError("out of luck")

    engine.add_request("a", prompts[0], SamplingParams())
    engine.executor.execute = failing
    with pytest.raises(RuntimeError):
        engine.step()
    engine.executor.execute = execute
    engine.check_invariants()
    assert not engine.has_unfinished
    engine.add_request("a", prompts[0], SamplingParams(max_tokens=1))
    engine.step()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy, copy.copy])
def test_an_engine_is_not_copied(model, copied):
    """Catches an error about a tensor's storage, and two that write to one pool."""
    with pytest.raises(TypeError, match=r"^an LLM cannot be pickled or copied; build one per process$"):
        copied(make_llm(model))


def test_twice_as_many_prompts_take_twice_as_many_looks(monkeypatch):
    """Catches a look at every prompt after each step: 60 of 69 s for 40,000 prompts."""
    looks, own = 0, Request.is_finished

    def counted(request):
        nonlocal looks
        looks += 1
        return own.fget(request)

    monkeypatch.setattr(Request, "is_finished", property(counted))
    found = []
    for count in (50, 100):
        llm, looks = LLM(executor=ToyModel(), block_size=4, max_num_seqs=4, disable_log_stats=True), 0
        llm.generate([[1, 2]] * count, SamplingParams(max_tokens=8))
        found.append(looks)
    assert found[1] <= 2 * found[0]
