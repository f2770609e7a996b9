// Paged attention for a CPU: blocks are read in place, each once for all query heads that share it.
//
// A work item (attention_items.h) is a few KV heads and a few query tokens; its rows are, for each KV head, the G query
// heads of each token (row = (head * tokens + token) * G + g). Keys are read in tiles of TILE tokens, with an online
// softmax:
//
//     block table ->  pointers to a tile's K rows  ->  scores [rows, TILE]  ->  softmax  ->  acc += p V
//
// Paging costs one pointer per token, and any block size will do. Arithmetic is float32; pools are
// [num_blocks, Hkv, block_size, Dk or Dv], of three float types. The softmax state of a row is a maximum m_i, a sum
// of exponentials l_i and an accumulator acc; alpha rescales earlier sums. Paper: section 5.1.

#include "attention_items.h"
#include "calls.h"
#include "parallel.h"
#include "vectors.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

constexpr int RUNS = 4, RUN = TILE / RUNS;  // runs of consecutive keys in a tile, read alternately; keys of a run
// The cache to prefetch into. 2, L2: it accepts more lines at a time (on Zen 4, decodes read 1.7 times as fast as with
// L1). 3, L1: as measured on Zen 3. 0, L1 past L2, where that is fast (AttentionCall::prefetch): on Zen 5, decodes read
// 1.15 times as fast as with L2.
constexpr int PREFETCH_INTO = LANES == 16 ? 2 : 3, PREFETCH_PAST_L2 = LANES == 16 ? 0 : PREFETCH_INTO;
constexpr int64_t L1_BYTES = 32 << 10;
constexpr int WIDEN_ROWS = 16;  // from so many rows on, a 16-bit tile is widened once, not at each use
constexpr double PARALLEL_WORK = 1e6;  // multiply-adds below which waking threads costs more than it saves
constexpr float INF = std::numeric_limits<float>::infinity();

// ---- The two register-blocked multiplications -------------------------------------------------------------
// Each prefetches the rows that are read next: blocks can be anywhere, so the hardware prefetcher cannot find the next
// one. Decode of 32 sequences, context 512-1024, 8/4 heads of 64, block size 16: 2.8 -> 1.8 ms a layer in float32,
// 1.4 -> 0.65 in bfloat16 (adding up the pools alone: 0.9 and 0.55).
//
// The rows of a tile are read from several places alternately, because one stream of reads does not saturate the
// bandwidth. On Zen 4, decodes in float32 with 1 or 4 query heads per KV head take a tenth to a sixth less time.
//
//     run of keys         0 .. 15 | 16 .. 31 | 32 .. 47 | 48 .. 63
//     read alternately    0         16         32         48          then 1 17 33 49, then 2 18 34 50, ...
//
// Scores do not depend on the order. Sums over values do, so a shorter tile keeps it and omits the missing keys.

// The K (or V) rows of a tile. `pointers`: to those of the item's first KV head; `offset`: from there, in elements.
template <class S>
struct Rows {
    const S* const* pointers = nullptr;
    int64_t offset = 0;

    ALWAYS_INLINE const S* operator[](int k) const { return pointers[k] + offset; }
};

// The rows that are read next, if known.
template <class S, int INTO>
struct Prefetch {
    Rows<S> rows;

    ALWAYS_INLINE void row(int k, int strip) const {
        if (!rows.pointers) return;
        const S* source = rows[k] + strip;
        for (int i = 0; i < STRIP; i += 64 / sizeof(S)) __builtin_prefetch(source + i, 0, INTO);
    }
};

