"""Decoding parameters: what is accepted, and the error for each bad value."""

import copy
import dataclasses
import inspect
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from minipaged.decoding.checks import ParamsError
from minipaged.decoding.params import BeamSearchParams, RequestOutputKind, SamplingParams
from minipaged.decoding.structured import StructuredOutputsParams

NAN, INF = math.nan, math.inf

BAD_SAMPLING = {
    "n": [0, -1, 1.0, True, "2", None, NAN, 16_385],
    "best_of": [0, -1, 2.5, True, 16_385],
    "temperature": [-0.1, 1001, NAN, INF, -INF, "0.5", None, True, 10**400],
    "top_p": [0, 0.0, -0.5, 1.1, NAN, INF, "1", None],
    "top_k": [-2, 1.5, True, "5", None, NAN],
    "min_p": [-0.1, 1.1, NAN, INF, None, "0"],
    "repetition_penalty": [0, -1.0, 0.001, 101, NAN, INF, None, "1"],
    "presence_penalty": [-2.1, 2.1, NAN, INF, None],
    "frequency_penalty": [-2.1, 2.1, NAN, INF, None],
    "logit_bias": [
        [1, 2],
        {"a": 1.0},
        {-1: 1.0},
        {1: NAN},
        {1: INF},
        {1: 101},
        {1: -101},
        {1: "x"},
        {1: None},
        {True: 1.0},
    ],
    "bad_words": ["word", [""], [[]], [[1, -2]], [[1.5]], [3], 7],
    "allowed_token_ids": [[], [-1], [1.0], "12", 3, [True]],
    "seed": [1.5, "1", True, NAN, [1]],
    "logprobs": [-2, 1.0, True, "5"],
    "prompt_logprobs": [-2, 1.0, True, "5"],
    "typical_p": [0, -0.1, 1.1, NAN, None, "1"],
    "no_repeat_ngram_size": [-1, 1.5, True, None, "2"],
    "logits_processors": [5, "f", [5], [None]],
    "truncate_prompt_tokens": [0, -2, 1.5, True, "5"],
    "detokenize": [1, None],
    "skip_special_tokens": [0, "no", None],
    "spaces_between_special_tokens": [0, None],
    "stop": ["", [""], ["a", ""], [1], 5, [None]],
    "stop_token_ids": [[-1], [1.5], ["a"], 7, "7", [True]],
    "include_stop_str_in_output": [1, "yes", None],
    "ignore_eos": [1, "yes", None],
    "min_tokens": [-1, 1.0, True, None],
    "max_tokens": [0, -1, 1.5, True, "16", NAN],
    "output_kind": [0, "DELTA", None],
    "structured_outputs": [{"regex": "a"}, "a", 1],
}
BAD_BEAM = {
    "beam_width": [0, -1, 1.5, True, "4", None],
    "length_penalty": [51, -51, NAN, INF, -INF, "1", None, True],
    "early_stopping": ["always", None, 1, 0, "True"],
    "num_return_sequences": [0, -1, 5, 1.5, True],
    "ignore_eos": [1, None],
    "min_tokens": [-1, 1.0],
    "stop_token_ids": [[-1], 7],
    "max_tokens": [0, 1.5],
    "structured_outputs": [StructuredOutputsParams(regex="a"), "a"],
    "temperature": [-1, NAN, None, "1", 1e-39, 9e-6],
    "logprobs": [-2, 1.0, True],
    "stop": ["", [1], 5],
    "include_stop_str_in_output": [1, None],
}


def cases(bad):
    return [pytest.param(name, value, id=f"{name}={value!r}"[:40]) for name in bad for value in bad[name]]


def complaint(make, **options):
    """The message of the error: one line that names the field."""
    with pytest.raises(ParamsError) as error:
        make(**options)
    assert isinstance(error.value, ValueError)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("name", "value"), cases(BAD_SAMPLING))
def test_a_bad_sampling_value_is_named_with_its_field(name, value):
    """Catches a value that would fail later, inside a step, with the request half admitted."""
    message = complaint(SamplingParams, **{name: value})
    assert message.startswith(name)
    assert any(hint in message for hint in ("; give", "; set"))


@pytest.mark.parametrize(("name", "value"), cases(BAD_BEAM))
def test_a_bad_beam_value_is_named_with_its_field(name, value):
    """Catches the same for beam search."""
    options = {"beam_width": 4, name: value}
    assert complaint(BeamSearchParams, **options).startswith(name)


def test_bad_values_are_checked_for_every_field():
    """Catches a field added without a check."""
    assert set(BAD_SAMPLING) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(BAD_BEAM) == {field.name for field in dataclasses.fields(BeamSearchParams)}


