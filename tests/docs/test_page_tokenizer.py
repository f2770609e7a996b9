"""The tokenizer of the model in the page, in Node: token for token the one of the package."""

import json
import random
import shutil
import subprocess

import pytest
from tokenizers import Tokenizer

from tests.docs.site import ROOT

FILE = ROOT / "minipaged/pocket_model/checkpoint/tokenizer.json"
PIECES = [
    *" \t\n\r\v\f\x85\xa0\u1680\u180e\u2003\u2028\u2029\u200b\u202f\u3000\ufeff\x1c",  # white, or nearly
    *"'\u2019\"<|>-_.,é²Ⅷ٣½日ß\u0301😀",
    *("'s", "'ll", "'S", "  ", "Once", "upon", "robot", "7", "42"),
    *("<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|end", "|>", "end"),
]
PROGRAM = """
import { readFileSync } from "node:fs";
import { Tokenizer } from "./tokenizer.mjs";

const [file, texts] = JSON.parse(readFileSync(0));
const tokenizer = new Tokenizer(JSON.parse(readFileSync(file)));
console.log(JSON.stringify(texts.map((text) => tokenizer.encode(text))));
"""


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """What the page makes of texts: a function."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed; on Debian: apt-get install nodejs")
    folder = tmp_path_factory.mktemp("page")
    shutil.copy(ROOT / "docs/play/tokenizer.js", folder / "tokenizer.mjs")
    (folder / "program.mjs").write_text(PROGRAM)

    def run(texts):
        given = json.dumps([str(FILE), texts])
        ran = subprocess.run(
            [node, "program.mjs"], cwd=folder, input=given, capture_output=True, text=True, timeout=60
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    return run


def test_random_texts_have_the_tokens_of_the_package(encoded):
    """Catches a special token that is spelt out, and what is white to JavaScript alone."""
    draw = random.Random(0)
    texts = ["", "<|end|>", "a \x85b", "\ufeff's", "x<|user|><|end|> y"]
    texts += ["".join(draw.choices(PIECES, k=draw.randint(1, 12))) for _ in range(5000)]
    right = Tokenizer.from_file(str(FILE))
    expected = [right.encode(text).ids for text in texts]
    wrong = [text for text, mine, ids in zip(texts, encoded(texts), expected, strict=True) if mine != ids]
    assert wrong == []
