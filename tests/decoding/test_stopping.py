"""When a sequence ends, and the text that is left of it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from minipaged.decoding.checks import ParamsError
from minipaged.decoding.detokenizer import Detokenizer
from minipaged.decoding.methods import SamplingMethod
from minipaged.decoding.params import BeamSearchParams, SamplingParams
from minipaged.decoding.stopping import StopChecker, final_text
from minipaged.scheduling import Sample
from minipaged.scheduling.request import Branch
from tests.concepts.decoding_driver import apply, make_request, make_sequence


class Letters:
    """A tokenizer whose token i is the i-th piece; "<eos>" is special."""

    all_special_ids = (0,)
    added_tokens_decoder = {}  # noqa: RUF012

    def __init__(self, *texts):
        self.pieces = ["<eos>", *texts]

    def get_vocab(self):
        return {piece: i for i, piece in enumerate(self.pieces)}

    def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(self.pieces[i] for i in ids if i or not skip_special_tokens)

    def encode(self, text):
        return [self.pieces.index(piece) for piece in text.split("|")]


ABC = Letters(*"abcd", "END", " E", "N", "Dx", "V")


def rules_of(tokenizer=ABC, eos=(0,), **options):
    return StopChecker(SamplingParams(max_tokens=None, **options), eos, Detokenizer(tokenizer))


def check_run(text, eos=(0,), max_num_tokens=100, tokenizer=ABC, **options):
    """Feed tokens until one ends the sequence: (tokens used, reason, stream); the final text is the same."""
    params = SamplingParams(max_tokens=None, **options)
    checker = StopChecker(params, eos, Detokenizer(tokenizer))
    sequence = make_sequence([1, 1], params=params, max_num_tokens=max_num_tokens)
    for token_id in tokenizer.encode(text):
        reason = checker.check(sequence, token_id)
        sequence.append(Branch(sequence, token_id, 0.0, reason))
        if reason:
            break
    text, pieces = checker.begin_text(()), []
    for token_id in sequence.output_token_ids:
        text, certain = text.after_all([token_id])
        pieces.append(certain)
    stream = "|".join(piece for piece in (*pieces, text.rest()) if piece)
    final = final_text(checker, sequence.output_token_ids)
    assert stream.replace("|", "") == final
    return sequence.num_generated_tokens, reason, stream


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("a|b|<eos>|c", {}, (3, "stop", "a|b")),
        ("a|b|<eos>|c", {"ignore_eos": True}, (4, None, "a|b|c")),
        ("a|<eos>|c", {"ignore_eos": True, "skip_special_tokens": False}, (3, None, "a|<eos>|c")),
        ("a|<eos>|b|<eos>", {"min_tokens": 2}, (4, "stop", "a|b")),
        ("a|<eos>|b", {"min_tokens": 1}, (2, "stop", "a")),
        ("a|b|c", {"stop_token_ids": [2]}, (2, "stop", "a")),
        ("a|b|c", {"stop_token_ids": [2], "include_stop_str_in_output": True}, (2, "stop", "a|b")),
        (
            "a|b|c",
            {"stop": "END", "stop_token_ids": [2], "include_stop_str_in_output": True},
            (2, "stop", "a|b"),
        ),
        ("a|b|c", {"stop_token_ids": [2], "min_tokens": 2}, (3, None, "a|b|c")),
        ("a|END|c", {"stop": "END"}, (2, "stop", "a")),
        ("a|END|c", {"stop": "END", "include_stop_str_in_output": True}, (2, "stop", "a|END")),
        ("a| E|N|Dx|b", {"stop": "END"}, (4, "stop", "a| ")),  # " " is certain, "E" is not
        ("a| E|N|Dx|b", {"stop": "END", "include_stop_str_in_output": True}, (4, "stop", "a| |END")),
        ("a| E|N|V|b", {"stop": "END"}, (5, None, "a| |ENV|b")),
        ("a| E|N", {"stop": "END"}, (3, None, "a| |EN")),  # cut by its length: what was held back is text
        ("a| E|N|<eos>", {"stop": "END"}, (4, "stop", "a| |EN")),
        ("END|a|END|b", {"stop": "END", "min_tokens": 1}, (3, "stop", "END|a")),
        ("a|b|c|d", {"stop": ["cd", "bc"]}, (3, "stop", "a")),  # the one that is complete first
        ("a|a|a|b", {"stop": "aab"}, (4, "stop", "a")),  # the held text slides along
    ],
)
def test_where_a_text_ends(text, options, expected):
    """Catches EOS before min_tokens, a stop string across tokens missed, cut wrongly or shown in part."""
    assert check_run(text, **options) == expected


def test_several_eos_tokens_end_a_text():
    """Catches a model's second EOS ignored (Llama 3 has three)."""
    assert check_run("a|b|c", eos=[3, 2])[:2] == (2, "stop")