def test_the_message_has_the_value_and_the_fix():
    """Catches a message that leaves the user guessing."""
    assert complaint(SamplingParams, top_p=0) == (
        "top_p is 0; give a number above 0 and at most 1 (1 keeps every token)"
    )
    assert complaint(SamplingParams, n=0) == "n is 0; give an integer of at least 1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": 3, "best_of": 2}, ("best_of", "3", "2")),
        ({"n": 2, "temperature": 0}, ("temperature", "2")),
        ({"best_of": 2, "temperature": 0}, ("temperature", "2")),
        ({"min_tokens": 17}, ("min_tokens", "17", "16")),
        ({"best_of": 2, "output_kind": RequestOutputKind.DELTA}, ("output_kind", "best_of", "2", "1")),
    ],
)
def test_sampling_values_that_contradict_each_other_are_refused(options, words):
    """Catches two values of which one would silently win."""
    message = complaint(SamplingParams, **options)
    assert all(word in message for word in words)


def test_beam_values_that_contradict_each_other_are_refused():
    """Catches more sequences to return than the beam can hold."""
    assert "beam_width" in complaint(BeamSearchParams, beam_width=2, num_return_sequences=3)
    assert "max_tokens" in complaint(BeamSearchParams, beam_width=2, max_tokens=3, min_tokens=4)


def test_good_values_on_the_boundary_are_taken():
    """Catches a check that is off by one."""
    everything = SamplingParams(
        n=1,
        best_of=1,
        temperature=0,
        top_p=1,
        top_k=-1,
        min_p=1,
        repetition_penalty=0.01,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={0: -INF, 3: 100},
        seed=-(10**30),
        logprobs=0,
        prompt_logprobs=0,
        min_tokens=16,
        max_tokens=16,
    )
    assert (everything.top_k, everything.seed, everything.logit_bias) == (-1, -(10**30), {0: -INF, 3: 100})
    SamplingParams(
        n=16_384,
        temperature=1000,
        repetition_penalty=100,
        presence_penalty=2,
        frequency_penalty=-2,
        logit_bias={0: -100},
        logprobs=-1,
        prompt_logprobs=-1,
        truncate_prompt_tokens=1,
        max_tokens=1,
    )
    unset = SamplingParams(max_tokens=None, min_tokens=10**6, stop=None, stop_token_ids=None, bad_words=None)
    assert (unset.max_tokens, unset.stop, unset.stop_token_ids, unset.bad_words) == (None, (), (), ())
    BeamSearchParams(beam_width=1, length_penalty=50, temperature=1000)
    alone = BeamSearchParams(beam_width=1, length_penalty=-50, early_stopping="never", max_tokens=None)
    assert (alone.beam_width, alone.length_penalty, alone.max_tokens) == (1, -50, None)
    assert (
        BeamSearchParams(beam_width=3, num_return_sequences=3, early_stopping=True).num_return_sequences == 3
    )


def test_numbers_of_numpy_are_taken_and_become_those_of_python():
    """Catches a loop over an array refused, and float32 in what is written as JSON or sent to other ranks."""
    params = SamplingParams(max_tokens=np.int64(5), temperature=np.float32(0.5))
    assert params == SamplingParams(max_tokens=5, temperature=0.5)
    assert (type(params.max_tokens), type(params.temperature)) == (int, float)


def test_a_count_has_at_most_64_bits_and_a_seed_any_number():
    """Catches an overflow where a count becomes an element of a tensor, far from the request it came with."""
    assert SamplingParams(max_tokens=2**63 - 1, seed=2**63).seed == 2**63
    with pytest.raises(ParamsError, match=f"max_tokens is {2**63}; give an integer below 2\\*\\*63"):
        SamplingParams(max_tokens=2**63)


def test_defaults_are_those_of_vllm():
    """Catches a default that changes what a script carried over from vLLM generates."""
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1, 1, 0, 16)
    assert (params.seed, params.stop, params.ignore_eos, params.logprobs) == (None, (), False, None)


def test_lists_become_tuples_and_one_stop_string_a_tuple_of_one():
    """Catches a list that the caller changes while the request runs, and "END" read as "E", "N", "D"."""
    ids = [1, 2]
    params = SamplingParams(stop="END", stop_token_ids=ids, allowed_token_ids=ids, bad_words=["a", [1, 2]])
    ids.append(3)
    assert (params.stop, params.stop_token_ids, params.allowed_token_ids) == (("END",), (1, 2), (1, 2))
    assert params.bad_words == ("a", (1, 2))
    assert SamplingParams(logits_processors=[print]).logits_processors == (print,)
    bias = {1: 2}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3
    assert params.logit_bias == {1: 2.0}


