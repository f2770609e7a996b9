// Rows x weights^T by AMX: one instruction adds the products of 16 rows, 16 outputs and 32 k in bfloat16, or 64 k in
// 8 bits.
//
// It reads panels as they are. Each row of a weight tile holds two k of 16 outputs in bfloat16, four in 8 bits:
//
//     panel    outputs   0 to 15   16 to 31   32 to 47   48 to 63
//     k = 0, 1           |         |          |          |              tile 4: the same 32 k of 16 rows
//     ...                | tile 5  | tile 6   | tile 5   | tile 6       tiles 0 to 3: the sums of 16 rows
//     k = 30, 31         |         |          |          |              and 64 outputs

#pragma once

#include "panel_formats.h"

#if defined(__linux__) && ((defined(__AMX_BF16__) && defined(__AMX_INT8__)) || \
                           (defined(__AMXBF16__) && defined(__AMXINT8__)))  // gcc, clang
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1
#endif

namespace {

constexpr int TILE_ROWS = 16, TILE_K = 32;
constexpr int64_t TILE_BYTES = 4 * WIDTH * TILE_K / 2;  // of a panel

#ifdef HAS_AMX

// Whether Linux lets this process use AMX, which it has to ask for (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool may_use_tiles() {
    static const bool may = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return may;
}

struct TileShapes {  // the memory layout that the instruction expects
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64};
    uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, 16};
};

class Tiles {  // of a thread
    int configured = 0;  // rows

    void configure(int num_rows) {
        if (num_rows == configured) return;
        TileShapes shapes;
        for (int tile = 0; tile < 5; tile++) shapes.num_rows[tile] = num_rows;
        asm volatile("" ::"r"(&shapes) : "memory");  // (GCC knows of only 8 bytes that the next line reads)
        _tile_loadconfig(&shapes);
        configured = num_rows;
    }

public:
    ~Tiles() {
        if (configured) _tile_release();
    }

    // totals[row][output] += the products of up to TILE_ROWS rows, `stride` bytes apart, with `size` k of a panel;
    // if this `starts` the sums, = instead of +=. For each tile row of the panel, the next `num_lines` cache lines
    // from `upcoming` on are prefetched; returns where they end.
    const char* add(int num_rows, const char* rows, int64_t stride, const char* weights, int64_t size, bool starts,
                    float* totals, const char* upcoming, int64_t num_lines) {
        configure(num_rows);
        asm volatile("" ::: "memory");  // (GCC does not know all the memory that these instructions read)
        const int64_t row_bytes = 4 * WIDTH;  // of totals and of a panel
        if (starts) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, totals, row_bytes);
            _tile_loadd(1, totals + 16, row_bytes);
            _tile_loadd(2, totals + 32, row_bytes);
            _tile_loadd(3, totals + 48, row_bytes);
        }
        for (int64_t k = 0; k < size; k += TILE_K, rows += 2 * TILE_K, weights += TILE_BYTES) {
            _tile_loadd(4, rows, stride);
            _tile_loadd(5, weights, row_bytes);
            _tile_dpbf16ps(0, 4, 5);
            for (int64_t i = 0; i < num_lines; i++, upcoming += 64) __builtin_prefetch(upcoming, 0, 2);
            _tile_loadd(6, weights + 64, row_bytes);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(5, weights + 128, row_bytes);
            _tile_dpbf16ps(2, 4, 5);
            _tile_loadd(6, weights + 192, row_bytes);
            _tile_dpbf16ps(3, 4, 6);
        }
        _tile_stored(0, totals, row_bytes);
        _tile_stored(1, totals + 16, row_bytes);
        _tile_stored(2, totals + 32, row_bytes);
        _tile_stored(3, totals + 48, row_bytes);
        return upcoming;
    }

    // sums[part][row][output] = the products of up to TILE_ROWS rows, each PARTS times 64 signed bytes, with 64 k of a
    // panel, unsigned bytes.
    template <int PARTS>
    void multiply_bytes(int num_rows, const char* rows, int64_t stride, const char* weights, int32_t* sums) {
        configure(num_rows);
        asm volatile("" ::: "memory");
        const int64_t row_bytes = 4 * WIDTH;
        for (int part = 0; part < PARTS; part++, rows += 64, sums += TILE_ROWS * WIDTH) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            _tile_loadd(4, rows, stride);
            _tile_loadd(5, weights, row_bytes);
            _tile_dpbsud(0, 4, 5);
            _tile_loadd(6, weights + 64, row_bytes);
            _tile_dpbsud(1, 4, 6);
            _tile_loadd(5, weights + 128, row_bytes);
            _tile_dpbsud(2, 4, 5);
            _tile_loadd(6, weights + 192, row_bytes);
            _tile_dpbsud(3, 4, 6);
            _tile_stored(0, sums, row_bytes);
            _tile_stored(1, sums + 16, row_bytes);
            _tile_stored(2, sums + 32, row_bytes);
            _tile_stored(3, sums + 48, row_bytes);
        }
    }
};

#else
bool may_use_tiles() { return false; }

struct Tiles {
    const char* add(int, const char*, int64_t, const char*, int64_t, bool, float*, const char* upcoming, int64_t) {
        return upcoming;
    }
    template <int PARTS>
    void multiply_bytes(int, const char*, int64_t, const char*, int32_t*) {}
};
#endif

}  // namespace
