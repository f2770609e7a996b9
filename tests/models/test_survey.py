"""Every causal model type of transformers runs as with eager attention, or is refused for the true reason."""

import re
from pathlib import Path

import pytest
import transformers

from minipaged.execution.accel.packed_linear import can_pack
from tests.models.survey import CAUSAL_TYPES, IMAGE_TEXT_TYPES, judge

PAGE = Path(__file__).parent.parent.parent / "docs" / "models.md"
IS_CURRENT = f"With transformers {transformers.__version__}," in PAGE.read_text()
LEAST_THAT_RUN = 120

SAMPLE = {
    "bart": "decoder of an encoder-decoder model",
    "bloom": "runs",  # a bias by distance (ALiBi)
    "codegen": "runs",  # its attention replaced, as Falcon's, GPT-Neo's and GPT-J's
    "deepseek_v32": "index_topk = 2048 tokens that its own indexer",
    "diffllama": "layer 0 attends twice in one pass",
    "falcon": "runs",
    "falcon_h1": "runs",
    "gpt_neo": "runs",
    "gpt_neox_japanese": "runs",
    "gptj": "runs",
    "granitemoehybrid": "runs",
    "hunyuan_v1_moe": "runs",  # its router reads the weight of its gate
    "inkling_text": "perhaps without its own mask or cache",
    "jamba": "runs",
    "lfm2_moe": "runs",
    "llava": "runs",
    "longcat_flash": "runs",  # as Hunyuan
    "mamba": "it is recurrent",
    "minimax": "other token mixing besides the attention",
    "mistral3": "runs",
    "mpt": "runs",
    "nemotron_h": "other results in pieces than all at once",
    "openai-gpt": "runs",
    "paligemma": "attends to later tokens",
    "qwen2_5_vl": "runs",
    "qwen3_5": "runs",
    "qwen3_next": "runs",
    "recurrent_gemma": "a recurrent state besides the attention",
    "roberta": "its positions do not start at 0",
    "roformer": "attention interface",  # (not an encoder-decoder's, although it takes an encoder's output)
    "rwkv": "it is recurrent",
    "whisper": "decoder of an encoder-decoder model",
    "xglm": "runs",
}


def shown_on_the_page() -> dict[str, str]:
    """Model type -> what the table says of it."""
    return dict(re.findall(r"^\| `(.+?)` \| (.*?) \|$", PAGE.read_text(), re.MULTILINE))


@pytest.mark.skipif(not can_pack(), reason="this PyTorch has no packed oneDNN products")
@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_type_runs_or_is_refused_for_what_it_is(model_type: str) -> None:
    """Types that crashed at the first token, were refused for nothing, or were blamed for another's fault."""
    verdict = judge(model_type)
    assert SAMPLE[model_type] in (verdict.reason or verdict.outcome)
    if IS_CURRENT:
        shown = shown_on_the_page()[model_type]
        assert shown == f"refused: {verdict.reason}" if verdict.reason else shown == "runs"


def test_the_page_lists_every_type() -> None:
    """A table that was cut off, or written before a type was added."""
    shown = shown_on_the_page()
    if IS_CURRENT:
        assert list(shown) == sorted({*CAUSAL_TYPES, *IMAGE_TEXT_TYPES})
    assert sum(verdict.startswith("runs") for verdict in shown.values()) >= LEAST_THAT_RUN


@pytest.mark.parametrize("page", ["README.md", "docs/guides/extending.md"])
def test_pages_count_as_the_table_does(page: str) -> None:
    """Catches figures of an earlier table."""
    shown = shown_on_the_page().values()
    num_run = sum(verdict == "runs" for verdict in shown)
    num_tried = sum(verdict != "not tried" for verdict in shown)
    text = (PAGE.parent.parent / page).read_text()
    assert {str(num_run), str(num_tried)} <= set(re.findall(r"\d+", text))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not can_pack(), reason="this PyTorch has no packed oneDNN products")
def test_no_type_differs_in_silence() -> None:
    """A mask, a position or a state that only the model knows: other tokens, without an error."""
    verdicts = {name: judge(name) for name in CAUSAL_TYPES}
    assert {name: verdict for name, verdict in verdicts.items() if verdict.outcome == "differs"} == {}
    assert [verdict.outcome for verdict in verdicts.values()].count("runs") >= LEAST_THAT_RUN
