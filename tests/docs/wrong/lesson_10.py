"""Lesson 10, done wrong: the worked kernel with one mistake each.

`caught_by` names the test that must notice, `task` the task whose tests must.

Triton reads a kernel's source from its file, so each mistake gets a file of its own.
"""

import tempfile
from pathlib import Path

from minipaged.learn.overrides import load_override

WORKED = Path(__file__).parents[1] / "worked/10_triton.py"
FOLDER = tempfile.TemporaryDirectory()


def mistake(name, caught_by, right, wrong, first_red="", says=""):
    """The worked kernel with `right` replaced by `wrong`; `caught_by`: the name of a test, or a task."""
    source = WORKED.read_text()
    assert source.count(right) == 1, right
    file = Path(FOLDER.name, f"{name}.py")
    assert not file.exists(), f"two mistakes are called {name}"
    file.write_text(source.replace(right, wrong))
    variant = load_override(f"{file}:paged_attention")
    setattr(variant, "task" if isinstance(caught_by, int) else "caught_by", caught_by)
    variant.first_red, variant.says = first_red, says
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
    "test_the_first_token_of_a_block_sees_that_block",
    "position // BLOCK_SIZE + 1)",
    "tl.maximum(position // BLOCK_SIZE, 1))",
)


# -- from the exercise's text alone --------------------------------------------------------------------------

forgets_the_scale = mistake("unscaled", 1, "axis=1) * scale", "axis=1) + 0 * scale")
masks_every_block_like_the_last = mistake(
    "mask", 2, "(logical * BLOCK_SIZE + slot <= position)", "(slot <= position % BLOCK_SIZE)"
)
never_divides = mistake("sum", 1, "mixed / total", "mixed")
does_not_shrink_the_sum = mistake("total", 2, "total = total * shrink +", "total = total +")
keeps_the_first_maximum = mistake(
    "first", 2, "        maximum = larger\n", "        maximum = tl.maximum(maximum, 0.0)\n"
)
strides_values_like_keys = mistake(
    "strides", 2, "value_cache + entry[:, None] * VALUE_DIM", "value_cache + entry[:, None] * KEY_DIM"
)
rows_of_another_sequence = mistake(
    "sequence", 1, "tl.load(row_sequence + row)", "tl.load(row_sequence + row) * 0"
)
reads_queries_as_contiguous = mistake(
    "contiguous", 2, "query + row * query_stride_row", "query + row * output_stride"
)
takes_a_zero_for_a_score = mistake("masked", 1, '* scale, float("-inf"))', "* scale, 0.0)")
computes_the_querys_strides = mistake(
    "query_strides",
    "test_strided_queries_are_read_by_their_strides",
    "query + row * query_stride_row + head * query_stride_head + key_dim",
    "query + (row * NUM_KV_HEADS * GROUP + head) * KEY_DIM + key_dim",
)
computes_the_stride_of_a_head = mistake(
    "head_stride",
    "test_a_query_is_read_by_its_strides",
    "head * query_stride_head + key_dim",
    "head * KEY_DIM + key_dim",
)
no_block_at_position_zero = mistake(
    "cdiv",
    "test_the_first_token_sees_itself",
    "position // BLOCK_SIZE + 1)",
    "tl.cdiv(position, BLOCK_SIZE))",
)
begins_the_maximum_at_zero = mistake(
    "zero", "test_scores_far_below_zero_have_weights", 'maximum = float("-inf")', "maximum = 0.0"
)


stores_past_the_value = mistake("store", 1, "mixed / total, mask=value_dim < VALUE_DIM", "mixed / total")
compares_within_the_block = mistake(
    "block_maximum",
    2,
    "tl.maximum(maximum, tl.max(scores, axis=0))",
    "tl.max(scores, axis=0)",
    says="an exp that overflows",
)
takes_padding_for_slots = mistake(
    "padding_of_full_blocks",
    2,
    "(slot < BLOCK_SIZE) & (logical * BLOCK_SIZE",
    "(slot >= 0) & (logical * BLOCK_SIZE",
)
loads_what_is_behind_a_key = mistake(
    "behind_a_key",
    "test_a_key_ends_at_its_size",
    "mask=visible[:, None] & (key_dim < KEY_DIM)[None, :]",
    "mask=visible[:, None] & (key_dim < KEY_PADDED)[None, :]",
)
loads_what_is_behind_a_query = mistake(
    "behind_a_query", "test_a_query_ends_at_its_size", "mask=key_dim < KEY_DIM, other=0.0", ""
)
has_two_kv_heads = mistake("two_kv_heads", 1, "head // GROUP", "tl.minimum(head // GROUP, 1)")
has_groups_of_two = mistake("groups_of_two", 1, "head // GROUP", "tl.minimum(head // 2, NUM_KV_HEADS - 1)")
begins_the_maximum_at_ten_thousand_below = mistake(
    "ten_thousand", 1, 'maximum = float("-inf")', "maximum = -1e4"
)
hides_with_a_score = mistake("hides", 1, '* scale, float("-inf"))', "* scale, -1e4)")
rounds_scores = mistake(
    "rounds_scores",
    "test_scores_are_not_rounded",
    "tl.sum(keys * q[None, :], axis=1) * scale",
    "tl.sum(keys * q[None, :], axis=1).to(query.dtype.element_ty).to(tl.float32) * scale",
)
rounds_weights = mistake(
    "rounds_weights",
    "test_weights_are_not_rounded",
    "weights = tl.exp(scores - larger)",
    "weights = tl.exp(scores - larger).to(query.dtype.element_ty).to(tl.float32)",
)
never_stores = mistake(
    "never_stores",
    1,
    "mixed / total, mask=value_dim < VALUE_DIM",
    "mixed / total, mask=value_dim < 0",
    first_red="test_rows_that_see_one_block",
    says="nothing was stored there",
)
joins_masks_with_and = mistake(
    "and",
    2,
    "(slot < BLOCK_SIZE) & (logical",
    "(slot < BLOCK_SIZE) and (logical",
    first_red="test_padded_slots_are_not_slots_in_a_full_block_either",
)
stores_heads_at_the_padded_size = mistake(
    "padded_heads",
    1,
    "head * VALUE_DIM + value_dim",
    "head * VALUE_PADDED + value_dim",
    first_red="test_nothing_is_written_past_the_result",
    says="a padded size in its address",
)
