// The fast tiles: 8-bit activations against quantised weights, dot products in int32, sums over groups in float.
#include <algorithm>
#include <cstring>

#include "tile.h"

namespace octavo {

namespace {

// y += scale_x (a dot(q - offset, x) + b sum(x)), group after group.  The integers are exact, so only these float
// operations order the result, and they come in the order of k:
//     acc = fma(b, scale_x sum(x), acc);  acc = fma(float(dot), a scale_x, acc)
template <Type TYPE, int R, int P> struct Fast {
    static constexpr PanelLayout lay = panel_layout(TYPE);
    using Dots = Dot<lay.bits>[R][P];

    template <int FROM, int TO>
    OCTAVO_INLINE static void steps(Dots& dot, const uint8_t* (&group)[P], const uint8_t* x) {
        bx u[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) u[p] = unpack_step<TYPE, FROM>(group[p]);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            xb four = xb_load((const int8_t*)x + (FROM * R + r) * 4);
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) dot[r][p].template step<FROM>(u[p], four);
        }
        if constexpr (FROM + 1 < TO) steps<FROM + 1, TO>(dot, group, x);
    }

    // n[r]: minus the sum of the activations that are to come
    OCTAVO_INLINE static void start(Dots& dot, const int32_t* n) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            ix from = ix_set1(0);
            if constexpr (lay.offset > 0 && !(lay.bits == 8 && signed_bytes)) from = ix_set1(n[r] * (1 << lay.offset));
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) dot[r][p].start(from);
        }
    }

    OCTAVO_INLINE static void add(fx (&acc)[R][P], const Dots& dot, const fx (&a)[P], const float* scale) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
            for (int p = 0; p < P; p++)
                acc[r][p] = fx_fma(fx_float(dot[r][p].total()), a[p] * set1(scale[r]), acc[r][p]);
        }
    }

    OCTAVO_INLINE static void group(fx (&acc)[R][P], const uint8_t* (&chunk)[P], int s, const uint8_t* x) {
        const float* scale = (const float*)(x + 32 * R);
        const int32_t* minus_sum = (const int32_t*)(scale + 2 * R);
        const uint8_t* quants[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) quants[p] = chunk[p] + lay.header + s * lay.group;
        fx a[P], b[P];
        Dots dot;
        if constexpr (TYPE == Type::Q6_K) {
            const int32_t* minus_half = minus_sum + R;
            int32_t rest[R];
            for (int r = 0; r < R; r++) rest[r] = minus_sum[r] - minus_half[r];
            start(dot, minus_half);
            steps<0, 4>(dot, quants, x);
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) group_scales<TYPE>(chunk[p], s, a[p], b[p]);
            add(acc, dot, a, scale);
            start(dot, rest);
            steps<4, 8>(dot, quants, x);
            add(acc, dot, b, scale);
            return;
        }
        start(dot, minus_sum);
        steps<0, 8>(dot, quants, x);
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) group_scales<TYPE>(chunk[p], s, a[p], b[p]);
        if constexpr (lay.minima) {
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
                for (int p = 0; p < P; p++) acc[r][p] = fx_fma(b[p], set1(scale[R + r]), acc[r][p]);
            }
        }
        add(acc, dot, a, scale);
    }

    static void run(const uint8_t* panel, int64_t panel_bytes, const uint8_t* x, int64_t K, const TileOut& out) {
        fx acc[R][P];
        const uint8_t* chunk[P];
        for (int p = 0; p < P; p++) {
            chunk[p] = panel + p * panel_bytes;
            for (int r = 0; r < R; r++) acc[r][p] = fx_zero();
        }
        for (int64_t left = K / 32; left > 0; left -= lay.groups) {
            const int n = int(std::min<int64_t>(lay.groups, left));
            if (out.ahead) {
#pragma GCC unroll 16
                for (int p = 0; p < P; p++) prefetch<lay.header>(chunk[p] + out.ahead);
            }
#pragma GCC unroll 1
            for (int s = 0; s < n; s++, x += 48 * R) {
                if (out.ahead) {
#pragma GCC unroll 16
                    for (int p = 0; p < P; p++) prefetch<lay.group>(chunk[p] + out.ahead + lay.header + s * lay.group);
                }
                group(acc, chunk, s, x);
            }
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) chunk[p] += lay.chunk();
        }
        finish_tile(acc, out);
    }
};

