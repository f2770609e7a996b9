"""Objects have the keys that their schema names, where that only narrows it."""

from __future__ import annotations

import copy
import json
import random
import time

import jsonschema
import pytest

from minipaged import LLM, SamplingParams, StructuredOutputsParams
from minipaged.decoding.free_formats import as_followed
from minipaged.decoding.named_keys import named_keys_only

NAMES = ["a", "b"]
SIMPLE = [1, "x"]
OBJECTS = [{}, *({name: value} for name in NAMES for value in SIMPLE), {"a": 1, "b": 1}, {"a": "x", "b": 1}]
UNIVERSE = [
    *SIMPLE,
    *OBJECTS,
    *([value] for value in [*SIMPLE, *OBJECTS]),
    *([{}, value] for value in OBJECTS),
    *({name: value} for name in NAMES for value in OBJECTS),
    *({"a": value, "b": 1} for value in OBJECTS),
    [],
]
"""Values to try; without some of its keys, each is another one of them."""


class RandomSchema:
    """Schemas of few keywords that often describe the same value, and refer to each other."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.keywords = {
            "properties": lambda: {name: self.part() for name in self.some(NAMES, 0)},
            "required": lambda: self.some(NAMES, 0),
            "minProperties": lambda: 1,
            "maxProperties": lambda: 1,
            "additionalProperties": self.part,
            "patternProperties": lambda: {pattern: self.part() for pattern in self.some(["^a", "a|b"])},
            "items": self.part,
            "prefixItems": self.parts,
            "minItems": lambda: 2,
            "uniqueItems": lambda: True,
            "allOf": self.parts,
            "anyOf": self.parts,
            "oneOf": self.parts,
            "not": self.part,
            "if": self.part,
            "then": self.part,
            "else": self.part,
            "contains": self.part,
            "maxContains": lambda: 1,
            "propertyNames": lambda: {"enum": ["b"]},
            "dependentSchemas": lambda: {"a": self.part()},
            "dependentRequired": lambda: {"a": ["b"]},
            "enum": lambda: self.some(UNIVERSE),
            "$ref": lambda: "#/$defs/d",
            "type": lambda: rng.choice(["object", "array"]),
        }

    def some(self, things: list, least: int = 1) -> list:
        return self.rng.sample(things, self.rng.randint(least, 2))

    def named(self) -> dict:
        """A plain object: what is closed."""
        leaves = [True, {"type": "integer"}, {"const": "x"}]
        named = {
            "type": "object",
            "properties": {name: self.rng.choice(leaves) for name in self.some(NAMES, 0)},
        }
        return named | self.rng.choice([{}, {"required": self.some(NAMES, 0)[:1]}])

    def part(self):
        to = {"$ref": self.rng.choice(["#/$defs/d", "#/$defs/d", "#/default"])}
        return self.rng.choice([self.named(), self.named(), to, to, {"type": "integer"}, {"type": "object"}])

    def parts(self) -> list:
        return [self.part() for _ in range(self.rng.randint(1, 2))]

    def tagged(self) -> dict:
        branches = [self.named(), self.named()]
        for branch in branches:
            value = self.rng.choice([*SIMPLE, 2])
            branch["properties"]["a"] = self.rng.choice(
                [{"const": value}, {"enum": [value]}, {"enum": SIMPLE}]
            )
        return {"oneOf": branches, "discriminator": {"propertyName": "a"}}

    def any(self) -> dict:
        names = self.rng.sample([*self.keywords], self.rng.randint(1, 4))
        return {name: self.keywords[name]() for name in names}

    def whole(self) -> dict:
        schema = self.rng.choice([self.any, self.any, self.tagged])()
        return {**schema, "$defs": {"d": self.rng.choice([self.named, self.any])()}, "default": self.any()}


def accepted(schema) -> list | None:
    """Those of the values that validate; None for a schema that refers to itself for ever."""
    validator = jsonschema.Draft202012Validator(schema)
    try:
        return [value for value in UNIVERSE if validator.is_valid(value)]
    except RecursionError:
        return None


def test_a_closed_schema_accepts_some_of_what_the_open_one_accepts():
    """Catches an answer that does not satisfy the schema as it was given, one that has no answer any more,
    and a caller's schema that changes."""
    random_schema = RandomSchema(random.Random(5))
    num_closed = 0
    for _ in range(20_000):
        schema = random_schema.whole()
        before = copy.deepcopy(schema)
        closed = named_keys_only(schema)
        assert schema == before
        if closed == schema or (of_open := accepted(schema)) is None:
            continue
        num_closed += 1
        of_closed = accepted(closed)
        assert all(value in of_open for value in of_closed), schema
        assert bool(of_closed) == bool(of_open), schema
    assert num_closed > 1000


