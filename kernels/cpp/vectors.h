// Vectors of floats, rows of three types, sums and exponentials, in GCC's and Clang's vector extensions, so any CPU
// will do; AVX-512 has registers for 16 floats.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int STRIP = 2 * LANES;  // elements of a row that are loaded together

using Vec = float __attribute__((vector_size(4 * LANES)));
using Int = int32_t __attribute__((vector_size(4 * LANES)));

template <class V>
ALWAYS_INLINE V read_as(const void* source) {  // of any alignment
    V value;
    std::memcpy(&value, source, sizeof value);
    return value;
}

inline Vec load(const float* source) { return read_as<Vec>(source); }

inline void store(float* destination, Vec vector) { std::memcpy(destination, &vector, sizeof vector); }

struct BFloat16 {
    uint16_t bits;
};
using Halves = uint16_t __attribute__((vector_size(2 * LANES)));

inline Vec load(const BFloat16* source) {
    return (Vec)(__builtin_convertvector(read_as<Halves>(source), Int) << 16);
}

inline Int rounded(Vec vector) {  // to nearest even; a bfloat16 is the upper half of a lane
    const Int bits = (Int)vector;
    return vector == vector ? bits + 0x7fff + (bits >> 16 & 1) : Int{} + 0x7fc00000;
}

inline void store(BFloat16* destination, Vec vector) {
    const Halves halves = __builtin_convertvector(rounded(vector) >> 16, Halves);
    std::memcpy(destination, &halves, sizeof halves);
}

struct Half {  // float16
    uint16_t bits;
};

inline Vec widened(Halves halves) {
#if defined(__AVX512F__)  // (without a mask GCC 12 warns about its own headers)
    return (Vec)_mm512_maskz_cvtph_ps((__mmask16)-1, (__m256i)halves);
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps((__m128i)halves);
#else
    const Int half = __builtin_convertvector(halves, Int), size = (half & 0x7fff) << 13;
    const Vec finite = (Vec)size * 0x1p112f;  // subnormal numbers too; only the last exponent is special
    const Int bits = size >= 0x0f800000 ? size | 0x7f800000 : (Int)finite;
    return (Vec)(bits | (half & 0x8000) << 16);
#endif
}

inline Halves narrowed(Vec vector) {  // to nearest even
#if defined(__AVX512F__)
    return (Halves)_mm512_maskz_cvtps_ph((__mmask16)-1, (__m512)vector, 0);
#elif defined(__F16C__)
    return (Halves)_mm256_cvtps_ph((__m256)vector, 0);
#else
    const Int size = (Int)vector & 0x7fffffff, sign = (Int)vector >> 16 & 0x8000;
    const Int normal = (size + 0xfff + (size >> 13 & 1) - (112 << 23)) >> 13;
    const Int subnormal = (Int)((Vec)size + 0.5f) - 0x3f000000;
    const Int finite = size < 0x38800000 ? subnormal : normal;
    const Int all = size >= 0x477ff000 ? Int{} + 0x7c00 : finite;  // 65520 and more round to infinity
    return __builtin_convertvector(size > 0x7f800000 ? Int{} + 0x7e00 : all | sign, Halves);
#endif
}

inline Vec load(const Half* source) { return widened(read_as<Halves>(source)); }

inline void store(Half* destination, Vec vector) {
    const Halves halves = narrowed(vector);
    std::memcpy(destination, &halves, sizeof halves);
}

// The end of a row: `count` elements, at most LANES; `load` fills up with zeros, `store` leaves the rest as it is.
template <class T>
Vec load(const T* source, int64_t count) {
    if (count >= LANES) return load(source);
    T elements[LANES] = {};
    std::memcpy(elements, source, count * sizeof(T));
    return load(elements);
}

template <class T>
void store(T* destination, Vec vector, int64_t count) {
    if (count >= LANES) return store(destination, vector);
    T elements[LANES];
    store(elements, vector);
    std::memcpy(destination, elements, count * sizeof(T));
}

// ---- Rows of the three storage types: STRIP elements become two vectors ----------------------------------

template <class T>
void load_strip(const T* source, Vec& first, Vec& second) {
    first = load(source);
    second = load(source + LANES);
}

// Two bfloat16 share a 32-bit lane; each is the upper half of a float32. So one shift gives the even elements
// and one mask the odd ones; nothing crosses lanes. Other operands have the same order (`place`).
inline void load_strip(const BFloat16* source, Vec& first, Vec& second) {
    const Int bits = read_as<Int>(source);
    first = (Vec)(bits << 16);
    second = (Vec)(bits & (int32_t)0xffff0000);
}

