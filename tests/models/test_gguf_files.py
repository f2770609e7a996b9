"""Models in GGUF files compute what they would from safetensors; what would be left out is refused."""

import re
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minipaged import LLM, SamplingParams, pocket_model
from minipaged.config import EngineConfig
from minipaged.execution.loading import load_model, load_tokenizer
from minipaged.kernels.dispatch import why_not_cpp
from tests.models.driver import random_tokens
from tests.models.zoo import VOCAB_SIZE, build

try:
    import gguf
except ImportError as reason:
    pytest.skip(f"GGUF files: {reason}", allow_module_level=True)

from tests.models.gguf_files import SCALES, Kind, write_gguf
from tests.models.refusal import refusal
from tests.slow import slow_but

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": random_tokens(length, VOCAB_SIZE, seed=length)} for length in (3, 9, 20)]
WIDE = {"hidden_size": 64, "intermediate_size": 96}  # the rows of a matrix are whole blocks of 32
LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
MODELS = {
    "llama": WIDE,
    "llama_llama3_rope": WIDE,
    "qwen2": WIDE,
    "qwen3": {**WIDE, "head_dim": 128},
    "gemma2": {
        **WIDE,
        "tie_word_embeddings": True,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        **WIDE,
        "tie_word_embeddings": True,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "num_hidden_layers": 7,  # one in six attends to everything
        "layer_types": None,
    },
    "phi3": {**WIDE, "sliding_window": 8},
}
MODELS["qwen3_narrow_heads"] = {**WIDE, "head_dim": 8}
MODELS["phi3_no_window"] = {**WIDE, "sliding_window": None}
MODELS["llama_linear_rope"] = {**WIDE, "rope_parameters": LINEAR}
MODELS["gemma3_linear_rope"] = {
    **MODELS["gemma3"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 100.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_gguf(build("llama", **WIDE), tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("dtype", slow_but(["auto"], ["auto", "bfloat16"]))
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_model_that_was_written(tmp_path: Path, name: str, kind: str, dtype: str) -> None:
    """Catches rows that stay in llama.cpp's order, another rope, and weights of another type."""
    written = build(re.sub("_(linear_rope|narrow_heads|no_window)", "", name), **MODELS[name])
    write_gguf(written, tmp_path / "tiny.gguf", Kind[kind])
    read = load_model(str(tmp_path / "tiny.gguf"), EngineConfig(dtype=dtype), CPU)
    assert not getattr(read, "is_quantized", False)
    weights, expected = dict(read.named_parameters()), dict(written.named_parameters())
    assert weights.keys() == expected.keys()
    for path, weight in weights.items():
        assert torch.equal(weight, expected[path].to(torch.float32 if dtype == "auto" else torch.bfloat16)), (
            path
        )
    if dtype == "auto":
        token_ids = torch.tensor([random_tokens(90, VOCAB_SIZE, seed=1)])
        actual, wanted = (model(token_ids).logits for model in (read, written))
        torch.testing.assert_close(actual, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q5_1", *(kind.name for kind in SCALES)])
def test_weights_are_those_of_llama_cpp_package(tmp_path: Path, kind: str) -> None:
    """K-quants, which nearly all published files have, and what stands in where a row is not of 256."""
    written = build("llama", hidden_size=256, intermediate_size=256)
    write_gguf(written, tmp_path / "tiny.gguf", Kind[kind])
    weights = dict(load_model(str(tmp_path / "tiny.gguf"), EngineConfig(), CPU).named_parameters())
    for path, expected in written.named_parameters():
        assert torch.equal(weights[path], expected), path


def test_the_file_is_not_copied_as_a_whole(tmp_path: Path, monkeypatch) -> None:
    """All weights were held as floats, before the first went into the model; and gguf's own reader, which
    takes 12 seconds for 128,000 tokens, read the file four times."""
    monkeypatch.setattr(gguf, "GGUFReader", None)
    alive = []
    dequantize = gguf.dequantize

    def counted(*args):
        values = dequantize(*args)
        alive.append(weakref.ref(values))
        assert sum(one() is not None for one in alive) < 12
        return values

    monkeypatch.setattr(gguf, "dequantize", counted)
    write_gguf(build("llama", **WIDE, num_hidden_layers=8), tmp_path / "tiny.gguf", Kind.Q8_0)
    load_model(str(tmp_path / "tiny.gguf"), EngineConfig(dtype="bfloat16"), CPU)
    assert len(alive) > 50


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}], ids=["plain", "int8"])
def test_tokens_are_those_of_the_model_in_safetensors(tmp_path: Path, settings: dict[str, str]) -> None:
    """The whole way, from the file, or the directory that holds it, to the output."""
    if settings and (missing := why_not_cpp(CPU)) is not None:
        pytest.skip(missing)
    model = build("qwen2", **WIDE)
    (tmp_path / "there").mkdir()
    write_gguf(model, tmp_path / "there" / "tiny.gguf", Kind.Q4_0)
    model.save_pretrained(tmp_path / "floats")
    names = (tmp_path / "there" / "tiny.gguf", tmp_path / "there", tmp_path / "floats")
    settings = {"dtype": "float32", "num_blocks": 50, "disable_log_stats": True, **settings}
    texts = [LLM(name, **settings).generate(PROMPTS, GREEDY) for name in names]
    assert len({str([one.outputs[0].token_ids for one in text]) for text in texts}) == 1


def test_the_embedded_model_chats_from_a_file(tmp_path: Path) -> None:
    """Tokenizer, chat template, beginning and end of a text are in the file, too."""
    tokenizer = AutoTokenizer.from_pretrained(str(pocket_model.PATH))
    model = AutoModelForCausalLM.from_pretrained(str(pocket_model.PATH), dtype="float32")
    write_gguf(model, tmp_path / "pocket.gguf", tokenizer=tokenizer)
    messages = [{"role": "user", "content": "Tell me a story about a dog."}]
    params = SamplingParams(temperature=0, max_tokens=60)
    ours, expected = (LLM(name, disable_log_stats=True) for name in (tmp_path / "pocket.gguf", None))
    for ask in (lambda llm: llm.chat(messages, params), lambda llm: llm.generate("Once upon a time", params)):
        (answer,), (wanted,) = ask(ours), ask(expected)
        assert answer.prompt_token_ids == wanted.prompt_token_ids
        assert answer.outputs[0].text == wanted.outputs[0].text
        assert answer.outputs[0].finish_reason == wanted.outputs[0].finish_reason


def test_the_vocabulary_is_that_of_the_file(tmp_path: Path) -> None:
    """transformers adds <|endoftext|>, an id beyond the model's: texts with it, and drafts, were refused."""
    tokenizer = AutoTokenizer.from_pretrained(str(pocket_model.PATH))
    write_gguf(build("llama", **WIDE), tmp_path / "tiny.gguf", tokenizer=tokenizer)
    read = load_tokenizer(str(tmp_path / "tiny.gguf"), EngineConfig())
    assert read.get_vocab() == tokenizer.get_vocab()
    assert len(read) == len(tokenizer)
    text = f"a <|endoftext|> b{tokenizer.eos_token}"
    assert read(text).input_ids == tokenizer(text).input_ids


@pytest.mark.parametrize("way", ["deepseek-llm", "default"])
def test_a_way_to_split_texts_that_is_not_known_means_token_ids(tmp_path: Path, caplog, way: str) -> None:
    """transformers would split them as GPT-2 does, in silence. (llama.cpp's default groups digits, too.)"""
    tokenizer = AutoTokenizer.from_pretrained(str(pocket_model.PATH))
    write_gguf(build("llama", **WIDE), tmp_path / "tiny.gguf", tokenizer=tokenizer, way=way)
    assert load_tokenizer(str(tmp_path / "tiny.gguf"), EngineConfig()) is None
    assert f"it is not known how it splits a text ({way}); put its tokenizer.json beside it" in caplog.text
    tokenizer.save_pretrained(tmp_path)
    text = "12 dogs"
    assert load_tokenizer(str(tmp_path / "tiny.gguf"), EngineConfig())(text) == tokenizer(text)


PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "▁▁",
    "a",
    "▁a",
    "b",
    "▁▁▁▁",
]


