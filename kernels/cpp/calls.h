// The structs that Python packs, and the kernels that both Python and `decode.cpp` call.

#pragma once

#include <cstdint>

// How what is read next is prefetched: `Prefetch` of panels.py.
enum : int64_t { BY_HARDWARE, PAST_L2, INTO_L2 };

// What `panels.py` packs: rows [T, size] x weights^T + bias -> output [T, num_outputs].
struct Product {
    const char* panels;
    const void *rows, *bias;  // no bias: null
    void* output;
    int64_t num_rows, row_stride, num_outputs, size, panel_bytes, num_threads;
    int64_t prefetch;  // with few rows
};

// What `attention.py` packs. Strides in elements; rows of one head are contiguous, pools throughout.
struct AttentionCall {
    const void* query;            // [T, Hq, Dk]
    const void* key_cache;        // [num_blocks, Hkv, block_size, Dk]
    const void* value_cache;      // [num_blocks, Hkv, block_size, Dv]
    void* output;                 // [T, Hq, Dv], contiguous
    const int32_t* block_tables;  // [S, >= blocks in use]
    const int32_t* query_start;   // [S + 1]
    const int32_t* context_len;   // [S]
    const float* sinks;           // [Hq], or null
    int64_t query_token_stride, query_head_stride, table_stride;
    int64_t num_sequences, num_heads, num_kv_heads, block_size, key_dim, value_dim;
    int64_t sliding_window;       // at least the longest context if there is none
    int64_t num_threads, prefetch;  // as for a Product
    double scale, softcap;        // softcap 0: none
};

extern "C" {
#define DECLARE_FOR(NAME)                                                                                     \
    void norm_##NAME(const void* input, int64_t input_stride, void* output, int64_t output_stride,            \
                     int64_t tokens, int64_t heads, int64_t dim, const void* weight, double epsilon,          \
                     int64_t threads);                                                                        \
    void wide_norm_##NAME(const void* input, int64_t input_stride, void* output, int64_t output_stride,            \
                     int64_t tokens, int64_t heads, int64_t dim, const void* weight, double epsilon,          \
                     int64_t threads);                                                                        \
    void rotate_##NAME(void* rows, int64_t stride, const void* cosines, const void* sines, int64_t tokens,    \
                       int64_t heads, int64_t dim, int64_t rotary_dim, int64_t threads);                      \
    void gate_##NAME(const void* input, void* output, int64_t tokens, int64_t dim, int64_t threads);          \
    void gelu_gate_##NAME(const void* input, void* output, int64_t tokens, int64_t dim, int64_t threads);          \
    void paged_attention_##NAME(const AttentionCall* call);
DECLARE_FOR(float32)
DECLARE_FOR(bfloat16)
DECLARE_FOR(float16)

// Copies token rows to their slots; strides and sizes in bytes, slot -1 is skipped.
void write_tokens(const void* tokens, int64_t token_stride, int64_t head_stride, void* cache,
                  const int64_t* slots, int64_t num_tokens, int64_t num_heads, int64_t block_size,
                  int64_t row_bytes);
}
