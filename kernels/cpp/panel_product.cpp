// rows x weights^T (GEMM). With few rows, it takes as long as reading the weights from memory.
//
//     weights [N, K]  ->  panels of 64 outputs, k after k:   | w(0..63, k=0) | w(0..63, k=1) | ...
//
// A panel is read sequentially, 64 k at a time; each vector is multiplied by one element of every row, with the
// accumulators in registers. 8-bit and 4-bit weights have a scale for each output and 64 k; `panels.py` packs them.

#include "calls.h"
#include "panel_formats.h"
#include "parallel.h"
#include "tiles.h"

#include <vector>

namespace {

constexpr int PREFETCH_DISTANCE = 8192;  // bytes; the hardware prefetches neighbours, but not across pages
constexpr int STREAMS = 4;               // panels that few rows read alternately
constexpr int LINES_PER_TURN = 4;        // rows of lanes from one of them before the next
constexpr int64_t ROW_BLOCK = 96;        // rows whose sums stay in the L1 and L2 caches
constexpr int64_t ROWS_AT_ONCE = 384;    // multiplied by all panels; with more, 2048 rows took 5 % longer
constexpr int64_t TILED_K = 256;         // k of a panel that stay in the L1 cache for all rows
constexpr int64_t LEAST_IN_BYTE_TILES = 8;   // quantized rows; fewer are faster with AVX-512
constexpr int64_t PARALLEL_BYTES = 1 << 19;  // below that, waking threads costs more than it saves
constexpr int64_t PARALLEL_ROW_ELEMENTS = 1 << 15;  // likewise, of rows that are converted

template <class Format>  // rows of one pass over a panel: what the registers hold
constexpr int MAX_ROWS = LANES == 16 || std::is_base_of_v<Float32, Format> ? 6 : 4;

// Rows (times their parts) that may read several panels alternately without software prefetching; more are
// compute-bound. Measured on Zen 3 (AVX2) and Granite Rapids (AVX-512), which reads other formats faster INTO_L2.
template <class Format>
constexpr int MAX_IN_STREAMS = std::is_same_v<Format, Float32>                ? (LANES == 16 ? 1 : 4)
                                : LANES == 16 || std::is_same_v<Format, Int4> ? 0
                                : std::is_same_v<Format, Float16>             ? 1
                                                                              : 2;
constexpr int READS_IN_STREAMS = LANES == 16 ? INTO_L2 : BY_HARDWARE;

// With AVX-512, rows (times their parts) that may leave prefetching to the hardware instead, as measured on Zen 4.
// Several passes over a group take so long that memory would be idle meanwhile, and so does one of six rows of floats.
template <int PARTS>
constexpr int MAX_UNPREFETCHED = LANES != 16 ? 0 : PARTS ? 6 : 5;

template <class Format>  // rows; for more, a group is converted to float32 first
constexpr int MAX_TO_CONVERT = LANES == 16 || std::is_same_v<Format, Float16> ? 12 : 32;

// ---- A group of a panel, or of several -------------------------------------------------------------------

// Each pass over a group prefetches from `upcoming` on, `stride` bytes for each row of lanes, so that memory is never
// idle, as it would be if only the first pass did:
//
//     multiplied     rows 0 to 5                rows 6 to 11     rows 12 to 17
//     prefetched     next group, first third    second third     last third
//
// With a stride of 0, nothing is prefetched.
struct Group {
    const char* weights;     // [GROUP / STEP][WIDTH] lanes
    const BFloat16* scales;  // [WIDTH], if the format has scales
    int count;               // k in the group
    const char* upcoming;
    int64_t stride;
    int64_t num_streams, stream_bytes;  // panels that are read alternately, and the distance between them