PET = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
CLOSED_PET = {**PET, "additionalProperties": False}


def tagged(tag: str, **more) -> dict:
    return {"type": "object", "properties": {"kind": {"const": tag}}, "required": ["kind"], **more}


def of_kinds(*tags: str, **more) -> dict:
    return {"type": "object", "properties": {"kind": {"enum": [*tags]}}, "required": ["kind"], **more}


ANY_OF_KIND_A, ANY_OF_KIND_B = (  # and lists, which may fit both
    {"properties": {"kind": {"const": tag}}, "required": ["kind"], "items": PET} for tag in "ab"
)
DEFS = {"$defs": {"Pet": PET}}
CLOSED_DEFS = {"$defs": {"Pet": CLOSED_PET}}
ONE_OF_ALL = {"allOf": [{"$ref": "#/$defs/Pet"}]}
BY_KIND = {"oneOf": [{"$ref": "#/$defs/A"}, tagged("b")], "discriminator": {"propertyName": "kind"}}
CLOSED_BY_KIND = {**BY_KIND, "oneOf": [{"$ref": "#/$defs/A"}, tagged("b", additionalProperties=False)]}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (PET, CLOSED_PET),
        ({"$id": "urn:pet", **PET}, {"$id": "urn:pet", **CLOSED_PET}),
        (
            {"properties": {"properties": PET, "enum": PET}},
            {"properties": {"properties": CLOSED_PET, "enum": CLOSED_PET}, "additionalProperties": False},
        ),
        (
            {"patternProperties": {"^x": PET}},
            {"patternProperties": {"^x": CLOSED_PET}, "additionalProperties": False},
        ),
        ({"items": PET, "maxItems": 2}, {"items": CLOSED_PET, "maxItems": 2}),
        ({"additionalProperties": PET}, {"additionalProperties": CLOSED_PET}),
        ({"anyOf": [PET, {"type": "null"}]}, {"anyOf": [CLOSED_PET, {"type": "null"}]}),
        (ONE_OF_ALL | DEFS, ONE_OF_ALL | CLOSED_DEFS),
        (
            {"oneOf": [PET, {"type": "null"}, {"const": 1}]},
            {"oneOf": [CLOSED_PET, {"type": "null"}, {"const": 1}]},
        ),
        (
            {**BY_KIND, "$defs": {"A": tagged("a")}},
            {**CLOSED_BY_KIND, "$defs": {"A": tagged("a", additionalProperties=False)}},
        ),
        (
            {"oneOf": [of_kinds("a", "b"), tagged("c")], "discriminator": {"propertyName": "kind"}},
            {
                "oneOf": [
                    of_kinds("a", "b", additionalProperties=False),
                    tagged("c", additionalProperties=False),
                ],
                "discriminator": {"propertyName": "kind"},
            },
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_objects_that_say_nothing_about_other_keys_are_closed(schema, closed):
    """Catches a nested object that is forgotten, and the name of a property that is taken for a keyword."""
    assert named_keys_only(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "default": PET, "enum": [PET]},
        {**PET, "additionalProperties": True},
        {"type": "object"},
        {**PET, "required": ["age"]},
        {**PET, "minProperties": 1},
        {**PET, "patternProperties": {"^x": {}}},
        {"patternProperties": {"^x": {}}, "required": ["y"]},
        {"patternProperties": {"^x": {}}, "minProperties": 1},
        {"properties": {"a": PET, "b": {"allOf": [PET, {"required": ["x"]}]}}},
        {**PET, "anyOf": [{"required": ["x"]}, {"required": ["name"]}]},
        {"$ref": "#/$defs/Pet", "required": ["x"], **DEFS},
        {"properties": {"a": PET, "b": {"$ref": "#/x"}}, "x": {"allOf": [PET, PET]}},
        {"oneOf": [PET, {"properties": {"age": {}}}]},
        {"oneOf": [PET, {"type": "object"}]},
        {"oneOf": [tagged("a"), tagged("b")], "discriminator": {"propertyName": "type"}},
        {"oneOf": [tagged("a"), tagged("a")], "discriminator": {"propertyName": "kind"}},
        {"oneOf": [of_kinds("a", "b"), tagged("b")], "discriminator": {"propertyName": "kind"}},
        {"oneOf": [ANY_OF_KIND_A, ANY_OF_KIND_B], "discriminator": {"propertyName": "kind"}},
        {"properties": {"a": {"not": PET}}},
        {"properties": {"a": {"$id": "x", "$defs": {"Pet": PET}, "$ref": "#/$defs/Pet"}}},
        {"properties": []},
        {"properties": {"a": {}}, "required": [["a"]]},
        {"properties": {"a": {}}, "discriminator": "a"},
        {"oneOf": [True, PET]},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_a_schema_that_closing_could_change_otherwise_stays_as_it_is(schema):
    """Catches data that is taken for a schema, keys that exclude each other, and malformed schemas."""
    assert named_keys_only(schema) == schema


def test_a_part_of_a_definition_is_not_told_apart_by_the_tag_of_the_whole():
    """Catches an answer that satisfies two branches of the schema as it was given, and so not the schema."""
    tags = {"oneOf": [{"$ref": f"#/$defs/{name}/properties/part"} for name in "ab"]}
    whole = {name: tagged(name) for name in "ab"}
    for name, key in (("a", "x"), ("b", "y")):
        whole[name]["properties"]["part"] = {"type": "object", "properties": {key: {}}}
    schema = {**tags, "discriminator": {"propertyName": "kind"}, "$defs": whole}
    answer = {"x": 1}
    assert not jsonschema.Draft202012Validator(schema).is_valid(answer)
    assert not jsonschema.Draft202012Validator(named_keys_only(schema)).is_valid(answer)


MANY = [f"p{i}" for i in range(2000)]
LARGE = {"type": "object", "properties": {name: {"const": name} for name in MANY}, "required": MANY}
BY_LAST = {"oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "discriminator": {"propertyName": MANY[-1]}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"A": LARGE}, "properties": dict.fromkeys(MANY, BY_LAST)},
        {"anyOf": [PET] * 5000},
        {"properties": dict.fromkeys(MANY, PET)},
    ],
    ids=["references", "alternatives", "properties"],
)
def test_a_large_schema_is_closed_at_once(schema):
    """Catches a cost that grows faster than the schema: the server compiles what clients send."""
    begin = time.perf_counter()
    assert named_keys_only(schema) != schema
    assert time.perf_counter() - begin < 1