// scores[r][k] = query[r] . keys[k]. R rows times LANES / R keys fill LANES accumulators, so a key is loaded
// once for R rows, and a single `sums_of` reduces them all. `dim`: elements of a key; `width`: in whole strips.
template <int R, class S, class Prefetch>
void score_rows(const float* query, int dim, int width, Rows<S> keys, int num_keys, Prefetch prefetch,
                float* scores) {
    constexpr int KEYS = LANES / R, STREAMS = std::min(RUNS, KEYS), LENGTH = KEYS / STREAMS;
    const int distance = num_keys / STREAMS;  // (`num_keys` is a multiple of LANES)
    for (int first = 0; first < distance; first += LENGTH) {
        Vec sum[LANES] = {};
        for (int strip = 0; strip < width; strip += STRIP) {
            const int start = strip_start(strip, dim);
            Vec q0[R], q1[R];
            for (int r = 0; r < R; r++) load_strip(query + r * width + strip, q0[r], q1[r]);
#pragma GCC unroll 4
            for (int j = 0; j < LENGTH; j++)
#pragma GCC unroll 4
                for (int s = 0; s < STREAMS; s++) {
                    const int k = first + s * distance + j, c = s * LENGTH + j;
                    Vec k0, k1;
                    load_strip(keys[k] + start, k0, k1);
                    prefetch.row(k, strip);
                    for (int r = 0; r < R; r++) sum[r * KEYS + c] = add_product(sum[r * KEYS + c], q0[r], k0);
                    for (int r = 0; r < R; r++) sum[r * KEYS + c] = add_product(sum[r * KEYS + c], q1[r], k1);
                }
        }
        Vec total = sums_of(sum);
        for (int r = 0; r < R; r++)
            for (int s = 0; s < STREAMS; s++)
                std::memcpy(scores + r * TILE + first + s * distance,
                            (const char*)&total + 4 * (r * KEYS + s * LENGTH), 4 * LENGTH);
    }
}

// acc[r] = acc[r] * alpha[r] + sum over k of p[r][k] * values[k], for W strips from `strip` on.
template <int R, int W, class S, class Prefetch>
void mix_strips(const float* p, int strip, int dim, int width, Rows<S> values, int num_keys, Prefetch prefetch,
                const float* alpha, float* acc) {
    Vec sum[R][2 * W];
    int start[W];
    for (int w = 0; w < W; w++) start[w] = strip_start(strip + w * STRIP, dim);
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2 * W; v++) sum[r][v] = load(acc + r * width + strip + v * LANES) * alpha[r];
    for (int i = 0; i < RUN; i++)
        for (int k = i; k < num_keys; k += RUN) {
            Vec value[2 * W];
            for (int w = 0; w < W; w++) {
                load_strip(values[k] + start[w], value[2 * w], value[2 * w + 1]);
                prefetch.row(k, strip + w * STRIP);
            }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < 2 * W; v++)
                    sum[r][v] = add_product(sum[r][v], p[r * TILE + k] - Vec{}, value[v]);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2 * W; v++) store(acc + r * width + strip + v * LANES, sum[r][v]);
}

template <int R, class S, class Prefetch>
void mix_rows(const float* p, int dim, int width, Rows<S> values, int num_keys, Prefetch prefetch,
              const float* alpha, float* acc) {
    int strip = 0;
    for (; strip + 2 * STRIP <= width; strip += 2 * STRIP)
        mix_strips<R, 2>(p, strip, dim, width, values, num_keys, prefetch, alpha, acc);
    if (strip < width) mix_strips<R, 1>(p, strip, dim, width, values, num_keys, prefetch, alpha, acc);
}

// Calls body(first row, number of rows as a constant) for groups of 4, then 2, then 1 rows.
template <class Body>
void in_groups(int num_rows, Body body) {
    int row = 0;
    for (; row + 4 <= num_rows; row += 4) body(row, std::integral_constant<int, 4>());
    if (row + 2 <= num_rows) body(row, std::integral_constant<int, 2>()), row += 2;
    if (row < num_rows) body(row, std::integral_constant<int, 1>());
}

// ---- The work items ---------------------------------------------------------------------------------------

int padded(int64_t count, int multiple) { return (int)((count + multiple - 1) / multiple * multiple); }