    const BFloat16* scales_of(int64_t stream, int vector) const {
        return scales + stream * stream_bytes / 2 + vector * LANES;
    }
};

// Locality hints. What a single pass reads had better bypass the L2 and L3 caches, where it would only evict K, V and
// whatever else a step reads again. But on Intel's Granite Rapids, that is less than half as fast, and on Zen 4, too,
// L2 is better where the hardware does not prefetch.
constexpr int HINT_PAST_L2 = 0, HINT_INTO_L2 = 2;

// The cache lines of N vectors of a row of lanes, and of its share of the scales; with AVX2, whose loops pass four
// times over a group, every other line in each.
template <class Format, int N, int HINT>
void prefetch(const char* upcoming, int64_t stride) {
    constexpr int MORE = LANES == 16 && HAS_SCALES<Format>, LINES = (LANES == 16 ? VECTORS : 2) + MORE;
    if (stride <= 64) return __builtin_prefetch(upcoming, 0, HINT);  // (at most one new line)
    for (int i = 0; i < N + MORE; i++) __builtin_prefetch(upcoming + stride / LINES * i, 0, HINT);
}

template <int N>
ALWAYS_INLINE void load_line(const char* source, Int (&raw)[N]) {
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) raw[v] = read_as<Int>(source + v * sizeof(Vec));
}

struct RowGroup {
    float sum, scale;  // of the elements, which stand for scale * element
};

// The rows that a group is multiplied by. A `Sum` accumulates one part of a row times the vectors of weights.
template <class Format_>
struct FloatRows {
    using Format = Format_;
    using Sum = Vec;
    static constexpr int PARTS = 1, MAX_PER_PASS = MAX_ROWS<Format>, MAX_IN_HALVES = MAX_PER_PASS;
    static constexpr int FLOATS = GROUP / (std::is_same_v<Format, Pairs> ? 2 : 1);  // of a row in a group
    const float* elements;  // `stride` apart; in the format Pairs a float holds two
    int64_t stride;
    const RowGroup* groups;
    int64_t num_groups;

    FloatRows from(int64_t r) const {
        return {elements + r * stride, stride, groups + r * num_groups, num_groups};
    }

    // Many rows come from the L2 or L3 cache. (Behind the end, prefetching is harmless.)
    void prefetch(int64_t first, int64_t num_rows, bool next_group) const {
        for (int64_t r = first; r < first + num_rows; r++)
            for (int i = 0; i < FLOATS; i += 16) __builtin_prefetch(elements + r * stride + next_group * FLOATS + i);
    }

    Vec start(int) const { return Vec{}; }

    // sums[i][] += a row of lanes times the elements k, k + 1, ... of row first + i.
    template <int R, int N>
    ALWAYS_INLINE void add(Vec (&sums)[R][N], int first, const char* source, int k) const {
        const float* own = elements + first * stride + (std::is_same_v<Format, Pairs> ? k / 2 : k);
        Int raw[N];
        load_line(source, raw);
#pragma GCC unroll 8
        for (int i = 0; i < Format::STEP; i++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int v = 0; v < N; v++)
                    sums[r][v] = add_product<Format>(sums[r][v], raw[v], own + r * stride, i);
    }

    // total + the dequantized sums of row r.
    Vec finish(Vec total, const Vec (&sums)[1], int r, const BFloat16* scales) const {
        if (!HAS_SCALES<Format>) return total + sums[0];
        const RowGroup& own = groups[r * num_groups];
        const Vec sum = Format::OFFSET ? add_product(sums[0], own.sum - Vec{}, Vec{} - Format::OFFSET) : sums[0];
        return add_product(total, sum * own.scale, load(scales));
    }
};

template <class Format_, int PARTS_>  // quantized: i is part i % PARTS of row i / PARTS
struct QuantizedRows {
    using Format = Format_;
    using Sum = Int;
    static constexpr int PARTS = PARTS_, MAX_PER_PASS = 6 / PARTS;  // whose sums the registers hold
    static constexpr int MAX_IN_HALVES = LANES == 16 ? 2 * MAX_PER_PASS : MAX_PER_PASS;  // half a panel at a time
    const QuantizedGroup<PARTS>* groups;  // of the rows, one after the other

    QuantizedRows from(int64_t r) const { return {groups + r}; }

    void prefetch(int64_t, int64_t, bool) const {}  // (these are small, and it makes int8 slower)

    const QuantizedGroup<PARTS>& row_of(int i) const { return groups[i / PARTS]; }

    Int start(int i) const { return Int{} - ZERO_POINT_OF<Format> * row_of(i).sums[i % PARTS]; }

