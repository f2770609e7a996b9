// rows x weights^T for few rows, at the speed at which memory delivers the weights.
//
//     weights [N, K]  ->  panels of 64 outputs, k after k:   | w(0..63, k=0) | w(0..63, k=1) | ...
//
// A panel is read once, in one direction, and each of its vectors meets one element of every row: 64 sums a row
// stay in registers. oneDNN packs float32 and bfloat16 weights in the same order, so one copy serves both.
// Bytes and nibbles carry a scale for each output and 64 k; `panels.py` puts each in its place.

#include "calls.h"
#include "vectors.h"

#include <type_traits>
#include <vector>

namespace {

constexpr int WIDTH = 64;              // outputs of a panel
constexpr int VECTORS = WIDTH / LANES;
constexpr int GROUP = 64;              // k that are multiplied at a time, and share a scale
constexpr int LINE = 64;               // bytes that memory delivers together
constexpr int AHEAD = 8192;            // bytes from what one pass multiplies to what is fetched meanwhile: the
                                       // processor fetches neighbours, but not from the next page
constexpr int STREAMS = 4;             // panels that few rows read at the same time
constexpr int LINES_IN_TURN = 4;       // rows of lanes from one of them before the next has its turn
constexpr int64_t ROW_BLOCK = 96;      // rows whose sums stay in the nearest caches
constexpr int64_t MOST_IN_WORDS = 2;   // rows that are quicker in fixed point of two words than as floats
constexpr int64_t PARALLEL_BYTES = 1 << 19;  // below that, waking threads costs more than it saves

// ---- Formats: `STEP` elements of one output in a lane of a vector ----------------------------------------

struct Float32 {
    static constexpr int STEP = 1;
    static constexpr float OFFSET = 0;
    static Vec value(Int raw, int) { return (Vec)raw; }
};

struct Bfloat16 {  // two k in a lane, the lower half first
    static constexpr int STEP = 2;
    static constexpr float OFFSET = 0;
    static Vec value(Int raw, int i) { return (Vec)(i ? raw & (int32_t)0xffff0000 : raw << 16); }
};

struct Float16 {  // likewise
    static constexpr int STEP = 2;
    static constexpr float OFFSET = 0;
    static Vec value(Int raw, int i) {
        const Int half = i ? raw >> 16 : raw;
        const Int size = (half & 0x7fff) << 13;
        const Vec finite = (Vec)size * 0x1p112f;  // subnormal numbers too; only the last exponent is special
        const Int bits = size >= 0x0f800000 ? size | 0x7f800000 : (Int)finite;
        return (Vec)(bits | (half & 0x8000) << 16);
    }
};

// Codes 0 to 255 stand for -128 to 127. As the upper bits of a mantissa a code is 256 + code, with no
// conversion; what that adds, 384 times the sum of a row's elements, is taken off after each group.
struct Int8 {
    static constexpr int STEP = 4, ZERO = 128;
    static constexpr float OFFSET = 256 + ZERO;
    static Vec value(Int raw, int i) {
        const Int moved = i < 2 ? raw << (15 - 8 * i) : raw >> (8 * i - 15);
        return (Vec)((moved & 0x7f8000) | 0x43800000);
    }
};

struct Int4 {  // codes 0 to 15 stand for -8 to 7, in the same way
    static constexpr int STEP = 8, ZERO = 8;
    static constexpr float OFFSET = 16 + ZERO;
    static Vec value(Int raw, int i) {
        const int place = 8 * (i % 4) + i / 4 * 4;  // the lower halves of four bytes, then the upper ones
        const Int moved = place < 19 ? raw << (19 - place) : raw >> (place - 19);
        return (Vec)((moved & 0x780000) | 0x41800000);
    }
};

struct W8A8 : Int8 {};  // the elements of the rows in 8 bits, too

template <class Format>  // rows that one pass over a panel multiplies: what the registers hold
constexpr int MOST_ROWS = LANES == 16 || std::is_same_v<Format, Float32> ? 6 : 4;

template <class Format>  // rows, or parts of them, that read several panels at the same time
constexpr int MOST_IN_STREAMS = LANES == 16 || std::is_same_v<Format, Int4> ? 0
                                : std::is_same_v<Format, Float32>           ? 4
                                : std::is_same_v<Format, Float16>           ? 1
                                                                            : 2;

template <class Format>  // rows; for more, the codes of a group become numbers first
constexpr int MOST_TO_DECODE = LANES == 16 || std::is_same_v<Format, Float16> ? 12 : 32;

// The weights as they are, with rows in bfloat16: one instruction for both k of a lane, where there is one.
struct Pairs {
    [[maybe_unused]] static constexpr int STEP = 2;
    [[maybe_unused]] static constexpr float OFFSET = 0;
};

// sum += the products of the STEP elements in each lane of `raw` with those of a row.
template <class Format>
inline __attribute__((always_inline)) Vec add_product(Vec sum, Int raw, const float* row, int i) {
    return add_product(sum, Format::value(raw, i), row[i] - Vec{});
}

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
template <>
inline __attribute__((always_inline)) Vec add_product<Pairs>(Vec sum, Int raw, const float* row, int i) {
    if (i) return sum;
    int32_t pair;
    std::memcpy(&pair, row, sizeof pair);
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)(__m512i)raw);
}
#else
constexpr bool HAS_PAIRS = false;
#endif

