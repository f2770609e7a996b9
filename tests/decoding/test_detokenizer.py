"""Incremental detokenization: pieces that join to the whole, over every family of tokenizers."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from minipaged.decoding.detokenizer import Detokenizer, Window
from minipaged.decoding.token_bytes import token_bytes

TEXT = [
    "The quick brown fox isn't lazy; it jumps over 12 dogs.",
    "  Two spaces,\n\ttabs and naïve café résumés.",
    "日本語のテキスト 🙂👩‍👩‍👧 ёж",
]


def byte_level():
    """Like GPT-2 and Llama 3: tokens are bytes, so a character may be cut anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXT[:2] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def sentencepiece_like():
    """Like Llama 2 and Gemma: spaces are part of words, unknown characters are runs of byte tokens."""
    pieces = ["<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += sorted({c for text in TEXT[:2] for c in text if c not in " \n\t"})
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for left, right in [
        ("▁", "q"),
        ("▁", "▁"),
        ("T", "h"),
        ("▁", "t"),
        ("o", "v"),
        ("ov", "e"),
        ("ove", "r"),
    ]:
        merges.append((left, right))
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def word_pieces():
    """Like BERT: spaces come from the decoder, ## joins."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["<unk>", "<eos>"])
    tokenizer.train_from_iterator(TEXT[:2] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


TOKENIZERS = {make.__name__: make() for make in (byte_level, sentencepiece_like, word_pieces)}
every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def pieces(detokenizer, token_ids, window=Window()):  # noqa: B008  (immutable)
    texts = []
    for token_id in token_ids:
        window, delta = detokenizer.push(window, token_id)
        texts.append(delta)
    return [*texts, detokenizer.flush(window)]


@every_tokenizer
@pytest.mark.parametrize("text", TEXT)
def test_pieces_join_to_the_text(tokenizer, text):
    """Catches a lost space at a piece's start and a character that comes out in halves."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    got = pieces(Detokenizer(tokenizer), ids)
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "\ufffd" not in "".join(got)


@every_tokenizer
def test_words_come_out_as_they_come_in(tokenizer):
    """Catches a detokenizer that keeps everything until the end."""
    ids = tokenizer.encode(TEXT[0], add_special_tokens=False)
    got = pieces(Detokenizer(tokenizer), ids)[:-1]
    assert got.count("") <= 1, "at most the space that decoding strips from the start"


@every_tokenizer
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_join_to_decode_for_any_tokens(tokenizer, skip, data):
    """Catches what only garbage shows: broken UTF-8, runs of byte tokens, special tokens in between."""
    token = st.integers(0, len(tokenizer) - 1)
    early = st.integers(0, min(258, len(tokenizer) - 1))  # mostly single bytes, where there are such
    ids = data.draw(st.lists(st.one_of(token, early, st.just(tokenizer.eos_token_id)), max_size=40))
    expected = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert "".join(pieces(Detokenizer(tokenizer, skip), ids)) == expected


@every_tokenizer
@pytest.mark.parametrize("text", TEXT)
def test_a_prompt_and_its_output_join_to_the_whole_text(tokenizer, text):
    """Catches the space lost between them: alone, an output's first word would begin a text."""
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for cut in range(len(ids)):
        prompt = detokenizer.decode(ids[:cut])
        if not prompt.endswith("\ufffd"):
            stream = pieces(detokenizer, ids[cut:], detokenizer.window_after(ids[:cut]))
            assert prompt + "".join(stream) == detokenizer.decode(ids)
            assert detokenizer.decode_after(ids[:cut], ids[cut:]) == "".join(stream)


def test_a_prompt_that_ends_within_a_character_leaves_the_rest_of_it_to_the_output():
    """Catches a character that neither text has."""
    detokenizer = Detokenizer(TOKENIZERS["byte_level"])
    ids = detokenizer.tokenizer.encode("a🙂b")
    assert detokenizer.decode_after(ids[:3], ids[3:]) == "\ufffd\ufffdb"


def test_the_window_after_a_run_of_bytes_begins_with_a_character():
    """Catches one that begins inside of a character, whose bytes then spoil those of the next one."""
    tokenizer = TOKENIZERS["sentencepiece_like"]
    prompt = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in "😀😀".encode()])
    assert Detokenizer(tokenizer).window_after(prompt) == Window(tuple(prompt), 8)


def test_special_tokens_at_the_end_of_a_prompt_do_not_hide_its_text():
    """Catches a space that is lost after the markers of a chat template."""
    detokenizer = Detokenizer(TOKENIZERS["sentencepiece_like"])
    quick, over = (detokenizer.tokenizer.encode(word, add_special_tokens=False) for word in ("quick", "over"))
    special = [detokenizer.tokenizer.eos_token_id] * 9
    assert detokenizer.decode_after(quick + special, over) == " over"
    assert detokenizer.decode_after(special, over) == "over", "nothing is before it"