@pytest.mark.parametrize("max_num_tokens", [3, 4])
def test_length_is_prompt_and_output(max_num_tokens):
    """Catches one token too many or too few: two prompt tokens, the last output token reaches the limit."""
    assert check_run("a|b|c|d", max_num_tokens=max_num_tokens)[:2] == (max_num_tokens - 2, "length")


def test_an_end_at_the_last_length_is_a_stop():
    """Catches "length" reported for a text that ended by itself."""
    assert check_run("a|<eos>", max_num_tokens=4)[:2] == (2, "stop")


def test_checking_changes_nothing_but_the_text_state():
    """Catches a candidate that is refused by the decoding method and still counts as text."""
    params = SamplingParams(stop="ab", max_tokens=None)
    checker = StopChecker(params, [0], Detokenizer(ABC))
    sequence = make_sequence([1], params=params)
    a, b, c = (ABC.pieces.index(piece) for piece in "abc")
    assert checker.check(sequence, a) is None
    assert checker.check(sequence, b) is None  # "b", not "ab": `a` was never appended
    sequence.append(Branch(sequence, a, 0.0))
    assert [checker.check(sequence, token) for token in (c, b, c)] == [None, "stop", None]


def test_a_check_decodes_only_what_is_new(monkeypatch):
    """Catches a text that is made again from its first token for every token, or twice for the new one."""
    params = SamplingParams(stop="END", max_tokens=None)
    checker = StopChecker(params, [0], Detokenizer(ABC))
    sequence, counts = make_sequence([1], params=params), []
    for _ in range(20):
        with monkeypatch.context() as patch:
            decoded = []
            patch.setattr(ABC, "decode", lambda ids, **_: decoded.append(ids) or "a" * len(ids))  # noqa: B023
            assert checker.check(sequence, 1) is None
            counts.append(len(decoded))
        sequence.append(Branch(sequence, 1, 0.0))
    assert counts[1:] == [2] * 19  # the window with and without the new token


def test_samples_that_fork_keep_texts_of_their_own():
    """Catches n samples that share the text state of the prompt they forked from."""
    params = SamplingParams(n=3, stop=["ab", "bb"], max_tokens=None)
    request = make_request([1], SamplingMethod(params, StopChecker(params, [0], Detokenizer(ABC))), params)
    a, b, c = (ABC.pieces.index(piece) for piece in "abc")
    for samples in ([Sample([a, b, c], [-1.0] * 3)], [Sample([b], [-1.0])] * 3):
        apply(request, request.method.advance(request, samples))
    assert [s.output_token_ids for s in request.completions] == [[a, b], [b, b]]
    assert [s.index for s in request.completions] == [0, 1]
    assert [(s.output_token_ids, s.index) for s in request.sequences] == [([c, b], 2)]


def test_the_first_step_asks_for_all_samples_and_later_ones_for_one():
    """Catches n candidates asked of every sample: the tree would explode."""
    params = SamplingParams(n=3, max_tokens=None, logprobs=0)
    request = make_request([1], SamplingMethod(params, StopChecker(params, [])), params)
    assert request.method.num_candidates(request) == request.method.num_sequences == 3
    reports = [{5: (-1.0, 1)}, {6: (-2.0, 2)}, {5: (-1.0, 1)}]
    apply(request, request.method.advance(request, [Sample([5, 6, 5], [-1.0, -2.0, -1.0], reports)]))
    assert request.method.num_candidates(request) == 1
    assert [s.index for s in request.sequences] == [0, 1, 2]
    assert [s.logprobs for s in request.sequences] == [[report] for report in reports]


