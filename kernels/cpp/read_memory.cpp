// The sum of many floats, as fast as memory allows: what a step of few rows is compared with.
//
//     blocks of 64 floats     0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
//     read alternately        0 3 6 9, then 1 4 7 10, then 2 5 8 11
//
// On some CPUs, a single stream of reads leaves memory idle for a third of the time.

#include "vectors.h"

namespace {

constexpr int BLOCK = 64;    // floats
constexpr int STREAMS = 4;

float sum_of_blocks(const float* blocks, int64_t num_blocks) {
    const int64_t distance = (num_blocks + STREAMS - 1) / STREAMS;
    Vec sums[BLOCK / LANES] = {};
    for (int64_t i = 0; i < distance; i++)
        for (int64_t block = i; block < num_blocks; block += distance)
#pragma GCC unroll 8
            for (int v = 0; v < BLOCK / LANES; v++) sums[v] += load(blocks + block * BLOCK + v * LANES);
    float total = 0;
    for (const Vec sum : sums) total += sum_of(sum);
    return total;
}

}  // namespace

extern "C" void sum_floats(const float* numbers, int64_t count, float* result, int64_t num_threads) {
    const int64_t num_blocks = count / BLOCK;
    float total = 0;
#pragma omp parallel for num_threads((int)num_threads) schedule(static) reduction(+ : total)
    for (int64_t part = 0; part < num_threads; part++) {
        const int64_t first = num_blocks * part / num_threads, last = num_blocks * (part + 1) / num_threads;
        total += sum_of_blocks(numbers + first * BLOCK, last - first);
    }
    for (int64_t i = num_blocks * BLOCK; i < count; i++) total += numbers[i];
    *result = total;
}
