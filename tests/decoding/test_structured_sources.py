"""Schemas and grammars that would end the process, or would not be followed exactly, are refused."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import threading

import pydantic
import pytest

from minipaged import LLM, SamplingParams, StructuredOutputsParams
from minipaged.decoding.forcing import MOST_FORCED, forces_little
from minipaged.decoding.free_formats import without_free_formats
from minipaged.decoding.params import ParamsError

LEAST, MOST = -(2**63), 2**63 - 1


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(num_blocks=16, disable_log_stats=True)


def compiled(llm: LLM, **given) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given).compile(llm.get_tokenizer(), llm.engine.executor.eos_token_ids)


def chain(link: str, count: int) -> str:
    """A schema whose definitions refer each to the next; `link` has NEXT for it."""
    links = [link.replace("NEXT", f'{{"$ref":"#/$defs/{i + 1}"}}') for i in range(count)]
    definitions = ",".join(f'"{i}":{text}' for i, text in enumerate([*links, '{"type":"null"}']))
    return f'{{"$ref":"#/$defs/0","$defs":{{{definitions}}}}}'


def rules(link: str, count: int) -> str:
    """A grammar whose rules refer each to the next; `link` has THIS and NEXT."""
    links = [link.replace("THIS", f"r{i}").replace("NEXT", f"r{i + 1}") for i in range(count)]
    return "\n".join(["start: r0", *links, f'r{count}: "a"'])


DEADLY = [
    {"json": {"type": "integer", "minimum": LEAST, "maximum": LEAST}},
    {"json": {"type": "integer", "minimum": -(10**20) - 5, "maximum": -(10**20)}},
    {"json": {"type": "integer", "minimum": -1e300, "maximum": -1e299}},
    {"json": {"const": LEAST}},
    {"json": {"enum": [1, {"a": [LEAST]}]}},
    {"grammar": f'start: "a" %json {{"const": {LEAST}}}'},
    {"json": chain("NEXT", 8000)},
    {"json": chain('{"items":NEXT}', 6000)},
    {"json": chain('{"type":"object","properties":{"x":NEXT},"required":["x"]}', 3000)},
    {"grammar": rules("THIS: NEXT", 15_000)},
    {"grammar": rules('THIS: "b" | NEXT', 12_000).replace("r", "R").replace("staRt", "start")},
]

ALL = """
import json, sys
from minipaged import LLM, StructuredOutputsParams
from minipaged.decoding.params import ParamsError

llm = LLM(num_blocks=16, disable_log_stats=True)
for given in json.load(sys.stdin):
    try:
        StructuredOutputsParams(**given).compile(llm.get_tokenizer(), llm.engine.executor.eos_token_ids)
        print("compiled", flush=True)
    except ParamsError as error:
        print("refused", error, flush=True)