def add_pieces(writer: gguf.GGUFWriter, spaced: bool | None) -> None:
    """A tokenizer of SentencePiece, as Llama 2, TinyLlama, Mistral, Gemma and Phi-3 have them."""
    kinds = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_types([*kinds, *[gguf.TokenType.NORMAL] * (len(PIECES) - len(kinds))])
    writer.add_token_scores([0.0] * 260 + [-1.0, -9.0, -2.0, -9.0, -3.0])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if spaced is not None:
        writer.add_add_space_prefix(spaced)


@pytest.mark.parametrize(
    ("text", "spaced", "tokens"),
    [
        ("a", None, ["▁a"]),
        (" a", None, ["▁▁", "a"]),
        ("  a", True, ["▁▁", "▁a"]),
        ("a</s>\na", True, ["▁a", "</s>", "▁", "<0x0A>", "a"]),
        ("a</s> b", True, ["▁a", "</s>", "▁▁", "b"]),
        ("a", False, ["a"]),
        ("a</s> b", False, ["a", "</s>", "▁", "b"]),
        ("é    ▁b", False, ["<0xC3>", "<0xA9>", "▁▁▁▁", "▁", "b"]),
        ("", True, []),
    ],
)
def test_sentencepiece_puts_a_space_before_a_text(tmp_path: Path, text, spaced, tokens: list[str]) -> None:
    """These tokens are llama.cpp's. transformers puts no space before one, and none after a special token,
    as in TinyLlama's chats; and it puts one where the file says not to."""
    path = tmp_path / "tiny.gguf"
    write_gguf(build("llama", **WIDE), path, add=lambda writer: add_pieces(writer, spaced))
    tokenizer = load_tokenizer(str(path), EngineConfig())
    token_ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(token_ids) == ["<s>", *tokens]
    assert tokenizer.decode(tokenizer(text.replace("</s>", "")).input_ids, skip_special_tokens=True) == (
        text.replace("</s>", "").replace("▁", " ")
    )


