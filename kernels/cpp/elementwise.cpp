// The operations between two matrix multiplications of a decoder layer, each fused into one pass over its rows.
//
//     norm      x / rms(x) * weight          rotate    (a, b) -> (a cos - b sin, b cos + a sin)
//     gate      silu(gate) * up, or gelu     greedy    argmax, and its log-probability
//
// PyTorch takes 7, 10 and 2 passes for the first three, each with a call, an allocation and a round trip to memory.
// Arithmetic is float32; rows are float32, bfloat16 or float16.

#include "calls.h"
#include "parallel.h"
#include "vectors.h"

#include <algorithm>
#include <limits>

namespace {

// Rows of `num_heads` heads of `dim` elements per token; token strides are in elements. May be in place.
// A row is rounded before a weight of its own type, and only after a weight of float32, as in the models.
template <class T, class Weight>
void norm(const T* input, int64_t input_stride, T* output, int64_t output_stride, int64_t num_tokens,
          int64_t num_heads, int64_t dim, const Weight* weight, float epsilon, int64_t num_threads) {
    in_parallel(num_tokens, threads_for(num_tokens * num_heads * dim, num_threads), [&](int64_t token) {
        for (int64_t head = 0; head < num_heads; head++) {
            const T* row = input + token * input_stride + head * dim;
            T* result = output + token * output_stride + head * dim;
            Vec squares = {};
            for (int64_t d = 0; d < dim; d += LANES) {
                const Vec x = load(row + d, dim - d);
                squares += x * x;
            }
            const float factor = 1 / std::sqrt(sum_of(squares) / dim + epsilon);
            for (int64_t d = 0; d < dim; d += LANES) {
                Weight normed[LANES];
                store(normed, load(row + d, dim - d) * factor);
                store(result + d, load(weight + d, dim - d) * load(normed), dim - d);
            }
        }
    });
}

// Rotary position embedding in place: element d of a head turns with element d + rotary_dim / 2.
template <class T>
void rotate(T* rows, int64_t stride, const T* cosines, const T* sines, int64_t num_tokens, int64_t num_heads,
            int64_t dim, int64_t rotary_dim, int64_t num_threads) {
    const int64_t half = rotary_dim / 2;
    in_parallel(num_tokens, threads_for(num_tokens * num_heads * dim, num_threads), [&](int64_t token) {
        const T *c = cosines + token * rotary_dim, *s = sines + token * rotary_dim;
        for (int64_t head = 0; head < num_heads; head++) {
            T *first = rows + token * stride + head * dim, *second = first + half;
            for (int64_t d = 0; d < half; d += LANES) {
                const int64_t left = half - d;
                const Vec a = load(first + d, left), b = load(second + d, left);
                store(first + d, a * load(c + d, left) - b * load(s + d, left), left);
                store(second + d, b * load(c + half + d, left) + a * load(s + half + d, left), left);
            }
        }
    });
}

// output = f(gate) * up, both in a row of 2 * dim: silu(x) = x / (1 + e^-x), and gelu with its tanh:
// gelu(x) = x / 2 * (1 + tanh(z / 2)) = x / (1 + e^-z) with z = sqrt(8 / pi) * (x + 0.044715 x^3).
template <bool is_gelu, class T>
void gate(const T* input, T* output, int64_t num_tokens, int64_t dim, int64_t num_threads) {
    in_parallel(num_tokens, threads_for(num_tokens * dim, num_threads), [&](int64_t token) {
        const T *gates = input + token * 2 * dim, *ups = gates + dim;
        for (int64_t d = 0; d < dim; d += LANES) {
            const Vec x = load(gates + d, dim - d);
            const Vec z = is_gelu ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
            const Vec power = exponential(z > -87.f ? -z : Vec{} + 87.f);  // beyond, x / e^87 is 0 anyway
            store(output + token * dim + d, x / (1.f + power) * load(ups + d, dim - d), dim - d);
        }
    });
}

// The first largest of a row, and log(e^largest / sum of e^x) = -log(sum of e^(x - largest)).
template <class T>
void greedy(const T* row, int64_t size, float* result) {
    const auto lanes_at = [&](int64_t i) {  // -inf after the end of the row
        if (i + LANES <= size) return load(row + i);
        float end[LANES];
        store(end, load(row + i, size - i));
        std::fill(end + (size - i), end + LANES, -std::numeric_limits<float>::infinity());
        return load(end);
    };
    Vec top = Vec{} - std::numeric_limits<float>::infinity();
    Int start = {};  // where each lane's largest was
    for (int64_t i = 0; i < size; i += LANES) {
        const Vec next = lanes_at(i);
        start = next > top ? Int{} + (int32_t)i : start;
        top = next > top ? next : top;
    }
    const float largest = max_of(top);
    int64_t token = size - 1;
    for (int lane = 0; lane < LANES; lane++)
        if (top[lane] == largest) token = std::min<int64_t>(token, start[lane] + lane);
    Vec sums = {};
    for (int64_t i = 0; i < size; i += LANES) sums += exponential(lanes_at(i) - largest);
    result[0] = (float)token;
    result[1] = -std::log(sum_of(sums));
}

template <class T>
void greedy_rows(const T* logits, int64_t num_rows, int64_t vocab_size, float* results, int64_t num_threads) {
    in_parallel(num_rows, threads_for(num_rows * vocab_size, num_threads), [&](int64_t row) {
        greedy(logits + row * vocab_size, vocab_size, results + 2 * row);
    });
}

}  // namespace

extern "C" {

#define FOR_TYPE(T, NAME)                                                                                     \
    void norm_##NAME(const void* input, int64_t input_stride, void* output, int64_t output_stride,            \
                     int64_t tokens, int64_t heads, int64_t dim, const void* weight, double epsilon,          \
                     int64_t threads) {                                                                       \
        norm((const T*)input, input_stride, (T*)output, output_stride, tokens, heads, dim, (const T*)weight,  \
             (float)epsilon, threads);                                                                        \
    }                                                                                                         \
    void wide_norm_##NAME(const void* input, int64_t input_stride, void* output, int64_t output_stride,       \
                          int64_t tokens, int64_t heads, int64_t dim, const void* weight, double epsilon,     \
                          int64_t threads) {                                                                  \
        norm((const T*)input, input_stride, (T*)output, output_stride, tokens, heads, dim,                    \
             (const float*)weight, (float)epsilon, threads);                                                  \
    }                                                                                                         \
    void rotate_##NAME(void* rows, int64_t stride, const void* cosines, const void* sines, int64_t tokens,    \
                       int64_t heads, int64_t dim, int64_t rotary_dim, int64_t threads) {                     \
        rotate((T*)rows, stride, (const T*)cosines, (const T*)sines, tokens, heads, dim, rotary_dim, threads); \
    }                                                                                                         \
    void gate_##NAME(const void* input, void* output, int64_t tokens, int64_t dim, int64_t threads) {         \
        gate<false>((const T*)input, (T*)output, tokens, dim, threads);                                       \
    }                                                                                                         \
    void gelu_gate_##NAME(const void* input, void* output, int64_t tokens, int64_t dim, int64_t threads) {    \
        gate<true>((const T*)input, (T*)output, tokens, dim, threads);                                        \
    }                                                                                                         \
    void greedy_##NAME(const void* logits, int64_t rows, int64_t vocab_size, float* results,                  \
                       int64_t threads) {                                                                     \
        greedy_rows((const T*)logits, rows, vocab_size, results, threads);                                    \
    }
FOR_TYPE(float, float32)
FOR_TYPE(BFloat16, bfloat16)
FOR_TYPE(Half, float16)
}
