// Formats of weights in panels and of activations (rows), and their dot products, a vector at a time.

#pragma once

#include "vectors.h"

#include <type_traits>

namespace {

constexpr int WIDTH = 64;  // outputs of a panel
constexpr int VECTORS = WIDTH / LANES;
constexpr int GROUP = 64;  // k that are multiplied at a time and share a scale

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
#ifdef __AVX512F__  // (GCC 12 takes an eighth longer for its own conversion)
        return widened((Halves)_mm512_maskz_cvtepi32_epi16((__mmask16)-1, (__m512i)half));
#else
        return widened(__builtin_convertvector(half, Halves));
#endif
    }
};

// 0 to 255 stand for -128 to 127. As the upper bits of a mantissa, a quantized value q is 256 + q, with no
// conversion; what that adds, 384 times the sum of a row's elements, is subtracted after each group.
struct Int8 {
    static constexpr int STEP = 4, ZERO_POINT = 128;
    static constexpr float OFFSET = 256 + ZERO_POINT;
    static Vec value(Int raw, int i) {
        const Int moved = i < 2 ? raw << (15 - 8 * i) : raw >> (8 * i - 15);
        return (Vec)((moved & 0x7f8000) | 0x43800000);
    }
};

struct Int4 {  // likewise, 0 to 15 for -8 to 7
    static constexpr int STEP = 8, ZERO_POINT = 8;
    static constexpr float OFFSET = 16 + ZERO_POINT;
    static Vec value(Int raw, int i) {
        const int place = 8 * (i % 4) + i / 4 * 4;  // the lower halves of four bytes, then the upper ones
        const Int moved = place < 19 ? raw << (19 - place) : raw >> (place - 19);
        return (Vec)((moved & 0x780000) | 0x41800000);
    }
};

struct W8A8 : Int8 {};  // 8-bit activations, too

// A group of int8 or int4 as floats, still without its scales.
struct Dequantized : Float32 {};

template <class Format>
constexpr bool HAS_SCALES = Format::OFFSET != 0 || std::is_same_v<Format, Dequantized>;

// bfloat16 weights and rows: one dot-product instruction for both k of a lane, where the CPU has it.
struct Pairs {
    [[maybe_unused]] static constexpr int STEP = 2;
    [[maybe_unused]] static constexpr float OFFSET = 0;
};

// sum += element i of the STEP elements in each lane of `raw` times that of a row.
template <class Format>
ALWAYS_INLINE Vec add_product(Vec sum, Int raw, const float* row, int i) {
    return add_product(sum, Format::value(raw, i), row[i] - Vec{});
}

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
template <>
ALWAYS_INLINE Vec add_product<Pairs>(Vec sum, Int raw, const float* row, int i) {
    if (i) return sum;
    const __m512i pair = _mm512_set1_epi32(read_as<int32_t>(row));
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)(__m512i)raw);
}
#else
constexpr bool HAS_PAIRS = false;
#endif

// ---- Integer dot products: one instruction for four k of a lane, or for two ---------------------------------

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool INTEGER_DOT = true, IN_16_BITS = false;
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr bool INTEGER_DOT = true, IN_16_BITS = true;
#else
constexpr bool INTEGER_DOT = false, IN_16_BITS = false;
#endif

// A quantized group of a row: an element is a 16-bit integer (in W8A8, 8-bit) times a scale. For 8-bit dot products,
// 16 bits are two parts, p0 + 2^8 p1. Dot products with the quantized weights are exact.
using Part = std::conditional_t<IN_16_BITS, int16_t, int8_t>;
constexpr int PART_BITS = 8 * sizeof(Part);
template <class Format>
constexpr int PARTS_OF = std::is_same_v<Format, W8A8> || IN_16_BITS ? 1 : 2;
template <class Format>
constexpr int MAX_QUANTIZED = std::is_same_v<Format, W8A8> ? 127 : 127 * 256 + 127;  // of an element's absolute value

template <int PARTS>
struct QuantizedGroup {
    float scale;
    int32_t sums[PARTS];  // of each part's elements
    Part elements[PARTS][GROUP];
};

// The bytes of four k in a lane are widened to two vectors of 16 bits, of the even k and of the odd k; so the
// elements of a row are in the order 0 2 1 3.
using Words = uint16_t __attribute__((vector_size(4 * LANES)));