def test_smollm_splits_numbers_into_digits(tmp_path: Path) -> None:
    """SmolLM 2's file had prompts of token ids only: transformers does not know how it splits a text."""
    tokenizer = AutoTokenizer.from_pretrained(str(pocket_model.PATH))
    write_gguf(build("llama", **WIDE), tmp_path / "tiny.gguf", tokenizer=tokenizer, way="smollm")
    read = load_tokenizer(str(tmp_path / "tiny.gguf"), EngineConfig())
    split = read.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    assert [part for part, _ in split("x12  a don't")] == ["x", "1", "2", "Ġ", "Ġa", "Ġdon", "'t"]


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("way", ["llama-bpe", "tekken", "qwen2"])
def test_llama_3_begins_with_its_first_token(tmp_path: Path, way: str, said: bool | None) -> None:
    """Its first files do not say so; and a word that is a token stays whole, whatever its merges are."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(way)
        writer.add_token_list(["a", "b", "c", "bc", "abc", "<bos>"])
        writer.add_token_types([gguf.TokenType.NORMAL] * 5 + [gguf.TokenType.CONTROL])
        writer.add_token_merges(["b c"])
        writer.add_bos_token_id(5)
        if said is not None:
            writer.add_add_bos_token(said)

    write_gguf(build("llama", **WIDE), tmp_path / "tiny.gguf", add=add)
    tokenizer = load_tokenizer(str(tmp_path / "tiny.gguf"), EngineConfig())
    begun = said or (said is None and way != "qwen2")
    assert tokenizer("abc").input_ids == [5] * begun + ([0, 3] if way == "qwen2" else [4])
    assert len(tokenizer) == 6


def test_an_answer_ends_where_a_chat_template_ends_it(tmp_path: Path) -> None:
    """Files name one end; Phi-3's template ends with <|end|>, Gemma's with <end_of_turn>: answers ran on."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(["a", "<eos>", "<|end|>", "<end_of_turn>", "<mine>", "b"])
        writer.add_token_types([gguf.TokenType.NORMAL, *[gguf.TokenType.CONTROL] * 4, gguf.TokenType.NORMAL])
        writer.add_token_merges([])
        writer.add_eos_token_id(1)
        writer.add_eot_token_id(4)

    write_gguf(build("llama", **WIDE), tmp_path / "tiny.gguf", add=add)
    for source in ("auto", "none"):
        llm = LLM(tmp_path / "tiny.gguf", generation_config=source, disable_log_stats=True)
        assert {*llm.engine.executor.eos_token_ids} == {1, 2, 3, 4}


