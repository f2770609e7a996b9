"""Beams with stop strings, log-probabilities and a temperature, on the embedded model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from minipaged import BeamSearchParams, SamplingParams, pocket_model
from tests.engine.conftest import make_llm
from tests.models.zoo import build

PROMPTS = ["Once upon a time", "The little robot", "One day Tom"]


@pytest.mark.parametrize("stop", [[","], [" a", "the"], ["ed"]])
def test_stop_strings_end_beams_as_in_transformers(llm, stop):
    """Catches a beam that goes on past its stop string, and one scored with another length."""
    reference = AutoModelForCausalLM.from_pretrained(pocket_model.PATH)
    params = BeamSearchParams(beam_width=4, num_return_sequences=4, max_tokens=12, stop=stop, temperature=0)
    outputs = llm.generate(PROMPTS, params)
    for output in outputs:
        prompt = torch.tensor([output.prompt_token_ids])
        found = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=12,
            do_sample=False,
            stop_strings=stop,
            tokenizer=llm.tokenizer,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = found.sequences[:, prompt.shape[1] :].tolist()
        pad = llm.tokenizer.pad_token_id
        expected = [[token for token in row if token != pad] for row in rows]
        assert [done.token_ids for done in output.outputs] == expected
        assert [done.score for done in output.outputs] == pytest.approx(
            found.sequences_scores.tolist(), abs=1e-4
        )
        for done in output.outputs:
            assert not any(word in done.text for word in stop)
            if done.finish_reason == "stop":
                assert done.stop_reason is None or done.stop_reason in stop
    assert any(done.stop_reason in stop for output in outputs for done in output.outputs)


def test_log_probabilities_of_beams_belong_to_their_tokens(llm):
    """Catches reports that stay with the beam they were forked from."""
    params = BeamSearchParams(beam_width=4, num_return_sequences=4, max_tokens=10, logprobs=2)
    asked, plain = (
        llm.generate(PROMPTS[0], params)[0],
        llm.generate(PROMPTS[0], BeamSearchParams(beam_width=4, num_return_sequences=4, max_tokens=10))[0],
    )
    assert [done.token_ids for done in asked.outputs] == [done.token_ids for done in plain.outputs]
    for done in asked.outputs:
        own = [top[token] for token, top in zip(done.token_ids, done.logprobs, strict=True)]
        assert sum(entry.logprob for entry in own) == pytest.approx(done.cumulative_logprob, abs=1e-4)
        assert all(2 <= len(top) <= 3 for top in done.logprobs)
        teacher = SamplingParams(max_tokens=1, prompt_logprobs=0)
        ids = asked.prompt_token_ids + done.token_ids
        forced = llm.generate(ids, teacher)[0].prompt_logprobs[len(asked.prompt_token_ids) :]
        assert [entry.rank for entry in own] == [
            top[token].rank for token, top in zip(done.token_ids, forced)
        ]


def test_a_temperature_reshapes_what_beams_are_compared_by(llm):
    """Catches a temperature that is taken and ignored, or that divides the scores alone."""
    hot = BeamSearchParams(
        beam_width=3, num_return_sequences=3, max_tokens=3, temperature=3.0, ignore_eos=True
    )
    [output] = llm.generate(PROMPTS[1], hot)
    model = AutoModelForCausalLM.from_pretrained(pocket_model.PATH)
    for done in output.outputs:
        ids = torch.tensor([output.prompt_token_ids + done.token_ids])
        with torch.inference_mode():
            logits = model(ids).logits[0, -4:-1] / 3.0
        total = logits.log_softmax(-1).gather(1, ids[0, -3:, None]).sum().item()
        assert done.cumulative_logprob == pytest.approx(total, abs=1e-3)
    cool = llm.generate(PROMPTS[1], BeamSearchParams(beam_width=3, max_tokens=3, ignore_eos=True))[0].outputs[
        0
    ]
    assert cool.cumulative_logprob > output.outputs[0].cumulative_logprob + 1


def test_beam_search_returns_every_hypothesis_with_its_prompt(llm):
    """Catches the best alone, and tokens or texts without the prompt, which may be given as tokens."""
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    found = llm.beam_search([{"prompt": PROMPTS[0]}, {"prompt_token_ids": [5, 6, 7]}], params)
    [output] = llm.generate(PROMPTS[0], BeamSearchParams(beam_width=3, num_return_sequences=3, max_tokens=6))
    for beam, done in zip(found[0].sequences, output.outputs, strict=True):
        assert beam.tokens == output.prompt_token_ids + done.token_ids
        assert beam.text == PROMPTS[0] + done.text
        assert (beam.cum_logprob, beam.score) == pytest.approx(
            (done.cumulative_logprob, done.score), abs=1e-4
        )
    prompt = llm.tokenizer.decode([5, 6, 7], skip_special_tokens=True)
    for beam in found[1].sequences:
        assert beam.tokens[:3] == [5, 6, 7]
        assert beam.text.startswith(prompt)
        assert len(beam.text) > len(prompt)
    as_given = "<|assistant|>Once"  # (decoded, it would lack its first token)
    assert llm.beam_search([as_given], params)[0].sequences[0].text.startswith(as_given)
    with pytest.raises(ValueError, match=r"params is SamplingParams.*; give BeamSearchParams"):
        llm.beam_search(PROMPTS, SamplingParams())


def test_without_a_tokenizer_a_beam_has_no_text():
    """Catches an error, and an empty text as if nothing had been generated."""
    llm = make_llm(build("llama"))
    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    [found] = llm.beam_search([{"prompt_token_ids": [5, 6, 7]}], params)
    assert [(len(beam.tokens), beam.text) for beam in found.sequences] == [(6, None)] * 2
