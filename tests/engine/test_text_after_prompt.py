"""A tokenizer that strips the first space of a text, as Llama 2's: an output continues its prompt."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from minipaged import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from tests.decoding.test_detokenizer import TOKENIZERS

TOKENIZER = TOKENIZERS["sentencepiece_like"]
THE = TOKENIZER.encode("q", add_special_tokens=False)[0]  # "▁q"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama2-like")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZER), eos_token_id=1, **sizes)).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return LLM(str(path), num_blocks=50)


def generate(llm, **options):
    params = SamplingParams(temperature=0, ignore_eos=True, **options)
    return llm.generate("The", params)[0].outputs[0]


def test_the_space_between_prompt_and_output_is_the_outputs(llm):
    """Catches "Theq q": whole, streamed, and of a beam."""
    assert TOKENIZER.convert_ids_to_tokens(THE) == "▁q"
    only_q = {"max_tokens": 2, "allowed_token_ids": [THE]}
    assert generate(llm, **only_q).text == " q q"
    assert "".join(llm.stream("The", SamplingParams(temperature=0, **only_q))) == " q q"
    [beam] = llm.beam_search(["The"], BeamSearchParams(beam_width=1, max_tokens=3))[0].sequences
    assert beam.text == TOKENIZER.decode(beam.tokens, skip_special_tokens=True)


def test_a_stop_string_may_begin_with_that_space(llm):
    """Catches a stop string that is first seen at the second token."""
    output = generate(llm, max_tokens=3, allowed_token_ids=[THE], stop=[" q"])
    assert (output.text, output.stop_reason, len(output.token_ids)) == ("", " q", 1)


@pytest.mark.parametrize("choice", [" over", "over"])
def test_a_structured_output_may_begin_with_that_space(llm, choice):
    """Catches a text that is not one of the choices."""
    params = StructuredOutputsParams(choice=[choice])
    assert generate(llm, max_tokens=20, structured_outputs=params).text == choice