// What one thread needs, allocated once a call. Widths are head sizes rounded up to whole strips.
template <class S>
struct Workspace {
    int key_width, value_width;
    std::vector<float> query, scores, acc;        // [rows, key_width], [rows, TILE], [rows, value_width]
    std::vector<float> m_i, l_i, alpha;             // [rows]
    std::vector<S> key_tile, value_tile;            // [TILE, width], empty if blocks are read in place
    std::vector<const S*> keys, values;             // [TILE]

    Workspace(const AttentionCall& call, int num_rows, bool in_place)
        : key_width(padded(call.key_dim, STRIP)), value_width(padded(call.value_dim, STRIP)),
          query(num_rows * key_width), scores(num_rows * TILE), acc(num_rows * value_width),
          m_i(num_rows), l_i(num_rows), alpha(num_rows), key_tile(in_place ? 0 : TILE * key_width),
          value_tile(in_place ? 0 : TILE * value_width), keys(TILE), values(TILE) {}
};

// R rows of scores become p = e^(score - m_i). Several rows at once, because the operations of a single
// row would wait for each other.
template <int R>
void softmax_rows(float* scores, int num_keys, float* m_i, float* l_i, float* alpha) {
    Vec top[R], total[R] = {};
    for (int r = 0; r < R; r++) top[r] = load(scores + r * TILE);
    for (int k = LANES; k < num_keys; k += LANES)
        for (int r = 0; r < R; r++) {
            const Vec next = load(scores + r * TILE + k);
            top[r] = next > top[r] ? next : top[r];
        }
    float base[R];
    for (int r = 0; r < R; r++) {
        const float before = m_i[r];
        m_i[r] = std::max(before, max_of(top[r]));
        base[r] = m_i[r] == -INF ? 0 : m_i[r];  // nothing seen yet: -inf - -inf would be NaN
        alpha[r] = before == base[r] ? 1 : std::exp(before - base[r]);
    }
    for (int k = 0; k < num_keys; k += LANES)
        for (int r = 0; r < R; r++) {
            const Vec p = exponential(load(scores + r * TILE + k) - base[r]);
            store(scores + r * TILE + k, p);
            total[r] += p;
        }
    for (int r = 0; r < R; r++) l_i[r] = l_i[r] * alpha[r] + sum_of(total[r]);
}

// The tiles of a span begin at multiples of TILE, or of RUN where a window begins in between. So a row adds up the
// same numbers in the same order, whatever rows share its item.
int first_tile(const Span& span) { return span.first_key / RUN * RUN; }

int keys_of_tile(const Span& span, int first) { return std::min(TILE - first % TILE, span.end_key - first); }

// Points `rows` to the K (or V) rows of a span's first KV head from token `first` on: into the pool itself or, if there
// is a `tile`, to copies in it, widened and in whole strips. Those before the span's first are never read: the first
// stands for them. The last is repeated up to a multiple of LANES.
template <class T, class S>
void find_rows(const AttentionCall& call, const void* cache, int dim, const Span& span, int first, int num_keys,
               std::vector<S>& tile, std::vector<const S*>& rows) {
    const int32_t* table = call.block_tables + span.sequence * call.table_stride;
    const int width = (int)tile.size() / TILE;
    const S** found = rows.data();
    const int unseen = std::max(0, span.first_key - first);
    int64_t block = (first + unseen) / call.block_size, offset = (first + unseen) % call.block_size;
    for (int k = unseen; k < num_keys; block++, offset = 0) {
        int64_t start = (table[block] * call.num_kv_heads + span.head) * call.block_size;
        const T* row = (const T*)cache + (start + offset) * dim;
        const int end = (int)std::min<int64_t>(num_keys, k + call.block_size - offset);
        for (; k < end; k++, row += dim) {
            if constexpr (std::is_same_v<S, T>) found[k] = row;
            if constexpr (std::is_same_v<S, float>)
                if (width) {
                    widen_row(row, dim, &tile[k * width]);
                    found[k] = &tile[k * width];
                }
        }
    }
    std::fill(rows.begin(), rows.begin() + unseen, rows[unseen]);
    std::fill(rows.begin() + num_keys, rows.begin() + padded(num_keys, LANES), rows[num_keys - 1]);
}

