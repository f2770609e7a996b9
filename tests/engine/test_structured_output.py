"""Structured outputs: what ends with "stop" follows its schema, expression or grammar, whatever happens."""

from __future__ import annotations

import json
import logging
import random
import re
import shutil
import unicodedata
from array import array
from collections import Counter
from contextlib import suppress
from functools import reduce
from types import SimpleNamespace

import jsonschema
import pydantic
import pytest
from transformers import AutoTokenizer

from minipaged import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams, pocket_model
from minipaged.decoding import structured
from minipaged.decoding.params import ParamsError
from tests.checked import checked
from tests.concepts.decoding_driver import make_sequence
from tests.engine.conftest import make_llm
from tests.engine.ctrl_c import interrupted_after_call

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GBNF = 'root ::= "SELECT " column (", " column)* " FROM " table\ncolumn ::= "a" | "b"\ntable ::= [a-z]{1,5}'
LARK = 'start: "SELECT " COLUMN (", " COLUMN)* " FROM " TABLE\nCOLUMN: "a" | "b"\nTABLE: /[a-z]{1,5}/'
SELECT = r"SELECT [ab](, [ab])* FROM [a-z]{1,5}"
STORY = "Once upon a time there was a little cat who lived in a house near the river."


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("minipaged").setLevel(logging.ERROR)  # hundreds of preemptions


def pocket(**options) -> LLM:
    """The embedded model."""
    return checked(LLM(**{"num_blocks": 400, "max_model_len": 256, "disable_log_stats": True, **options}))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return pocket()


def follow(max_tokens: int = 40, **options) -> SamplingParams:
    """Sampling parameters; json, regex, choice and grammar go into the structured outputs."""
    kinds = {kind: options.pop(kind) for kind in structured.KINDS if kind in options}
    given = StructuredOutputsParams(**kinds)
    return SamplingParams(structured_outputs=given, **{"max_tokens": max_tokens, "temperature": 0, **options})


def random_schema(rng: random.Random, depth: int = 2) -> dict:
    """A small JSON schema of the keywords that people use."""
    number = {"type": rng.choice(["integer", "number"]), "minimum": rng.randint(-50, 0)}
    scalars = [None, True, 3, -1.5, "", "é", 'a"b\\', "red"]
    patterns = ["^[a-z]{1,4}$", r"^\d{3}-\d{2}$", "^(yes|no)+$"]
    simple = [
        {"type": rng.choice(["null", "boolean"])},
        number | rng.choice([{}, {"maximum": rng.randint(0, 50)}, {"exclusiveMaximum": 9, "multipleOf": 2}]),
        {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)},
        {"type": "string", "pattern": rng.choice(patterns)},
        {"type": "string", "format": rng.choice(["date", "time", "uuid", "ipv4", "email"])},
        {"enum": rng.sample(scalars, rng.randint(1, 4))},
        {"const": rng.choice([*scalars, [1, "a"], {"a": None}])},
        {"type": ["string", "integer", "null"], "maxLength": 5},
    ]
    if not depth:
        return rng.choice(simple)
    inner = [random_schema(rng, depth - 1) for _ in range(3)]
    names = rng.sample(["a", "b", "name", "x y", "é"], rng.randint(0, 3))
    nested = [
        {"type": "array", "items": inner[0], "minItems": rng.randint(0, 2), "maxItems": rng.randint(2, 3)},
        {"type": "array", "prefixItems": inner, "items": False, "minItems": rng.randint(0, 3)},
        {"anyOf": inner},
        {"oneOf": inner[:2]},
        {"allOf": inner[:1]},
        {
            "type": "object",
            "properties": dict(zip(names, inner)),
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"a": inner[0]},
            "required": ["a"],
            "additionalProperties": True,
            "maxProperties": 3,
        },
    ]
    schema = rng.choice(simple + 3 * nested)
    if depth == 2 and rng.random() < 0.2:
        return {"$defs": {"t": schema}, "type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}
    return schema


@pytest.mark.parametrize("temperature", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_every_finished_text_of_200_random_schemas_validates(temperature):
    """A keyword that is dropped, EOS inside a value, a matcher that lost a token in a preemption."""
    tight = pocket(num_blocks=90, block_size=4, max_num_batched_tokens=64, preemption_mode="swap")
    rng = random.Random(17)
    schemas: list[dict] = []
    refused = 0
    while len(schemas) < 200:
        schema = random_schema(rng)
        try:
            StructuredOutputsParams(json=schema).compile(tight.tokenizer, [1])
            schemas.append(schema)
        except ParamsError:  # (of "oneOf" whose two may overlap)
            refused += 1
    assert refused < 40
    params = [follow(json=s, temperature=temperature, seed=i, max_tokens=48) for i, s in enumerate(schemas)]
    outputs = tight.generate(["The answer is "] * 200, params)
    ends = Counter(output.outputs[0].finish_reason for output in outputs)
    assert ends["stop"] >= 120  # (others write a number without end)
    assert ends["stop"] + ends["length"] == 200
    assert tight.engine.metrics.num_preemptions > 0
    for output, schema in zip(outputs, schemas):
        if output.outputs[0].finish_reason == "stop":
            value = json.loads(output.outputs[0].text)
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"regex": r"[A-Z][a-z]{2,8}, \d{4}-\d\d-\d\d"}, None),
        ({"regex": "^(😀|é){3}$"}, None),
        ({"regex": r"(?i)yes|no|a.c"}, None),
        ({"choice": ["yes", "yesterday", 'a "quoted" one', "two\nlines", "😀 é\\"]}, None),
        ({"choice": {"only"}}, "only"),
        ({"grammar": GBNF}, SELECT),
        *(({"grammar": grammar}, SELECT) for grammar in (LARK, f"?{LARK}")),
    ],
)
def test_every_sample_matches_as_a_whole(llm, given, wanted, temperature):
    """A match of a part, a choice that is a prefix of another, a character of several tokens cut in two."""
    number = 8 if temperature else 1
    params = follow(**given, temperature=temperature, n=number, seed=5)
    texts = [done.text for done in llm.generate(STORY, params)[0].outputs if done.finish_reason == "stop"]
    assert len(texts) >= number / 2
    for text in texts:
        if "choice" in given:
            assert text in given["choice"]
        else:
            assert re.fullmatch(wanted or given["regex"], text)