"""


@pytest.mark.slow
def test_no_schema_and_no_grammar_ends_the_process():
    """Catches a request that kills the server, and every other request with it: llguidance overflows the
    stack at -2^63, and where references follow each other by the thousand."""
    command = [sys.executable, "-c", ALL]
    ran = subprocess.run(command, input=json.dumps(DEADLY), capture_output=True, text=True, timeout=300)
    lines = ran.stdout.splitlines()
    assert (ran.returncode, len(lines)) == (0, len(DEADLY)), ran.stderr
    assert [line.split()[0] for line in lines[:6]] == ["refused"] * 6
    # (One of them is more than llguidance computes, which it says.)
    assert [line.split()[0] for line in lines[6:]].count("compiled") >= 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": {"type": "integer", "minimum": LEAST, "maximum": MOST}}, f"minimum is {LEAST}; "),
        ({"json": {"type": "integer", "minimum": 2**53 + 1}}, f"minimum is {2**53 + 1}; "),
        ({"json": {"items": {"exclusiveMaximum": 1e19}}}, "exclusiveMaximum is 1e+19; "),
        ({"json": {"const": 10**25}}, f"const is {10**25}; "),
        ({"json": {"enum": ["a", {"b": 2**53 + 1}]}}, f"enum is {2**53 + 1}; "),
        ({"json": {"multipleOf": 10**17}}, f"multipleOf is {10**17}; "),
        ({"json": {"type": "integer", "multipleOf": 604_800}}, "multipleOf is 604800, "),
        ({"json": {"type": "number", "multipleOf": 99999.99}}, "multipleOf is 99999.99, "),
        (
            {"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}},
            "of multipleOf is 988027, ",
        ),
        ({"json": '{"const": 1' + "0" * 5000 + "}"}, "digits"),
        ({"json": '{"const": 1'}, "EOF"),
        ({"json": "[" * 100_000}, "nested too deeply"),
        ({"grammar": f'start: %json {{"maximum": {MOST}}}'}, f"maximum is {MOST}; "),
        ({"grammar": f'start: "%json {{" | %json {{"maximum": {MOST}}}'}, f"maximum is {MOST}; "),
        ({"grammar": f'// %json {{\nstart: %json {{"maximum": {MOST}}}'}, f"maximum is {MOST}; "),
        ({"grammar": "start: %json {"}, "EOF"),
        ({"grammar": "start: /[a-z]+/ B"}, ': at 1(8): unknown name: "B"; correct it'),
        ({"json": {"description": "a" * 300_000}}, "has 300,019 bytes; give at most 262,144"),
        ({"regex": "é" * 200_000}, "has 400,000 bytes; give at most 262,144"),
        ({"grammar": 'start: "a"' + " " * 300_000}, "has 300,010 bytes; give at most 262,144"),
        ({"json": {"type": "object", "minProperties": 2}}, "minProperties is 2; "),
        ({"json": {"items": {"required": ["a"], "minProperties": 3}}}, "minProperties is 3; "),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_would_not_be_exact_is_refused_with_its_value(llm, given, message):
    """Catches a bound that llguidance rounds to a double or to 64 bits, so that texts do not validate; a key
    that is written twice and counts as two; and a refusal in the library's words."""
    with pytest.raises(ParamsError) as raised:
        compiled(llm, **given)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 400


def test_what_is_exact_is_not_refused(llm):
    """Catches a check that is too strict: the greatest exact numbers, names of keywords as names of
    properties, a large number that is not a bound, many choices, keys of which all must be there."""
    for schema in (
        {"type": "integer", "minimum": -(2**53), "maximum": 2**53},
        {"enum": [2**53, -(2**53), 0.1]},
        {"type": "object", "properties": {"minimum": {"default": MOST, "type": "integer"}}},
        {"type": "object", "minProperties": 1},
        {"anyOf": [{"type": "integer", "multipleOf": each} for each in (10**9, 15, 7000)]},
        {"properties": {str(each): {"type": "number", "multipleOf": each} for each in (997, 991, 0.01)}},
        {
            "prefixItems": [
                {"type": "integer", "multipleOf": 997},
                {"anyOf": [{"multipleOf": 991}, {"type": "null"}]},
            ]
        },
        {"enum": [{"multipleOf": 604_801}], "default": {"multipleOf": 604_801}},
        {"type": "object", "required": ["a", "b"], "minProperties": 3},
        chain('{"items":NEXT}', 1000),
    ):
        assert compiled(llm, json=schema).compiled is not None
    assert compiled(llm, choice=[f"choice {i}" for i in range(30_000)]).compiled is not None
    mixed = 'start: "a" %json {"type": "null"} "b" %json {"maximum": 5}'
    assert compiled(llm, grammar=mixed).compiled is not None


