// What paged attention computes together: which rows attend to which keys, decided before any is read.
//
// An item is a few query tokens of one sequence and one KV head, or several whose rows are at most ROWS; or one KV head
// and a token each of several decodes whose block tables have a common prefix. Blocks that these share are read once
// for all of them (Hydragen, arXiv 2402.05099):
//
//     sequence 4   | block 7 | block 2 | block 9 |            one span of keys for what all three share,
//     sequence 5   | block 7 | block 2 | block 1 | block 8 |  then one a sequence
//     sequence 6   | block 7 | block 2 | block 5 |

#pragma once

#include "calls.h"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace {

constexpr int TILE = 64;  // keys scored before their values are mixed: both fit in the L1 cache
constexpr int ROWS = 32;  // rows of an item, if a single token does not already have more

// Some rows of an item, and the keys of a sequence, first_key <= key < end_key, that they attend to. The first
// `rows_alike` rows are at `position` and see no later key, the next `rows_alike` at the next position, and so on.
// An item with several heads has a single span, of the rows of its first head; those of the others follow it.
struct Span {
    int sequence, head, first_row, num_rows, rows_alike, first_key, end_key, position;
};

struct Item {
    int head, num_heads, first_row, num_tokens;  // KV heads from `head` on; `first_row` of the query
    size_t first_span, end_span;
};

struct Items {
    std::vector<Item> items;
    std::vector<Span> spans;  // of one item after the other
};

int group_of(const AttentionCall& call) { return (int)(call.num_heads / call.num_kv_heads); }

int query_len(const AttentionCall& call, int sequence) {
    return call.query_start[sequence + 1] - call.query_start[sequence];
}

// `num_tokens` tokens of a sequence, from token `token` of the step on; `num_heads` KV heads to an item.
void add_chunk(const AttentionCall& call, int sequence, int token, int num_tokens, int num_heads, Items& own) {
    const int group = group_of(call);
    const int position = call.context_len[sequence] - query_len(call, sequence) + token;
    const int end = position + num_tokens;
    const int first = std::max(0, position - (int)std::min<int64_t>(call.sliding_window, end) + 1);
    for (int head = 0; head < call.num_kv_heads; head += num_heads) {
        const size_t span = own.spans.size();
        const int count = std::min(num_heads, (int)call.num_kv_heads - head);
        if (first < end) own.spans.push_back({sequence, head, 0, num_tokens * group, group, first, end, position});
        own.items.push_back({head, count, call.query_start[sequence] + token, num_tokens, span, own.spans.size()});
    }
}

// Consecutive sequences with one token each, and the keys that they share.
struct Family {
    int count, num_keys;
};

// Keys in the same blocks of both sequences: in whole tiles, so that each row adds up the same numbers in the same
// order as it would alone.
int num_shared(const AttentionCall& call, int one, int other) {
    if (std::max(call.context_len[one], call.context_len[other]) > call.sliding_window) return 0;
    const int32_t *first = call.block_tables + one * call.table_stride,
                  *second = call.block_tables + other * call.table_stride;
    const int64_t least = std::min(call.context_len[one], call.context_len[other]);
    int64_t block = 0;
    while ((block + 1) * call.block_size <= least && first[block] == second[block]) block++;
    return (int)(block * call.block_size / TILE * TILE);
}

// The decode at `sequence` and those after it, up to `most`, that share at least as much as the first two.
Family family_of(const AttentionCall& call, int sequence, int most) {
    Family family{1, 0};
    for (; family.count < most && sequence + family.count < call.num_sequences; family.count++) {
        const int other = sequence + family.count;
        const int num_keys = query_len(call, other) == 1 ? num_shared(call, sequence, other) : 0;
        if (num_keys == 0 || num_keys < family.num_keys) break;
        if (family.num_keys == 0) family.num_keys = num_keys;
    }
    return family;
}

// A token of each of several sequences with shared keys.
void add_family(const AttentionCall& call, int sequence, Family family, Items& own) {
    const int group = group_of(call), all = family.count * group, shared = family.num_keys;
    for (int head = 0; head < call.num_kv_heads; head++) {
        const size_t first_span = own.spans.size();
        own.spans.push_back({sequence, head, 0, all, all, 0, shared, shared - 1});
        for (int i = 0; i < family.count; i++) {
            const int one = sequence + i, end = call.context_len[one];
            const int first = std::max(shared, end - (int)std::min<int64_t>(call.sliding_window, end));
            if (first < end) own.spans.push_back({one, head, i * group, group, group, first, end, end - 1});
        }
        own.items.push_back({head, 1, call.query_start[sequence], family.count, first_span, own.spans.size()});
    }
}

}  // namespace