def test_a_pydantic_class_is_a_schema(llm):
    """`model_json_schema` that is not called, or its "$ref" not followed."""

    class Colour(pydantic.BaseModel, extra="forbid"):
        red: int = pydantic.Field(ge=0, le=255)

    class Picture(pydantic.BaseModel, extra="forbid"):
        name: str = pydantic.Field(max_length=5)
        colours: list[Colour] = pydantic.Field(max_length=2)

    [output] = llm.generate(STORY, follow(json=Picture, max_tokens=80))
    assert output.outputs[0].finish_reason == "stop"
    Picture.model_validate_json(output.outputs[0].text)
    schema = Picture.model_json_schema()
    assert llm.generate(STORY, follow(json=json.dumps(schema), max_tokens=80))[0].outputs == output.outputs


# -- whatever happens to a request ---------------------------------------------------------------

MIXED = [
    follow(json=PERSON),
    SamplingParams(temperature=0, max_tokens=30),
    follow(json=PERSON, temperature=1, seed=3, n=3),
    SamplingParams(temperature=1, seed=4, n=2, max_tokens=30),
    follow(regex=r"(\d{2} [a-z]{3,5} )+", temperature=1, seed=5, logprobs=2),
    BeamSearchParams(beam_width=3, max_tokens=20),
    follow(choice=["the river", "the house", "a cat"], temperature=1, seed=6),
    follow(grammar=GBNF, temperature=1, seed=7, repetition_penalty=1.2, ignore_eos=True),
]
PROMPTS = [STORY, STORY, STORY, STORY, "A cat ", "A dog ", STORY, STORY + " It was"]


def results(outputs) -> list:
    return [
        [(done.text, done.token_ids, done.finish_reason) for done in output.outputs] for output in outputs
    ]