    template <int I, int N>
    ALWAYS_INLINE void add(Int (&sums)[I][N], int first, const char* source, int k) const {
        Int raw[N];
        load_line(source, raw);
#pragma GCC unroll 2
        for (int nibble = 0; nibble < Format::STEP / 4; nibble++, k += 4) {
            IntegerWeights weights[N];
#pragma GCC unroll 8
            for (int v = 0; v < N; v++) weights[v] = split(bytes_of<Format>(raw[v], nibble));
#pragma GCC unroll 16
            for (int i = 0; i < I; i++) {
                const Part* elements = row_of(first + i).elements[(first + i) % PARTS] + k;
#pragma GCC unroll 8
                for (int v = 0; v < N; v++) sums[i][v] = add_four(sums[i][v], weights[v], elements);
            }
        }
    }

    Vec finish(Vec total, const Int (&sums)[PARTS], int r, const BFloat16* scales) const {
        const Int sum = sum_of(sums[0], sums[PARTS - 1]);
        return add_product(total, __builtin_convertvector(sum, Vec) * groups[r].scale, load(scales));
    }

    static Int sum_of(Int lower, Int upper) { return PARTS == 1 ? lower : (upper << PART_BITS) + lower; }
};

// totals[row][output] += scale[output] * the dot products of a group with R rows from row `first_row` on.
// (`rows` and `stride` are copies so that the compiler knows that no store changes them. An argument by value would be
// stored in parts and loaded as one vector, which cannot be forwarded: 8 % of the time in bfloat16.)
template <int R, int HINT, class Rows>
void add_group(const Group& group, const Rows& all_rows, float* totals, int64_t first_row) {
    using Format = typename Rows::Format;
    using Sum = typename Rows::Sum;
    const Rows rows = all_rows.from(first_row);
    totals += first_row * WIDTH;
    constexpr int N = LANES == 16 && R <= Rows::MAX_PER_PASS ? VECTORS : 2;  // what the registers hold
    constexpr int PARTS = Rows::PARTS;
    for (int first = 0; first < VECTORS; first += N) {
        Sum sums[R * PARTS][N];
#pragma GCC unroll 16
        for (int i = 0; i < R * PARTS; i++)
#pragma GCC unroll 8
            for (int v = 0; v < N; v++) sums[i][v] = rows.start(i);
        const char* source = group.weights + first * sizeof(Vec);
        const char* upcoming = group.upcoming + first * group.stride / VECTORS;
        const int64_t stride = group.stride;
        const auto add_line = [&](int k) __attribute__((always_inline)) {
            if (stride) prefetch<Format, N, HINT>(upcoming, stride);
            rows.add(sums, 0, source, k);
            source += 4 * WIDTH, upcoming += stride;
        };
        if constexpr (LANES == 8 && Format::STEP < 4)  // loop overhead takes a fifth of the time
#pragma GCC unroll 4
            for (int k = 0; k < group.count; k += Format::STEP) add_line(k);
        else
#pragma GCC unroll 2
            for (int k = 0; k < group.count; k += Format::STEP) add_line(k);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < N; v++) {
                Sum own[PARTS];
#pragma GCC unroll 8
                for (int part = 0; part < PARTS; part++) own[part] = sums[r * PARTS + part][v];
                float* total = totals + r * WIDTH + (first + v) * LANES;
                store(total, rows.finish(load(total), own, r, group.scales_of(0, first + v)));
            }
    }
}

template <int HINT, class Rows, int R = HINT == HINT_PAST_L2 ? Rows::MAX_IN_HALVES : Rows::MAX_PER_PASS>
void add_some(int64_t num_rows, const Group& group, const Rows& rows, float* totals, int64_t first_row = 0) {
    if constexpr (R > 1)
        if (num_rows < R) return add_some<HINT, Rows, R - 1>(num_rows, group, rows, totals, first_row);
    add_group<R, HINT>(group, rows, totals, first_row);
}

