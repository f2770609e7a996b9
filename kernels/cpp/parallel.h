// A parallel loop.

#pragma once

#include <cstdint>

namespace {

// body(0) to body(count - 1). A single thread does without OpenMP: GCC's would set up a team for each loop, and end it
// with a system call that wakes nobody. A decode step of twelve layers has a hundred such loops.
template <class Body>
void in_parallel(int64_t count, int64_t num_threads, const Body& body) {
    if (num_threads <= 1) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
#pragma omp parallel for num_threads((int)num_threads) schedule(static)
    for (int64_t i = 0; i < count; i++) body(i);
}

constexpr int64_t PARALLEL_ELEMENTS = 1 << 16;  // below that, waking threads costs more than it saves

[[maybe_unused]] int64_t threads_for(int64_t elements, int64_t num_threads) {
    return elements < PARALLEL_ELEMENTS ? 1 : num_threads;
}

}  // namespace