// ---- One group of a panel --------------------------------------------------------------------------------

// While rows pass over a group, one or two lines of each `stride` bytes from `coming` on are fetched, so that
// memory delivers all the time, and not just during the first pass:
//
//     multiplied     rows 0 to 5                rows 6 to 11     rows 12 to 17
//     fetched        next group, first third    second third     last third
struct Group {
    const char* weights;     // [GROUP / STEP][WIDTH] lanes
    const BFloat16* scales;  // [WIDTH], or null for 1
    int count;               // k in the group
    const char* coming;
    int64_t stride;
    int num_streams;
    int64_t stream_bytes;  // from the group of one stream to that of the next
};

// Few rows read several panels at the same time, a kilobyte of each in turn, and fetch nothing ahead. The
// processor then fetches by itself, along several streams, and memory delivers up to 1.5 times as much:
//
//     panels          0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
//     read together   0       3       6       9            then 1 4 7 10
//
// All `num_rows` take their turn before the next panel has its own, for the lines are in the nearest cache then.
template <class Format, class Vector, int MOST, class AddLine>
inline __attribute__((always_inline)) void in_turns(const Group& group, int64_t num_rows,
                                                    Vector (*sums)[MOST][VECTORS], AddLine add_line) {
    constexpr int TURN = LINES_IN_TURN * Format::STEP;
    for (int k = 0; k < group.count; k += TURN)
        for (int stream = 0; stream < group.num_streams; stream++)
            for (int r = 0; r < num_rows; r++) {
                const char* source = group.weights + stream * group.stream_bytes + k / Format::STEP * 4 * WIDTH;
                Vector own[1][VECTORS];
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) own[0][v] = sums[stream][r][v];
                const int end = std::min(k + TURN, group.count);
                for (int i = k; i < end; i += Format::STEP, source += 4 * WIDTH) add_line(own, source, r, i);
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; v++) sums[stream][r][v] = own[0][v];
            }
}

inline void fetch(const char* coming, int64_t stride) {  // every other line: the processor fetches neighbours
    __builtin_prefetch(coming, 0, 2);
    if (stride > LINE) __builtin_prefetch(coming + stride / 2, 0, 2);
}

struct RowGroup {
    float sum, scale;  // of the elements, which stand for scale * element
};

// sums[row][] += the products of a row of lanes with the elements k, k + 1, ... of R rows.
template <class Format, int R, int N>
inline __attribute__((always_inline)) void add_line(Vec (&sums)[R][N], const char* source, const float* rows,
                                                    int64_t stride, int k) {
    constexpr bool IN_PAIRS = std::is_same_v<Format, Pairs>;
    Int raw[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) std::memcpy(&raw[v], source + v * sizeof(Vec), sizeof(Vec));
#pragma GCC unroll 8
    for (int i = 0; i < Format::STEP; i++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int v = 0; v < N; v++)
                sums[r][v] = add_product<Format>(sums[r][v], raw[v], rows + r * stride + (IN_PAIRS ? k / 2 : k), i);
}