// totals[stream][row][output] += the same for a group of each of several panels. With few rows, a kilobyte of each is
// read alternately, without software prefetching. The hardware prefetcher then follows several streams, and bandwidth
// is up to 1.5 times as high (on Zen 3):
//
//     panels              0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
//     read alternately    0       3       6       9            then 1 4 7 10, then 2 5 8 11
//
// Each kilobyte is multiplied by all rows while it is in the L1 cache.
template <class Rows>
void add_alternating(int64_t num_rows, const Group& group, const Rows& rows, float* totals) {
    using Format = typename Rows::Format;
    using Sum = typename Rows::Sum;
    constexpr int TURN = LINES_PER_TURN * Format::STEP, PARTS = Rows::PARTS;
    const int num_parts = (int)num_rows * PARTS;
    static_assert(STREAMS * MAX_IN_STREAMS<Format> <= ROW_BLOCK, "totals hold the sums of so many rows");
    Sum sums[STREAMS][MAX_IN_STREAMS<Format>][VECTORS];
    for (int s = 0; s < group.num_streams; s++)
        for (int i = 0; i < num_parts; i++)
            for (Sum& sum : sums[s][i]) sum = rows.start(i);
    for (int k = 0; k < group.count; k += TURN)
        for (int s = 0; s < group.num_streams; s++)
            for (int i = 0; i < num_parts; i++) {
                const char* source = group.weights + s * group.stream_bytes + k / Format::STEP * 4 * WIDTH;
                Sum own[1][VECTORS];
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) own[0][v] = sums[s][i][v];
                for (int line = k; line < std::min(k + TURN, group.count); line += Format::STEP, source += 4 * WIDTH)
                    rows.add(own, i, source, line);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) sums[s][i][v] = own[0][v];
            }
    for (int s = 0; s < group.num_streams; s++)
        for (int v = 0; v < VECTORS; v++)
            for (int r = 0; r < num_rows; r++) {
                Sum own[PARTS];
                for (int part = 0; part < PARTS; part++) own[part] = sums[s][r * PARTS + part][v];
                float* total = totals + (s * num_rows + r) * WIDTH + v * LANES;
                store(total, rows.finish(load(total), own, r, group.scales_of(s, v)));
            }
}

// Converts a group to the layout of Float32, which is faster with many rows.
template <class Format>
void expand(const char* group, int count, char* floats) {
    for (int k = 0; k < count; k += Format::STEP, group += 4 * WIDTH)
        for (int v = 0; v < VECTORS; v++) {
            const Int raw = read_as<Int>(group + v * sizeof(Vec));
#pragma GCC unroll 8
            for (int i = 0; i < Format::STEP; i++)
                store((float*)floats + (k + i) * WIDTH + v * LANES, Format::value(raw, i) - Format::OFFSET);
        }
}

// Unpacks a group of int4 to the layout of Int8.
template <class Format>
void unpack(const char* group, char* bytes) {
    for (int line = 0; line < GROUP / 4; line += 2, group += 4 * WIDTH)
        for (int nibble = 0; nibble < 2; nibble++, bytes += 4 * WIDTH)
            for (int v = 0; v < VECTORS; v++) {
                const Int own = bytes_of<Format>(read_as<Int>(group + v * sizeof(Vec)), nibble);
                std::memcpy(bytes + v * sizeof(Vec), &own, sizeof own);
            }
}

// ---- All panels ------------------------------------------------------------------------------------------

int64_t groups_of(const Product& call) { return (call.size + GROUP - 1) / GROUP; }

template <class T>
const T* row_of(const Product& call, int64_t r) {
    return (const T*)call.rows + r * call.row_stride;
}

// Where a part of the rows begins. Parts have nearly the same size, in whole tiles; only the last tile may be partial.
int64_t first_row(int64_t num_rows, int64_t part, int64_t num_parts) {
    static_assert(ROW_BLOCK % TILE_ROWS == 0 && ROWS_AT_ONCE % TILE_ROWS == 0, "so no part has more rows than these");
    const int64_t num_tiles = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
    return std::min(num_rows, num_tiles * part / num_parts * TILE_ROWS);
}

template <class Body>  // body(r) for each row
void for_rows(const Product& call, const Body& body) {
    in_parallel(call.num_rows, call.num_rows * call.size < PARALLEL_ROW_ELEMENTS ? 1 : call.num_threads, body);
}

template <class Format, class T, bool IN_PAIRS>
struct Floats {  // the rows in float32. Quantized ones stay integers, whose sums are exact.
    static constexpr bool NEED_NO_COPY = IN_PAIRS || (std::is_same_v<T, float> && std::is_same_v<Format, Float32>);
    const float* elements;
    int64_t stride;
    std::vector<float> copies;
    std::vector<RowGroup> groups;

