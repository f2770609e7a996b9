// What recurrent layers compute for each token, and how it changes their states.
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

constexpr auto INDICES = std::make_integer_sequence<int, LANES>();

// ---- Short convolutions: a bias, then products from the last element back, whatever the number of tokens -------

template <int FIRST, int... I>
Vec every_second(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (FIRST + 2 * I)...);
}

// Four elements of each of LANES channels, [LANES, 4], as vectors of one element of each.
ALWAYS_INLINE void turn(Vec* four) {
    const Vec even[] = {every_second<0>(four[0], four[1], INDICES), every_second<0>(four[2], four[3], INDICES)};
    const Vec odd[] = {every_second<1>(four[0], four[1], INDICES), every_second<1>(four[2], four[3], INDICES)};
    for (int i = 0; i < 2; i++) {
        const Vec* source = i ? odd : even;
        four[i] = every_second<0>(source[0], source[1], INDICES);
        four[i + 2] = every_second<1>(source[0], source[1], INDICES);
    }
}

// Shift four elements of each of some channels by one, to which `last` is added from channel FIRST on.
template <int FIRST, class T, int... I>
void shift(T* own, const T* last, std::integer_sequence<int, I...>) {
    using Raw = std::conditional_t<sizeof(T) == 2, Halves, Vec>;
    const Raw a = read_as<Raw>(own), b = read_as<Raw>(last);
    const Raw shifted = __builtin_shufflevector(a, b, (I % 4 < 3 ? I + 1 : LANES + FIRST + I / 4)...);
    std::memcpy(own, &shifted, sizeof shifted);
}

// The same for LANES channels at once, of four elements each.
template <class T>
Vec convolve_four(T* own, const T* last, const T* weight, Vec sum) {
    Vec elements[4], weights[4];
    for (int i = 0; i < 4; i++) {
        elements[i] = load(own + i * LANES);
        weights[i] = load(weight + i * LANES);
    }
    shift<0>(own, last, INDICES);
    shift<LANES / 4>(own + LANES, last, INDICES);
    shift<LANES / 2>(own + 2 * LANES, last, INDICES);
    shift<3 * LANES / 4>(own + 3 * LANES, last, INDICES);
    turn(elements);
    turn(weights);
    sum = add_product(sum, load(last), weights[3]);
    for (int k = 2; k >= 0; k--) sum = add_product(sum, elements[k + 1], weights[k]);
    return sum;
}

// Along each channel of a sequence, of its last `size` elements, which are shifted by one.
template <class T>
void convolve(T* states, const T* rows, int64_t stride, const T* weight, const T* bias, T* output,
              int64_t num_rows, int64_t num_channels, int64_t size, int64_t num_threads) {
    in_parallel(num_rows, threads_for(num_rows * num_channels * size, num_threads), [&](int64_t row) {
        std::vector<float> elements(LANES * size), weights(LANES * size);
        for (int64_t first = 0; first < num_channels; first += LANES) {
            const int64_t left = num_channels - first, count = std::min<int64_t>(left, LANES) * size;
            const T* last = rows + row * stride + first;
            T *own = states + (row * num_channels + first) * size, *result = output + row * num_channels + first;
            const Vec added = bias ? load(bias + first, left) : Vec{};
            if (size == 4 && left >= LANES) {
                store(result, convolve_four(own, last, weight + first * size, added));
                continue;
            }
            std::memmove(own, own + 1, (count - 1) * sizeof(T));
            for (int64_t c = 0; c < count / size; c++) own[c * size + size - 1] = last[c];
            for (int64_t i = 0; i < count; i += LANES) {
                store(&elements[i], load(own + i, count - i));
                store(&weights[i], load(weight + first * size + i, count - i));
            }
            float sums[LANES];
            store(sums, added);
            for (int64_t c = 0; c < count / size; c++)
                for (int64_t i = (c + 1) * size - 1; i >= c * size; i--)
                    sums[c] += elements[i] * weights[i];
            store(result, load(sums), left);
        }
    });
}