// total += the products of a row with a group, of which `sum` are those with the codes.
template <class Format>
inline void finish(Vec sum, const RowGroup& row, const BFloat16* scales, float* total) {
    if (Format::OFFSET) sum -= Format::OFFSET * row.sum;
    if (scales) sum = sum * row.scale * load(scales);
    store(total, load(total) + sum);
}

// totals[row][output] += scale[output] * the products of R rows. A row is `stride` floats long, with num_groups
// row_groups; in the format Pairs a float holds two elements.
template <class Format, int R>
void add_group(const Group& group, const float* rows, int64_t stride, const RowGroup* row_groups,
               int64_t num_groups, float* totals) {
    constexpr int N = LANES == 16 ? VECTORS : 2;  // what the registers hold
    for (int first = 0; first < VECTORS; first += N) {
        Vec sums[R][N] = {};
        const char* source = group.weights + first * sizeof(Vec);
        const char* coming = group.coming + first * group.stride / VECTORS;
        const auto add_step = [&](int k) __attribute__((always_inline)) {
            fetch(coming, group.stride);
            add_line<Format>(sums, source, rows, stride, k);
            source += 4 * WIDTH, coming += group.stride;
        };
        if constexpr (LANES == 8 && Format::STEP < 4)  // what surrounds few products takes a fifth of the time
#pragma GCC unroll 4
            for (int k = 0; k < group.count; k += Format::STEP) add_step(k);
        else
            for (int k = 0; k < group.count; k += Format::STEP) add_step(k);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < N; v++)
                finish<Format>(sums[r][v], row_groups[r * num_groups],
                               group.scales ? group.scales + (first + v) * LANES : nullptr,
                               totals + r * WIDTH + (first + v) * LANES);
    }
}

// totals[stream][row][output] += the same for a group of each stream.
template <class Format>
void add_in_turns(int64_t num_rows, const Group& group, const float* rows, int64_t stride, const RowGroup* row_groups,
                  int64_t num_groups, float* totals) {
    Vec sums[STREAMS][MOST_IN_STREAMS<Format>][VECTORS];
    for (int stream = 0; stream < group.num_streams; stream++)
        for (int r = 0; r < num_rows; r++)
            for (Vec& sum : sums[stream][r]) sum = Vec{};
    in_turns<Format>(group, num_rows, sums, [&](auto& own, const char* source, int r, int k) __attribute__((always_inline)) {
        add_line<Format>(own, source, rows + r * stride, 0, k);
    });
    for (int stream = 0; stream < group.num_streams; stream++)
        for (int r = 0; r < num_rows; r++)
            for (int v = 0; v < VECTORS; v++)
                finish<Format>(sums[stream][r][v], row_groups[r * num_groups],
                               group.scales ? group.scales + stream * group.stream_bytes / 2 + v * LANES : nullptr,
                               totals + (stream * num_rows + r) * WIDTH + v * LANES);
}

template <class Format, int R = MOST_ROWS<Format>>
void add_some(int num_rows, const Group& group, const float* rows, int64_t stride, const RowGroup* row_groups,
              int64_t num_groups, float* totals) {
    if constexpr (R > 1)
        if (num_rows < R)
            return add_some<Format, R - 1>(num_rows, group, rows, stride, row_groups, num_groups, totals);
    add_group<Format, R>(group, rows, stride, row_groups, num_groups, totals);
}

