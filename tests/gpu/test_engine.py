"""Layer 4, the whole engine: the embedded model on a GPU, through Triton and through PyTorch."""

import pytest
import torch

from minipaged import LLM, SamplingParams
from minipaged.execution.accel.fused_layer import FusedLayer
from minipaged.kernels.dispatch import why_not_triton
from tests.models.driver import Driver, random_tokens
from tests.models.zoo import VOCAB_SIZE, build

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


def errors_of(logits, exact):
    """Relative L2 error of each row, less the mean, which no probability sees."""
    logits, exact = (
        rows.double().cpu() - rows.double().cpu().mean(-1, keepdim=True) for rows in (logits, exact)
    )
    return (logits - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "gemma2", "bloom", "mpt"])
def test_logits_of_prompts_chunks_and_decodes_are_as_good_as_transformers_in_bf16(name):
    """Catches an accumulation in bfloat16 in any row, not the first token's alone."""
    token_ids = random_tokens(90, VOCAB_SIZE, seed=1)
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        exact = build(name)(ids, use_cache=False).logits[0]
        theirs = build(name).to("cuda", torch.bfloat16)(ids.cuda(), use_cache=False).logits[0]
    driver = Driver(build(name).to("cuda", torch.bfloat16), num_blocks=200, attention_backend="triton")
    sequence, other = driver.add(token_ids), driver.add(random_tokens(90, VOCAB_SIZE, seed=2))
    counts = [30, 1, 1, 1, 17, *[1] * 40]
    ours = torch.cat([driver.logits([(other, 1), (sequence, count)])[1] for count in counts])
    assert ours.isfinite().all()
    bound = 2 * errors_of(theirs, exact).max()
    assert (errors_of(ours, exact) <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fused_layers_give_the_logits_of_plain_ones(name, dtype):
    """Catches a pass that the equivalence check's few rows do not show: chunks, decodes, replayed graphs."""
    token_ids = random_tokens(90, VOCAB_SIZE, seed=1)
    with torch.inference_mode():
        exact = build(name)(torch.tensor([token_ids]), use_cache=False).logits[0]
    errors = []
    for is_fused in (False, True):
        driver = Driver(build(name).to("cuda", dtype), num_blocks=200, attention_backend="triton")
        if is_fused:
            driver.runner.optimize()
        kinds = [type(layer) for layer in driver.runner.model.model.layers]
        assert (kinds == [FusedLayer] * len(kinds)) == is_fused
        sequence, other = driver.add(token_ids), driver.add(random_tokens(90, VOCAB_SIZE, seed=2))
        counts = [30, 1, 1, 1, 17, *[1] * 40]
        logits = torch.cat([driver.logits([(other, 1), (sequence, count)])[1] for count in counts])
        assert logits.isfinite().all()
        assert driver.runner.decode_runner is not None
        errors.append(errors_of(logits, exact))
    bound = 1e-3 if dtype == torch.float32 else 2 * errors[0].max()
    assert (errors[1] <= bound).all()
