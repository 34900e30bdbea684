// The exact tiles: float activations against weights brought to float in registers.  Chains of fma over kChain k at a
// time, whose sums are added up in order: the error grows with the square root of K more slowly than in one chain.
#include <algorithm>
#include <cstring>

#include "tile.h"

namespace octavo {

namespace {

// acc[r][p] += x[k][r] w[k], for one k.
template <int R, int P> OCTAVO_INLINE void multiply(fx (&acc)[R][P], const fx (&w)[P], const float* x) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        vf xr = set1(x[r]);
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) acc[r][p] = fx_fma(w[p], xr, acc[r][p]);
    }
}

template <int R, int P> OCTAVO_INLINE void clear(fx (&acc)[R][P]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) acc[r][p] = fx_zero();
    }
}

constexpr int kChain = 64;

template <int R, int P> OCTAVO_INLINE void flush(fx (&total)[R][P], fx (&acc)[R][P]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) total[r][p] = total[r][p] + acc[r][p];
    }
    clear(acc);
}

// ---- float types ------------------------------------------------------------------------------------------------

template <Type TYPE> OCTAVO_INLINE fx load_line(const uint8_t* panel, int64_t k) {
    if constexpr (TYPE == Type::F32) return fx_load((const float*)panel + k * NR);
    if constexpr (TYPE == Type::F16) return fx_load_f16(panel + k * NR * 2);
    return fx_load_bf16(panel + k * NR * 2);
}

template <Type TYPE, int R, int P> struct Floats {
    static void run(const uint8_t* panel, int64_t panel_bytes, const uint8_t* packed, int64_t K, const TileOut& out) {
        const float* x = (const float*)packed;
        fx acc[R][P], total[R][P];
        clear(acc);
        clear(total);
        constexpr int item = TYPE == Type::F32 ? 4 : 2;
        Fetch fetch(out, (K + kChain - 1) / kChain);
        for (int64_t k = 0; k < K; k++, x += R) {
            if (TYPE == Type::F32 && k % kChain == 0) fetch.some();
            if (out.ahead && k % (4 / item) == 0) {
#pragma GCC unroll 16
                for (int p = 0; p < P; p++) prefetch<64>(panel + p * panel_bytes + k * NR * item + out.ahead);
            }
            fx w[P];
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) w[p] = load_line<TYPE>(panel + p * panel_bytes, k);
            multiply(acc, w, x);
            if (k % kChain == kChain - 1) flush(total, acc);
        }
        flush(total, acc);
        finish_tile(total, out);
    }
};

// ---- quantised types --------------------------------------------------------------------------------------------

// The weights come out as the format defines them, rounding by rounding: (d scale) first, times q, then the minimum.
template <Type TYPE, int R, int P> struct Exact {
    static constexpr PanelLayout lay = panel_layout(TYPE);

    template <int J>
    OCTAVO_INLINE static void bytes(fx (&acc)[R][P], const bx (&u)[P], const fx (&a)[P], const fx (&b)[P],
                                    const float* x) {
        fx w[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) {
            ix q = bx_byte<J>(u[p]);
            if constexpr (lay.offset > 0) OCTAVO_EACH q.v[i] = q.v[i] - iset1(1 << lay.offset);
            w[p] = a[p] * fx_float(q);
            if constexpr (lay.minima) w[p] = w[p] + b[p];
        }
        multiply(acc, w, x + J * R);
        if constexpr (J < 3) bytes<J + 1>(acc, u, a, b, x);
    }

    // Steps T..END-1 of a group.
    template <int T, int END>
    OCTAVO_INLINE static void steps(fx (&acc)[R][P], const uint8_t* (&group)[P], const fx (&a)[P], const fx (&b)[P],
                                    const float* x) {
        bx u[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) u[p] = unpack_step<TYPE, T>(group[p]);
        bytes<0>(acc, u, a, b, x);
        if constexpr (T + 1 < END) steps<T + 1, END>(acc, group, a, b, x + 4 * R);
    }

    // A group of 32.  All 8 steps written out for each of some hundred tiles would be a megabyte of code, so pairs of
    // steps, which look alike but for Q6_K, are looped over.
    OCTAVO_INLINE static void group(fx (&acc)[R][P], const uint8_t* (&quants)[P], const fx (&a)[P], const fx (&b)[P],
                                    const float* x) {
        if constexpr (TYPE == Type::Q6_K) {
            steps<0, 4>(acc, quants, a, b, x);
            steps<4, 8>(acc, quants, b, b, x + 16 * R);
        } else {
#pragma GCC unroll 1
            for (int line = 0; line < 4; line++, x += 8 * R) two_steps(acc, quants, line, a, b, x);
        }
    }

    OCTAVO_INLINE static void two_steps(fx (&acc)[R][P], const uint8_t* (&quants)[P], int line, const fx (&a)[P],
                                        const fx (&b)[P], const float* x) {
        bx u[P], v[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) {
            if constexpr (lay.bits == 8) {
                u[p] = bx_load(quants[p] + line * 128);
                v[p] = bx_load(quants[p] + line * 128 + 64);
            } else {
                bx both = bx_load(quants[p] + line * 64);
                u[p] = low_nibbles(both);
                v[p] = high_nibbles(both);
                if constexpr (lay.bits == 5) {
                    u[p] = add_bits(u[p], quants[p] + lay.high() + line * 16);
                    v[p] = add_bits(v[p], quants[p] + lay.high() + line * 16 + 8);
                }
            }
        }
        bytes<0>(acc, u, a, b, x);
        bytes<0>(acc, v, a, b, x + 4 * R);
    }

    static void run(const uint8_t* panel, int64_t panel_bytes, const uint8_t* packed, int64_t K, const TileOut& out) {
        const float* x = (const float*)packed;
        fx acc[R][P], total[R][P];
        clear(acc);
        clear(total);
        int64_t groups = 0;
        for (int64_t left = K / 32; left > 0; left -= lay.groups, panel += lay.chunk()) {
            const int n = int(std::min<int64_t>(lay.groups, left));
            if (out.ahead) {
#pragma GCC unroll 16
                for (int p = 0; p < P; p++) prefetch<lay.header>(panel + p * panel_bytes + out.ahead);
            }
#pragma GCC unroll 1
            for (int s = 0; s < n; s++, x += 32 * R) {
                fx a[P], b[P];
                const uint8_t* quants[P];
#pragma GCC unroll 16
                for (int p = 0; p < P; p++) {
                    group_scales<TYPE>(panel + p * panel_bytes, s, a[p], b[p]);
                    quants[p] = panel + p * panel_bytes + lay.header + s * lay.group;
                    if (out.ahead) prefetch<lay.group>(quants[p] + out.ahead);
                }
                group(acc, quants, a, b, x);
                if (++groups % (kChain / 32) == 0) flush(total, acc);
            }
        }
        flush(total, acc);
        finish_tile(total, out);
    }
};