// T: type of the pool. S: type that is multiplied, T itself or float. `next`: the span after this one, or null.
// A tile's heads are read one after the other, as they lie in a block: the keys of all, then the values of all.
template <class T, int INTO, class S>
void attend_span(const AttentionCall& call, int num_heads, const Span& span, const Span* next, Workspace<S>& work) {
    const int first_row = span.first_row, end_row = first_row + num_heads * span.num_rows;
    const int window = (int)std::min<int64_t>(call.sliding_window, span.end_key);
    const bool in_place = work.key_tile.empty();
    const float softcap = (float)call.softcap;
    const int key_dim = (int)call.key_dim, value_dim = (int)call.value_dim;  // of a row of the pool, and
    const int key_row = in_place ? key_dim : work.key_width;                  // of the rows that are multiplied
    const int value_row = in_place ? value_dim : work.value_width;

    auto find_keys = [&](const Span& owner, int first) {
        const int num_keys = keys_of_tile(owner, first);
        find_rows<T>(call, call.key_cache, key_dim, owner, first, num_keys, work.key_tile, work.keys);
        return num_keys;
    };
    auto keys = [&](int head) { return Rows<S>{work.keys.data(), head * call.block_size * key_dim}; };
    auto values = [&](int head) { return Rows<S>{work.values.data(), head * call.block_size * value_dim}; };
    // Calls body(first row, number of rows, their keys or values, what to prefetch) for groups of rows of each head.
    // The first group prefetches what is read next: the rows of the next head or, after the last, `after`.
    auto for_heads = [&](auto rows_of, Rows<S> after, auto body) {
        for (int head = 0; head < num_heads; head++) {
            const Rows<S> next_rows = head + 1 < num_heads ? rows_of(head + 1) : after;
            in_groups(span.num_rows, [&](int row, auto rows) {
                body(first_row + head * span.num_rows + row, rows, rows_of(head),
                     Prefetch<S, INTO>{in_place && row == 0 ? next_rows : Rows<S>{}});
            });
        }
    };
    find_keys(span, first_tile(span));
    for (int first = first_tile(span), num_keys; first < span.end_key; first += num_keys) {
        num_keys = keys_of_tile(span, first);
        const int num_scores = padded(num_keys, LANES);
        find_rows<T>(call, call.value_cache, value_dim, span, first, num_keys, work.value_tile, work.values);
        for_heads(keys, values(0), [&](int row, auto rows, Rows<S> of_head, auto prefetch) {
            score_rows<rows()>(&work.query[row * work.key_width], key_row, work.key_width, of_head, num_scores,
                               prefetch, &work.scores[row * TILE]);
        });
        for (int row = first_row; row < end_row; row++) {
            float* scores = &work.scores[row * TILE];
            for (int k = 0; softcap != 0 && k < num_keys; k++)
                scores[k] = std::tanh(scores[k] / softcap) * softcap;
            // Of the tile's keys this row sees [oldest, newest); the rest, padding included, has no weight.
            const int token = (row - first_row) % span.num_rows / span.rows_alike;
            const int seen = span.position + token + 1 - first;
            const int newest = std::clamp(seen, 0, num_keys), oldest = std::clamp(seen - window, 0, newest);
            std::fill(scores, scores + oldest, -INF);
            std::fill(scores + newest, scores + num_scores, -INF);
        }
        in_groups(end_row - first_row, [&](int group, auto rows) {
            const int row = first_row + group;
            softmax_rows<rows()>(&work.scores[row * TILE], num_scores, &work.m_i[row], &work.l_i[row],
                                 &work.alpha[row]);
        });
        // To be prefetched meanwhile: the keys of the next tile or, after the last, of the next span.
        int num_next = 0;
        if (first + num_keys < span.end_key)
            num_next = find_keys(span, first + num_keys);
        else if (in_place && next)
            num_next = find_keys(*next, first_tile(*next));
        const Rows<S> next_keys = num_next ? keys(0) : Rows<S>{};
        for_heads(values, next_keys, [&](int row, auto rows, Rows<S> of_head, auto prefetch) {
            mix_rows<rows()>(&work.scores[row * TILE], value_row, work.value_width, of_head, num_keys, prefetch,
                             &work.alpha[row], &work.acc[row * work.value_width]);
        });
        for (int k = num_keys; in_place && k < num_next; k++)
            for (int strip = 0; strip < key_dim; strip += STRIP) Prefetch<S, INTO>{next_keys}.row(k, strip);
    }
}

