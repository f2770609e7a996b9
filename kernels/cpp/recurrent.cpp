// What recurrent layers compute for one token of each sequence, and how it changes their states.
//
//     convolve    output[c] = sum over i of states[c][i] * weight[c][i], the last states[c][i] being the token's
//     delta rule  state S [Dk, Dv]:  S *= e^decay;  S += k (v - k S)^T * beta;  output = q S
//     Mamba 2     state S [P, N]:    S *= e^(dt A);  S += dt x B^T;             output = S C + D x
//
// Arithmetic is float32; rows are float32, bfloat16 or float16.

#include "parallel.h"
#include "vectors.h"

#include <vector>

namespace {

// Along each channel of a sequence, of its last `size` elements, which are shifted by one.
template <class T>
void convolve(T* states, const T* rows, int64_t stride, const T* weight, const T* bias, T* output,
              int64_t num_rows, int64_t num_channels, int64_t size, int64_t num_threads) {
    in_parallel(num_rows, threads_for(num_rows * num_channels * size, num_threads), [&](int64_t row) {
        std::vector<float> products(LANES * size);
        for (int64_t first = 0; first < num_channels; first += LANES) {
            const int64_t left = num_channels - first, count = std::min<int64_t>(left, LANES) * size;
            T* own = states + (row * num_channels + first) * size;
            std::memmove(own, own + 1, (count - 1) * sizeof(T));
            for (int64_t c = 0; c < count / size; c++)
                own[c * size + size - 1] = rows[row * stride + first + c];
            for (int64_t i = 0; i < count; i += LANES)
                store(&products[i], load(own + i, count - i) * load(weight + first * size + i, count - i), count - i);
            float sums[LANES] = {};
            for (int64_t c = 0; c < count / size; c++)
                for (int64_t k = 0; k < size; k++) sums[c] += products[c * size + k];
            const Vec added = bias ? load(bias + first, left) : Vec{};
            store(output + row * num_channels + first, load(sums) + added, left);
        }
    });
}

// A vector of `dim` floats whose length is `length`, from a row.
template <class T>
void normalize(const T* row, int64_t dim, float length, float* output) {
    Vec squares = {};
    for (int64_t d = 0; d < dim; d += LANES) {
        const Vec x = load(row + d, dim - d);
        squares += x * x;
    }
    const float factor = length / std::sqrt(sum_of(squares) + 1e-6f);
    for (int64_t d = 0; d < dim; d += LANES) store(output + d, load(row + d, dim - d) * factor, dim - d);
}

struct DeltaRule {
    float* states;  // [R, H, Dk, Dv]
    const void *query, *key, *value;  // [R, Hk, Dk], [R, Hk, Dk], [R, H, Dv]
    const float *decay, *beta;  // [R, H]
    void* output;  // [R, H, Dv]
    int64_t num_rows, num_heads, num_key_heads, key_dim, value_dim, num_threads;
};

template <class T>
void apply(const DeltaRule& call) {
    const int64_t size = call.key_dim * call.value_dim, count = call.num_rows * call.num_heads;
    in_parallel(count, threads_for(count * size, call.num_threads), [&](int64_t i) {
        const int64_t row = i / call.num_heads, head = i % call.num_heads;
        const int64_t key_head = row * call.num_key_heads + head * call.num_key_heads / call.num_heads;
        const int64_t dim = call.value_dim;
        std::vector<float> q(call.key_dim), k(call.key_dim), delta(dim), output(dim);
        const int64_t start = key_head * call.key_dim;
        normalize((const T*)call.query + start, call.key_dim, 1 / std::sqrt((float)call.key_dim), &q[0]);
        normalize((const T*)call.key + start, call.key_dim, 1, &k[0]);
        const float decay = std::exp(call.decay[i]), beta = call.beta[i];
        float* state = call.states + i * size;
        for (int64_t r = 0; r < call.key_dim; r++)
            for (int64_t d = 0; d < dim; d += LANES) {
                const int64_t left = dim - d;
                store(&delta[d], load(&delta[d], left) + load(state + r * dim + d, left) * (k[r] * decay), left);
            }
        for (int64_t d = 0; d < dim; d += LANES) {
            const int64_t left = dim - d;
            const Vec value = load((const T*)call.value + i * dim + d, left);
            store(&delta[d], (value - load(&delta[d], left)) * beta, left);
        }
        for (int64_t r = 0; r < call.key_dim; r++)
            for (int64_t d = 0; d < dim; d += LANES) {
                const int64_t left = dim - d;
                float* own = state + r * dim + d;
                const Vec updated = load(own, left) * decay + load(&delta[d], left) * k[r];
                store(own, updated, left);
                store(&output[d], load(&output[d], left) + updated * q[r], left);
            }
        for (int64_t d = 0; d < dim; d += LANES)
            store((T*)call.output + i * dim + d, load(&output[d], dim - d), dim - d);
    });
}

struct Mamba2 {
    float* states;  // [R, H, P, N]
    const void *x, *B, *C;  // [R, H, P], [R, G, N], [R, G, N]
    const float *dt, *A, *D;  // [R, H], [H], [H]
    void* output;  // [R, H, P]
    int64_t num_rows, num_heads, num_groups, width, size, num_threads;
};

// One pass over the states: each is read and written once.
template <class T>
void apply(const Mamba2& call) {
    const int64_t area = call.width * call.size, count = call.num_rows * call.num_heads;
    in_parallel(count, threads_for(count * area, call.num_threads), [&](int64_t i) {
        const int64_t row = i / call.num_heads, head = i % call.num_heads;
        const int64_t group = row * call.num_groups + head * call.num_groups / call.num_heads;
        const int64_t size = call.size, padded = (size + LANES - 1) / LANES * LANES;
        std::vector<float> b(padded), c(padded);
        for (int64_t n = 0; n < size; n += LANES) {
            store(&b[n], load((const T*)call.B + group * size + n, size - n));
            store(&c[n], load((const T*)call.C + group * size + n, size - n));
        }
        const float dt = call.dt[i], decay = std::exp(dt * call.A[head]);
        for (int64_t first = 0; first < call.width; first += LANES) {
            const int64_t start = i * call.width + first, left = call.width - first;
            const Vec x = load((const T*)call.x + start, left), added = x * dt;
            Vec sums[LANES] = {};
            for (int64_t p = 0; p < std::min<int64_t>(left, LANES); p++)
                for (int64_t n = 0; n < size; n += LANES) {
                    float* own = call.states + (start + p) * size + n;
                    const Vec updated = load(own, size - n) * decay + load(&b[n]) * added[p];
                    store(own, updated, size - n);
                    sums[p] += updated * load(&c[n]);
                }
            store((T*)call.output + start, sums_of(sums) + x * call.D[head], left);
        }
    });
}

}  // namespace

extern "C" {

#define FOR_TYPE(T, NAME)                                                                                     \
    void convolve_##NAME(void* states, const void* rows, int64_t stride, const void* weight,                  \
                         const void* bias, void* output, int64_t num_rows, int64_t channels, int64_t size,    \
                         int64_t threads) {                                                                   \
        convolve((T*)states, (const T*)rows, stride, (const T*)weight, (const T*)bias, (T*)output, num_rows,  \
                 channels, size, threads);                                                                    \
    }                                                                                                         \
    void delta_rule_##NAME(const DeltaRule* call) { apply<T>(*call); }                                        \
    void mamba2_##NAME(const Mamba2* call) { apply<T>(*call); }
FOR_TYPE(float, float32)
FOR_TYPE(BFloat16, bfloat16)
FOR_TYPE(Half, float16)
}
