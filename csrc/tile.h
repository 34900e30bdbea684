// The innermost unit of the GEMM: R rows of activations against P panels, over all of K.
//
// A tile function exists for each (type, R, P).  All of them run the same operations for one element of y, so any
// choice of R and P gives the same bits; the choice is made for speed, by how many registers there are.
#pragma once

#include <cstdint>

#include "dot.h"

namespace octavo {

// Rows of a tile at most; panels of a tile: kNarrow, or kWide where a single row leaves registers free.
// Under a sanitizer few tiles, as they take minutes to compile and are all cut from one template.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kFastRows = 2, kExactRows = 2, kWide = 2, kNarrow = 1;
#elif defined(OCTAVO_SCALAR)
inline constexpr int kFastRows = 1, kExactRows = 1, kWide = 1, kNarrow = 1;
#elif defined(__AVX512F__)
inline constexpr int kFastRows = 6, kExactRows = 8, kWide = 2, kNarrow = 2;
#elif defined(__AVX2__)
inline constexpr int kFastRows = 4, kExactRows = 6, kWide = 2, kNarrow = 1;
#else
inline constexpr int kFastRows = 3, kExactRows = 4, kWide = 2, kNarrow = 1;
#endif

// Where a tile's sums go.  Pointers are at the tile's first row and column; bias and residual may be null.
struct TileOut {
    float* y;
    int64_t ldy;
    const float* bias;
    const float* residual;
    int64_t ldr;
    int64_t columns;  // that exist, from the first panel's first column on
    int64_t ahead;    // what to prefetch, in bytes from what is read; 0 for nothing
    const uint8_t* next;  // for a tile that takes unpacked panels: kNarrow packed ones to prefetch, next_bytes, or null
    int64_t next_bytes;
};

// x: packed activations of the tile's rows (pack_fast, pack_exact).  Where fewer than P panels are left, panel_bytes is
// 0 (a panel stands in for its neighbours) and out.columns keeps the surplus from being stored.
using TileFn = void (*)(const uint8_t* panel, int64_t panel_bytes, const uint8_t* x, int64_t K, const TileOut& out);

// panels: kNarrow, or kWide for a single row.
TileFn fast_tile(Type type, int rows, int panels);
TileFn exact_tile(Type type, int rows, int panels);

// Where several tiles meet the same panels, these are unpacked once for all of them, which changes no bit: `unpack` fills
// unpacked_bytes(K) at `to` from kNarrow panels, and the tile function takes that in place of the panels.
//   fast:  for each group of 32 k, kNarrow panels: 512 bytes of quants in steps, f32 a[16], b[16], sum of the weights[16]
//   exact: f32, a panel of type F32 for each panel
struct Unpacked {
    void (*unpack)(const uint8_t* panel, int64_t panel_bytes, int64_t K, uint8_t* to);
    TileFn tile;
    int64_t panel_bytes;  // of what the tile function takes
};
inline constexpr int kReady = 512 + 3 * NR * 4;
inline int64_t unpacked_bytes(bool fast, int64_t K) { return kNarrow * (fast ? K / 32 * kReady : K * NR * 4); }
Unpacked fast_unpacked(Type type, int rows);
Unpacked exact_unpacked(Type type, int rows, int64_t K);

// Activations of a tile.  Fast: for each group of 32 k a record of kRecord bytes a row,
//   int8 [8 steps][rows][4], f32 scale[rows], f32 scale*sum[rows], f32 middle[rows], i32 -sum[rows],
//   i32 -(sum of the first 16)[rows]
// exact: f32 [K][rows].
inline constexpr int kRecord = 52;
inline int64_t fast_row_bytes(int64_t K) { return K / 32 * kRecord; }
void pack_fast(const float* x, int64_t ldx, int rows, int64_t K, uint8_t* out);
void pack_exact(const float* x, int64_t ldx, int rows, int64_t K, float* out);

// Panels are short, so the hardware's prefetchers lose their streams at each panel's end; few rows leave no time to
// wait for them.  Into L2 only, as the panels ahead may be larger than L1.
template <int BYTES> OCTAVO_INLINE void prefetch(const uint8_t* p) {
#pragma GCC unroll 16
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// The packed panels that come next, a part of them at each of so many turns.
struct Fetch {
    const uint8_t *p, *end;
    int64_t part;
    Fetch(const TileOut& out, int64_t turns)
        : p(out.next), end(out.next + out.next_bytes), part(((out.next_bytes + turns - 1) / turns + 63) / 64 * 64) {}
    OCTAVO_INLINE void some() {
        if (p == end) return;
        const uint8_t* to = end - p < part ? end : p + part;
        for (; p < to; p += 64) __builtin_prefetch(p, 0, 2);
        p = to;
    }
};

template <int R, int P> OCTAVO_INLINE void finish_tile(const fx (&acc)[R][P], const TileOut& out) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) {
            const int n = out.columns - p * NR < NR ? int(out.columns - p * NR) : NR;
            fx v = acc[r][p];
            if (out.bias) v = v + fx_load_n(out.bias + p * NR, n);
            if (out.residual) v = v + fx_load_n(out.residual + r * out.ldr + p * NR, n);
            fx_store_n(out.y + r * out.ldy + p * NR, v, n);
        }
    }
}

// Step T (4 k) of a group, as unsigned bytes.
template <Type TYPE, int T> OCTAVO_INLINE bx unpack_step(const uint8_t* group) {
    constexpr PanelLayout lay = panel_layout(TYPE);
    if constexpr (lay.bits == 8) {
        return bx_load(group + T * 64);
    } else {
        bx line = bx_load(group + T / 2 * 64);
        bx u = T % 2 ? high_nibbles(line) : low_nibbles(line);
        if constexpr (lay.bits == 5) u = add_bits(u, group + lay.high() + T * 8);
        if constexpr (lay.bits == 6) u = add_pairs<T % 4>(u, bx_load(group + lay.high() + T / 4 * 64));
        return u;
    }
}

// w = a (q - offset) + b of group s of a chunk.  Q6_K: a for the first 16 k, b is the *scale* of the other 16.
template <Type TYPE> OCTAVO_INLINE void group_scales(const uint8_t* chunk, int s, fx& a, fx& b) {
    constexpr PanelLayout lay = panel_layout(TYPE);
    if constexpr (lay.groups == 2) {
        a = fx_load_f16(chunk + s * 32);
    } else if constexpr (lay.groups == 1) {
        a = fx_load_f16(chunk);
        b = fx_load_f16(chunk + 32);
    } else if constexpr (lay.minima) {
        const uint8_t* sc = chunk + 64 + s * 32;
        a = fx_load_f16(chunk) * fx_float(ix_load_u8(sc));
        b = fx_neg(fx_load_f16(chunk + 32) * fx_float(ix_load_u8(sc + 16)));
    } else {
        const uint8_t* sc = chunk + 64 + s * 32;
        fx d = fx_load_f16(chunk);
        a = d * fx_float(ix_load_s8(sc));
        b = d * fx_float(ix_load_s8(sc + 16));
    }
}

// The function of one family for so many rows: MAKE<TYPE, R, P>::run.
template <template <Type, int, int> class MAKE, Type TYPE, int R, int MAX> TileFn tile_of(int rows, int panels) {
    if (rows == R) {
        if (R == 1 && panels == kWide) return MAKE<TYPE, R, R == 1 ? kWide : kNarrow>::run;
        return MAKE<TYPE, R, kNarrow>::run;
    }
    if constexpr (R < MAX) return tile_of<MAKE, TYPE, R + 1, MAX>(rows, panels);
    return nullptr;
}

}  // namespace octavo