// The codes of a group as numbers, in the order of Float32 or Pairs: for many rows that is quicker.
template <class Format>
void expand(const char* group, bool in_pairs, char* numbers) {
    for (int k = 0; k < GROUP; k += Format::STEP, group += 4 * WIDTH)
        for (int v = 0; v < VECTORS; v++) {
            Int raw;
            std::memcpy(&raw, group + v * sizeof(Vec), sizeof raw);
            Vec values[Format::STEP];
#pragma GCC unroll 8
            for (int i = 0; i < Format::STEP; i++) values[i] = Format::value(raw, i) - Format::OFFSET;
            for (int i = 0; i < Format::STEP; i += 1 + in_pairs) {
                float* place = (float*)numbers + (k + i) / (1 + in_pairs) * WIDTH + v * LANES;
                if (in_pairs)  // whole numbers up to 256 are exact in bfloat16
                    store(place, (Vec)(((Int)values[i + 1] & (int32_t)0xffff0000) | ((Int)values[i] >> 16 & 0xffff)));
                else
                    store(place, values[i]);
            }
        }
}

// ---- Elements as floats -----------------------------------------------------------------------------------

struct Half {
    uint16_t bits;
};

float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

float widened(float value) { return value; }
float widened(BFloat16 value) { return as_float((uint32_t)value.bits << 16); }
float widened(Half value) {
    const uint32_t size = (value.bits & 0x7fffu) << 13, sign = (value.bits & 0x8000u) << 16;
    return as_float((size >= 0x0f800000u ? size | 0x7f800000u : bits_of(as_float(size) * 0x1p112f)) | sign);
}

void narrow(float value, float& result) { result = value; }
void narrow(float value, BFloat16& result) {
    const uint32_t bits = bits_of(value);
    result.bits = value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}
void narrow(float value, Half& result) {
    const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) result.bits = 0x7e00;
    else if (size >= 0x477ff000) result.bits = sign | 0x7c00;  // 65520 and more round to infinity
    else if (size < 0x38800000) result.bits = sign | (bits_of(as_float(size) + 0.5f) - 0x3f000000);
    else result.bits = sign | (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
}

// ---- Codes times whole numbers: one instruction for four k of a lane, or for two ---------------------------

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool IN_WHOLE_NUMBERS = true, IN_WORDS = false;
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr bool IN_WHOLE_NUMBERS = true, IN_WORDS = true;
#else
constexpr bool IN_WHOLE_NUMBERS = false, IN_WORDS = false;
#endif

// A group of a row in fixed point: an element is scale * (p0 + 2^8 p1 + 2^16 p2), with parts of a byte, or
// scale * (p0 + 2^16 p1), with parts of a word. So many are as precise as float32, and sums of their products
// with codes are exact. W8A8 has one.
using Part = std::conditional_t<IN_WORDS, int16_t, int8_t>;
constexpr int PART_BITS = 8 * sizeof(Part);
template <class Format>
constexpr int PARTS_OF = std::is_same_v<Format, W8A8> ? 1 : IN_WORDS ? 2 : 3;

template <int PARTS>
struct FixedGroup {
    float scale;
    int32_t sums[PARTS];  // of each part's numbers
    Part numbers[PARTS][GROUP];
};

// Codes of four k in a lane are words of two k each, the even ones and the odd ones; so the numbers that they
// meet stand in the order 0 2 1 3.
struct Codes {
    Int even, odd;
};
using Words = uint16_t __attribute__((vector_size(4 * LANES)));

int place_of(int k) { return IN_WORDS ? (k & ~3) | (k & 1) << 1 | (k >> 1 & 1) : k; }

[[maybe_unused]] inline Codes split(Int codes) {
    if (IN_WORDS) return {codes & 0x00ff00ff, (Int)((Words)codes >> 8)};
    return {codes, codes};
}

inline Int add_lanes(Int sum, Int codes, const Part* numbers) {
    int32_t lane;
    std::memcpy(&lane, numbers, sizeof lane);
#if defined(__AVX512VNNI__)
    return (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(lane));
#elif defined(__AVXVNNI__)
    return (Int)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(lane));
#elif defined(__AVX512BW__)
    return sum + (Int)_mm512_madd_epi16((__m512i)codes, _mm512_set1_epi32(lane));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (Int)_mm256_madd_epi16((__m256i)codes, _mm256_set1_epi32(lane));
#else
    return sum + codes * lane;  // (never called)