// Along each channel of T tokens, before which there are zeros.
template <class T>
void convolve_tokens(const T* rows, const T* weight, const T* bias, T* output, int64_t num_rows, int64_t num_tokens,
                     int64_t num_channels, int64_t size, int64_t num_threads) {
    const int64_t width = 16 * LANES, parts = (num_channels + width - 1) / width, count = num_rows * parts;
    const int64_t elements = num_rows * num_tokens * num_channels * size;
    in_parallel(count, threads_for(elements, num_threads), [&](int64_t i) {
        const int64_t first = i % parts * width, left = std::min(width, num_channels - first);
        std::vector<float> weights(size * width), turned(size * width), added(width);
        for (int64_t k = 0; k < size * left; k += LANES)
            store(&weights[k], load(weight + first * size + k, size * left - k));
        for (int64_t c = 0; c < left; c++)
            for (int64_t k = 0; k < size; k++) turned[k * width + c] = weights[(c + 1) * size - 1 - k];
        for (int64_t c = 0; bias && c < left; c += LANES) store(&added[c], load(bias + first + c, left - c));
        const int64_t start = i / parts * num_tokens * num_channels + first;
        for (int64_t t = 0; t < num_tokens; t++)
            for (int64_t c = 0; c < left; c += LANES) {
                const int64_t place = start + t * num_channels + c;
                Vec sum = load(&added[c]);
                for (int64_t k = 0; k < std::min(size, t + 1); k++) {
                    const Vec element = load(rows + place - k * num_channels, left - c);
                    sum = add_product(sum, element, load(&turned[k * width + c]));
                }
                store(output + place, sum, left - c);
            }
    });
}

// ---- States of heads ------------------------------------------------------------------------------------------

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
    const void *query, *key, *value;  // [R, T, Hk, Dk], [R, T, Hk, Dk], [R, T, H, Dv]; a token's heads are contiguous
    const float *decay, *beta;  // [R, T, H]
    void* output;  // [R, T, H, Dv]
    int64_t query_stride, key_stride, value_stride;  // from token to token
    int64_t num_rows, num_tokens, num_heads, num_key_heads, key_dim, value_dim, num_threads;
};

constexpr int COLUMN_VECTORS = 4, SINGLE_VECTORS = LANES / 2;  // of a state, passed over together; for a single token
constexpr int64_t MOST_TOKENS = 64;  // whose queries and keys are normalized before the passes

// Some tokens of a head: normalized queries and keys [count, size], and their products.
struct Tokens {
    std::vector<float> queries, keys, products, decays, betas;
    int64_t size, count;

    Tokens(int64_t most, int64_t size)
        : queries(most * size), keys(most * size), products(most), decays(most), betas(most), size(size) {}
};

// All tokens, for N vectors of a state's columns. Each pass over them updates the state for one token and reads it for
// the next one: the first only reads, the last only updates. Between the two, the columns are in
// `own`, in cache, or for a single token where they were.
//
//     q S' = q (S e^decay + k delta^T) = (q S) e^decay + (q k) delta^T
template <int N, bool IN_PLACE, class T>
void pass_over(const Tokens& tokens, float* state, int64_t key_dim, int64_t dim, const T* values, int64_t stride,
               T* output, int64_t output_stride, int64_t left, float* own) {
    const int64_t width = IN_PLACE ? dim : N * LANES;
    if (IN_PLACE) own = state;
    Vec delta[N] = {};
    float decay = 1;
    for (int64_t t = 0; t <= tokens.count; t++) {
        const bool is_first = t == 0, is_last = t == tokens.count;
        const float *source = is_first ? state : own, *last_key = &tokens.keys[(is_first ? 0 : t - 1) * tokens.size];
        float* target = is_last ? state : own;
        const int64_t from = is_first ? dim : width, to = is_last ? dim : width, next = is_last ? 0 : t;
        const float *key = &tokens.keys[next * tokens.size], *query = &tokens.queries[next * tokens.size];
        Vec by_key[N] = {}, by_query[N] = {};
        for (int64_t r = 0; r < key_dim; r++)
            for (int n = 0; n < N; n++) {
                const int64_t count = N == 1 ? left : LANES;
                const Vec updated = load(source + r * from + n * LANES, count) * decay + delta[n] * last_key[r];
                if (!IN_PLACE || is_last) store(target + r * to + n * LANES, updated, count);
                if (is_first) __builtin_prefetch(source + r * from + (n + N) * LANES);  // the next columns
                by_key[n] += updated * key[r];
                by_query[n] += updated * query[r];
            }
        if (is_last) return;
        decay = tokens.decays[t];
        for (int n = 0; n < N; n++) {
            const int64_t count = N == 1 ? left : LANES;
            delta[n] = (load(values + t * stride + n * LANES, count) - by_key[n] * decay) * tokens.betas[t];
            store(output + t * output_stride + n * LANES, by_query[n] * decay + delta[n] * tokens.products[t], count);
        }
    }
}