@pytest.fixture(scope="module")
def alone(llm) -> list:
    return [results(llm.generate(prompt, params))[0] for prompt, params in zip(PROMPTS, MIXED)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 40, "block_size": 4, "preemption_mode": "recompute"},
        {"num_blocks": 40, "block_size": 4, "preemption_mode": "swap"},
        {"num_blocks": 40, "block_size": 4, "preemption_mode": "recompute", "enable_prefix_caching": False},
        {"max_num_batched_tokens": 7},
        {"enable_chunked_prefill": False, "enable_prefix_caching": False},
    ],
    ids=["batch", "recompute", "swap", "no_caching", "chunks", "prefill_first"],
)
def test_a_mixed_batch_gives_what_each_request_gives_alone(alone, options):
    """A mask in the row of a neighbour; a matcher that a preemption, a fork or a second run leaves behind."""
    llm = pocket(**options)
    assert results(llm.generate(PROMPTS, MIXED)) == alone
    assert results(llm.generate(PROMPTS, MIXED)) == alone  # seeds reproduce; prefixes are cached now
    if "preemption_mode" in options:
        assert llm.engine.metrics.num_preemptions > 0


def test_a_step_that_is_rolled_back_changes_nothing(alone):
    """A matcher that consumed a token which the rolled-back step then never appended."""
    llm = pocket()
    execute, failures = llm.engine.executor.execute, []

    def fail_after_sampling(plan):
        result = execute(plan)
        if len(failures) < plan.step // 3:
            failures.append(plan.step)
            raise RuntimeError("injected")
        return result

    llm.engine.executor.execute = fail_after_sampling
    requests = [llm._add(prompt, params) for prompt, params in zip(PROMPTS, MIXED)]
    while llm.engine.has_unfinished:
        try:
            llm.engine.step()
        except RuntimeError:
            continue
    assert len(failures) > 5
    assert results(llm.engine.output(request) for request in requests) == alone


def test_ctrl_c_after_any_call_changes_no_text(llm):
    """Catches a matcher that an interrupted step left ahead of its note: it consumed a token twice, and the
    request failed because the grammar "forbids every token"."""
    params = follow(regex="[a-z]{3}(abc|xyz)[0-9]{2}")
    wanted = llm.generate("Hello", params)[0].outputs[0].token_ids
    number, found = 1, True
    while found:
        request = llm.engine.add_request(f"interrupted {number}", *llm.tokenize("Hello", params))
        for _ in range(2):
            llm.engine.step()
        with suppress(KeyboardInterrupt):
            found = interrupted_after_call(number, llm.engine.step, ("decoding/structured.py",))
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert llm.engine.output(request).outputs[0].token_ids == wanted, number
        number += 1
    assert number > 20


def test_sample_i_of_n_is_a_lone_sample_with_that_seed(llm):
    """Samples that share the matcher of the sequence they forked from."""
    [output] = llm.generate(STORY, follow(json=PERSON, temperature=1, seed=20, n=4))
    lone = [llm.generate(STORY, follow(json=PERSON, temperature=1, seed=20 + i))[0] for i in range(4)]
    assert [done.token_ids for done in output.outputs] == [other.outputs[0].token_ids for other in lone]
    assert len({done.text for done in output.outputs}) > 1


def allowed(llm, sequence) -> list[str]:
    [row] = structured.allowed_tokens([sequence], llm.engine.executor.vocab_size)
    return [llm.tokenizer.decode([token]) for token in row.nonzero()[0]]


def test_thousands_of_choices_that_begin_alike_are_followed(llm):
    """Catches the library's limit of 2,000 ways to go on, after which nothing was allowed."""
    choices = [f"c{number}" for number in range(5000)]
    [output] = llm.generate(STORY, follow(choice=choices))
    assert output.error is None
    assert output.outputs[0].text in choices


def test_what_may_follow_depends_on_the_tokens_alone(llm):
    """A matcher that is only ever driven forward: tokens taken back or replaced leave it where it was."""
    params = follow(choice=["yes", "no"]).compile(llm.tokenizer, [1])
    sequence = make_sequence([5], [], params)
    first = allowed(llm, sequence)
    encode = llm.tokenizer.encode
    assert set(first) == {"y", "ye", "yes", "n", "no"} & set(map(llm.tokenizer.decode, range(2048)))
    for tokens, wanted in [
        ("y", "es"),
        ("n", "o"),
        ("no", "<|end|>"),
        ("ye", "s"),
        ("y e", "s"),
        ("q", ""),
    ]:
        ids = [token for part in tokens.split() for token in encode(part, add_special_tokens=False)]
        sequence.token_ids[1:] = array("i", ids)
        # ("q" is in neither: llguidance's own mask then has EOS.)
        assert set(allowed(llm, sequence)) == set(wanted.split()) & {*first, "e", "es", "o", "s", "<|end|>"}
    del sequence.token_ids[1:]
    assert allowed(llm, sequence) == first