#endif
}

[[maybe_unused]] inline Int add_four(Int sum, const Codes& codes, const Part* numbers) {
    if (IN_WORDS) return add_lanes(add_lanes(sum, codes.even, numbers), codes.odd, numbers + 2);
    return add_lanes(sum, codes.even, numbers);
}

using Narrow = Part __attribute__((vector_size(LANES * sizeof(Part))));

template <int PARTS, class T>
void in_parts(const T* row, int64_t count, FixedGroup<PARTS>& group) {
    constexpr float MOST = PARTS == 1 ? 127 : 8.355e6f;  // a little less than three bytes hold
    float values[GROUP] = {};
    for (int k = 0; k < count; k++) values[place_of(k)] = widened(row[k]);
    Vec largest = {}, zeros = {};
    for (int k = 0; k < GROUP; k += LANES) {
        const Vec value = load(values + k), size = value < 0 ? -value : value;
        largest = size > largest ? size : largest;
        zeros += value * 0.f;
    }
    const float furthest = max_of(largest), zero = sum_of(zeros);  // NaN if one is not finite: so is what it meets
    const bool is_zero = !(zero == 0) || furthest < 1e-30f;
    group.scale = furthest / MOST + zero;
    Int sums[PARTS] = {};
    for (int k = 0; k < GROUP; k += LANES) {
        const Vec value = load(values + k) * (MOST / furthest);
        Int rest = is_zero ? Int{} : __builtin_convertvector(value + (value < 0 ? Vec{} - 0.5f : Vec{} + 0.5f), Int);
        for (int part = 0; part < PARTS; part++) {
            const Int number = rest << (32 - PART_BITS) >> (32 - PART_BITS);
            const Narrow numbers = __builtin_convertvector(number, Narrow);
            std::memcpy(group.numbers[part] + k, &numbers, sizeof numbers);
            sums[part] += number;
            rest = (rest - number) >> PART_BITS;
        }
    }
    for (int part = 0; part < PARTS; part++)
        group.sums[part] = (int32_t)sum_of(__builtin_convertvector(sums[part], Vec));
}

constexpr int MOST_PARTS = 6;  // whose sums the registers hold

// sums[i][] += the products of a row of lanes with the numbers k, k + 1, ... of each of N_PARTS parts.
template <class Format, int NUM_PARTS, int N, class NumbersOf>
inline __attribute__((always_inline)) void add_line(Int (&sums)[NUM_PARTS][N], const char* source,
                                                    NumbersOf numbers_of, int k) {
    Int raw[N];
#pragma GCC unroll 8
    for (int v = 0; v < N; v++) std::memcpy(&raw[v], source + v * sizeof(Vec), sizeof(Vec));
#pragma GCC unroll 2
    for (int i = 0; i < Format::STEP / 4; i++, k += 4) {
        Codes codes[N];
#pragma GCC unroll 8
        for (int v = 0; v < N; v++) codes[v] = split(Format::STEP == 4 ? raw[v] : raw[v] >> 4 * i & 0x0f0f0f0f);
#pragma GCC unroll 8
        for (int part = 0; part < NUM_PARTS; part++)
#pragma GCC unroll 8
            for (int v = 0; v < N; v++) sums[part][v] = add_four(sums[part][v], codes[v], numbers_of(part) + k);
    }
}

// total += scale * the products of a row with a group: `sums` are those of its parts.
template <int PARTS>
inline void finish(const Int (&sums)[PARTS], float row_scale, const BFloat16* scales, float* total) {
    Vec sum = {};
    for (int part = PARTS - 1; part >= 0; part--)
        sum = sum * (float)(1 << PART_BITS) + __builtin_convertvector(sums[part], Vec);
    store(total, load(total) + sum * row_scale * load(scales));
}

