// Formats of weights in panels, of rows, and what a vector of one adds to sums with the other.

#pragma once

#include "vectors.h"

#include <type_traits>

namespace {

constexpr int WIDTH = 64;  // outputs of a panel
constexpr int VECTORS = WIDTH / LANES;
constexpr int GROUP = 64;  // k that are multiplied at a time, and share a scale

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

// The weights as they are, with rows in bfloat16: one instruction for both k of a lane, where there is one.
struct Pairs {
    [[maybe_unused]] static constexpr int STEP = 2;
    [[maybe_unused]] static constexpr float OFFSET = 0;
};

// sum += the products of the STEP elements in each lane of `raw` with those of a row.
template <class Format>
ALWAYS_INLINE Vec add_product(Vec sum, Int raw, const float* row, int i) {
    return add_product(sum, Format::value(raw, i), row[i] - Vec{});
}

#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
template <>
ALWAYS_INLINE Vec add_product<Pairs>(Vec sum, Int raw, const float* row, int i) {
    if (i) return sum;
    int32_t pair;
    std::memcpy(&pair, row, sizeof pair);
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)(__m512i)raw);
}
#else
constexpr bool HAS_PAIRS = false;
#endif

// ---- Codes times whole numbers: one instruction for four k of a lane, or for two ---------------------------

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool IN_WHOLE_NUMBERS = true, IN_WORDS = false;
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr bool IN_WHOLE_NUMBERS = true, IN_WORDS = true;
#else
constexpr bool IN_WHOLE_NUMBERS = false, IN_WORDS = false;
#endif

// A group of a row in fixed point: an element is a whole number of 16 bits, in W8A8 of 8, times a scale. Where bytes
// meet bytes, 16 bits are two parts, p0 + 2^8 p1. The sums of their products with codes are exact.
using Part = std::conditional_t<IN_WORDS, int16_t, int8_t>;
constexpr int PART_BITS = 8 * sizeof(Part);
template <class Format>
constexpr int PARTS_OF = std::is_same_v<Format, W8A8> || IN_WORDS ? 1 : 2;
template <class Format>
constexpr int MOST_STEPS = std::is_same_v<Format, W8A8> ? 127 : 127 * 256 + 127;  // of an element, from zero

template <int PARTS>
struct FixedGroup {
    float scale;
    int32_t sums[PARTS];  // of each part's numbers
    Part numbers[PARTS][GROUP];
};

// Codes of four k in a lane are words of two k each, the even ones and the odd ones; so the numbers that they
// meet stand in the order 0 2 1 3.
using Words = uint16_t __attribute__((vector_size(4 * LANES)));

struct Codes {
    Int even, odd;
};

// Arm's products take signed bytes only, so codes of 8 bits are moved by ZERO.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool SIGNED_CODES = true;
#else
constexpr bool SIGNED_CODES = false;
#endif
template <class Format>
constexpr int ZERO_CODE = SIGNED_CODES && Format::STEP == 4 ? 0 : Format::ZERO;

template <class Format>
Int bytes_of(Int raw, int nibble) {
    if (Format::STEP == 8) return raw >> 4 * nibble & 0x0f0f0f0f;
    return SIGNED_CODES ? raw ^ (int32_t)0x80808080 : raw;
}

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
#elif defined(__ARM_FEATURE_DOTPROD)
    int32x4_t sums[2];
    int8x16_t halves[2];
    std::memcpy(sums, &sum, sizeof sum);
    std::memcpy(halves, &codes, sizeof codes);
    for (int half = 0; half < 2; half++)
        sums[half] = vdotq_s32(sums[half], halves[half], vreinterpretq_s8_s32(vdupq_n_s32(lane)));
    std::memcpy(&sum, sums, sizeof sum);
    return sum;
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

template <class Format, int PARTS, class T>
void in_parts(const T* row, int64_t count, FixedGroup<PARTS>& group) {
    constexpr float MOST = MOST_STEPS<Format>;
    float own[GROUP] = {}, values[GROUP];
    for (int k = 0; k < count; k += LANES) store(own + k, load(row + k, count - k));
    for (int k = 0; k < GROUP; k++) values[place_of(k)] = own[k];
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

}  // namespace