def test_several_files_are_a_choice(llama: Path) -> None:
    """The first in the alphabet may be of any size."""
    shutil.copy(llama, llama.with_name("other.gguf"))
    assert f"holds 2 GGUF files; give one of them, such as {llama.with_name('other.gguf')}" in refusal(
        llama.parent
    )


def test_a_file_beside_a_config_without_weights_is_named(llama: Path) -> None:
    """As some repositories have them: transformers asks for model.safetensors."""
    (llama.parent / "config.json").write_text('{"model_type": "llama"}')
    shutil.copy(llama, llama.with_name("z.gguf"))
    message = f"{llama.parent} has its weights as GGUF only; give the .gguf file itself: {llama}"
    assert refusal(llama.parent) == message
    assert load_model(str(llama), EngineConfig(), CPU).config.num_hidden_layers == 2


@pytest.mark.parametrize("suffix", [".GGUF", ""])
def test_a_file_with_another_suffix(llama: Path, suffix: str) -> None:
    """transformers goes by the name, and would read a pickle."""
    other = llama.rename(llama.with_suffix(suffix))
    assert f"{other} is a GGUF file, but its name does not end in .gguf; rename it" in refusal(other)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no file" in refusal(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("size", [0, 3, 100, 5000, -1])
def test_a_damaged_file_is_called_one(llama: Path, size: int) -> None:
    """A download that broke off: struct's and numpy's errors say nothing to its owner."""
    llama.write_bytes(llama.read_bytes()[:size])
    assert "damaged" in refusal(llama)
    message = refusal(llama.parent)  # (not the folder: that may hold much else)
    assert llama.name in message
    assert "compare its size with the original's" in message


def test_positions_that_are_declared_unscaled(tmp_path: Path) -> None:
    """Was refused like any other scaling."""
    path = tmp_path / "tiny.gguf"
    write_gguf(
        build("llama", **WIDE),
        path,
        add=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.NONE),
    )
    assert load_model(str(path), EngineConfig(), CPU).config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    ("add", "reason"),
    [
        (
            lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            "llama.rope.scaling.type = yarn",
        ),
        (lambda writer: writer.add_expert_count(8), "llama.expert_count = 8"),
        (lambda writer: writer.add_uint16("split.count", 3), "is one of 3 parts"),
        (lambda writer: writer.add_rope_scaling_factor(8.0), "llama.rope.scaling.factor = 8.0"),
    ],
)
def test_what_transformers_would_pass_over_is_named(tmp_path: Path, add, reason: str) -> None:
    """The model would run, but with other positions, or a third of its layers."""
    write_gguf(build("llama", **WIDE), tmp_path / "tiny.gguf", add=add)
    assert reason in refusal(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gemma2", {"head_dim": 128}, "gemma2.attention.key_length = 128"),
        ("gemma2", {"final_logit_softcapping": 20.0}, "gemma2.final_logit_softcapping = 20.0"),
        ("gemma3", {"head_dim": 128}, "gemma3.attention.key_length = 128"),
        ("phi3", {"head_dim": 8}, "phi3.rope.dimension_count = 8"),
    ],
)
def test_what_transformers_takes_for_granted(tmp_path: Path, name: str, changes, reason: str) -> None:
    """Gemma's largest models scale their scores otherwise, and Phi-4-mini rotates a part of each head; a file
    does not say the one, and transformers reads the other as if it were not there."""
    write_gguf(build(name, **{**MODELS[name], **changes}), tmp_path / "tiny.gguf")
    assert reason in refusal(tmp_path / "tiny.gguf")


def test_biases_that_transformers_would_pass_over_are_named(tmp_path: Path) -> None:
    """A Llama with biases: its kind of file does not say that it has them."""
    write_gguf(build("llama", **WIDE, attention_bias=True), tmp_path / "tiny.gguf")
    assert "has blk.0.attn_k.bias, which is not read for a llama model" in refusal(tmp_path / "tiny.gguf")


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    """Whether transformers reads them rightly, no test says."""
    write_gguf(build("llama", **WIDE), tmp_path / "tiny.gguf", architecture="stablelm")
    known = "gemma2, gemma3, llama, phi3, qwen2, qwen3"
    assert f"is a GGUF file of a stablelm model, and only {known} are read" in refusal(tmp_path / "tiny.gguf")