ENDLESS = [
    {"grammar": "start: /a+/ /a+/"},
    {"grammar": "start: /[a-z]/ /a+/ /a+/"},
    {"grammar": '%llguidance {"no_forcing": false}\nstart: /a+/ /a+/'},
    {"grammar": 'start: WORD "x"\nWORD: "x"+'},
    {"grammar": 'start: x x\nx[max_tokens=100000]: "a"+'},
    {"grammar": 'root ::= w w\nw ::= "a"+'},
    {"json": {"items": {"const": 1}, "minItems": 2, "x-guidance": {"whitespace_pattern": "1+"}}},
    {"json": {"properties": {"a": {}}, "required": ["a"], "x-guidance": {"whitespace_pattern": '"+'}}},
    {"json": {"items": {"const": 1}, "minItems": 3, "x-guidance": {"item_separator": "1+"}}},
]


@pytest.mark.parametrize("given", ENDLESS, ids=str)
def test_a_forced_text_without_an_end_is_not_searched_for_one(llm, given):
    """Catches a request that is never compiled, or a step that never ends: the first greedy expression takes
    what the next one needs, so nothing but another of its letters may ever follow."""
    if "json" in given:
        given = {"json": {"type": "array" if "items" in given["json"] else "object", **given["json"]}}
    params = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(**given))
    outputs = []
    other = LLM(num_blocks=16, disable_log_stats=True)  # (it is lost if it hangs)
    thread = threading.Thread(target=lambda: outputs.extend(other.generate("a", params)), daemon=True)
    thread.start()
    thread.join(30)
    assert outputs, "it still searches"
    assert outputs[0].outputs[0].finish_reason == "length"


LONG = MOST_FORCED + 1


