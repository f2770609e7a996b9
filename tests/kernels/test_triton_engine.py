"""Layer 2, the whole engine: the embedded model decodes the same tokens through Triton as through PyTorch."""

import os

import pytest

from minipaged import LLM, SamplingParams

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton's interpreter is used where there is no GPU", allow_module_level=True)
pytest.importorskip("triton", reason="needs the package triton")

pytestmark = pytest.mark.interpreter

PROMPTS = ["One morning a", "Tom has two"]


def tokens(backend, **options):
    llm = LLM(attention_backend=backend, dtype="float32", num_blocks=24, block_size=4, **options)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


def test_the_engine_generates_the_same_tokens_through_triton():
    """Catches pools, strides or metadata of the engine that the kernels' own tests do not produce."""
    assert tokens("triton", max_num_batched_tokens=5) == tokens("torch")
