// A decode step in one call: with few rows, calling the kernels from Python would take as long as running them.
//
//     token -> embedding = x -> all layers -> norm -> linear -> logits
//
//     x -> norm -> [Q K V] -> rotate Q, K -> write K, V; attend -> linear, + x  = y
//     y -> norm -> [gate up] -> silu(gate) * up                 -> linear, + y
//
// In Gemma, embeddings are scaled, the gate's function is GELU, and another norm may follow each linear. In Granite,
// embeddings and the outputs of attention and MLP are scaled. SmolLM3 rotates in some of its layers only.
// The same kernels in the same order as in fused_layer.py, so the results are bit-identical.

#include "calls.h"
#include "vectors.h"

#include <vector>

struct Linear {
    Product product;  // without the rows, their number and the output
    void (*multiply)(const Product*);
};

struct Norm {
    const void* weight;  // null: no norm
    double epsilon;
    int64_t is_wide;  // the weight is float32
};

// What `decode.py` packs: what stays the same from step to step ...
struct DecoderLayer {
    Linear query_key_value, attention_output, gate_up, mlp_output;
    AttentionCall attention;
    Norm attention_norm, query_norm, key_norm, mlp_norm, attention_output_norm, mlp_output_norm;
    double output_factor;
    int64_t is_gelu, rotation;  // which of the step's angles; -1: none
};

// Around the layers.
struct Ends {
    const void* embeddings;  // [V, D]
    double embedding_scale;
    int64_t num_rotations;
    Norm norm;
    Linear head;
};

// ... and what does not. T sequences with one token each.
struct DecodeStep {
    const int64_t *token_ids, *positions, *slots;  // [T]
    const void* angles;                            // [num_rotations, cosines and sines, num_positions, rotary_dim]
    void* logits;                                  // [T, V]
    const int32_t *block_tables, *query_start, *context_len;
    int64_t num_positions, rotary_dim, table_stride, num_rows, num_threads;
};

namespace {

template <class T>
struct Kernels;

#define KERNELS_FOR(T, NAME)                                                          \
    template <>                                                                       \
    struct Kernels<T> {                                                               \
        static constexpr auto norm = norm_##NAME;                                     \
        static constexpr auto wide_norm = wide_norm_##NAME;                           \
        static constexpr auto rotate = rotate_##NAME;                                 \
        static constexpr auto gate = gate_##NAME;                                     \
        static constexpr auto gelu_gate = gelu_gate_##NAME;                           \
        static constexpr auto attend = paged_attention_##NAME;                        \
    };
KERNELS_FOR(float, float32)
KERNELS_FOR(BFloat16, bfloat16)
KERNELS_FOR(Half, float16)

template <class T>
class Decode {
    const Ends& ends;
    const DecodeStep& step;
    std::vector<std::vector<T>> angles;  // of each rotation cosines, then sines
    std::vector<T> rows, normed, heads, attended, total, gates, gated;

    std::vector<T> look_up(const T* table, const int64_t* indices, int64_t size) const {
        std::vector<T> found(step.num_rows * size);
        for (int64_t t = 0; t < step.num_rows; t++)
            std::memcpy(&found[t * size], table + indices[t] * size, size * sizeof(T));
        return found;
    }

    T* multiply(const Linear& linear, const std::vector<T>& rows, T* output) const {
        Product product = linear.product;
        product.rows = rows.data();
        product.output = output;
        product.num_rows = step.num_rows;
        product.row_stride = product.size;
        product.num_threads = step.num_threads;
        linear.multiply(&product);
        return output;
    }

    void apply(const Norm& norm, const T* input, T* output, int64_t stride, int64_t num_heads,
               int64_t dim) const {
        const auto kernel = norm.is_wide ? Kernels<T>::wide_norm : Kernels<T>::norm;
        kernel(input, stride, output, stride, step.num_rows, num_heads, dim, norm.weight, norm.epsilon,
               step.num_threads);
    }

    void norm_rows(const Norm& norm, const std::vector<T>& rows, T* output) const {
        const int64_t size = rows.size() / step.num_rows;
        apply(norm, rows.data(), output, size, 1, size);
    }

    void norm_heads(const Norm& norm, T* first, int64_t stride, int64_t num_heads, int64_t dim) const {
        if (norm.weight) apply(norm, first, first, stride, num_heads, dim);
    }

    void write(const T* tokens, int64_t stride, const void* cache, const AttentionCall& call) const {
        const int64_t row_bytes = call.key_dim * sizeof(T);
        write_tokens(tokens, stride * sizeof(T), row_bytes, (void*)cache, step.slots, step.num_rows,
                     call.num_kv_heads, call.block_size, row_bytes);
    }