    explicit Floats(const Product& call) : elements((const float*)call.rows), stride(call.row_stride / (1 + IN_PAIRS)) {
        const int64_t num_groups = groups_of(call);
        groups.assign(call.num_rows * num_groups, {0, 1});
        const int64_t read_whole = IN_PAIRS && may_use_tiles() ? TILE_K : 1 + IN_PAIRS;
        if (NEED_NO_COPY && call.size % read_whole == 0 && call.row_stride % (1 + IN_PAIRS) == 0) return;
        stride = num_groups * GROUP / (1 + IN_PAIRS);
        copies.resize(call.num_rows * stride);  // (zeros behind the end)
        elements = copies.data();
        for_rows(call, [&](int64_t r) {
            const T* row = row_of<T>(call, r);
            float* own = &copies[r * stride];
            if (IN_PAIRS) {
                std::memcpy(own, row, call.size * sizeof(T));
                return;
            }
            for (int64_t k = 0; k < call.size; k += LANES) store(own + k, load(row + k, call.size - k));
            for (int64_t g = 0; std::is_same_v<Format, W8A8> && g < num_groups; g++) {
                QuantizedGroup<1> group;
                quantize_group<Format>(own + g * GROUP, GROUP, group);
                for (int k = 0; k < GROUP; k++) own[g * GROUP + k] = group.elements[0][k];
                groups[r * num_groups + g].scale = group.scale;
            }
            for (int64_t g = 0; Format::OFFSET != 0 && g < num_groups; g++) {
                Vec sum = {};
                for (int64_t k = 0; k < GROUP; k += LANES) sum += load(own + g * GROUP + k);
                groups[r * num_groups + g].sum = sum_of(sum);
            }
        });
    }

    template <class As>
    FloatRows<As> as(const Product& call, int64_t g) const {
        const int64_t start = g * GROUP / (1 + IN_PAIRS);
        return {elements + start, stride, &groups[g], groups_of(call)};
    }
};

template <class Format, class T>
struct Quantized {  // the rows in parts, never in pairs
    static constexpr int PARTS = PARTS_OF<Format>;
    std::vector<QuantizedGroup<PARTS>> groups;  // [groups][rows]

    explicit Quantized(const Product& call) : groups(call.num_rows * groups_of(call)) {
        for_rows(call, [&](int64_t r) {
            for (int64_t g = 0, start = 0; start < call.size; g++, start += GROUP)
                quantize_group<Format>(row_of<T>(call, r) + start, std::min<int64_t>(GROUP, call.size - start),
                                 groups[g * call.num_rows + r]);
        });
    }

    template <class>
    QuantizedRows<Format, PARTS> as(const Product& call, int64_t g) const {
        return {&groups[g * call.num_rows]};
    }
};

template <class Format, class T>
class Multiplication {
    static constexpr bool IS_QUANTIZED = HAS_SCALES<Format>;
    static constexpr int PARTS = IS_QUANTIZED && INTEGER_DOT ? PARTS_OF<Format> : 0;  // 0: rows stay floats
    static constexpr int64_t SCALE_BYTES = IS_QUANTIZED ? WIDTH * sizeof(BFloat16) : 0;
    static constexpr int64_t GROUP_BYTES = 4 * WIDTH * GROUP / Format::STEP + SCALE_BYTES;
    static constexpr int64_t STRIDE =  // a row of lanes and its share of the scales (with AVX2, prefetches overlap)
        4 * WIDTH + (LANES == 16 ? SCALE_BYTES * Format::STEP / GROUP : 0);
    static constexpr bool IN_PAIRS = HAS_PAIRS && std::is_same_v<Format, Bfloat16>;
    static constexpr bool CAN_EXPAND =  // (reading bfloat16 in place takes only a shift)
        !PARTS && !std::is_same_v<Format, Float32> &&
        !(std::is_same_v<Format, Bfloat16> && (IN_PAIRS || LANES == 8));