struct IntegerWeights {
    Int even, odd;
};

// Arm's dot products take only signed bytes, so the zero point of 8-bit weights is subtracted first.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool SIGNED_BYTES = true;
#else
constexpr bool SIGNED_BYTES = false;
#endif
template <class Format>
constexpr int ZERO_POINT_OF = SIGNED_BYTES && Format::STEP == 4 ? 0 : Format::ZERO_POINT;

template <class Format>
Int bytes_of(Int raw, int nibble) {
    if (Format::STEP == 8) return raw >> 4 * nibble & 0x0f0f0f0f;
    return SIGNED_BYTES ? raw ^ (int32_t)0x80808080 : raw;
}

int place_of(int k) { return IN_16_BITS ? (k & ~3) | (k & 1) << 1 | (k >> 1 & 1) : k; }

[[maybe_unused]] inline IntegerWeights split(Int bytes) {
    if (IN_16_BITS) return {bytes & 0x00ff00ff, (Int)((Words)bytes >> 8)};
    return {bytes, bytes};
}

inline Int add_lanes(Int sum, Int weights, const Part* elements) {
    const int32_t lane = read_as<int32_t>(elements);
#if defined(__AVX512VNNI__)
    return (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(lane));
#elif defined(__AVXVNNI__)
    return (Int)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(lane));
#elif defined(__ARM_FEATURE_DOTPROD)
    int32x4_t sums[2];
    int8x16_t halves[2];
    std::memcpy(sums, &sum, sizeof sum);
    std::memcpy(halves, &weights, sizeof weights);
    for (int half = 0; half < 2; half++)
        sums[half] = vdotq_s32(sums[half], halves[half], vreinterpretq_s8_s32(vdupq_n_s32(lane)));
    std::memcpy(&sum, sums, sizeof sum);
    return sum;
#elif defined(__AVX512BW__)
    return sum + (Int)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(lane));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (Int)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(lane));
#else
    return sum + weights * lane;  // (never called)
#endif
}

[[maybe_unused]] inline Int add_four(Int sum, const IntegerWeights& weights, const Part* elements) {
    if (IN_16_BITS) return add_lanes(add_lanes(sum, weights.even, elements), weights.odd, elements + 2);
    return add_lanes(sum, weights.even, elements);
}

using Narrow = Part __attribute__((vector_size(LANES * sizeof(Part))));

template <class Format, int PARTS, class T>
void quantize_group(const T* row, int64_t count, QuantizedGroup<PARTS>& group) {
    constexpr float LIMIT = MAX_QUANTIZED<Format>;
    float own[GROUP] = {}, values[GROUP];
    for (int k = 0; k < count; k += LANES) store(own + k, load(row + k, count - k));
    for (int k = 0; k < GROUP; k++) values[place_of(k)] = own[k];
    Vec largest = {}, zeros = {};
    for (int k = 0; k < GROUP; k += LANES) {
        const Vec value = load(values + k), size = value < 0 ? -value : value;
        largest = size > largest ? size : largest;
        zeros += value * 0.f;
    }
    const float absmax = max_of(largest), zero = sum_of(zeros);  // NaN if one is not finite: so is the result
    const bool is_zero = !(zero == 0) || absmax < 1e-30f;
    group.scale = absmax / LIMIT + zero;
    Int sums[PARTS] = {};
    for (int k = 0; k < GROUP; k += LANES) {
        const Vec value = load(values + k) * (LIMIT / absmax);
        Int rest = is_zero ? Int{} : __builtin_convertvector(value + (value < 0 ? Vec{} - 0.5f : Vec{} + 0.5f), Int);
        for (int part = 0; part < PARTS; part++) {
            const Int wide = rest << (32 - PART_BITS) >> (32 - PART_BITS);
            const Narrow elements = __builtin_convertvector(wide, Narrow);
            std::memcpy(group.elements[part] + k, &elements, sizeof elements);
            sums[part] += wide;
            rest = (rest - wide) >> PART_BITS;
        }
    }
    for (int part = 0; part < PARTS; part++)
        group.sums[part] = (int32_t)sum_of(__builtin_convertvector(sums[part], Vec));
}

}  // namespace