# -- where a text ends, and what contradicts it --------------------------------------------------


SPELLED = {
    "choice": (["<|end|>", "x<|end|>y"], r"x?<\|end\|>y?"),
    "regex": (r"x<\|end\|>y", r"x<\|end\|>y"),
    "json": ({"const": "b<|begin|>c"}, r'"b<\|begin\|>c"'),
    "grammar": ('start: "<|user|>"', r"<\|user\|>"),
}


@pytest.mark.parametrize("kind", SPELLED)
def test_a_text_may_spell_a_special_token(llm, kind):
    """Catches the special token itself, which is not text: asked for where only one text may follow."""
    given, wanted = SPELLED[kind]
    params = SamplingParams(
        temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(**{kind: given})
    )
    (output,) = llm.generate("a", params)
    assert re.fullmatch(wanted, output.outputs[0].text), output.error
    assert output.outputs[0].finish_reason == "stop"


def test_special_tokens_need_no_role():
    """Most of Llama 3's have none, nor those of a GGUF file: only the tokenizer's backend lists them."""
    tokenizer = AutoTokenizer.from_pretrained(str(pocket_model.PATH), extra_special_tokens=[])
    assert "<|user|>" not in tokenizer.all_special_tokens
    (output,) = LLM(tokenizer=tokenizer, disable_log_stats=True).generate("a", follow(choice=["<|user|>x"]))
    assert output.outputs[0].text == "<|user|>x"


def test_an_added_token_in_angle_brackets_may_be_spelled():
    """Catches Qwen's <tool_call>, which is not special to transformers, but is to llguidance."""
    tokenizer = AutoTokenizer.from_pretrained(str(pocket_model.PATH))
    tokenizer.add_tokens(["<tool_call>"])
    params = SamplingParams(max_tokens=30, structured_outputs=StructuredOutputsParams(choice=["<tool_call>"]))
    (output,) = pocket(tokenizer=tokenizer).generate("The cat", params)
    assert output.outputs[0].text == "<tool_call>"


@pytest.mark.parametrize("name", ["<｜end｜>", "<🤖>"])
def test_a_special_token_may_be_written_with_escapes(name):
    """DeepSeek's are not ASCII: JSON writes them as `\\uff5c`, and an emoji as two of these."""
    tokenizer = AutoTokenizer.from_pretrained(str(pocket_model.PATH), extra_special_tokens=[name])
    llm = LLM(tokenizer=tokenizer, disable_log_stats=True)
    for is_escaped in (True, False):
        schema = json.dumps({"const": name}, ensure_ascii=is_escaped)
        (output,) = llm.generate("a", follow(json=schema))
        assert output.outputs[0].text == f'"{name}"', output.error


def test_a_grammar_too_large_to_follow_says_so(llm):
    """Catches an error that blames settings that nobody gave."""
    endless = StructuredOutputsParams(grammar='start: ("b" | "c") a\na: "a" a')
    params = SamplingParams(structured_outputs=endless)
    (output,) = llm.generate("a", params)
    assert "too large to follow" in output.error


def test_a_text_too_large_to_follow_leaves_its_grammar_to_others(llm):
    """Catches a grammar that no request can follow any more once one has filled its automaton."""
    multiples = {"type": "integer", "multipleOf": 99999, "minimum": 12345, "maximum": 10**15}
    text = "x" * 30  # (longer than the steps that fill it)
    schema = {"anyOf": [multiples, {"const": text}]}
    too_large = follow(json=schema, allowed_token_ids=ids(llm, "0123456789"))
    small = follow(json=schema, allowed_token_ids=[*ids(llm, '"x'), 1])
    for params in ([too_large, small], [small, too_large], [small]):  # (beside it, and after it)
        for param, output in zip(params, llm.generate(["a"] * len(params), params)):
            if param is small:
                assert output.outputs[0].text == f'"{text}"', output.error
            else:
                assert "forbid every token" in output.error


def ids(llm, characters: str) -> list[int]:
    """The tokens of single characters."""
    return llm.tokenizer.convert_tokens_to_ids([*characters])


