// Paged attention for a CPU: the pages are read in place, each once, by all query heads that share them.
//
// A work item is one KV head of one sequence and a few query tokens of it; its rows are the G query heads
// of each token (row = token * G + g). Keys pass by in tiles of TILE tokens, with a running softmax:
//
//     block table ->  K row pointers of a tile  ->  scores [rows, TILE]  ->  softmax  ->  mix the V rows
//
// A row pointer a token is all that paging costs, and any block size will do. Arithmetic is float32, the
// pool float32 or bfloat16. Paper: section 5.1. Does NOT know: torch, models, steps.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int CHUNK = 2 * LANES;  // elements of a row that are loaded together
constexpr int TILE = 128;         // keys scored before their values are mixed: K and V tiles stay in L2
constexpr int ROWS = 32;          // rows of a work item, if a single token does not already have more
constexpr int WIDEN_ROWS = 16;    // rows from which a bfloat16 tile is widened once instead of at each use
constexpr double PARALLEL_WORK = 1e5;  // multiply-adds below which waking threads costs more than it saves
constexpr float INF = std::numeric_limits<float>::infinity();

using Vec = float __attribute__((vector_size(4 * LANES)));
using Int = int32_t __attribute__((vector_size(4 * LANES)));

Vec load(const float* source) {
    Vec vector;
    std::memcpy(&vector, source, sizeof vector);
    return vector;
}

void store(float* destination, Vec vector) { std::memcpy(destination, &vector, sizeof vector); }

// ---- The two storage types: CHUNK elements become two vectors --------------------------------------------

struct BFloat16 {
    uint16_t bits;
};

void load_chunk(const float* source, Vec& first, Vec& second) {
    first = load(source);
    second = load(source + LANES);
}

// Two bfloat16 share a 32-bit lane; each is the upper half of a float32. So one shift gives the even
// elements and one mask the odd ones; nothing crosses lanes. Queries and outputs follow that order (`place`).
void load_chunk(const BFloat16* source, Vec& first, Vec& second) {
    Int bits;
    std::memcpy(&bits, source, sizeof bits);
    first = (Vec)(bits << 16);
    second = (Vec)(bits & (int32_t)0xffff0000);
}

int place(const float*, int element) { return element; }
int place(const BFloat16*, int element) {
    int inside = element % CHUNK;
    return element - inside + inside % 2 * LANES + inside / 2;
}

float widen(float value) { return value; }
float widen(BFloat16 value) {
    uint32_t bits = (uint32_t)value.bits << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

void narrow(float value, float& result) { result = value; }
void narrow(float value, BFloat16& result) {  // round to nearest even
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    result.bits = std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// ---- Vector arithmetic -----------------------------------------------------------------------------------

// e^x as 2^n * e^f with |f| <= ln(2) / 2 (Cephes' polynomial); exactly 0 for x < -87, -inf included.
Vec exponential(Vec x) {
    Vec n = (x * 1.44269504f + 12582912.f) - 12582912.f;  // + 1.5 * 2^23 rounds to an integer
    Vec f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vec sum = f * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * f + 8.3334519073e-3f;
    sum = sum * f + 4.1665795894e-2f;
    sum = sum * f + 1.6666665459e-1f;
    sum = sum * f + 5.0000001201e-1f;
    sum = sum * f * f + f + 1.f;
    Vec power = (Vec)((__builtin_convertvector(n, Int) + 127) << 23);
    return x < -87.f ? Vec{} : sum * power;
}

template <int STEP, int... I>
Vec fold(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I & STEP ? LANES + I : I)...) +
           __builtin_shufflevector(a, b, (I & STEP ? LANES + (I ^ STEP) : I ^ STEP)...);
}

// Lane i of the result is the sum of all lanes of vectors[i]: LANES horizontal sums for LANES - 1 additions.
template <int STEP = 1>
Vec sums_of(Vec* vectors) {
    if constexpr (STEP == LANES) {
        return vectors[0];
    } else {
        for (int i = 0; i < LANES; i += 2 * STEP)
            vectors[i] = fold<STEP>(vectors[i], vectors[i + STEP], std::make_integer_sequence<int, LANES>());
        return sums_of<2 * STEP>(vectors);
    }
}

// ---- The two register-blocked products -------------------------------------------------------------------