template <class Format, int PARTS, int R>
void add_group(const Group& group, const FixedGroup<PARTS>* rows, int64_t stride, float* totals) {
    constexpr int N = LANES == 16 ? VECTORS : 2;  // what the registers hold
    const auto numbers_of = [&](int i) { return rows[i / PARTS * stride].numbers[i % PARTS]; };
    for (int first = 0; first < VECTORS; first += N) {
        Int sums[R * PARTS][N];
        for (int i = 0; i < R * PARTS; i++)
            for (Int& sum : sums[i]) sum = Int{} - Format::ZERO * rows[i / PARTS * stride].sums[i % PARTS];
        const char* source = group.weights + first * sizeof(Vec);
        const char* coming = group.coming + first * group.stride / VECTORS;
        for (int k = 0; k < GROUP; k += Format::STEP, source += 4 * WIDTH, coming += group.stride) {
            fetch(coming, group.stride);
            add_line<Format>(sums, source, numbers_of, k);
        }
        for (int v = 0; v < N; v++)
            for (int r = 0; r < R; r++) {
                Int own[PARTS];
                for (int part = 0; part < PARTS; part++) own[part] = sums[r * PARTS + part][v];
                finish(own, rows[r * stride].scale, group.scales + (first + v) * LANES,
                       totals + r * WIDTH + (first + v) * LANES);
            }
    }
}

template <class Format, int PARTS, int R = MOST_PARTS / PARTS>
void add_some(int num_rows, const Group& group, const FixedGroup<PARTS>* rows, int64_t stride, float* totals) {
    if constexpr (R > 1)
        if (num_rows < R) return add_some<Format, PARTS, R - 1>(num_rows, group, rows, stride, totals);
    add_group<Format, PARTS, R>(group, rows, stride, totals);
}

template <class Format, int PARTS>
void add_in_turns(int64_t num_rows, const Group& group, const FixedGroup<PARTS>* rows, int64_t stride, float* totals) {
    Int sums[STREAMS][MOST_IN_STREAMS<Format>][VECTORS];
    for (int stream = 0; stream < group.num_streams; stream++)
        for (int i = 0; i < num_rows * PARTS; i++)
            for (Int& sum : sums[stream][i]) sum = Int{} - Format::ZERO * rows[i / PARTS * stride].sums[i % PARTS];
    in_turns<Format>(group, num_rows * PARTS, sums,
                     [&](auto& own, const char* source, int i, int k) __attribute__((always_inline)) {
        add_line<Format>(own, source, [&](int) { return rows[i / PARTS * stride].numbers[i % PARTS]; }, k);
    });
    for (int stream = 0; stream < group.num_streams; stream++)
        for (int r = 0; r < num_rows; r++)
            for (int v = 0; v < VECTORS; v++) {
                Int own[PARTS];
                for (int part = 0; part < PARTS; part++) own[part] = sums[stream][r * PARTS + part][v];
                finish(own, rows[r * stride].scale, group.scales + stream * group.stream_bytes / 2 + v * LANES,
                       totals + (stream * num_rows + r) * WIDTH + v * LANES);
            }
}

// ---- All panels ------------------------------------------------------------------------------------------

int64_t groups_of(const Product& call) { return (call.size + GROUP - 1) / GROUP; }

template <class T>
const T* row_of(const Product& call, int64_t r) {
    return (const T*)call.rows + r * call.row_stride;
}

template <class T>
struct Rows {  // the rows as the kernel reads them. Rounded ones stay whole numbers, whose sums are exact.
    std::vector<float> elements;
    std::vector<RowGroup> groups;
    int64_t stride;

    Rows(const Product& call, bool in_pairs, bool with_sums, bool rounds) {
        const int64_t num_groups = groups_of(call);
        groups.assign(call.num_rows * num_groups, {0, 1});
        stride = num_groups * GROUP >> in_pairs;
        elements.resize(call.num_rows * stride);  // (zeros behind the end)
        for (int64_t r = 0; r < call.num_rows; r++) {
            const T* row = row_of<T>(call, r);
            float* own = &elements[r * stride];
            if (in_pairs) {
                std::memcpy(own, row, call.size * sizeof(T));
                continue;
            }
            for (int64_t k = 0; k < call.size; k++) own[k] = widened(row[k]);
            for (int64_t g = 0; rounds && g < num_groups; g++) {
                FixedGroup<1> group;
                in_parts(own + g * GROUP, GROUP, group);
                for (int k = 0; k < GROUP; k++) own[g * GROUP + k] = group.numbers[0][k];
                groups[r * num_groups + g].scale = group.scale;
            }
            for (int64_t g = 0; with_sums && g < num_groups; g++) {
                Vec sum = {};
                for (int64_t k = 0; k < GROUP; k += LANES) sum += load(own + g * GROUP + k);
                groups[r * num_groups + g].sum = sum_of(sum);
            }
        }
    }
};