template <class T, int INTO, class S>
void attend(const AttentionCall& call, const Item& item, const std::vector<Span>& spans, Workspace<S>& work) {
    const int group = group_of(call), rows_of_head = item.num_tokens * group, num_rows = item.num_heads * rows_of_head;
    const auto token_of = [&](int row) { return (int64_t)item.first_row + row % rows_of_head / group; };
    const auto head_of = [&](int row) { return (int64_t)(item.head + row / rows_of_head) * group + row % group; };
    for (int row = 0; row < num_rows; row++) {
        const int64_t token = token_of(row), head = head_of(row);
        float* query = &work.query[row * work.key_width];
        const int64_t place = token * call.query_token_stride + head * call.query_head_stride;
        widen_row((const T*)call.query + place, (int)call.key_dim, query);
        clear_shared<T>((int)call.key_dim, query);
        for (int d = 0; d < work.key_width; d++) query[d] *= (float)call.scale;
        // A sink is one more logit in the initial state, without a value.
        work.m_i[row] = call.sinks ? call.sinks[head] : -INF;
        work.l_i[row] = call.sinks ? 1 : 0;
    }
    std::fill(work.acc.begin(), work.acc.begin() + num_rows * work.value_width, 0.f);
    for (size_t s = item.first_span; s < item.end_span; s++)
        attend_span<T, INTO>(call, item.num_heads, spans[s], s + 1 < spans.size() ? &spans[s + 1] : nullptr, work);
    for (int row = 0; row < num_rows; row++) {
        T* output = (T*)call.output + (token_of(row) * call.num_heads + head_of(row)) * call.value_dim;
        narrow_row(&work.acc[row * work.value_width], (int)call.value_dim, work.l_i[row], output);
    }
}

template <class T, class S, int INTO>
void attend_all(const AttentionCall& call, const Items& all, bool in_place, int num_threads) {
    const std::vector<Item>& items = all.items;
    if (items.empty()) return;
    int num_rows = 0;
    size_t num_heads = 0;
    for (const Item& item : items) {
        num_rows = std::max(num_rows, item.num_heads * item.num_tokens * group_of(call));
        num_heads += item.num_heads;
    }
    // In runs of about eight heads at most, because a thread prefetches for the item after its own.
    const size_t longest = std::max<size_t>(1, 8 * items.size() / num_heads);
    const size_t run = std::clamp<size_t>(items.size() / (4 * num_threads), 1, longest);
    std::atomic<size_t> taken = 0;
    in_parallel(num_threads, num_threads, [&](int64_t) {
        Workspace<S> work(call, num_rows, in_place);
        for (size_t first; (first = taken.fetch_add(run)) < items.size();)
            for (size_t i = first; i < std::min(first + run, items.size()); i++)
                attend<T, INTO>(call, items[i], all.spans, work);
    });
}