// scores[r][k] = query[r] . keys[k]. R rows times LANES / R keys fill LANES accumulators, so a key is loaded
// once for R rows, and one `sums_of` finishes them all.
template <int R, class S>
void score_rows(const float* query, int dim, const S* const* keys, int num_keys, float* scores) {
    constexpr int KEYS = LANES / R;
    for (int k = 0; k < num_keys; k += KEYS) {
        Vec sum[LANES] = {};
        for (int d = 0; d < dim; d += CHUNK) {
            Vec q0[R], q1[R];
            for (int r = 0; r < R; r++) q0[r] = load(query + r * dim + d), q1[r] = load(query + r * dim + d + LANES);
            for (int c = 0; c < KEYS; c++) {
                Vec k0, k1;
                load_chunk(keys[k + c] + d, k0, k1);
                for (int r = 0; r < R; r++) sum[r * KEYS + c] += q0[r] * k0;
                for (int r = 0; r < R; r++) sum[r * KEYS + c] += q1[r] * k1;
            }
        }
        Vec total = sums_of(sum);
        for (int r = 0; r < R; r++)
            std::memcpy(scores + r * TILE + k, (const char*)&total + 4 * r * KEYS, 4 * KEYS);
    }
}

// mixed[r] = mixed[r] * decay[r] + sum over k of weights[r][k] * values[k], W chunks of the row at `offset`.
template <int R, int W, class S>
void mix_chunks(const float* weights, const S* const* values, int num_keys, int offset, int dim,
                const float* decay, float* mixed) {
    Vec sum[R][2 * W];
    for (int r = 0; r < R; r++)
        for (int w = 0; w < 2 * W; w++) sum[r][w] = load(mixed + r * dim + offset + w * LANES) * decay[r];
    for (int k = 0; k < num_keys; k++) {
        Vec value[2 * W];
        for (int w = 0; w < W; w++) load_chunk(values[k] + offset + w * CHUNK, value[2 * w], value[2 * w + 1]);
        for (int r = 0; r < R; r++)
            for (int w = 0; w < 2 * W; w++) sum[r][w] += weights[r * TILE + k] * value[w];
    }
    for (int r = 0; r < R; r++)
        for (int w = 0; w < 2 * W; w++) store(mixed + r * dim + offset + w * LANES, sum[r][w]);
}

template <int R, class S>
void mix_rows(const float* weights, const S* const* values, int num_keys, int dim, const float* decay,
              float* mixed) {
    int offset = 0;
    for (; offset + 2 * CHUNK <= dim; offset += 2 * CHUNK)
        mix_chunks<R, 2>(weights, values, num_keys, offset, dim, decay, mixed);
    if (offset < dim) mix_chunks<R, 1>(weights, values, num_keys, offset, dim, decay, mixed);
}

// Calls body(first row, number of rows as a constant) for groups of 4, then 2, then 1 rows.
template <class Body>
void in_groups(int num_rows, Body body) {
    int row = 0;
    for (; row + 4 <= num_rows; row += 4) body(row, std::integral_constant<int, 4>());
    if (row + 2 <= num_rows) body(row, std::integral_constant<int, 2>()), row += 2;
    if (row < num_rows) body(row, std::integral_constant<int, 1>());
}

}  // namespace

// ---- The call --------------------------------------------------------------------------------------------

extern "C" {

// Mirrors `Call` in attention.py. Strides in elements; rows of one head are contiguous, pools throughout.
struct Call {
    const void* query;            // [T, Hq, Dk]
    const void* key_cache;        // [num_blocks, Hkv, block_size, Dk]
    const void* value_cache;      // [num_blocks, Hkv, block_size, Dv]
    void* output;                 // [T, Hq, Dv], contiguous
    const int32_t* block_tables;  // [S, >= blocks in use]
    const int32_t* query_start;   // [S + 1]
    const int32_t* context_len;   // [S]
    const float* sinks;           // [Hq], or null
    int64_t query_token_stride, query_head_stride, table_stride;
    int64_t num_sequences, num_heads, num_kv_heads, block_size, key_dim, value_dim;
    int64_t sliding_window;       // at least the longest context if there is none
    int64_t num_threads;
    double scale, softcap;        // softcap 0: none
};
}

namespace {

struct Item {
    int sequence, head, first_token, num_tokens;
};

int padded(int64_t count, int multiple) { return (int)((count + multiple - 1) / multiple * multiple); }

// What one thread needs; allocated once a call.
template <class S>
struct Workspace {
    int key_dim, value_dim;  // padded to whole chunks
    std::vector<float> query, scores, mixed, maximum, sum, decay;
    std::vector<S> key_tile, value_tile;  // only where pages are not read in place
    std::vector<const S*> keys, values;