template <int PARTS, class T>
struct FixedRows {  // the same in fixed point
    std::vector<FixedGroup<PARTS>> groups;

    FixedRows(const Product& call, bool, bool, bool) : groups(call.num_rows * groups_of(call)) {
        for (int64_t r = 0; r < call.num_rows; r++)
            for (int64_t g = 0, start = 0; start < call.size; g++, start += GROUP)
                in_parts(row_of<T>(call, r) + start, std::min<int64_t>(GROUP, call.size - start),
                         groups[r * groups_of(call) + g]);
    }
};

template <class Format>
constexpr bool rounds = std::is_same_v<Format, W8A8>;

template <class Format, class T>
constexpr bool can_pair = HAS_PAIRS && std::is_same_v<T, BFloat16> && !rounds<Format>;

template <class Format, class T, int PARTS>  // of an element; 0: it stays a float
class Multiplication {
    static constexpr bool IS_CODED = Format::OFFSET != 0;
    static constexpr int64_t SCALE_BYTES = IS_CODED ? WIDTH * sizeof(BFloat16) : 0;
    static constexpr int64_t GROUP_BYTES = 4 * WIDTH * GROUP / Format::STEP + SCALE_BYTES;
    static constexpr bool CAN_PAIR = can_pair<Format, T>;
    static constexpr bool IS_NATIVE =  // (a shift is all that bfloat16 takes)
        std::is_same_v<Format, Float32> || (std::is_same_v<Format, Bfloat16> && (CAN_PAIR || LANES == 8));

    const Product& call;
    const bool expands = !IS_NATIVE && !PARTS && call.num_rows > MOST_TO_DECODE<Format>;
    const bool in_pairs = CAN_PAIR && (expands || IS_NATIVE);
    const bool in_streams = call.num_rows * std::max(PARTS, 1) <= MOST_IN_STREAMS<Format>;
    const std::conditional_t<(PARTS > 0), FixedRows<PARTS, T>, Rows<T>> rows{call, in_pairs, IS_CODED, rounds<Format>};

    // totals [streams, rows, WIDTH] += the products of rows first to last with a group of each stream; `numbers`
    // is where it expands.
    void add(Group group, int64_t g, int64_t first, int64_t last, char* numbers, float* totals) const {
        const int64_t num_groups = groups_of(call);
        if constexpr (MOST_IN_STREAMS<Format> > 0)
            if (in_streams) {
                if constexpr (PARTS)
                    return add_in_turns<Format, PARTS>(last, group, &rows.groups[g], num_groups, totals);
                else
                    return add_in_turns<Format>(last, group, &rows.elements[g * GROUP], rows.stride, &rows.groups[g],
                                                num_groups, totals);
            }
        const int64_t most = PARTS     ? MOST_PARTS / std::max(PARTS, 1)
                             : expands ? MOST_ROWS<Float32>
                                       : MOST_ROWS<Format>;
        const int64_t num_passes = (last - first + most - 1) / most;
        const int64_t rows_at_once = (last - first + num_passes - 1) / num_passes;
        if (num_passes > 1) {
            group.coming += GROUP_BYTES - AHEAD;
            group.stride /= num_passes;
        }
        if (expands) {
            expand<Format>(group.weights, in_pairs, numbers);
            group.weights = numbers;
        }
        for (int64_t r = first; r < last; r += rows_at_once) {
            const int num = (int)std::min(rows_at_once, last - r);
            float* own = totals + (r - first) * WIDTH;
            if (r > first) group.coming += GROUP_BYTES / num_passes;
            if constexpr (PARTS) {
                add_some<Format, PARTS>(num, group, &rows.groups[r * num_groups + g], num_groups, own);
            } else {
                const float* elements = &rows.elements[r * rows.stride + (g * GROUP >> in_pairs)];
                const RowGroup* own_groups = &rows.groups[r * num_groups + g];
                const auto add_as = [&](auto format) {
                    add_some<decltype(format)>(num, group, elements, rows.stride, own_groups, num_groups, own);
                };
                if (in_pairs) {
                    if constexpr (CAN_PAIR) add_as(Pairs{});
                } else if (expands) {
                    add_as(Float32{});
                } else {
                    add_as(Format{});
                }
            }
        }
    }