    const Product& call;
    const bool in_tiles = IN_PAIRS && may_use_tiles();
    const bool bytes_in_tiles =
        PARTS > 0 && !IN_16_BITS && call.num_rows >= LEAST_IN_BYTE_TILES && may_use_tiles();
    const bool expands = CAN_EXPAND && call.num_rows > MAX_TO_CONVERT<Format>;
    const int64_t num_panels = (call.num_outputs + WIDTH - 1) / WIDTH;
    const int64_t num_row_blocks = row_blocks();  // of nearly the same size
    const int64_t num_row_parts = call.num_rows * std::max(PARTS, 1);
    const bool in_streams = call.prefetch == READS_IN_STREAMS && num_row_parts <= MAX_IN_STREAMS<Format>;
    const bool prefetches = call.prefetch != BY_HARDWARE || num_row_parts > MAX_UNPREFETCHED<PARTS>;
    const int64_t prefetch_stride = prefetches ? STRIDE : 0;
    using Storage = std::conditional_t<(PARTS > 0), Quantized<Format, T>, Floats<Format, T, IN_PAIRS>>;
    const Storage rows{call};

    int64_t row_blocks() const {
        const int64_t most = (call.num_rows + ROW_BLOCK - 1) / ROW_BLOCK;
        if (!in_tiles || num_panels == 0) return most;
        const int64_t to_share = (4 * call.num_threads + num_panels - 1) / num_panels;  // evenly between threads
        return std::min(most, to_share);
    }

    // totals [rows, WIDTH] += `num_rows` rows times a group, in as few passes as the registers allow. They have nearly
    // the same size, because the sums of two rows alone are too few to keep the multipliers busy.
    template <class Rows>
    void add_passes(const Group& whole, int64_t num_rows, const Rows& rows, float* totals) const {
        const int64_t most = Rows::MAX_PER_PASS;
        if constexpr (LANES == 16)  // (with AVX2, several loops pass over a group)
            if (call.prefetch == PAST_L2 && num_rows <= Rows::MAX_IN_HALVES)
                return add_some<HINT_PAST_L2>(num_rows, whole, rows, totals);
        const int64_t num_passes = (num_rows + most - 1) / most;
        if (num_passes == 1) return add_some<HINT_INTO_L2>(num_rows, whole, rows, totals);
        Group group = whole;
        group.upcoming += GROUP_BYTES - PREFETCH_DISTANCE;
        group.stride = (group.stride + num_passes - 1) / num_passes;  // (rounded down, it would omit lines)
        const int64_t least = num_rows / num_passes, num_larger = num_rows % num_passes;
        const int64_t bytes_a_pass = GROUP_BYTES / num_passes;
        for (int64_t pass = 0, first = 0; pass < num_passes; pass++, group.upcoming += bytes_a_pass) {
            const int64_t num = least + (pass < num_larger), next = first + num;
            const bool is_last = next == num_rows;
            rows.prefetch(is_last ? 0 : next, least + 1, is_last);
            add_some<HINT_INTO_L2>(num, group, rows, totals, first);
            first = next;
        }
    }

