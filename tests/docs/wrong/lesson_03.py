"""Lesson 03, done wrong: the oracle with one mistake each.

`caught_by` names the test that must notice, `task` the task whose tests must.
"""

import functools

import torch

from minipaged.kernels.reference.attention import paged_attention as worked


def one_row_at_a_time(
    query, key_cache, value_cache, metadata, *, scale, sliding_window=None, softcap=None, sinks=None, **wrong
):
    """Right, unless told otherwise by `wrong`."""
    _, num_heads, key_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    output = query.new_zeros(query.shape[0], num_heads, value_cache.shape[-1])
    if wrong.get("float32"):
        output = output.float()
    for sequence, context in enumerate(metadata.context_len_list):
        first, end = metadata.query_start_list[sequence : sequence + 2]
        table = metadata.block_tables[0 if wrong.get("first_table") else sequence].tolist()
        for row in range(first, end):
            position = context - (end - row) + wrong.get("sees_ahead", 0)
            position = min(row - first if wrong.get("forgets_history") else position, context - 1)
            newest = context - 1 if wrong.get("window_of_the_last") else position
            oldest = 0 if sliding_window is None else max(0, newest - sliding_window + wrong.get("edge", 1))
            oldest = min(oldest, position)
            last = position + 1
            if wrong.get("whole_blocks"):
                last = -(-last // block_size) * block_size
            places = [
                (k // block_size if wrong.get("logical") else table[k // block_size], k % block_size)
                for k in range(0 if wrong.get("gathers_all") else oldest, last)
            ]
            keys = torch.stack([key_cache[block, :, offset] for block, offset in places])
            values = torch.stack([value_cache[block, :, offset] for block, offset in places])
            if wrong.get("gathers_all"):
                places, keys, values = places[oldest:], keys[oldest:], values[oldest:]
            for head in range(num_heads):
                kv = head % num_kv_heads if wrong.get("modulo") else head // group
                used = key_dim**-0.5 if wrong.get("own_scale") else scale
                asks = query[row, head]
                if wrong.get("half_query"):
                    asks, used = asks * used, 1.0
                scores = keys[:, kv].float() @ asks.float()
                if wrong.get("half"):
                    scores = scores.to(torch.float16).float()
                if softcap is not None and wrong.get("cap_without_dividing"):
                    scores = torch.tanh(scores * used) * softcap
                elif softcap is not None and wrong.get("cap_first"):
                    scores = torch.tanh(scores / softcap) * softcap * used
                else:
                    scores = scores * used
                    if softcap is not None:
                        scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None and not wrong.get("no_sinks"):
                    sink = sinks[head : head + 1].float() * wrong.get("sink_factor", 1)
                    scores = torch.cat([scores, sink])
                if "mask" in wrong:
                    hidden = torch.full((context - len(places) - oldest,), wrong["mask"])
                    scores = torch.cat([scores, hidden])
                if softcap is not None and wrong.get("cap_after_mask"):
                    hidden = torch.full((context - len(places) - oldest,), -softcap)
                    scores = torch.cat([scores, hidden])
                weights = torch.softmax(scores, dim=0)[: len(places)]
                if wrong.get("half_weights"):
                    weights = weights.to(query.dtype).float()
                if wrong.get("maximum_from_zero"):
                    weights = (scores - scores.max().clamp(min=0)).exp()
                    weights = (weights / weights.sum())[: len(places)]
                if sinks is not None and wrong.get("no_maximum"):
                    weights = (scores.exp() / scores.exp().sum())[: len(places)]
                output[row, head] = (weights @ values[:, kv].float()).to(output.dtype)
    return output


def mistake(caught_by=None, task=None, **wrong):
    """A paged attention with one mistake."""

    @functools.wraps(worked)
    def paged_attention(*inputs, **options):
        return one_row_at_a_time(*inputs, **options, **wrong)

    vars(paged_attention).update({"task": task} if task else {"caught_by": caught_by})
    return paged_attention


def masks_by_weight(query, key_cache, value_cache, metadata, *, scale, sliding_window=None, **options):
    """Gathers whole blocks and gives rubbish the weight 0: 0 x NaN is NaN."""
    output = query.new_zeros(query.shape[0], query.shape[1], value_cache.shape[-1])
    group, size = query.shape[1] // key_cache.shape[1], key_cache.shape[2]
    for sequence, context in enumerate(metadata.context_len_list):
        first, end = metadata.query_start_list[sequence : sequence + 2]
        blocks = metadata.block_tables[sequence][: -(-context // size)].long()
        keys = key_cache[blocks].transpose(1, 2).flatten(0, 1).repeat_interleave(group, dim=1)
        values = value_cache[blocks].transpose(1, 2).flatten(0, 1).repeat_interleave(group, dim=1)
        places = torch.arange(len(keys))
        rows = torch.arange(context - (end - first), context)
        visible = places <= rows[:, None]
        if sliding_window is not None:
            visible &= places > rows[:, None] - sliding_window
        scores = torch.einsum("qhd,khd->hqk", query[first:end].float(), keys.float()) * scale
        weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
        output[first:end] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(output.dtype)
    return output


reads_logical_blocks = mistake("test_any_mix_of_query_lengths_equals_the_oracle", logical=True)
reads_the_rest_of_the_last_block = mistake(
    "test_any_mix_of_query_lengths_equals_the_oracle", whole_blocks=True
)
sees_the_next_token = mistake("test_any_mix_of_query_lengths_equals_the_oracle", sees_ahead=1)
takes_heads_modulo = mistake("test_query_heads_share_the_kv_head_of_their_group", modulo=True)
uses_a_scale_of_its_own = mistake("test_the_scale_is_the_callers", own_scale=True)
window_off_by_one = mistake("test_a_window_reads_only_what_it_can_see", edge=0)
caps_before_scaling = mistake("test_random_shapes_equal_the_oracle", cap_first=True)
forgets_the_sinks = mistake("test_softcap_and_sinks_equal_the_oracle", no_sinks=True)


# -- from the exercise's text alone --------------------------------------------------------------------------

reads_the_first_sequences_table = mistake(task=1, first_table=True)
scores_in_half_precision = mistake(task=1, half=True)
rounds_the_weights = mistake(task=1, half_weights=True)
forgets_what_was_computed_before = mistake(task=2, forgets_history=True)
answers_in_float32 = mistake(task=2, float32=True)
one_window_for_all_rows = mistake(task=3, window_of_the_last=True)
window_one_too_narrow = mistake(task=3, edge=2)
caps_without_dividing = mistake(task=3, cap_without_dividing=True)
scales_the_sink = mistake(task=3, sink_factor=0.5)
masks_by_weight = functools.wraps(worked)(masks_by_weight)
masks_by_weight.task = 1

gathers_for_the_last_row = mistake("test_every_row_has_a_window_of_its_own", window_of_the_last=True)


def spoiling(spoil, task):
    """The worked attention, before which `spoil` does something to its inputs."""

    @functools.wraps(worked)
    def paged_attention(query, key_cache, value_cache, metadata, **options):
        query = spoil(query, key_cache, options)
        return worked(query, key_cache, value_cache, metadata, **options)

    paged_attention.task = task
    return paged_attention


def scale_in_place(query, key_cache, options):
    scaled = query.float()
    scaled *= options["scale"]
    options["scale"] = 1.0
    return scaled.to(query.dtype)


def tidy_up(query, key_cache, options):
    key_cache.nan_to_num_(0.0)
    return query


scales_the_callers_query = spoiling(scale_in_place, task=1)
tidies_the_cache_up = spoiling(tidy_up, task=1)
exponent_overflows_beside_a_sink = mistake(task=3, no_maximum=True)
caps_after_the_mask = mistake(task=3, cap_after_mask=True)
scales_the_query_in_half_precision = mistake("test_a_scaled_query_is_not_rounded", half_query=True)
cuts_the_window_after_the_gather = mistake(
    "test_blocks_before_the_window_are_not_looked_up", gathers_all=True
)
hides_with_minus_ten_thousand = mistake("test_a_hidden_key_is_hidden_from_scores_far_below_zero", mask=-1e4)
hides_with_minus_a_billion = mistake(task=2, mask=-1e9)
begins_the_maximum_with_zero = mistake("test_scores_far_below_zero_have_weights", maximum_from_zero=True)


def uses_up_the_lists(query, key_cache, value_cache, metadata, **options):
    """Takes the first row of each sequence off the caller's list as it goes."""
    output = worked(query, key_cache, value_cache, metadata, **options)
    del metadata.query_start_list[:-1]
    return output


uses_up_the_lists = functools.wraps(worked)(uses_up_the_lists)
uses_up_the_lists.caught_by = "test_attention_changes_none_of_its_inputs"


def returns_nothing(query, key_cache, value_cache, metadata, **options):
    """Has no `return`."""
    worked(query, key_cache, value_cache, metadata, **options)


returns_nothing = functools.wraps(worked)(returns_nothing)
returns_nothing.task, returns_nothing.says = 1, "expected a tensor, got None"
masks_by_weight.says = "NaN: a slot that it does not see"


def looks_up_one_entry_too_many(query, key_cache, value_cache, metadata, **options):
    """Gathers context // block_size + 1 blocks, then cuts them."""
    for table, context in zip(metadata.block_tables, metadata.context_len_list):
        key_cache[table[: context // key_cache.shape[2] + 1]]
    return worked(query, key_cache, value_cache, metadata, **options)


looks_up_one_entry_too_many = functools.wraps(worked)(looks_up_one_entry_too_many)
looks_up_one_entry_too_many.task = 1