// Four lines of a panel of floats: byte J and those after it of one step.
template <Type TYPE, int J> OCTAVO_INLINE void unpack_bytes(bx u, const fx& a, const fx& b, float* out) {
    constexpr PanelLayout lay = panel_layout(TYPE);
    ix q = bx_byte<J>(u);
    if constexpr (lay.offset > 0) OCTAVO_EACH q.v[i] = q.v[i] - iset1(1 << lay.offset);
    fx w = a * fx_float(q);
    if constexpr (lay.minima) w = w + b;
    fx_store(out + J * NR, w);
    if constexpr (J < 3) unpack_bytes<TYPE, J + 1>(u, a, b, out);
}

// Steps T..7 of a group.
template <Type TYPE, int T> OCTAVO_INLINE void unpack_steps(const uint8_t* quants, const fx& a, const fx& b, float* out) {
    unpack_bytes<TYPE, 0>(unpack_step<TYPE, T>(quants), TYPE == Type::Q6_K && T >= 4 ? b : a, b, out + T * 4 * NR);
    if constexpr (T < 7) unpack_steps<TYPE, T + 1>(quants, a, b, out);
}

// kNarrow panels as panels of floats.
template <Type TYPE> void unpack_panels(const uint8_t* panel, int64_t panel_bytes, int64_t K, uint8_t* to) {
    constexpr PanelLayout lay = panel_layout(TYPE);
    float* out = (float*)to;
    for (int p = 0; p < kNarrow; p++)
        for (int64_t g = 0; g < K / 32; g++, out += 32 * NR) {
            const uint8_t* chunk = panel + p * panel_bytes + g / lay.groups * lay.chunk();
            const int s = int(g % lay.groups);
            fx a, b = fx_zero();
            group_scales<TYPE>(chunk, s, a, b);
            unpack_steps<TYPE, 0>(chunk + lay.header + s * lay.group, a, b, out);
        }
}

}  // namespace

void pack_exact(const float* x, int64_t ldx, int rows, int64_t K, float* out) {
    for (int64_t k = 0; k < K; k++)
        for (int r = 0; r < rows; r++) out[k * rows + r] = x[r * ldx + k];
}

TileFn exact_tile(Type type, int rows, int panels) {
    switch (type) {
        case Type::F32: return tile_of<Floats, Type::F32, 1, kExactRows>(rows, panels);
        case Type::F16: return tile_of<Floats, Type::F16, 1, kExactRows>(rows, panels);
        case Type::BF16: return tile_of<Floats, Type::BF16, 1, kExactRows>(rows, panels);
        case Type::Q8_0: return tile_of<Exact, Type::Q8_0, 1, kExactRows>(rows, panels);
        case Type::Q4_0: return tile_of<Exact, Type::Q4_0, 1, kExactRows>(rows, panels);
        case Type::Q4_1: return tile_of<Exact, Type::Q4_1, 1, kExactRows>(rows, panels);
        case Type::Q5_0: return tile_of<Exact, Type::Q5_0, 1, kExactRows>(rows, panels);
        case Type::Q5_1: return tile_of<Exact, Type::Q5_1, 1, kExactRows>(rows, panels);
        case Type::Q4_K: return tile_of<Exact, Type::Q4_K, 1, kExactRows>(rows, panels);
        case Type::Q5_K: return tile_of<Exact, Type::Q5_K, 1, kExactRows>(rows, panels);
        case Type::Q6_K: return tile_of<Exact, Type::Q6_K, 1, kExactRows>(rows, panels);
    }
    return nullptr;
}

Unpacked exact_unpacked(Type type, int rows, int64_t K) {
    const TileFn tile = exact_tile(Type::F32, rows, kNarrow);
    const int64_t bytes = K * NR * 4;
    switch (type) {
        case Type::Q8_0: return {unpack_panels<Type::Q8_0>, tile, bytes};
        case Type::Q4_0: return {unpack_panels<Type::Q4_0>, tile, bytes};
        case Type::Q4_1: return {unpack_panels<Type::Q4_1>, tile, bytes};
        case Type::Q5_0: return {unpack_panels<Type::Q5_0>, tile, bytes};
        case Type::Q5_1: return {unpack_panels<Type::Q5_1>, tile, bytes};
        case Type::Q4_K: return {unpack_panels<Type::Q4_K>, tile, bytes};
        case Type::Q5_K: return {unpack_panels<Type::Q5_K>, tile, bytes};
        case Type::Q6_K: return {unpack_panels<Type::Q6_K>, tile, bytes};
        default: return {nullptr, nullptr, 0};
    }
}

}  // namespace octavo