    // The same by AMX for quantized rows; `bytes` is where int4 is unpacked. The sums are exact, so no bit differs.
    template <class Rows>
    void add_bytes_in_tiles(Tiles& tiles, const Group& group, int64_t num_rows, const Rows& rows, char* bytes,
                            float* totals) const {
        const bool is_packed = Format::STEP == 8;
        if (is_packed) unpack<Format>(group.weights, bytes);
        const char* weights = is_packed ? bytes : group.weights;
        const int64_t num_passes = (num_rows + TILE_ROWS - 1) / TILE_ROWS;
        const int64_t num_lines = (GROUP_BYTES / 64 + num_passes - 1) / num_passes;
        const char* upcoming = group.upcoming + GROUP_BYTES - PREFETCH_DISTANCE;
        alignas(64) int32_t sums[PARTS][TILE_ROWS][WIDTH];
        Vec scales[VECTORS];
        for (int v = 0; v < VECTORS; v++) scales[v] = load(group.scales_of(0, v));
        for (int64_t r = 0; r < num_rows; r += TILE_ROWS) {
            const Rows own = rows.from(r);
            const int num = (int)std::min<int64_t>(TILE_ROWS, num_rows - r);
            for (int64_t i = 0; i < num_lines; i++, upcoming += 64) __builtin_prefetch(upcoming, 0, HINT_INTO_L2);
            tiles.multiply_bytes<PARTS>(num, (const char*)own.groups->elements, sizeof(*own.groups), weights,
                                        sums[0][0]);
            for (int i = 0; i < num; i++) {
                float* total = totals + (r + i) * WIDTH;
                const Int start = own.sum_of(own.start(i * PARTS), own.start(i * PARTS + PARTS - 1));
                const Vec scale = own.groups[i].scale - Vec{};
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++, total += LANES) {
                    const Int lower = read_as<Int>(&sums[0][i][v * LANES]);
                    const Int sum = own.sum_of(lower, read_as<Int>(&sums[PARTS - 1][i][v * LANES])) + start;
                    store(total, add_product(load(total), __builtin_convertvector(sum, Vec) * scale, scales[v]));
                }
            }
        }
    }

    // totals [streams, rows, WIDTH] += rows first to last times group g of each stream; `floats` is where it is
    // expanded. (A copy of the group would wait for its stores: a tenth of the time of one row.)
    void add(Tiles& tiles, Group& group, int64_t g, int64_t first, int64_t last, char* floats, float* totals) const {
        if constexpr (PARTS > 0)
            if (bytes_in_tiles) {
                const auto own = rows.template as<Format>(call, g).from(first);
                return add_bytes_in_tiles(tiles, group, last - first, own, floats, totals);
            }
        if constexpr (MAX_IN_STREAMS<Format> >= std::max(PARTS, 1))
            if (in_streams) return add_alternating(last - first, group, rows.template as<Format>(call, g), totals);
        const auto add_as = [&](const auto& own) { add_passes(group, last - first, own.from(first), totals); };
        if constexpr (CAN_EXPAND)
            if (expands) {
                expand<Format>(group.weights, group.count, floats);
                group.weights = floats;
                return add_as(rows.template as<std::conditional_t<IS_QUANTIZED, Dequantized, Float32>>(call, g));
            }
        add_as(rows.template as<std::conditional_t<IN_PAIRS, Pairs, Format>>(call, g));
    }

    // totals [rows, WIDTH] = rows first to last times a panel, by AMX. A single pass prefetches the weights of its
    // next tile row; several share the prefetching of the next `size` k.
    void add_in_tiles(Tiles& tiles, int64_t panel, int64_t first, int64_t last, float* totals) const {
        if constexpr (IN_PAIRS) {
            const int64_t num_passes = (last - first + TILE_ROWS - 1) / TILE_ROWS;
            const int64_t num_lines = (TILE_BYTES / 64 + num_passes - 1) / num_passes;
            const int64_t whole = (call.size + TILE_K - 1) / TILE_K * TILE_K;  // (zeros follow the last k)
            const int64_t most = num_passes == 1 ? whole : TILED_K;
            for (int64_t k = 0; k < whole; k += most) {
                const int64_t size = std::min(most, whole - k);
                const char* weights = call.panels + panel * call.panel_bytes + 2 * WIDTH * k;
                const char* upcoming = weights + (num_passes == 1 ? TILE_BYTES : 2 * WIDTH * size);
                for (int64_t r = first; r < last; r += TILE_ROWS) {
                    const int num_rows = (int)std::min<int64_t>(TILE_ROWS, last - r);
                    if (k + size == whole) prefetch_output(panel, r, r + num_rows);
                    upcoming = tiles.add(num_rows, (const char*)(rows.elements + r * rows.stride + k / 2),
                                         4 * rows.stride, weights, size, k == 0, totals + (r - first) * WIDTH, upcoming,
                                         num_lines);
                }
            }
        }
    }

    void write(int64_t panel, int64_t first, int64_t last, const float* totals) const {
        const int64_t start = panel * WIDTH, width = std::min<int64_t>(WIDTH, call.num_outputs - start);
        const T* bias = call.bias ? (const T*)call.bias + start : nullptr;
        for (int64_t r = first; r < last; r++, totals += WIDTH) {
            T* output = (T*)call.output + r * call.num_outputs + start;
            for (int64_t o = 0; o < width; o += LANES) {
                const Vec added = bias ? load(bias + o, width - o) : Vec{};
                store(output + o, load(totals + o) + added, width - o);
            }
        }
    }

    // Otherwise, stores wait for their cache lines.
    void prefetch_output(int64_t panel, int64_t first, int64_t last) const {
        for (int64_t r = first; r < last; r++) {
            const T* output = (const T*)call.output + r * call.num_outputs + panel * WIDTH;
            for (int o = 0; o < WIDTH; o += 64 / sizeof(T)) __builtin_prefetch(output + o, 1);
        }
    }

    // Units of work first_unit to last_unit - 1: one panel after the other, times one block of rows after the other.
    void run(int64_t first_unit, int64_t last_unit) const {
        const int64_t most = in_streams ? STREAMS : 1;  // (few rows: one block)
        const int64_t units_a_stream = (last_unit - first_unit + most - 1) / most;
        Tiles tiles;
        for (int64_t unit = first_unit; unit < first_unit + units_a_stream; unit++) {
            alignas(64) float totals[(IN_PAIRS ? ROWS_AT_ONCE : ROW_BLOCK) * WIDTH];
            alignas(64) char floats[4 * WIDTH * GROUP];
            const int64_t num_streams = (last_unit - unit + units_a_stream - 1) / units_a_stream;
            const int64_t stream_bytes = units_a_stream * call.panel_bytes;
            const int64_t panel = unit / num_row_blocks, block = unit % num_row_blocks;
            const int64_t first = first_row(call.num_rows, block, num_row_blocks);
            const int64_t last = first_row(call.num_rows, block + 1, num_row_blocks), size = (last - first) * WIDTH;
            if (!in_tiles) std::fill(totals, totals + num_streams * size, 0.f);
            const char* whole = call.panels + panel * call.panel_bytes;
            if (in_tiles) add_in_tiles(tiles, panel, first, last, totals);
            else for (int64_t g = 0; g < groups_of(call); g++) {
                const char* start = whole + g * GROUP_BYTES;
                const int count = (int)std::min<int64_t>(GROUP, call.size - g * GROUP);
                Group group{start + SCALE_BYTES, (const BFloat16*)start, count, start + PREFETCH_DISTANCE,
                            prefetch_stride, num_streams, stream_bytes};
                if (g == groups_of(call) - 1) prefetch_output(panel, first, last);
                add(tiles, group, g, first, last, floats, totals);
            }
            for (int64_t stream = 0; stream < num_streams; stream++)
                write(panel + stream * units_a_stream, first, last, totals + stream * size);
        }
    }

