"""Lesson 10, done wrong: the worked kernel with one mistake each; `caught_by` names its test.

Triton reads a kernel's source from its file, so each mistake gets a file of its own.
"""

import tempfile
from pathlib import Path

from minipaged.learn.overrides import load_override

WORKED = Path(__file__).parents[1] / "worked/10_triton.py"
FOLDER = tempfile.TemporaryDirectory()


def mistake(name, caught_by, right, wrong):
    """The worked kernel with `right` replaced by `wrong`."""
    source = WORKED.read_text()
    assert source.count(right) == 1, right
    file = Path(FOLDER.name, f"{name}.py")
    file.write_text(source.replace(right, wrong))
    variant = load_override(f"{file}:paged_attention")
    variant.caught_by = caught_by
    return variant


FIND_BLOCK = "tl.load(block_tables + sequence * table_stride + logical)"
reads_logical_blocks = mistake(
    "logical", "test_rows_that_see_one_block", FIND_BLOCK, "(logical + 0 * sequence).to(tl.int32)"
)
sees_the_next_token = mistake(
    "ahead", "test_a_row_does_not_see_the_one_after_it", "+ slot <= position)", "+ slot <= position + 1)"
)
takes_heads_modulo = mistake(
    "modulo", "test_heads_of_a_group_read_one_kv_head", "head // GROUP", "head % NUM_KV_HEADS"
)
forgets_the_padding = mistake(
    "padding",
    "test_a_block_need_not_be_a_power_of_two",
    "(slot < BLOCK_SIZE) & (logical * BLOCK_SIZE + slot <= position)",
    "logical * BLOCK_SIZE + slot <= position + BLOCK_PADDED - BLOCK_SIZE",
)
never_rescales = mistake(
    "rescale", "test_any_mix_of_query_lengths_equals_the_oracle", "mixed * shrink", "mixed"
)
one_block_too_few = mistake(
    "few",
    "test_block_size_changes_nothing",
    "position // BLOCK_SIZE + 1)",
    "tl.maximum(position // BLOCK_SIZE, 1))",
)