def test_eos_ends_a_complete_text_even_where_it_is_ignored(llm):
    """Text after the last bracket, a row without tokens, EOS repeated up to max_tokens."""
    for ignored in (False, True):
        [output] = llm.generate(STORY, follow(choice=["yes", "no"], ignore_eos=ignored))
        done = output.outputs[0]
        assert (done.text in ("yes", "no"), done.finish_reason, done.token_ids[-1]) == (True, "stop", 1)
    # What may go on does, if EOS is ignored.
    [output] = llm.generate(STORY, follow(regex="a+", ignore_eos=True, max_tokens=20))
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 20)
    assert set(output.outputs[0].text) == {"a"}


def test_other_masks_penalties_and_biases_hold_too(llm):
    """One mask that takes the place of another; a bias or a penalty that lifts a forbidden token."""
    digits = [llm.tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "0123456789"]
    number = {"regex": r"\d{1,9}|[a-z]{1,9}"}
    limits = {"allowed_token_ids": [*digits, 1], "min_tokens": 4, "bad_words": [[digits[3]]]}
    params = follow(**number, **limits, temperature=1, n=8, seed=1)
    for done in llm.generate(STORY, params)[0].outputs:
        assert re.fullmatch("[0-24-9]{4,9}", done.text)
    a = llm.tokenizer.encode("a", add_special_tokens=False)[0]
    edits = {"logit_bias": {a: 100, digits[0]: 50}, "repetition_penalty": 1.1, "frequency_penalty": -2.0}
    [output] = llm.generate(STORY, follow(regex=r"\d{4}", presence_penalty=-2.0, **edits))
    assert output.outputs[0].text == "0000"


@pytest.mark.parametrize(
    "options",
    [
        {"choice": ["yes", "no"], "min_tokens": 9},
        {"choice": ["yes", "no"], "allowed_token_ids": [300]},
        {"choice": ["yes", "no"], "logit_bias": {1: float("-inf")}},
    ],
)
def test_a_request_whose_masks_leave_nothing_fails_alone_and_says_so(llm, options):
    """Token 0 forever, or an invalid answer."""
    contradicted, fine = llm.generate([STORY, STORY], [follow(**options), follow(choice=["yes", "no"])])
    _, mask = options
    assert contradicted.error == f"structured_outputs and {mask} forbid every token; relax one of them"
    assert contradicted.outputs[0].finish_reason == "error"
    assert fine.outputs[0].finish_reason == "stop"


def test_the_schema_true_is_any_value(llm):
    """Catches the shortest valid schema refused."""
    any_value, of_true = (llm.generate(STORY, follow(json=schema))[0].outputs[0] for schema in ({}, " true "))
    assert of_true == any_value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": {"type": "strin"}}, "json .*Invalid type: strin"),
        ({"json": "{"}, r"json .*'\{': EOF"),
        *(({"json": text}, f"json .*'{text}': no text follows it; give") for text in ("false", "7")),
        ({"json": {"not": {"type": "null"}}}, 'json .*Unimplemented keys: ."not"'),
        (
            {"json": {"type": "integer", "minimum": 2, "maximum": 1}},
            "json .*minimum .2. is greater than maximum",
        ),
        *(
            (given, f"{kind} .*: no text follows it; give")
            for kind, given in (
                ("json", {"json": {"$ref": "#"}}),
                ("json", {"json": {"anyOf": [{"$ref": "#"}]}}),
                ("regex", {"regex": "[a&&b]"}),
                ("grammar", {"grammar": "start: x\nx: start"}),
                ("grammar", {"grammar": "start: start start"}),
                ("grammar", {"grammar": "start: A\nA: /a+b/ & /a+c/"}),
            )
        ),
        ({"json": reduce(lambda part, _: {"items": part}, range(2000), {})}, "json is nested too deeply"),
        ({"json": {"enum": [object()]}}, "json is not a valid JSON schema: .*not JSON serializable"),
        ({"regex": "(a"}, r"regex .*'\(a': unclosed group"),
        ({"regex": "(?=a)b"}, "regex .*look-around"),
        ({"grammar": "root ::= foo"}, "grammar .*Rule 'foo' not found"),
        ({"grammar": "start: FOO"}, 'grammar .*unknown name: "FOO"'),
    ],
)
def test_what_cannot_be_followed_is_refused_when_it_is_added(llm, given, message):
    """A schema that fails in the middle of a batch, or a keyword that is ignored."""
    with pytest.raises(ParamsError, match=f"^{message}") as refused:
        llm.generate([STORY, STORY], [SamplingParams(), follow(**given)])
    assert "\n" not in str(refused.value)
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "structured_outputs has nothing; give exactly one of json, regex, choice, grammar"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs has regex and choice; give exactly one"),
        ({"choice": []}, "choice is .*at least one string"),
        ({"choice": "yes"}, "choice is 'yes'; give a list"),
        ({"choice": [1]}, "choice has 1; give strings"),
        ({"regex": 3}, "regex is 3; give a string"),
        ({"grammar": ["a"]}, "grammar is .*; give a string"),
        ({"json": [1]}, "json is .*; give a JSON schema"),
    ],
)
def test_not_exactly_one_of_its_type_is_refused_when_built(given, message):
    """The second of two that is dropped; a string taken for a list of letters."""
    with pytest.raises(ParamsError, match=message):
        StructuredOutputsParams(**given)


