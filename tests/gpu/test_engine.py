"""Layer 4, the whole engine: the embedded model on a GPU, through Triton and through PyTorch."""

import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.kernels.dispatch import why_not_triton

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm device", allow_module_level=True)
if (missing := why_not_triton(torch.device("cuda"))) is not None:
    pytest.skip(missing, allow_module_level=True)

PROMPTS = [
    f"{subject} {verb}" for subject in ("Tom", "The cat", "One day a") for verb in ("has", "went to", "saw")
]


def generate(backend, dtype, max_tokens, **options):
    llm = LLM(attention_backend=backend, dtype=dtype, num_blocks=400, **options)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [output.outputs[0] for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("max_num_batched_tokens", [7, 2048])
def test_tokens_are_the_reference_paths_in_fp32(max_num_batched_tokens):
    """Catches a chunk, a decode or a mixture of both that reads other tokens through Triton."""
    options = {"dtype": "float32", "max_tokens": 48, "max_num_batched_tokens": max_num_batched_tokens}
    triton, torch_ = generate("triton", **options), generate("torch", **options)
    assert [output.token_ids for output in triton] == [output.token_ids for output in torch_]


def test_log_probabilities_are_close_in_bf16():
    """Catches an accumulation in bfloat16: the first token's log-probability would move by tenths."""
    triton = generate("triton", "bfloat16", 1)
    exact = generate("torch", "float32", 1)
    for ours, theirs in zip(triton, exact):
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=0.1)
