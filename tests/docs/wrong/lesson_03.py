"""Lesson 03, done wrong: the oracle with one mistake each. `caught_by` names the test that must notice."""

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
    for sequence, context in enumerate(metadata.context_len_list):
        first, end = metadata.query_start_list[sequence : sequence + 2]
        table = metadata.block_tables[sequence].tolist()
        for row in range(first, end):
            position = context - (end - row) + wrong.get("sees_ahead", 0)
            position = min(position, context - 1)
            oldest = 0 if sliding_window is None else max(0, position - sliding_window + wrong.get("edge", 1))
            last = position + 1
            if wrong.get("whole_blocks"):
                last = -(-last // block_size) * block_size
            places = [
                (k // block_size if wrong.get("logical") else table[k // block_size], k % block_size)
                for k in range(oldest, last)
            ]
            keys = torch.stack([key_cache[block, :, offset] for block, offset in places])
            values = torch.stack([value_cache[block, :, offset] for block, offset in places])
            for head in range(num_heads):
                kv = head % num_kv_heads if wrong.get("modulo") else head // group
                used = key_dim**-0.5 if wrong.get("own_scale") else scale
                scores = keys[:, kv].float() @ query[row, head].float()
                if softcap is not None and wrong.get("cap_first"):
                    scores = torch.tanh(scores / softcap) * softcap * used
                else:
                    scores = scores * used
                    if softcap is not None:
                        scores = torch.tanh(scores / softcap) * softcap
                if sinks is not None and not wrong.get("no_sinks"):
                    scores = torch.cat([scores, sinks[head : head + 1].float()])
                weights = torch.softmax(scores, dim=0)[: len(places)]
                output[row, head] = (weights @ values[:, kv].float()).to(output.dtype)
    return output


def mistake(caught_by, **wrong):
    """A paged attention with one mistake."""

    @functools.wraps(worked)
    def paged_attention(*inputs, **options):
        return one_row_at_a_time(*inputs, **options, **wrong)

    paged_attention.caught_by = caught_by
    return paged_attention


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