    Workspace(const Call& call, int num_rows, bool in_place)
        : key_dim(padded(call.key_dim, CHUNK)), value_dim(padded(call.value_dim, CHUNK)),
          query(num_rows * key_dim), scores(num_rows * TILE), mixed(num_rows * value_dim), maximum(num_rows),
          sum(num_rows), decay(num_rows), key_tile(in_place ? 0 : TILE * key_dim),
          value_tile(in_place ? 0 : TILE * value_dim), keys(TILE), values(TILE) {}
};

// One row of the scores becomes weights of the running softmax; returns what earlier weights shrink by.
float softmax_row(float* scores, int num_keys, float& maximum, float& sum) {
    Vec top = load(scores);
    for (int k = LANES; k < num_keys; k += LANES) {
        Vec next = load(scores + k);
        top = next > top ? next : top;
    }
    float before = maximum;
    for (int lane = 0; lane < LANES; lane++) maximum = std::max(maximum, top[lane]);
    float base = maximum == -INF ? 0 : maximum;  // nothing seen yet: -inf - -inf would be NaN
    Vec total = {};
    for (int k = 0; k < num_keys; k += LANES) {
        Vec weight = exponential(load(scores + k) - base);
        store(scores + k, weight);
        total += weight;
    }
    float decay = std::exp(before - base), added = 0;
    for (int lane = 0; lane < LANES; lane++) added += total[lane];
    sum = sum * decay + added;
    return decay;
}

// Pointers to the K (or V) rows of tokens first, first + 1, ... of one KV head: into the pool itself, or, where
// there is a `tile`, to copies in it, widened and padded with zeros. Rounded up to LANES by repetition.
template <class T, class S>
void find_rows(const Call& call, const T* cache, int64_t dim, const Item& item, int first, int num_keys,
               std::vector<S>& tile, int padded_dim, std::vector<const S*>& rows) {
    const int32_t* table = call.block_tables + item.sequence * call.table_stride;
    int64_t block = first / call.block_size, offset = first % call.block_size;
    for (int k = 0; k < num_keys; block++, offset = 0) {
        const T* row = cache + ((table[block] * call.num_kv_heads + item.head) * call.block_size + offset) * dim;
        for (; offset < call.block_size && k < num_keys; offset++, k++, row += dim) {
            if constexpr (std::is_same_v<S, T>)
                rows[k] = row;
            if constexpr (std::is_same_v<S, float>)
                if (!tile.empty()) {
                    float* copy = tile.data() + k * padded_dim;
                    for (int d = 0; d < dim; d++) copy[d] = widen(row[d]);
                    rows[k] = copy;
                }
        }
    }
    std::fill(rows.begin() + num_keys, rows.begin() + padded(num_keys, LANES), rows[num_keys - 1]);
}

// T: type of the pool. S: type the products read, T itself or float.
template <class T, class S>
void attend(const Call& call, const Item& item, Workspace<S>& work) {
    const int group = (int)(call.num_heads / call.num_kv_heads), num_rows = item.num_tokens * group;
    const int first_row = call.query_start[item.sequence] + item.first_token;
    const int query_len = call.query_start[item.sequence + 1] - call.query_start[item.sequence];
    const int position = call.context_len[item.sequence] - query_len + item.first_token;
    const int end = position + item.num_tokens, window = (int)std::min<int64_t>(call.sliding_window, end);

    for (int row = 0; row < num_rows; row++) {
        int token = first_row + row / group, head = item.head * group + row % group;
        const T* query = (const T*)call.query + token * call.query_token_stride + head * call.query_head_stride;
        for (int d = 0; d < call.key_dim; d++)
            work.query[row * work.key_dim + place((const S*)nullptr, d)] = widen(query[d]) * (float)call.scale;
        // A sink is one more logit that is there from the start, with no value to mix.
        work.maximum[row] = call.sinks ? call.sinks[head] : -INF;
        work.sum[row] = call.sinks ? 1 : 0;
    }
    std::fill(work.mixed.begin(), work.mixed.begin() + num_rows * work.value_dim, 0.f);

    for (int first = std::max(0, position - window + 1); first < end; first += TILE) {
        const int num_keys = std::min(TILE, end - first), num_scores = padded(num_keys, LANES);
        find_rows(call, (const T*)call.key_cache, call.key_dim, item, first, num_keys, work.key_tile,
                  work.key_dim, work.keys);
        in_groups(num_rows, [&](int row, auto rows) {
            score_rows<rows()>(&work.query[row * work.key_dim], work.key_dim, work.keys.data(), num_scores,
                               &work.scores[row * TILE]);
        });
        for (int row = 0; row < num_rows; row++) {
            float* scores = &work.scores[row * TILE];
            if (call.softcap != 0)
                for (int k = 0; k < num_keys; k++)
                    scores[k] = std::tanh(scores[k] / (float)call.softcap) * (float)call.softcap;
            // Of the tile's keys this row sees [oldest, newest); the rest, padding included, weighs nothing.
            int newest = std::clamp(position + row / group + 1 - first, 0, num_keys);
            int oldest = std::clamp(position + row / group + 1 - window - first, 0, newest);
            std::fill(scores, scores + oldest, -INF);
            std::fill(scores + newest, scores + num_scores, -INF);
            work.decay[row] = softmax_row(scores, num_scores, work.maximum[row], work.sum[row]);
        }
        find_rows(call, (const T*)call.value_cache, call.value_dim, item, first, num_keys, work.value_tile,
                  work.value_dim, work.values);
        in_groups(num_rows, [&](int row, auto rows) {
            mix_rows<rows()>(&work.scores[row * TILE], work.values.data(), num_keys, work.value_dim,
                             &work.decay[row], &work.mixed[row * work.value_dim]);
        });
    }

    for (int row = 0; row < num_rows; row++) {
        int64_t token = first_row + row / group, head = item.head * group + row % group;
        T* output = (T*)call.output + (token * call.num_heads + head) * call.value_dim;
        for (int d = 0; d < call.value_dim; d++)
            narrow(work.mixed[row * work.value_dim + place((const S*)nullptr, d)] / work.sum[row], output[d]);
    }
}

template <class T, class S>
void attend_all(const Call& call, const std::vector<Item>& items, bool in_place, int num_threads) {
    if (items.empty()) return;
    int num_tokens = 0;
    for (const Item& item : items) num_tokens = std::max(num_tokens, item.num_tokens);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        Workspace<S> work(call, num_tokens * (int)(call.num_heads / call.num_kv_heads), in_place);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < items.size(); i++) attend<T>(call, items[i], work);
    }
}