def test_a_character_of_four_tokens_comes_out_with_the_last():
    """Catches U+FFFD sent to the user, which no later piece can take back."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a🙂b")
    assert len(ids) == 6
    assert pieces(Detokenizer(tokenizer), ids) == ["a", "", "", "", "🙂", "b", ""]


def test_half_a_character_at_the_end_is_what_decode_makes_of_it():
    """Catches bytes that are dropped when the text is cut by its length."""
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a🙂")[:-1]
    assert pieces(Detokenizer(tokenizer), ids)[-1] == "\ufffd"


def test_bytes_that_never_become_a_character_do_not_wait_for_the_end():
    """Catches the text before them that comes out again with the first of them."""
    tokenizer = TOKENIZERS["byte_level"]
    bad = next(i for i in range(len(tokenizer)) if tokenizer.decode([i]) == "\ufffd")
    ids = [*tokenizer.encode("over"), *[bad] * 14]
    *early, rest = pieces(Detokenizer(tokenizer), ids)
    assert "".join(early) + rest == tokenizer.decode(ids)
    assert "\ufffd" in "".join(early)


def test_a_bad_byte_spoils_its_whole_run():
    """Catches a character shown before the byte after it turned it into U+FFFD (byte fallback)."""
    tokenizer = TOKENIZERS["sentencepiece_like"]
    run = tokenizer.convert_tokens_to_ids(["<0xC3>", "<0xA9>", "<0xFF>"])
    word = tokenizer.convert_tokens_to_ids("over")
    assert pieces(Detokenizer(tokenizer), [word, *run[:2], word]) == ["over", "", "", "éover", ""]
    spoiled = pieces(Detokenizer(tokenizer), [word, *run, word])
    assert spoiled == ["over", "", "", "", "\ufffd\ufffd\ufffdover", ""]


@every_tokenizer
def test_the_space_before_a_word_survives_a_special_token(tokenizer):
    """Catches a window that begins with a token without text: the next word then loses its space."""
    ids = tokenizer.encode("over the", add_special_tokens=False)
    ids = [part for token in ids for part in (token, tokenizer.eos_token_id)]
    assert "".join(pieces(Detokenizer(tokenizer), ids)).endswith("over the")


class HalvesOfCharacters:
    """Every token ends one character and begins the next: no cut between tokens is clean."""

    all_special_ids = ()
    added_tokens_decoder = {}  # noqa: RUF012

    def get_vocab(self):
        return {}

    def decode(self, token_ids, **options):
        return (b"\x82\xe2" * len(token_ids)).decode("utf-8", "replace")


def test_text_that_cannot_be_cut_is_held_back_and_not_changed():
    """Catches a window cut in the middle of a character, which doubles its U+FFFD."""
    detokenizer = Detokenizer(HalvesOfCharacters())
    assert pieces(detokenizer, range(30)) == [*[""] * 30, detokenizer.decode(range(30))]


class CountingTokenizer:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.num_decoded = 0

    def decode(self, token_ids, **options):
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


@every_tokenizer
@pytest.mark.parametrize("kind", ["text", "random", "bytes", "special"])
def test_the_cost_grows_with_the_tokens_not_with_their_square(tokenizer, kind):
    """Catches a window that never moves on: garbage bytes or special tokens without end."""
    rng = random.Random(0)
    counting = CountingTokenizer(tokenizer)
    detokenizer = Detokenizer(counting)
    ids = {
        "text": tokenizer.encode(TEXT[0], add_special_tokens=False) * 40,
        "random": [rng.randrange(len(tokenizer)) for _ in range(1000)],
        "bytes": [200 if len(tokenizer) > 200 else 1] * 1000,
        "special": [tokenizer.eos_token_id] * 1000,
    }[kind]
    counting.num_decoded = 0
    got = pieces(detokenizer, ids)
    assert counting.num_decoded < 60 * len(ids)
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_like"])
def test_the_bytes_of_tokens_join_to_those_of_the_text(name):
    """Catches a part of a character whose bytes are those of U+FFFD."""
    tokenizer, text = TOKENIZERS[name], "quick" + "日本🦊é"
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = [token_bytes(tokenizer, token_id, detokenizer.token(token_id)) for token_id in ids]
    assert b"".join(parts) == text.encode()
    assert any(len(part) < 2 for part in parts)
    assert token_bytes(tokenizer, tokenizer.eos_token_id, "<eos>") == b"<eos>"
    itself = SimpleNamespace(convert_ids_to_tokens=lambda token_id: "\ufffd")
    assert token_bytes(itself, 7, "\ufffd") == "\ufffd".encode(), "a vocabulary may have this character"


def test_fast_tokenizers_are_asked_directly(monkeypatch):
    """Catches transformers' detour, which looks at each id in Python: most of a streamed token's cost."""
    detokenizer = Detokenizer(byte_level())
    ids = detokenizer.tokenizer.encode(TEXT[0])
    monkeypatch.setattr("transformers.tokenization_utils_base.to_py_obj", None)
    window, text = Window(), ""
    for token_id in ids:
        window, piece = detokenizer.push(window, token_id)
        text += piece
    assert text + detokenizer.flush(window) == TEXT[0]


@pytest.mark.parametrize("name", ["decode", "_decode"])
def test_a_tokenizer_that_decodes_by_itself_is_let(name):
    """Catches the shortcut taken past a class that changes what `decode` gives."""

    def shout(self, *args, **options):
        return getattr(PreTrainedTokenizerFast, name)(self, *args, **options).upper()

    tokenizer = byte_level()
    tokenizer.__class__ = type("Loud", (PreTrainedTokenizerFast,), {name: shout})
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.decode(tokenizer.encode("quick")) == "QUICK"


def test_the_space_before_a_full_stop_stays():
    """Catches transformers' clean-up of spaces, which takes away characters that the model has generated."""
    words = models.WordLevel({" .": 0}, unk_token=" .")  # (it leaves BPE alone)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    own = {"decode": lambda *args, **options: PreTrainedTokenizerFast.decode(*args, **options)}
    tokenizer.__class__ = type("Own", (PreTrainedTokenizerFast,), own)
    detokenizer = Detokenizer(tokenizer)
    assert (detokenizer.decode([0]), detokenizer.token(0)) == (" .", " .")
