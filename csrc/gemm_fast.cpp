// The fast tiles: 8-bit activations against quantised weights, dot products in int32, sums over groups in float.
#include <algorithm>
#include <cstring>
#include <limits>

#include "tile.h"

namespace octavo {

namespace {

// A group of activations is scale n + middle with n in -127..127: rounding uses the range that the group really has.
// y += sum w middle + scale (a dot(q - offset, n) + b sum(n)), group after group, with sum w = a sum(q - offset) + 32 b.
// The integers are exact, so only these float operations order the result, and they come in the order of k:
//     acc = fma(sum w, middle, acc);  acc = fma(b, scale sum(n), acc);  acc = fma(float(dot), a scale, acc)
template <Type TYPE, int R, int P> struct Fast {
    static constexpr PanelLayout lay = panel_layout(TYPE);
    using Dots = Dot<lay.bits>[R][P];
    using Ones = Sums<lay.bits>[P];

    template <int FROM, int TO>
    OCTAVO_INLINE static void steps(Dots& dot, Ones& ones, const uint8_t* (&group)[P], const uint8_t* x) {
        bx u[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) u[p] = unpack_step<TYPE, FROM>(group[p]);
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) ones[p].template step<FROM>(u[p]);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            xb four = xb_load((const int8_t*)x + (FROM * R + r) * 4);
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) dot[r][p].template step<FROM>(u[p], four);
        }
        if constexpr (FROM + 1 < TO) steps<FROM + 1, TO>(dot, ones, group, x);
    }

    // Where a dot product with q - offset starts, if minus_sum is minus the sum of what q is multiplied with.
    OCTAVO_INLINE static ix from(int32_t minus_sum) {
        if constexpr (lay.offset > 0 && !(lay.bits == 8 && signed_bytes)) return ix_set1(minus_sum * (1 << lay.offset));
        return ix_set1(0);
    }

    // n[r]: minus the sum of the activations that are to come, of which there are `count`
    OCTAVO_INLINE static void start(Dots& dot, Ones& ones, const int32_t* n, int count) {
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) ones[p].start(from(-count));
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) dot[r][p].start(from(n[r]));
        }
    }

    // acc[r][p] += w[p] x[r]
    OCTAVO_INLINE static void add(fx (&acc)[R][P], const fx (&w)[P], const float* x) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) acc[r][p] = fx_fma(w[p], set1(x[r]), acc[r][p]);
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
        const float* middle = scale + 2 * R;
        const int32_t* minus_sum = (const int32_t*)(scale + 3 * R);
        const uint8_t* quants[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) quants[p] = chunk[p] + lay.header + s * lay.group;
        fx a[P], b[P], w[P];
        Dots dot;
        Ones ones;
        if constexpr (TYPE == Type::Q6_K) {
            const int32_t* minus_half = minus_sum + R;
            int32_t rest[R];
            for (int r = 0; r < R; r++) rest[r] = minus_sum[r] - minus_half[r];
            start(dot, ones, minus_half, 16);
            steps<0, 4>(dot, ones, quants, x);
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) {
                group_scales<TYPE>(chunk[p], s, a[p], b[p]);
                w[p] = a[p] * fx_float(ones[p].total());
            }
            add(acc, dot, a, scale);
            start(dot, ones, rest, 16);
            steps<4, 8>(dot, ones, quants, x);
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) w[p] = fx_fma(fx_float(ones[p].total()), b[p], w[p]);
            add(acc, w, middle);
            add(acc, dot, b, scale);
            return;
        }
        start(dot, ones, minus_sum, 32);
        steps<0, 8>(dot, ones, quants, x);
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) {
            group_scales<TYPE>(chunk[p], s, a[p], b[p]);
            w[p] = a[p] * fx_float(ones[p].total());
            if constexpr (lay.minima) w[p] = fx_fma(b[p], set1(32.0f), w[p]);
        }
        add(acc, w, middle);
        if constexpr (lay.minima) add(acc, b, scale + R);
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
            for (int s = 0; s < n; s++, x += kRecord * R) {
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

// The same against unpacked panels (tile.h).
template <Type TYPE, int R, int P> struct Ready {
    using Packed = Fast<TYPE, R, P>;
    static constexpr PanelLayout lay = panel_layout(TYPE);
    using Dots = typename Packed::Dots;

    template <int FROM, int TO>
    OCTAVO_INLINE static void steps(Dots& dot, const uint8_t* group, const uint8_t* x) {
        bx u[P];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) u[p] = bx_load(group + p * kReady + FROM * 64);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            xb four = xb_load((const int8_t*)x + (FROM * R + r) * 4);
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) dot[r][p].template step<FROM>(u[p], four);
        }
        if constexpr (FROM + 1 < TO) steps<FROM + 1, TO>(dot, group, x);
    }

    OCTAVO_INLINE static void start(Dots& dot, const int32_t* n) {
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) dot[r][p].start(Packed::from(n[r]));
        }
    }

    // Array `which` (a, b, sums) of every panel.
    OCTAVO_INLINE static void floats(fx (&f)[P], const uint8_t* group, int which) {
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) f[p] = fx_load((const float*)(group + p * kReady + 512) + which * NR);
    }

    OCTAVO_INLINE static void group(fx (&acc)[R][P], const uint8_t* group, const uint8_t* x) {
        const float* scale = (const float*)(x + 32 * R);
        const int32_t* minus_sum = (const int32_t*)(scale + 3 * R);
        fx f[P];
        Dots dot;
        if constexpr (TYPE == Type::Q6_K) {
            const int32_t* minus_half = minus_sum + R;
            int32_t rest[R];
            for (int r = 0; r < R; r++) rest[r] = minus_sum[r] - minus_half[r];
            start(dot, minus_half);
            steps<0, 4>(dot, group, x);
            floats(f, group, 0);
            Packed::add(acc, dot, f, scale);
            start(dot, rest);
            steps<4, 8>(dot, group, x);
            floats(f, group, 2);
            Packed::add(acc, f, scale + 2 * R);
            floats(f, group, 1);
            Packed::add(acc, dot, f, scale);
            return;
        }
        start(dot, minus_sum);
        steps<0, 8>(dot, group, x);
        floats(f, group, 2);
        Packed::add(acc, f, scale + 2 * R);
        if constexpr (lay.minima) {
            floats(f, group, 1);
            Packed::add(acc, f, scale + R);
        }
        floats(f, group, 0);
        Packed::add(acc, dot, f, scale);
    }

    static void run(const uint8_t* panel, int64_t, const uint8_t* x, int64_t K, const TileOut& out) {
        fx acc[R][P];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 16
            for (int p = 0; p < P; p++) acc[r][p] = fx_zero();
        }
        Fetch fetch(out, K / 32);