@pytest.mark.parametrize(("n", "best_of", "order"), [(3, None, [0, 1, 2]), (2, 3, [2, 0]), (3, 3, [0, 1, 2])])
def test_best_of_returns_the_likeliest_and_n_alone_keeps_the_order(n, best_of, order):
    """Catches samples in the order in which they finished, and a ranking that keeps the worst."""
    params = SamplingParams(n=n, best_of=best_of, max_tokens=None, stop_token_ids=[9])
    method = SamplingMethod(params, StopChecker(params, []))
    request = make_request([1], method, params)
    apply(request, method.advance(request, [Sample([5, 9, 6], [-2.0, -3.0, -1.0])]))
    apply(request, method.advance(request, [Sample([7], [-0.5]), Sample([9], [-0.5])]))
    apply(request, method.advance(request, [Sample([9], [-0.1])]))
    assert not request.sequences
    assert [s.index for s in request.completions] == [1, 2, 0]
    assert [s.index for s in method.rank(request)] == order


def test_a_stop_string_needs_a_tokenizer():
    """Catches a stop string that is silently ignored when a model has no tokenizer."""
    with pytest.raises(ParamsError, match="stop_token_ids"):
        StopChecker(SamplingParams(stop="x"), [])


def test_min_tokens_need_one_allowed_token_that_ends_nothing():
    """Catches a refusal of every list of allowed tokens, and an output that must go on and cannot."""
    for options in ({"min_tokens": 1, "allowed_token_ids": [0, 1]}, {"allowed_token_ids": [0]}):
        assert rules_of(**options).end_ids == {0}
    with pytest.raises(ParamsError, match="min_tokens is 1, but allowed_token_ids has only end tokens"):
        rules_of(min_tokens=1, allowed_token_ids=[0, 2], stop_token_ids=[2])


def test_an_output_without_tokens_has_no_text():
    """Catches a request that is aborted before its first token and breaks what shows its text."""
    assert [final_text(rules_of(**options), []) for options in ({}, {"stop": "END"})] == ["", ""]


def test_a_complete_text_stays_as_it_is():
    """Catches tokens behind a stop string that are shown, or show the last piece again."""
    rules = rules_of(stop="END", include_stop_str_in_output=True)
    assert final_text(rules, ABC.encode("a|b|END|c|d")) == "abEND"
    text, _ = rules.begin_text(()).after_all(ABC.encode("a|END"))
    assert text.after_all(ABC.encode("c|d")) == (text, "")


@pytest.mark.parametrize(("include", "expected"), [(False, "a"), (True, "ab")])
def test_a_stop_string_before_half_a_character_cuts_the_text(include, expected):
    """Catches a stop string that is shown because the character behind it never came."""
    tokenizer = Letters("a", "b\ufffd")
    rules = rules_of(tokenizer, stop="b", include_stop_str_in_output=include)
    assert final_text(rules, [1, 2]) == expected