def test_params_are_frozen():
    """Catches settings that change under a running request."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        BeamSearchParams(beam_width=2).beam_width = 3


def test_an_assignment_gets_an_error_that_shows_how_to_copy():
    """Catches a script that changes its parameters and learns only that it may not."""
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"clone\(max_tokens=\.\.\.\)"):
        SamplingParams().max_tokens = 10
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"replace\(params, max_tokens=\.\.\.\)"):
        BeamSearchParams(beam_width=2).max_tokens = 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(temprature=0), "unknown field 'temprature' .*mean temperature"),
        (lambda: BeamSearchParams(beam_with=2), "unknown field 'beam_with' .*mean beam_width"),
        (lambda: StructuredOutputsParams(regexp="a"), "unknown field 'regexp' .*mean regex"),
        (lambda: SamplingParams(qqq=0), "unknown field 'qqq' of SamplingParams; drop it"),
        (lambda: SamplingParams().clone(temprature=0), "mean temperature"),
    ],
)
def test_an_unknown_field_is_a_value_error_with_a_suggestion(make, message):
    """Catches a misspelt parameter that ends in a TypeError, which nobody who checks parameters expects."""
    with pytest.raises(ParamsError, match=message):
        make()


def test_fields_of_vllm_that_ask_for_nothing_pass():
    """Catches a script that spells out a default of vLLM; other values would be ignored."""
    assert (
        SamplingParams(flat_logprobs=False, extra_args=None, thinking_token_budget=None) == SamplingParams()
    )
    assert StructuredOutputsParams(regex="a", json_object=None, disable_any_whitespace=False).regex == "a"
    for make, message in (
        (
            lambda: SamplingParams(flat_logprobs=True),
            "flat_logprobs is True, which is not supported; drop it",
        ),
        (
            lambda: StructuredOutputsParams(json_object=True),
            'json_object is True.*give json={"type": "object"}',
        ),
        (lambda: SamplingParams(guided_decoding=5), "guided_decoding is 5.*give structured_outputs"),
    ):
        with pytest.raises(ParamsError, match=message):
            make()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"do_sample": False}, "'do_sample'.*; give temperature, where 0 is greedy"),
        ({"num_beams": 4}, "'num_beams'.*; give BeamSearchParams"),
        ({"use_beam_search": True}, "use_beam_search is True.*; give BeamSearchParams"),
        ({"length_penalty": 1.5}, "length_penalty is 1.5.*; give BeamSearchParams"),
        ({"early_stopping": True}, "early_stopping is True.*; give BeamSearchParams"),
        ({"num_return_sequences": 2}, "'num_return_sequences'.*; did you mean n"),
        ({"stop_words": ["."]}, "'stop_words'.*; did you mean stop[?]"),
        ({"stop_strings": ["."]}, "'stop_strings'.*; did you mean stop[?]"),
        ({"response_format": {}}, "'response_format'.*; give structured_outputs"),
    ],
)
def test_the_names_of_other_libraries_get_the_one_here(given, message):
    """Catches "drop it" for a field that is only elsewhere: without do_sample=False, the text is sampled."""
    with pytest.raises(ParamsError, match=message):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_p": 0.5}, "'top_p'.*; only samples have it: drop it, or use SamplingParams"),
        ({"seed": 1}, "'seed'.*; only samples have it"),
        ({"n": 2}, "'n'.*; give num_return_sequences"),
        ({"best_of": 2}, "'best_of'.*; give beam_width"),
        ({"num_beams": 4}, "'num_beams'.*; give beam_width"),
        ({"max_new_tokens": 4}, "'max_new_tokens'.*; did you mean max_tokens"),
    ],
)
def test_beams_name_what_only_samples_have(given, message):
    """Catches "did you mean stop?" for top_p."""
    with pytest.raises(ParamsError, match=message):
        BeamSearchParams(beam_width=2, **given)


def test_params_can_be_copied_in_every_way():
    """Catches a check of names that stands in the way of replace, pickle and copy."""
    params = SamplingParams(temperature=0.5, stop="x", seed=3)
    assert params.num_samples == 1  # (a cached property)
    for copied in (dataclasses.replace(params), params.clone(), copy.deepcopy(params), copy.copy(params)):
        assert copied == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert "temperature" in inspect.signature(SamplingParams).parameters


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1e-6, "top_p": 0.5, "seed": 1, "stop": "x"}, True),
        ({"temperature": 1e-4}, False),
        ({"temperature": 0, "logprobs": 0}, False),
        ({"temperature": 0, "min_tokens": 1}, False),
        ({"temperature": 0, "presence_penalty": 0.1}, False),
        ({"temperature": 0, "logit_bias": {1: 1.0}}, False),
        ({"temperature": 0, "bad_words": [[1]]}, False),
        ({"temperature": 0, "allowed_token_ids": [1]}, False),
        ({"temperature": 0, "no_repeat_ngram_size": 2}, False),
        ({"temperature": 0, "logits_processors": [print]}, False),
        ({"temperature": 0, "structured_outputs": StructuredOutputsParams(regex="a")}, False),
    ],
)
def test_plain_greedy_is_what_needs_only_an_argmax(options, plain):
    """Catches a setting that the fast path of a greedy batch would ignore."""
    assert SamplingParams(**options).is_plain_greedy is plain


def test_bad_words_are_resolved_alone_and_after_a_space():
    """Catches a word that slips through at the beginning of a text or in the middle of it."""
    vocabulary = {"bad": [5], " bad": [6], "worse": [7, 8], " worse": [7, 8]}
    params = SamplingParams(bad_words=["bad", [1, 2], "worse"])
    assert params.resolve(vocabulary.__getitem__).bad_words == ((5,), (6,), (1, 2), (7, 8))
    with pytest.raises(ParamsError, match="no token"):
        params.resolve(lambda text: [])
    unchanged = SamplingParams(bad_words=[[1]])
    assert unchanged.resolve(vocabulary.__getitem__) is unchanged


def test_a_bad_line_break_forbids_no_space():
    r"""Catches "\n" stripped to nothing, which forbids every lone space, and "\nA", which forbids " A"."""
    resolved = SamplingParams(bad_words=["\n", "\nA", " B"]).resolve(lambda text: list(text.encode()))
    assert [bytes(word) for word in resolved.bad_words] == [b"\n", b" \n", b"\nA", b" \nA", b" B"]


@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 101},
        {"prompt_logprobs": 101},
        {"logit_bias": {100: 1.0}},
        {"bad_words": [[1, 100]]},
        {"bad_words": ["text"]},
        {"allowed_token_ids": [0, 100]},
        {"stop_token_ids": [100]},
    ],
)
def test_what_the_vocabulary_lacks_is_refused(options):
    """Catches an index error inside a step, which would end every request of the batch."""
    [name] = options
    assert complaint(SamplingParams(**options).check_vocabulary, vocab_size=100).startswith(name)


def test_what_the_vocabulary_has_passes():
    """Catches a check that is off by one."""
    SamplingParams(
        logprobs=100, prompt_logprobs=100, logit_bias={99: 1.0}, bad_words=[[99]], stop_token_ids=[99]
    ).check_vocabulary(100)
    BeamSearchParams(beam_width=100, stop_token_ids=[99]).check_vocabulary(100)


def test_a_beam_wider_than_the_vocabulary_is_refused():
    """Catches a beam that can never be filled."""
    message = complaint(BeamSearchParams(beam_width=101).check_vocabulary, vocab_size=100)
    assert message.startswith("beam_width is 101")
    assert complaint(BeamSearchParams(beam_width=1, stop_token_ids=[100]).check_vocabulary, vocab_size=100)
    assert complaint(BeamSearchParams(beam_width=1, logprobs=101).check_vocabulary, vocab_size=100)


@pytest.mark.parametrize(("max_tokens", "kept"), [(10, 54), (None, 63), (64, 1), (1000, 1)])
def test_of_a_prompt_stays_what_leaves_room_for_the_answer(max_tokens, kept):
    """Catches a prompt that fills the model, and one that is kept whole because nothing of it fits."""
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=max_tokens)
    assert params.truncate([*range(100)], max_model_len=64) == [*range(100)][-kept:]


def test_parameters_and_methods_load_no_torch():
    """Catches an import that makes the command line's checks slow."""
    modules = ("params", "methods", "beam_search", "stopping", "detokenizer", "structured", "speculation")
    imports = "".join(f"import minipaged.decoding.{name}; " for name in modules)
    code = f"{imports}import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_seed_of_minus_one_is_none():
    """vLLM's other way to say so; catches a script that gets the same text every time."""
    assert SamplingParams(seed=-1) == SamplingParams(seed=None)
    assert SamplingParams(seed=-2).seed == -2


def test_what_stop_takes_is_said_whole():
    """Catches a message that asks for a list, where one string will do."""
    assert complaint(SamplingParams, stop=5) == "stop is 5; give a string or a list of strings"