template <class T>
void apply(const DeltaRule& call) {
    const int64_t key_dim = call.key_dim, dim = call.value_dim, count = call.num_rows * call.num_heads;
    const int64_t elements = count * call.num_tokens * key_dim * dim;
    in_parallel(count, threads_for(elements, call.num_threads), [&](int64_t i) {
        const int64_t row = i / call.num_heads, head = i % call.num_heads;
        const int64_t key_head = head * call.num_key_heads / call.num_heads;
        const int64_t padded = (key_dim + LANES - 1) / LANES * LANES;
        std::vector<float> own(key_dim * COLUMN_VECTORS * LANES);
        Tokens tokens(std::min(MOST_TOKENS, call.num_tokens), padded);
        const int64_t end = (row + 1) * call.num_tokens;
        for (int64_t first = row * call.num_tokens; first < end; first += MOST_TOKENS) {
            tokens.count = std::min(MOST_TOKENS, end - first);
            for (int64_t t = 0; t < tokens.count; t++) {
                const int64_t token = first + t;
                float *query = &tokens.queries[t * padded], *key = &tokens.keys[t * padded];
                const T* source = (const T*)call.query + token * call.query_stride + key_head * key_dim;
                normalize(source, key_dim, 1 / std::sqrt((float)key_dim), query);
                normalize((const T*)call.key + token * call.key_stride + key_head * key_dim, key_dim, 1, key);
                Vec products = {};
                for (int64_t d = 0; d < padded; d += LANES) products += load(query + d) * load(key + d);
                tokens.products[t] = sum_of(products);
                tokens.decays[t] = std::exp(call.decay[token * call.num_heads + head]);
                tokens.betas[t] = call.beta[token * call.num_heads + head];
            }
            for (int64_t d = 0; d < dim;) {
                const int64_t left = dim - d, stride = call.num_heads * dim;
                const T* values = (const T*)call.value + first * call.value_stride + head * dim + d;
                T* output = (T*)call.output + first * stride + head * dim + d;
                const bool single = tokens.count == 1;
                const int64_t wide = LANES * (single ? SINGLE_VECTORS : COLUMN_VECTORS);
                const bool is_wide = left >= wide;
                const auto pass = !is_wide ? pass_over<1, false, T>
                                  : single ? pass_over<SINGLE_VECTORS, true, T>
                                           : pass_over<COLUMN_VECTORS, false, T>;
                float* state = call.states + i * key_dim * dim + d;
                pass(tokens, state, key_dim, dim, values, call.value_stride, output, stride, left, &own[0]);
                d += is_wide ? wide : LANES;
            }
        }
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
    void convolve_tokens_##NAME(const void* rows, const void* weight, const void* bias, void* output,         \
                                int64_t num_rows, int64_t tokens, int64_t channels, int64_t size,             \
                                int64_t threads) {                                                            \
        convolve_tokens((const T*)rows, (const T*)weight, (const T*)bias, (T*)output, num_rows, tokens,       \
                        channels, size, threads);                                                             \
    }                                                                                                         \
    void delta_rule_##NAME(const DeltaRule* call) { apply<T>(*call); }                                        \
    void mamba2_##NAME(const Mamba2* call) { apply<T>(*call); }
FOR_TYPE(float, float32)
FOR_TYPE(BFloat16, bfloat16)
FOR_TYPE(Half, float16)
}