def test_beams_stop_at_tokens_and_length():
    """Catches parameters of beam search that the checker does not read."""
    params = BeamSearchParams(beam_width=2, stop_token_ids=[4], min_tokens=1, max_tokens=None)
    checker = StopChecker(params, [0])
    sequence = make_sequence([1], params=params, max_num_tokens=3)
    assert checker.check(sequence, 4) is None
    sequence.append(Branch(sequence, 5, 0.0))
    assert [checker.check(sequence, token) for token in (4, 0, 5)] == ["stop", "stop", "length"]


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.sampled_from(["a", "b", "ab", "aab", "ba", "c"]), max_size=25),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 3),
)
def test_streams_agree_with_a_plain_search(tokens, stop, include, min_tokens):
    """Catches any stop string missed or shown in part: all texts over a, b, c against `str.find`."""
    tokenizer = Letters("a", "b", "ab", "aab", "ba", "c")
    rules = rules_of(tokenizer, stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    text, shown = rules.begin_text(()), ""
    whole = ""
    for count, token in enumerate(tokens, 1):
        text = text.after(tokenizer.pieces.index(token))
        shown += text.delta
        whole += token
        ends = [
            (end, end - len(s))
            for s in stop
            for end in range(len(whole) - len(token) + 1, len(whole) + 1)
            if whole[:end].endswith(s)
        ]
        if ends and count > min_tokens:
            end, start = min(ends)
            assert text.stopped
            assert shown == whole[: end if include else start]
            return
        assert not text.stopped
        assert whole.startswith(shown)
        undecided = len(whole) - len(shown)
        assert undecided == 0 or any(s.startswith(whole[-undecided:]) for s in stop)
        assert not any(whole.endswith(s[:k]) for s in stop for k in range(undecided + 1, len(s)))
    assert shown + text.rest() == whole


def test_twice_as_many_stop_strings_take_hardly_more_looks_for_a_beginning():
    """Catches every beginning of every stop string compared with every piece: 0.7 ms a token for 1,000."""

    class Looked(str):
        looks = 0

        def __getitem__(self, key):
            Looked.looks += 1
            return super().__getitem__(key)

        def startswith(self, beginning):
            Looked.looks += 1
            return super().startswith(beginning)

        def __gt__(self, other):
            Looked.looks += 1
            return super().__gt__(other)

    looks = []
    for count in (200, 400):
        rules, Looked.looks = rules_of(stop=[Looked(f"{i:04}{i:04}") for i in range(count)]), 0
        assert rules.num_undecided("ab0123012") == 7
        looks.append(Looked.looks)
    assert looks[1] - looks[0] < 10


def test_stream_and_final_text_agree_on_random_letters():
    """Catches a final text that is decoded another way than it was streamed."""
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(1, len(ABC.pieces)) for _ in range(rng.randint(0, 12))]
        options = rng.choice([{}, {"stop": "END"}, {"stop": ["aa", "N"]}, {"stop_token_ids": [3]}])
        if ids:
            check_run("|".join(ABC.pieces[i] for i in ids), **options)


def byte_fallback(*pieces):
    """A tokenizer with a token for each byte, as of Llama 2 and Gemma."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        # A stop string that is a byte token ends the text with that token.
        ("a <0x0A> b", {"stop": ["\n"]}, (2, "a")),
        ("a <0x0A> b", {"stop": ["\n"], "include_stop_str_in_output": True}, (2, "a\n")),
        ("a <0x0A> <0x0A> b", {"stop": ["\n\n"]}, (3, "a")),
        ("a <0x0A> b a", {"stop": ["a\nb"]}, (3, "")),
        ("a <0xC3> <0xA9> b", {"stop": ["é"]}, (3, "a")),
        # So does an end token, and it is shown if it is to be included.
        (
            "a <0x41> b",
            {"stop": ["zz"], "stop_token_ids": [1 + 0x41], "include_stop_str_in_output": True},
            (2, "aA"),
        ),
        # Half a character is none, so no stop string either.
        ("a <0xC3> <0xA9> b", {"stop": ["\ufffd"]}, (4, "aéb")),
        # One that was complete before `min_tokens` does not end the text later.
        ("a <0x0A> <0x41> b <0x0A> a", {"stop": ["\n"], "min_tokens": 3}, (5, "a\nAb")),
        ("a <0x0A> b a", {"stop": ["\n"], "min_tokens": 2}, (4, "a\nba")),
    ],
)
def test_a_stop_string_of_byte_tokens_ends_the_text_at_its_token(names, options, expected):
    """Catches one token too many: a run of bytes is shown only when it is over, but stops before."""
    tokenizer = byte_fallback("a", "b")
    rules = rules_of(tokenizer, (), **options)
    sequence = make_sequence([1], params=SamplingParams(max_tokens=None, **options), max_num_tokens=100)
    for token_id in tokenizer.convert_tokens_to_ids(names.split()):
        reason = rules.check(sequence, token_id)
        sequence.append(Branch(sequence, token_id, 0.0, reason))
        if reason:
            break
    token_ids = sequence.output_token_ids
    assert (len(token_ids), final_text(rules, token_ids)) == expected