#pragma GCC unroll 1
        for (int64_t g = 0; g < K / 32; g++, x += kRecord * R, panel += P * kReady) {
            fetch.some();
            group(acc, panel, x);
        }
        finish_tile(acc, out);
    }
};

// Steps T..7 of a group as bytes, and their sums: of each half of the group for Q6_K, else of all in the first.
template <Type TYPE, int T>
OCTAVO_INLINE void ready_steps(const uint8_t* quants, Sums<panel_layout(TYPE).bits> (&sum)[2], uint8_t* to) {
    const bx u = unpack_step<TYPE, T>(quants);
    std::memcpy(to + T * 64, &u, 64);
    sum[TYPE == Type::Q6_K ? T / 4 : 0].template step<T>(u);
    if constexpr (T < 7) ready_steps<TYPE, T + 1>(quants, sum, to);
}

template <Type TYPE> OCTAVO_INLINE void ready_group(const uint8_t* chunk, int s, uint8_t* to) {
    constexpr PanelLayout lay = panel_layout(TYPE);
    constexpr int halves = TYPE == Type::Q6_K ? 2 : 1;
    Sums<lay.bits> sum[2];
    for (auto& half : sum) half.start(Fast<TYPE, 1, 1>::from(-32 / halves));
    ready_steps<TYPE, 0>(chunk + lay.header + s * lay.group, sum, to);
    fx a, b = fx_zero();
    group_scales<TYPE>(chunk, s, a, b);
    fx w = a * fx_float(sum[0].total());
    if constexpr (lay.minima) w = fx_fma(b, set1(32.0f), w);
    if constexpr (halves == 2) w = fx_fma(fx_float(sum[1].total()), b, w);
    float* f = (float*)(to + 512);
    fx_store(f, a);
    fx_store(f + NR, b);
    fx_store(f + 2 * NR, w);
}