// Blocks are read in place, with two exceptions. Rows shorter than a strip are padded in a copied tile, and
// 16-bit tiles that many rows share are widened there, once for all of them.
template <class T>
void attend_batch(const AttentionCall& call) {
    const bool long_rows = call.key_dim >= STRIP && call.value_dim >= STRIP;
    const int step = std::max(1, ROWS / group_of(call));  // tokens of an item
    // Sequences that may share an item, so that every thread has one.
    const int most = (int)std::clamp<int64_t>(call.num_sequences * call.num_kv_heads / call.num_threads, 1, step);
    int64_t num_keys = 0;
    for (int sequence = 0; sequence < call.num_sequences; sequence++) num_keys += call.context_len[sequence];
    // Without AVX-512, prefetches go into L1, where two heads' tiles must fit: the one being read and the next.
    const int64_t tile_bytes = TILE * std::max(call.key_dim, call.value_dim) * sizeof(T);
    const bool heads_fit = LANES == 16 || 2 * tile_bytes <= L1_BYTES;
    // KV heads of a sequence that may share an item: none has more than a quarter of a thread's share of all keys.
    const auto most_heads = [&](int sequence) -> int64_t {
        if (!heads_fit) return 1;
        if (call.num_threads == 1) return ROWS;
        const int64_t share = num_keys * call.num_kv_heads / (4 * call.num_threads);
        return std::max<int64_t>(1, share / std::max(1, call.context_len[sequence]));
    };
    Items in_place, copied;
    const auto is_copied = [&](int num_tokens) {
        return !long_rows || (!std::is_same_v<T, float> && num_tokens * group_of(call) >= WIDEN_ROWS);
    };
    double pairs = 0;  // of query and key tokens
    for (int sequence = 0, count; sequence < call.num_sequences; sequence += count) {
        const int length = query_len(call, sequence);
        count = 1;
        const Family family = length == 1 ? family_of(call, sequence, most) : Family{1, 0};
        if (family.num_keys) {
            count = family.count;
            add_family(call, sequence, family, is_copied(1) ? copied : in_place);
        } else {
            for (int token = 0; token < length; token += step) {
                const int num_tokens = std::min(step, length - token);
                const bool copy = is_copied(num_tokens);
                const int64_t fitting = ROWS / (num_tokens * group_of(call));
                const int num_heads = copy ? 1 : (int)std::clamp<int64_t>(fitting, 1, most_heads(sequence));
                add_chunk(call, sequence, token, num_tokens, num_heads, copy ? copied : in_place);
            }
        }
        pairs += (double)length * count * call.context_len[sequence];
    }
    const double work = pairs * call.num_heads * (call.key_dim + call.value_dim);
    const int num_threads = work < PARALLEL_WORK ? 1 : (int)call.num_threads;
    const auto attend_in_place =
        call.prefetch == PAST_L2 ? attend_all<T, T, PREFETCH_PAST_L2> : attend_all<T, T, PREFETCH_INTO>;
    attend_in_place(call, in_place, true, num_threads);
    attend_all<T, float, PREFETCH_INTO>(call, copied, false, num_threads);
}

}  // namespace

extern "C" {

void paged_attention_float32(const AttentionCall* call) { attend_batch<float>(*call); }
void paged_attention_bfloat16(const AttentionCall* call) { attend_batch<BFloat16>(*call); }
void paged_attention_float16(const AttentionCall* call) { attend_batch<Half>(*call); }

void write_tokens(const void* tokens, int64_t token_stride, int64_t head_stride, void* cache,
                  const int64_t* slots, int64_t num_tokens, int64_t num_heads, int64_t block_size,
                  int64_t row_bytes) {
    for (int64_t token = 0; token < num_tokens; token++) {
        if (slots[token] < 0) continue;
        int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
        for (int64_t head = 0; head < num_heads; head++)
            std::memcpy((char*)cache + ((block * num_heads + head) * block_size + offset) * row_bytes,
                        (const char*)tokens + token * token_stride + head * head_stride, row_bytes);
    }
}
}
