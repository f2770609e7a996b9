"""The page "Follow one token": its decoder computes what transformers computes; what it shows is printed."""

import ast
import importlib.util
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from minipaged.memory import BlockAllocator, BlockTable
from tests.docs.site import ROOT

FILE = ROOT / "docs/examples/readable_decoder.py"
PAGE = ROOT / "docs/guides/one-token.md"
SCATTERED = [11, 4, 9, 0, 7, 2, 13, 5, 8, 1]
PROMPT = [0, 457, 446, 748, 582, 264, 300, 301, 302, 303, 304]  # 2 full blocks and 3 tokens


@pytest.fixture(scope="module")
def readable():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("readable_decoder", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def decoder(readable):
    return readable.Decoder(readable.POCKET_MODEL, num_blocks=14, block_size=4)


@pytest.fixture(scope="module")
def theirs(readable):
    """The embedded model as transformers runs it, float32."""
    return AutoModelForCausalLM.from_pretrained(
        readable.POCKET_MODEL, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture
def table():
    """An empty block table over a pool that hands out its blocks out of order."""
    return BlockTable(BlockAllocator(14, order=SCATTERED), block_size=4)


@pytest.mark.parametrize("pieces", [[11], [1] * 11, [4, 7], [3, 5, 2, 1]], ids=str)
def test_the_logits_are_those_of_transformers_at_every_position(decoder, theirs, table, pieces):
    """Catches a wrong slot, rotation, mask or head group, in a prompt, a chunk of one and a decode."""
    rows = []
    for count in pieces:
        rows.append(decoder.forward(PROMPT[table.num_tokens :][:count], table))
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    assert table.blocks == SCATTERED[:3]
    torch.testing.assert_close(torch.cat(rows), expected, atol=1e-4, rtol=0)


def test_twenty_greedy_tokens_are_those_of_transformers(decoder, theirs, table):
    """Catches keys that are stored at one position and read at another."""
    prompt = PROMPT[:6]
    mine = decoder.generate(prompt, table, num_tokens=20)
    ids = torch.tensor([prompt])
    generated = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=20, max_new_tokens=20
    )
    assert mine == generated[0, len(prompt) :].tolist()
    assert table.blocks == SCATTERED[:7]


def test_only_the_bookkeeping_of_blocks_is_the_engines():
    """Catches a decoder that lets the engine compute what it should show."""
    imported = {
        (node.module, alias.name)
        for node in ast.walk(ast.parse(FILE.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("minipaged")
        for alias in node.names
    }
    assert imported == {("minipaged.memory", "BlockAllocator"), ("minipaged.memory", "BlockTable")}


@pytest.mark.slow
def test_the_page_shows_what_the_example_prints():
    """Catches a number on the page that was never printed, and a line that the page leaves out."""
    shown = "".join(re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    ran = subprocess.run([sys.executable, FILE], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert shown == ran.stdout


def test_the_page_shows_every_step_of_the_decoder():
    """Catches a step that was added to the decoder and is not explained."""
    shown = re.findall(
        r'--8<-- "code/docs/examples/readable_decoder.py/Decoder\.(\w+)\.py"', PAGE.read_text()
    )
    decoder = next(node for node in ast.parse(FILE.read_text()).body if isinstance(node, ast.ClassDef))
    methods = {node.name for node in decoder.body if isinstance(node, ast.FunctionDef)}
    assert methods - set(shown) == {"__init__", "linear", "norm"}