template <class T>
void store_strip(T* destination, Vec first, Vec second) {
    store(destination, first);
    store(destination + LANES, second);
}

inline void store_strip(BFloat16* destination, Vec first, Vec second) {
    const Int low = rounded(first) >> 16 & 0xffff, high = rounded(second) & (int32_t)0xffff0000;
    const Int bits = low | high;
    std::memcpy(destination, &bits, sizeof bits);
}

template <class T>
int place(const T*, int inside) { return inside; }
inline int place(const BFloat16*, int inside) { return inside % 2 * LANES + inside / 2; }

// A row of 80 in strips of 32: the last one begins early, so that nothing beyond the row is read.
//
//     0              32              64      80
//     | strip 0       | strip 1       |       |      what strips 1 and 2 share counts only once:
//                             | strip 2       |      in strip 2 the query is zero there (`clear_shared`)
inline int strip_start(int strip, int dim) { return std::max(0, std::min(strip, dim - STRIP)); }

// A row as floats, strip by strip; a row shorter than a strip is padded with zeros.
template <class T>
void widen_row(const T* row, int dim, float* wide) {
    T padded[STRIP] = {};
    if (dim < STRIP) row = (const T*)std::memcpy(padded, row, dim * sizeof(T));
    for (int strip = 0; strip < dim; strip += STRIP) {
        Vec first, second;
        load_strip(row + strip_start(strip, dim), first, second);
        store(wide + strip, first);
        store(wide + strip + LANES, second);
    }
}

template <class T>
void clear_shared(int dim, float* wide) {
    const int last = (dim - 1) / STRIP * STRIP, num_shared = last - strip_start(last, dim);
    for (int inside = 0; inside < num_shared; inside++) wide[last + place((T*)nullptr, inside)] = 0;
}

// Back to the row's own type and order, divided by `sum`. What two strips share is the same in both.
template <class T>
void narrow_row(const float* wide, int dim, float sum, T* row) {
    T padded[STRIP];
    T* result = dim < STRIP ? padded : row;
    for (int strip = 0; strip < dim; strip += STRIP)
        store_strip(result + strip_start(strip, dim), load(wide + strip) / sum, load(wide + strip + LANES) / sum);
    if (dim < STRIP) std::memcpy(row, padded, dim * sizeof(T));
}

// ---- Vector arithmetic -----------------------------------------------------------------------------------

// sum + a * b, rounded once. GCC fuses the two only if they end up in the same basic block: in the loop for one row,
// say, but not in that for four. A row's bits must not depend on its neighbours.
inline Vec add_product(Vec sum, Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#else
    return sum + a * b;
#endif
}

// e^x as 2^n * e^f with |f| <= ln(2) / 2 (Cephes' polynomial); exactly 0 for x < -87, -inf included.
inline Vec exponential(Vec x) {
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
Vec swapped(Vec vector, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(vector, vector, (I ^ STEP)...);
}

// Horizontal sum: lanes 1 apart, then 2, then 4, ...
template <int STEP = 1>
float sum_of(Vec vector) {
    if constexpr (STEP == LANES) return vector[0];
    else return sum_of<2 * STEP>(vector + swapped<STEP>(vector, std::make_integer_sequence<int, LANES>()));
}

template <int STEP = 1>
float max_of(Vec vector) {
    if constexpr (STEP == LANES) {
        return vector[0];
    } else {
        const Vec other = swapped<STEP>(vector, std::make_integer_sequence<int, LANES>());
        return max_of<2 * STEP>(other > vector ? other : vector);
    }
}

template <int STEP, int... I>
Vec fold(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I & STEP ? LANES + I : I)...) +
           __builtin_shufflevector(a, b, (I & STEP ? LANES + (I ^ STEP) : I ^ STEP)...);
}

// Lane i of the result is the sum of all lanes of vectors[i]: LANES horizontal sums for LANES - 1 additions.
// Always inlined, so that the vectors stay in registers: a fifth of the time of a decode in cache.
template <int STEP = 1>
ALWAYS_INLINE Vec sums_of(Vec* vectors) {
    if constexpr (STEP == LANES) {
        return vectors[0];
    } else {
        for (int i = 0; i < LANES; i += 2 * STEP)
            vectors[i] = fold<STEP>(vectors[i], vectors[i + STEP], std::make_integer_sequence<int, LANES>());
        return sums_of<2 * STEP>(vectors);
    }
}

}  // namespace