    static void scale(std::vector<T>& rows, double factor) {
        if (factor == 1) return;
        for (int64_t i = 0, count = rows.size(); i < count; i += LANES)
            store(&rows[i], load(&rows[i], count - i) * (float)factor, count - i);
    }

    static void add(T* rows, const std::vector<T>& others) {
        for (int64_t i = 0, count = others.size(); i < count; i += LANES)
            store(rows + i, load(rows + i, count - i) + load(&others[i], count - i), count - i);
    }

public:
    Decode(const Ends& ends, const DecodeStep& step, int64_t size)
        : ends(ends), step(step), rows(look_up((const T*)ends.embeddings, step.token_ids, size)),
          normed(rows.size()), total(rows.size()) {
        scale(rows, ends.embedding_scale);
        for (int64_t i = 0; i < 2 * ends.num_rotations; i++)
            angles.push_back(look_up((const T*)step.angles + i * step.num_positions * step.rotary_dim,
                                     step.positions, step.rotary_dim));
    }

    void finish() {
        norm_rows(ends.norm, rows, normed.data());
        multiply(ends.head, normed, (T*)step.logits);
    }

    void run(const DecoderLayer& layer) {
        AttentionCall call = layer.attention;
        const int64_t dim = call.key_dim;
        const int64_t stride = layer.query_key_value.product.num_outputs;
        const int64_t query_size = call.num_heads * dim, key_size = call.num_kv_heads * dim;

        norm_rows(layer.attention_norm, rows, normed.data());
        heads.resize(step.num_rows * stride);
        T* query = multiply(layer.query_key_value, normed, heads.data());
        T *key = query + query_size, *value = key + key_size;
        norm_heads(layer.query_norm, query, stride, call.num_heads, dim);
        norm_heads(layer.key_norm, key, stride, call.num_kv_heads, dim);
        if (layer.rotation >= 0) {
            const auto *cosines = &angles[2 * layer.rotation], *sines = cosines + 1;
            Kernels<T>::rotate(query, stride, cosines->data(), sines->data(), step.num_rows,
                               call.num_heads + call.num_kv_heads, dim, step.rotary_dim, step.num_threads);
        }
        write(key, stride, call.key_cache, call);
        write(value, stride, call.value_cache, call);
        attended.resize(step.num_rows * query_size);
        call.query = query;
        call.query_token_stride = stride;
        call.query_head_stride = dim;
        call.output = attended.data();
        call.block_tables = step.block_tables;
        call.table_stride = step.table_stride;
        call.query_start = step.query_start;
        call.context_len = step.context_len;
        call.num_sequences = step.num_rows;
        call.num_threads = step.num_threads;
        Kernels<T>::attend(&call);

        multiply(layer.attention_output, attended, total.data());
        if (layer.attention_output_norm.weight) norm_rows(layer.attention_output_norm, total, total.data());
        scale(total, layer.output_factor);
        add(total.data(), rows);
        norm_rows(layer.mlp_norm, total, normed.data());
        const int64_t width = layer.mlp_output.product.size;
        gates.resize(step.num_rows * 2 * width);
        gated.resize(step.num_rows * width);
        multiply(layer.gate_up, normed, gates.data());
        const auto gate = layer.is_gelu ? Kernels<T>::gelu_gate : Kernels<T>::gate;
        gate(gates.data(), gated.data(), step.num_rows, width, step.num_threads);
        multiply(layer.mlp_output, gated, rows.data());
        if (layer.mlp_output_norm.weight) norm_rows(layer.mlp_output_norm, rows, rows.data());
        scale(rows, layer.output_factor);
        add(rows.data(), total);
    }
};

template <class T>
void decode(const DecoderLayer* layers, int64_t num_layers, const Ends& ends, const DecodeStep& step) {
    Decode<T> work(ends, step, layers[0].query_key_value.product.size);
    for (int64_t i = 0; i < num_layers; i++) work.run(layers[i]);
    work.finish();
}

}  // namespace

extern "C" {

#define FOR_TYPE(T, NAME)                                                                                     \
    void decode_##NAME(const DecoderLayer* layers, int64_t num_layers, const Ends* ends,                      \
                       const DecodeStep* step) {                                                              \
        decode<T>(layers, num_layers, *ends, *step);                                                          \
    }
FOR_TYPE(float, float32)
FOR_TYPE(BFloat16, bfloat16)
FOR_TYPE(Half, float16)
}