public:
    explicit Multiplication(const Product& call) : call(call) {}

    void run() const {
        const bool is_small = call.num_rows * num_panels * call.panel_bytes < PARALLEL_BYTES;
        const int64_t num_parts = is_small ? 1 : call.num_threads, num_units = num_panels * num_row_blocks;
        in_parallel(num_parts, num_parts, [&](int64_t part) {
            run(num_units * part / num_parts, num_units * (part + 1) / num_parts);
        });
    }
};

// Many rows pass over all panels part by part, so that a part is still in the L2 cache for the next panel.
template <class Format, class T>
void multiply(const Product& whole) {
    const int64_t num_parts = (whole.num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (int64_t part = 0; part < num_parts; part++) {
        const int64_t first = first_row(whole.num_rows, part, num_parts);
        const int64_t last = first_row(whole.num_rows, part + 1, num_parts);
        Product call = whole;
        call.rows = row_of<T>(whole, first);
        call.output = (T*)whole.output + first * whole.num_outputs;
        call.num_rows = last - first;
        Multiplication<Format, T>(call).run();
    }
}

}  // namespace

extern "C" {

#define FOR_ROWS(FORMAT, NAME, T, TYPE) \
    void multiply_##NAME##_##TYPE(const Product* call) { multiply<FORMAT, T>(*call); }
#define FOR_FORMAT(FORMAT, NAME)              \
    FOR_ROWS(FORMAT, NAME, float, float32)    \
    FOR_ROWS(FORMAT, NAME, BFloat16, bfloat16)\
    FOR_ROWS(FORMAT, NAME, Half, float16)
FOR_ROWS(Float32, float32, float, float32)
FOR_ROWS(Bfloat16, bfloat16, BFloat16, bfloat16)
FOR_ROWS(Float16, float16, Half, float16)
FOR_FORMAT(Int8, int8)
FOR_FORMAT(Int4, int4)
FOR_FORMAT(W8A8, w8a8)
}
