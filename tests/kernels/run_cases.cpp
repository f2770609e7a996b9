// Runs the C++ kernels on cases from a file, where there is no Python: under an emulator, or in another build.
//
//     run_cases CASES RESULTS          all in native byte order; an array is its size in bytes, then its bytes
//
// A case is the name of its function (an array), then what that function reads below; its result is an array.

#include "paged_attention.cpp"
#include "elementwise.cpp"
#include "panel_product.cpp"
#undef FOR_TYPE
#include "recurrent.cpp"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

std::FILE *cases, *results;

template <class T>
T number() {
    T value;
    if (std::fread(&value, sizeof value, 1, cases) != 1) std::abort();
    return value;
}

int64_t integer() { return number<int64_t>(); }

std::vector<char> array() {
    std::vector<char> bytes(integer());
    if (std::fread(bytes.data(), 1, bytes.size(), cases) != bytes.size()) std::abort();
    return bytes;
}

void give(const std::vector<char>& bytes) {
    const int64_t size = bytes.size();
    std::fwrite(&size, sizeof size, 1, results);
    std::fwrite(bytes.data(), 1, bytes.size(), results);
}

template <class T>
T* as(std::vector<char>& bytes) {
    return bytes.empty() ? nullptr : (T*)bytes.data();
}

template <class T>
void attention() {
    auto query = array(), keys = array(), values = array(), output = array();
    auto tables = array(), starts = array(), contexts = array(), sinks = array();
    AttentionCall call = {
        query.data(),        keys.data(),         values.data(),         output.data(),
        as<int32_t>(tables), as<int32_t>(starts), as<int32_t>(contexts), as<float>(sinks)};
    for (int64_t* field : {&call.query_token_stride, &call.query_head_stride, &call.table_stride,
                           &call.num_sequences, &call.num_heads, &call.num_kv_heads, &call.block_size,
                           &call.key_dim, &call.value_dim, &call.sliding_window, &call.num_threads,
                           &call.prefetch})
        *field = integer();
    call.scale = number<double>();
    call.softcap = number<double>();
    attend_batch<T>(call);
    give(output);
}

template <class T>
void elementwise(const std::string& name) {
    auto rows = array(), first = array(), second = array();
    const int64_t tokens = integer(), heads = integer(), dim = integer(), stride = heads * dim;
    if (name == "norm") norm(as<T>(rows), stride, as<T>(rows), stride, tokens, heads, dim, as<T>(first), 1e-5f, 1);
    if (name == "wide norm")
        norm(as<T>(rows), stride, as<T>(rows), stride, tokens, heads, dim, as<float>(first), 1e-5f, 1);
    if (name == "rotate") rotate(as<T>(rows), stride, as<T>(first), as<T>(second), tokens, heads, dim, dim, 1);
    if (name == "gate") gate<false>(as<T>(rows), as<T>(first), tokens, dim, 1);
    if (name == "gelu gate") gate<true>(as<T>(rows), as<T>(first), tokens, dim, 1);
    if (name == "greedy") greedy_rows(as<T>(rows), tokens, dim, as<float>(first), 1);
    give(name == "gate" || name == "gelu gate" || name == "greedy" ? first : rows);
}

template <class T>
void product() {
    const auto format = array();
    auto weights = array(), rows = array(), bias = array(), output = array();
    Product call = {weights.data(), rows.data(), bias.data(), output.data()};
    for (int64_t* field : {&call.num_rows, &call.row_stride, &call.num_outputs, &call.size, &call.panel_bytes,
                           &call.num_threads, &call.prefetch})
        *field = integer();
    using Own = std::conditional_t<std::is_same_v<T, float>, Float32,
                                   std::conditional_t<std::is_same_v<T, Half>, Float16, Bfloat16>>;
    const std::string name(format.begin(), format.end());
    if (name == "own") Multiplication<Own, T>(call).run();
    if (name == "int8") Multiplication<Int8, T>(call).run();
    if (name == "int4") Multiplication<Int4, T>(call).run();
    if (name == "w8a8") Multiplication<W8A8, T>(call).run();
    give(output);
}

template <class T>
void convolution() {
    auto states = array(), rows = array(), weight = array(), bias = array(), output = array();
    const int64_t num_rows = integer(), channels = integer(), size = integer();
    convolve(as<T>(states), as<T>(rows), channels, as<T>(weight), as<T>(bias), as<T>(output), num_rows, channels,
             size, 1);
    give(output);
}

template <class T>
void whole_convolution() {
    auto rows = array(), weight = array(), bias = array(), output = array();
    const int64_t num_rows = integer(), num_tokens = integer(), channels = integer(), size = integer();
    convolve_tokens(as<T>(rows), as<T>(weight), as<T>(bias), as<T>(output), num_rows, num_tokens, channels, size, 1);
    give(output);
}

template <class T>
void delta_rule() {
    auto states = array(), query = array(), key = array(), value = array(), decay = array(), beta = array();
    auto output = array();
    DeltaRule call = {as<float>(states), query.data(), key.data(), value.data(), as<float>(decay), as<float>(beta),
                      output.data()};
    for (int64_t* field : {&call.query_stride, &call.key_stride, &call.value_stride, &call.num_rows, &call.num_tokens,
                           &call.num_heads, &call.num_key_heads, &call.key_dim, &call.value_dim, &call.num_threads})
        *field = integer();
    apply<T>(call);
    give(output);
}

template <class T>
void mamba2() {
    auto states = array(), x = array(), B = array(), C = array(), dt = array(), A = array(), D = array();
    auto output = array();
    Mamba2 call = {as<float>(states), x.data(), B.data(), C.data(), as<float>(dt), as<float>(A), as<float>(D),
                   output.data()};
    for (int64_t* field : {&call.num_rows, &call.num_heads, &call.num_groups, &call.width, &call.size,
                           &call.num_threads})
        *field = integer();
    apply<T>(call);
    give(output);
}

template <class T>
void run(const std::string& name) {
    if (name == "attention") return attention<T>();
    if (name == "product") return product<T>();
    if (name == "convolution") return convolution<T>();
    if (name == "whole convolution") return whole_convolution<T>();
    if (name == "delta rule") return delta_rule<T>();
    if (name == "mamba2") return mamba2<T>();
    elementwise<T>(name);
}

}  // namespace

int main(int, char** files) {
    cases = std::fopen(files[1], "rb");
    results = std::fopen(files[2], "wb");
    for (int64_t left = integer(); left > 0; left--) {
        const auto bytes = array();
        const std::string name(bytes.begin(), bytes.end());
        const int64_t type = integer();
        if (type == 0) run<float>(name);
        if (type == 1) run<BFloat16>(name);
        if (type == 2) run<Half>(name);
    }
    return std::fclose(results);
}