    void write(int64_t panel, int64_t first, int64_t last, const float* totals) const {
        const int64_t start = panel * WIDTH, width = std::min<int64_t>(WIDTH, call.num_outputs - start);
        const T* bias = call.bias ? (const T*)call.bias + start : nullptr;
        for (int64_t r = first; r < last; r++, totals += WIDTH) {
            T* output = (T*)call.output + r * call.num_outputs + start;
            for (int64_t o = 0; o < width; o++) narrow(totals[o] + (bias ? widened(bias[o]) : 0.f), output[o]);
        }
    }

    // Panels first_panel to last_panel.
    void run(int64_t first_panel, int64_t last_panel) const {
        const int64_t most = in_streams ? STREAMS : 1, stream_panels = (last_panel - first_panel + most - 1) / most;
        for (int64_t panel = first_panel; panel < first_panel + stream_panels; panel++) {
            alignas(64) float totals[ROW_BLOCK * WIDTH];
            alignas(64) char numbers[4 * WIDTH * GROUP];
            const int64_t num_streams = (last_panel - panel + stream_panels - 1) / stream_panels;
            for (int64_t first = 0; first < call.num_rows; first += ROW_BLOCK) {
                const int64_t last = std::min(first + ROW_BLOCK, call.num_rows), size = (last - first) * WIDTH;
                std::fill(totals, totals + num_streams * size, 0.f);
                for (int64_t g = 0; g < groups_of(call); g++) {
                    const char* start = call.panels + panel * call.panel_bytes + g * GROUP_BYTES;
                    const int count = (int)std::min<int64_t>(GROUP, call.size - g * GROUP);
                    add({start + SCALE_BYTES, IS_CODED ? (const BFloat16*)start : nullptr, count, start + AHEAD, 4 * WIDTH,
                         (int)num_streams, stream_panels * call.panel_bytes}, g, first, last, numbers, totals);
                }
                for (int64_t stream = 0; stream < num_streams; stream++)
                    write(panel + stream * stream_panels, first, last, totals + stream * size);
            }
        }
    }

public:
    explicit Multiplication(const Product& call) : call(call) {}

    void run() const {
        const int64_t num_panels = (call.num_outputs + WIDTH - 1) / WIDTH;
        const bool is_small = call.num_rows * num_panels * call.panel_bytes < PARALLEL_BYTES;
        const int64_t num_parts = is_small ? 1 : call.num_threads;
#pragma omp parallel for num_threads((int)num_parts) schedule(static)
        for (int64_t part = 0; part < num_parts; part++)
            run(num_panels * part / num_parts, num_panels * (part + 1) / num_parts);
    }
};

template <class Format, class T>
void multiply(const Product& call) {
    // Many rows in bfloat16 are quicker in pairs, and more than a few are quicker as floats than in two words.
    constexpr bool ALWAYS = !can_pair<Format, T> && !(IN_WORDS && PARTS_OF<Format> > 1);
    if constexpr (IN_WHOLE_NUMBERS && Format::OFFSET != 0)
        if (ALWAYS || call.num_rows <= (IN_WORDS ? MOST_IN_WORDS : MOST_TO_DECODE<Format>))
            return Multiplication<Format, T, PARTS_OF<Format>>(call).run();
    Multiplication<Format, T, 0>(call).run();
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