// 32 activations of one row to int8; returns their scale.
OCTAVO_INLINE float round_group(const float* x, int8_t* q) {
    constexpr int V = 32 / VF;
    vf v[V];
    vi top = iset1(0);  // the bits of a float without its sign sort like the float, with NaN above infinity on top
#pragma GCC unroll 16
    for (int i = 0; i < V; i++) {
        v[i] = load(x + i * VF);
        top = imax(top, as_int(abs(v[i])));
    }
    const int32_t bits = himax(top);
    const float most = float_of(uint32_t(bits));
    // Not finite: the row's results shall be NaN, where whoever asked for them will see it.  Very small: zero, since
    // 127 / most must be finite.
    const bool odd = bits >= 0x7f800000, tiny = most < 1e-30f;
    const vf inverse = set1(odd || tiny ? 0.0f : 127.0f / most);
#pragma GCC unroll 16
    for (int i = 0; i < V; i++) store_s8(q + i * VF, round_int(odd ? zero() : v[i] * inverse));
    return odd ? float_of(0x7fc00000u) : tiny ? 0.0f : most / 127.0f;
}

template <int R> void pack_rows(const float* x, int64_t ldx, int64_t K, uint8_t* out) {
    for (int64_t g = 0; g < K / 32; g++, out += 48 * R) {
        for (int r = 0; r < R; r++) {
            alignas(32) int8_t q[32];
            const float scale = round_group(x + r * ldx + g * 32, q);
#pragma GCC unroll 8
            for (int t = 0; t < 8; t++) std::memcpy(out + (t * R + r) * 4, q + t * 4, 4);
            const int32_t half = sum16(q), sum = half + sum16(q + 16);
            float* f = (float*)(out + 32 * R) + r;
            int32_t* n = (int32_t*)(out + 40 * R) + r;
            f[0] = scale;
            f[R] = scale * float(sum);
            n[0] = -sum;
            n[R] = -half;
        }
    }
}

template <int R> void pack_rows_of(int rows, const float* x, int64_t ldx, int64_t K, uint8_t* out) {
    if (rows == R) return pack_rows<R>(x, ldx, K, out);
    if constexpr (R < kFastRows) pack_rows_of<R + 1>(rows, x, ldx, K, out);
}

}  // namespace

void pack_fast(const float* x, int64_t ldx, int rows, int64_t K, uint8_t* out) {
    pack_rows_of<1>(rows, x, ldx, K, out);
}

TileFn fast_tile(Type type, int rows, int panels) {
    switch (type) {
        case Type::Q8_0: return tile_of<Fast, Type::Q8_0, 1, kFastRows>(rows, panels);
        case Type::Q4_0: return tile_of<Fast, Type::Q4_0, 1, kFastRows>(rows, panels);
        case Type::Q4_1: return tile_of<Fast, Type::Q4_1, 1, kFastRows>(rows, panels);
        case Type::Q5_0: return tile_of<Fast, Type::Q5_0, 1, kFastRows>(rows, panels);
        case Type::Q5_1: return tile_of<Fast, Type::Q5_1, 1, kFastRows>(rows, panels);
        case Type::Q4_K: return tile_of<Fast, Type::Q4_K, 1, kFastRows>(rows, panels);
        case Type::Q5_K: return tile_of<Fast, Type::Q5_K, 1, kFastRows>(rows, panels);
        case Type::Q6_K: return tile_of<Fast, Type::Q6_K, 1, kFastRows>(rows, panels);
        default: return nullptr;
    }
}

}  // namespace octavo