def test_a_deep_schema_is_left_to_its_compilation():
    """Catches a recursion that ends the request with another error."""
    deep: dict = {}
    deep_list: dict = PET
    for _ in range(400):
        deep, deep_list = {"properties": {"a": deep}}, {"items": deep_list}
    assert named_keys_only(deep) == deep
    assert named_keys_only(deep_list) == deep_list
    lists: list = []
    for _ in range(900):
        lists = [lists]
    assert named_keys_only({"items": lists}) == {"items": lists}
    nested: dict = PET
    for _ in range(60):  # (llguidance takes as many)
        nested = {"anyOf": [nested]}
    assert '"additionalProperties": false' in as_followed(json.dumps(nested))
    for text in ("[" * 100_000, "{", '{"default": ' + "[" * 800 + "]" * 800 + "}"):
        assert as_followed(text) == text


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=64, disable_log_stats=True)


NESTED = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "pet": {"properties": {}}},
    "required": ["ok"],
}


@pytest.mark.parametrize("form", [dict, json.dumps], ids=["dict", "text"])
def test_a_key_that_the_schema_does_not_name_is_not_allowed(llm, form):
    """Catches a model that goes on with keys of its own until `max_tokens`, unless it is asked to."""
    eos = llm.engine.executor.eos_token_ids
    for more, is_allowed in (({}, False), ({"additionalProperties": True}, True)):
        params = StructuredOutputsParams(json=form(NESTED | more)).compile(llm.get_tokenizer(), eos)
        for text, is_right in (
            ('{"ok":true', True),
            ('{"ok":true,"x"', is_allowed),
            ('{"ok":true,"pet":{"x"', False),
        ):
            tokens = llm.get_tokenizer().encode(text, add_special_tokens=False)
            followed = params.compiled.start.deep_copy().validate_tokens(tokens)
            assert (followed == len(tokens)) is is_right, text


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}


def test_answers_end_and_validate(llm):
    """Catches texts that are cut off, and those that the schema as it was given does not allow."""
    wanted = StructuredOutputsParams(json=PERSON)
    params = [SamplingParams(structured_outputs=wanted, seed=seed, max_tokens=100) for seed in range(20)]
    for output in llm.generate(["A cat: "] * 20, params, use_tqdm=False):
        assert output.outputs[0].finish_reason == "stop"
        jsonschema.validate(json.loads(output.outputs[0].text), PERSON)