template <Type TYPE> void make_ready(const uint8_t* panel, int64_t panel_bytes, int64_t K, uint8_t* to) {
    constexpr PanelLayout lay = panel_layout(TYPE);
    for (int p = 0; p < kNarrow; p++)
        for (int64_t g = 0; g < K / 32; g++)
            ready_group<TYPE>(panel + p * panel_bytes + g / lay.groups * lay.chunk(), int(g % lay.groups),
                              to + (g * kNarrow + p) * kReady);
}

template <Type TYPE> Unpacked ready_of(int rows) {
    return {make_ready<TYPE>, tile_of<Ready, TYPE, 1, kFastRows>(rows, kNarrow), 0};
}

struct Rounded {
    float scale, middle;
};

// 32 activations of one row to scale n + middle; n goes to q.
OCTAVO_INLINE Rounded round_group(const float* x, int8_t* q) {
    constexpr int V = 32 / VF;
    vf v[V];
    v[0] = load(x);
    const vf infinity = set1(std::numeric_limits<float>::infinity());
    vm finite = abs(v[0]) < infinity;
    vf high = v[0], low = v[0];
#pragma GCC unroll 16
    for (int i = 1; i < V; i++) {
        v[i] = load(x + i * VF);
        finite = finite & (abs(v[i]) < infinity);
        high = vmax(high, v[i]);
        low = vmin(low, v[i]);
    }
    // Not finite: the row's results shall be NaN, where whoever asked for them will see it.  A very small range: all
    // are the middle, since 127 / half must be finite.
    const bool odd = any(~finite);
    const float most = 0.5f * hmax(high), least = -0.5f * hmax(neg(low));
    const float middle = most + least, half = most - least;
    const bool tiny = half < 1e-30f;
    const vf inverse = set1(odd || tiny ? 0.0f : 127.0f / half), from = set1(middle);
#pragma GCC unroll 16
    for (int i = 0; i < V; i++) store_s8(q + i * VF, round_int(odd ? zero() : (v[i] - from) * inverse));
    if (odd) return {float_of(0x7fc00000u), 0.0f};
    return {tiny ? 0.0f : half / 127.0f, middle};
}

template <int R> void pack_rows(const float* x, int64_t ldx, int64_t K, uint8_t* out) {
    for (int64_t g = 0; g < K / 32; g++, out += kRecord * R) {
        for (int r = 0; r < R; r++) {
            alignas(32) int8_t q[32];
            const Rounded group = round_group(x + r * ldx + g * 32, q);
#pragma GCC unroll 8
            for (int t = 0; t < 8; t++) std::memcpy(out + (t * R + r) * 4, q + t * 4, 4);
            const int32_t half = sum16(q), sum = half + sum16(q + 16);
            float* f = (float*)(out + 32 * R) + r;
            int32_t* n = (int32_t*)(out + 44 * R) + r;
            f[0] = group.scale;
            f[R] = group.scale * float(sum);
            f[2 * R] = group.middle;
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

Unpacked fast_unpacked(Type type, int rows) {
    switch (type) {
        case Type::Q8_0: return ready_of<Type::Q8_0>(rows);
        case Type::Q4_0: return ready_of<Type::Q4_0>(rows);
        case Type::Q4_1: return ready_of<Type::Q4_1>(rows);
        case Type::Q5_0: return ready_of<Type::Q5_0>(rows);
        case Type::Q5_1: return ready_of<Type::Q5_1>(rows);
        case Type::Q4_K: return ready_of<Type::Q4_K>(rows);
        case Type::Q5_K: return ready_of<Type::Q5_K>(rows);
        case Type::Q6_K: return ready_of<Type::Q6_K>(rows);
        default: return {nullptr, nullptr, 0};
    }
}

}  // namespace octavo