@pytest.mark.parametrize(
    ("kind", "source", "is_little"),
    [
        ("regex", r"[0-9]{4}-[0-9]{2}-[0-9]{2}", True),
        ("regex", "-".join(["[0-9a-f]{4}"] * 8) + "c{0,100000}", True),
        ("regex", "(ab{3}){20}", True),
        ("regex", "a{100000}", False),
        ("regex", "(a{100}){100}", False),
        ("regex", "((a{20}){20}){20}", False),
        ("regex", "a" * LONG, False),
        ("choice", json.dumps(["a", "b" * LONG]), False),
        ("choice", json.dumps(["a", "b"] * 5000), True),
        ("json", json.dumps({"const": "a" * LONG}), False),
        ("json", json.dumps({"description": "a" * LONG, "pattern": "^a+$", "minLength": 9}), True),
        ("json", json.dumps({"pattern": "^a+$", "minLength": LONG}), False),
        ("json", json.dumps({"pattern": f"^a{{{LONG}}}$"}), False),
        ("json", json.dumps({"x-guidance": {"whitespace_pattern": "[ \\n]*"}}), True),
        ("json", json.dumps({"x-guidance": {"whitespace_pattern": "\n{0,2}| ?"}}), True),
        ("json", json.dumps({"x-guidance": {"whitespace_pattern": "\\x22+"}}), False),
        ("json", json.dumps({"const": "a" * 900, "x-guidance": {"whitespace_pattern": ""}}), True),
        ("json", json.dumps({"minItems": 5000, "x-guidance": {"whitespace_pattern": ""}}), False),
        ("json", json.dumps({"enum": ["a" * 900] * 10, "x-guidance": {"whitespace_pattern": ""}}), False),
        ("grammar", 'start: "a+/" ("b" // A+ /\n "c")* # D', True),
        ("grammar", 'start: "if" A\nA: "b" | "c"', True),
        ("grammar", 'start: "a" | /"+/ "b" | /"c/', False),
        ("grammar", 'start: %json {"required": ["A+"]} ("\\n" x)*', True),
        ("grammar", 'start: %json {"x-guid\\u0061nce": {"whitespace_pattern": "1+"}} "1"', False),
        ("grammar", f'start: "{"a" * LONG}"', False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_text_that_is_forced_is_short(kind, source, is_little):
    """Catches a step that takes as long as it takes to split 100,000 characters, and makes all others wait;
    and a schema or a grammar whose keys are no longer forced for no reason."""
    assert forces_little(kind, source) == is_little


class Upload(pydantic.BaseModel):
    path: pathlib.Path
    files: list[pydantic.FilePath] | dict[str, pydantic.DirectoryPath]
    password: pydantic.SecretStr | None
    content: bytes
    format: str = "path"


def test_formats_that_any_text_has_are_followed(llm):
    """Catches pydantic's types for paths, passwords and bytes refused for what restricts nothing."""
    for given in (Upload, '{"\\u0066ormat": "path"}'):
        assert compiled(llm, json=given).compiled is not None
    schema = {"properties": {"format": {"const": {"format": "path"}}}, "items": [], "format": 5}
    assert without_free_formats(schema) == schema
    part = {"type": "string", "maxLength": 3}
    for name in ("password", "binary", "file-path"):
        given = {"$defs": {"format": part | {"format": name}}, "anyOf": [part | {"format": name}]}
        assert without_free_formats(given) == {"$defs": {"format": part}, "anyOf": [part]}
    deep: dict = {"format": "path"}
    for _ in range(900):
        deep = {"items": [deep]}
    assert without_free_formats(deep) == deep


def test_only_the_thread_that_compiles_has_the_deep_stack(llm):
    """Catches half a gigabyte of address space for each thread that the process starts later."""
    before = threading.stack_size()
    assert compiled(llm, json={"const": "deep"}).compiled is not None
    assert threading.stack_size() == before


MANY_PATTERNS = [{"pattern": f"a{{{count}}}.*b"} for count in range(1, 9)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"json": {"format": "postcode", "type": "string"}}, "; leave it out"),
        ({"json": {"not": {"type": "string"}, "dependencies": {}}}, "; leave it out"),
        ({"regex": "(a"}, ": unclosed group; correct it"),
        ({"grammar": "start: limit"}, ': at 1(8): unknown name: "limit"; correct it'),
        ({"json": {"$ref": "#/$defs/limit"}}, "limit' does not exist; correct it"),
        ({"regex": "a$b"}, ": ^, $ and \\b are not supported inside a regular expression; leave them out"),
        ({"regex": "(?=a)b"}, "look-behind, is not supported; leave them out"),
        ({"json": {"$ref": "http://x/y"}}, ": $ref is an address; put the schema into $defs, and give #/"),
        ({"json": {"minimum": "a"}}, """: Expected f64 for 'minimum', got "a"; correct it"""),
        *(
            (given, ": a length or count is greater than 4,294,967,295; give a smaller one")
            for given in ({"json": {"maxLength": 2**32}}, {"regex": "a{9999999999}"})
        ),
        ({"json": {"enum": []}}, ": anyOf or enum is empty; give at least one entry"),
        (
            {"json": {"type": "string", "format": "date", "minLength": 11}},
            ": no string satisfies its pattern, ",
        ),
        ({"json": {"maximum": 1e-300, "const": 2.5}}, "0000...; no text follows it, so relax it"),
        ({"json": {"oneOf": [{"type": "string"}, {"const": "a"}]}}, "oneOf may overlap; give anyOf"),
        (
            {"json": {"allOf": MANY_PATTERNS, "type": "string"}},
            ": it is too large to compile; give a simpler",
        ),
        ({"regex": "(" + "a" * 79}, "s is '(" + "a" * 79 + "': "),
        ({"regex": "(" + "a" * 80}, "s is '(" + "a" * 76 + "...': "),
    ],
)
def test_a_refusal_shows_the_source_and_what_to_do(options, expected):
    """Catches a long source or a dump of the library's that fills a terminal, its terms without a fix, and
    advice to leave out what is not a keyword."""
    with pytest.raises(ParamsError) as refused:
        StructuredOutputsParams(**options).check("s")
    message = str(refused.value)
    assert expected in message
    assert len(message) < 350
    assert message.endswith("; leave it out") == (expected == "; leave it out")