// Whole chunks are read in place. Rows that end within a chunk are padded in a copied tile, and bfloat16
// tiles that many rows share are widened there, once for all of them.
template <class T>
void paged_attention(const Call& call) {
    const bool whole = call.key_dim % CHUNK == 0 && call.value_dim % CHUNK == 0;
    const int group = (int)(call.num_heads / call.num_kv_heads), step = std::max(1, ROWS / group);
    std::vector<Item> in_place, copied;
    double work = 0;
    for (int sequence = 0; sequence < call.num_sequences; sequence++) {
        int query_len = call.query_start[sequence + 1] - call.query_start[sequence];
        work += (double)query_len * call.context_len[sequence] * call.num_heads * (call.key_dim + call.value_dim);
        for (int token = 0; token < query_len; token += step)
            for (int head = 0; head < call.num_kv_heads; head++) {
                int num_tokens = std::min(step, query_len - token);
                bool direct = whole && (std::is_same_v<T, float> || num_tokens * group < WIDEN_ROWS);
                (direct ? in_place : copied).push_back({sequence, head, token, num_tokens});
            }
    }
    int num_threads = work < PARALLEL_WORK ? 1 : (int)call.num_threads;
    attend_all<T, T>(call, in_place, true, num_threads);
    attend_all<T, float>(call, copied, false, num_threads);
}

}  // namespace

extern "C" {

void paged_attention_float32(const Call* call) { paged_attention<float>(*call); }
void paged_attention_bfloat16(const Call* call) { paged_attention<BFloat16>(*call); }

// Copies token rows to their slots; strides and sizes in bytes, slot -1 is skipped.
void write_tokens(const char* tokens, int64_t token_stride, int64_t head_stride, char* cache, const int64_t* slots,
                  int64_t num_tokens, int64_t num_heads, int64_t block_size, int64_t row_bytes) {
    for (int64_t token = 0; token < num_tokens; token++) {
        if (slots[token] < 0) continue;
        int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
        for (int64_t head = 0; head < num_heads; head++)
            std::memcpy(cache + ((block * num_heads + head) * block_size + offset) * row_bytes,
                        tokens + token * token_stride + head * head_stride, row_bytes);
    }
}
}
