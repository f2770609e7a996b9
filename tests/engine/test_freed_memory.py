"""What weights took before they were packed goes back to the system, and nothing of their file is kept."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minipaged import LLM, SamplingParams
from minipaged.config import config_from
from minipaged.execution.model_runner import ModelRunner
from minipaged.kernels.dispatch import why_not_cpp
from tests.models.zoo import build

MEGABYTE = 1 << 20
needs_cpp = pytest.mark.skipif(
    why_not_cpp(torch.device("cpu")) is not None, reason="the C++ kernels cannot be built here"
)


def anonymous_megabytes() -> int:
    """Memory of this process that is not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) // 1024


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc can be asked"
)
@pytest.mark.parametrize("backend", ["torch", pytest.param("cpp", marks=needs_cpp)])
def test_memory_that_was_freed_in_the_middle_of_the_heap_goes_back(backend):
    """Catches a quantized model that takes three times the memory of its weights."""
    runner = ModelRunner(build("llama"), config_from({"num_blocks": 8, "attention_backend": backend}))
    pieces = [torch.ones(MEGABYTE // 64) for _ in range(16 * 200)]  # 200 MB, smaller than glibc maps
    kept = pieces[::50]  # (at the end of the heap, freed memory goes back by itself)
    full = anonymous_megabytes()
    del pieces
    assert anonymous_megabytes() > full - 50, "nothing would be caught"
    runner.optimize()
    assert anonymous_megabytes() < full - 150
    del kept


@pytest.mark.skipif(sys.platform == "win32", reason="a file that is in use cannot be changed there")
@pytest.mark.parametrize("options", [{}, {"attention_backend": "torch"}], ids=["auto", "torch"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "qwen2", "mixtral", "gpt_oss", "opt"])
def test_a_checkpoint_that_is_written_anew_does_not_change_a_model_that_runs(name, options, tmp_path):
    """Catches weights that stay mapped: other tokens, or SIGBUS once the file is shorter; and a mapped file
    counts as memory as a whole, so that a model seemed to take twice the bytes of its weights."""
    build(name).save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), num_blocks=8, **options)
    prompt, params = {"prompt_token_ids": [5, 6, 7]}, SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate(prompt, params)[0].outputs[0].token_ids
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as weights:
        weights.write(bytes(file.stat().st_size))
    llm.reset_prefix_cache()
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == before
    if sys.platform == "linux":
        assert str(file) not in Path("/proc/self/maps").read_text()


PEAK = """
from minipaged.environment import prepare_process
prepare_process()  # as the command line does
import sys
from pathlib import Path
from minipaged import LLM
from minipaged.execution import model_runner
from minipaged.kernels.cpp.panels import best_prefetch

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))

best_prefetch()  # (a trial that takes memory of its own)

def watched(*arguments, optimize=model_runner.optimize):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = kilobytes("VmRSS")
    optimize(*arguments)
    print(kilobytes("VmHWM") - before)

model_runner.optimize = watched
LLM(sys.argv[1], dtype="float32", num_blocks=8)
"""


@pytest.mark.slow  # (transformers is imported again)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a peak that can be reset")
@needs_cpp
def test_packing_weights_takes_little_more_memory_than_they_do(tmp_path):
    """Catches freed weights that the allocator keeps in pieces too small for the next: at the peak, a model
    took twice the memory of its weights."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 16, "vocab_size": 1000}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8))
    num_bytes = 4 * sum(weight.numel() for weight in model.parameters())
    model.to(torch.bfloat16).save_pretrained(tmp_path)  # (weights of another type are read into memory)
    child = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(child.stdout) * 1024 < num_bytes / 3, "only a layer at a time is there twice"