def test_who_cannot_follow_says_so(llm, model, monkeypatch):
    """Beams, a model without tokenizer or EOS, a missing package: free text, or a stack trace in a step."""
    given = StructuredOutputsParams(regex="a")
    with pytest.raises(ParamsError, match="given, but beam search does not support it; use SamplingParams"):
        BeamSearchParams(beam_width=2, structured_outputs=given)
    with pytest.raises(ParamsError, match=r"structured_outputs is {'regex': 'a'}; give StructuredOutputsP"):
        SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(ParamsError, match="not compiled; LLM compiles it if the model has a tokenizer"):
        make_llm(model).generate({"prompt_token_ids": [5]}, follow(regex="a"))
    with pytest.raises(ParamsError, match="the model has no EOS"):
        given.compile(llm.tokenizer, [])
    monkeypatch.setattr(structured, "find_spec", lambda name: None)
    with pytest.raises(ParamsError, match=r'needs llguidance.*pip install -c .* -e "\.\[structured\]"'):
        StructuredOutputsParams(regex="a")


def composing(tokenizer):
    """As Qwen's tokenizers: a letter and its accent become one."""
    tokenizer["normalizer"] = {"type": "NFC"}


def prefixing(tokenizer):
    """As RoBERTa's: a space comes before a text."""
    tokenizer["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True


@pytest.mark.parametrize("change", [composing, prefixing])
def test_a_tokenizer_that_changes_what_it_encodes_does_not_change_what_is_forced(change, tmp_path):
    """Catches "y e", or a request that fails: tokens of another text than the one that must follow."""
    shutil.copytree(pocket_model.PATH, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    change(tokenizer)
    file.write_text(json.dumps(tokenizer))
    llm, choices = pocket(model=str(tmp_path)), ["cafe\u0301 noir", "cafe\u0301 au lait"]
    params = [follow(choice=choices), follow(json={"const": {"cafe\u0301": True}})]
    chosen, constant = (output.outputs[0].text for output in llm.generate(["Drink:"] * 2, params))
    assert chosen in choices
    assert json.loads(constant) == {"cafe\u0301": True}


def test_a_long_source_is_compared_with_its_tokens_in_pieces(llm, monkeypatch):
    """Catches a call that holds up every other thread for seconds, and an accent that a cut takes from its
    letter."""
    sizes = []

    def compose(text):
        sizes.append(len(text))
        return unicodedata.normalize("NFC", text)

    vocabulary = structured._vocabulary(llm.tokenizer, (1,))
    monkeypatch.setattr(
        vocabulary, "_tokenizer", SimpleNamespace(tokenize_str=compose, decode_bytes=str.encode)
    )
    assert vocabulary._spells("caf\u00e9 " * 100_000)
    assert max(sizes) < 10_000
    assert not any(vocabulary._spells("-" * before + "e\u0301" + "-" * 5000) for before in range(4090, 4102))


def test_a_grammar_is_compiled_once_for_all_requests_with_it(llm):
    """Milliseconds for each of a thousand requests with the same schema."""
    first, second = (follow(json=PERSON).compile(llm.tokenizer, [1]) for _ in range(2))
    assert first.structured_outputs.compiled is second.structured_outputs.compiled
