// The arithmetic of attention: register blocks of query rows against a tile of positions, and the online softmax.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kv.h"

namespace octavo {

constexpr int kTile = 64;      // positions whose scores are computed at a time
constexpr int kBlockRows = 6;  // query rows of a register block
constexpr int kTileVecs = kTile / VF;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Vectors of a register block beside R rows: enough chains to hide the latency of fma, few enough to stay in registers.
template <int R> constexpr int kBlockVecs = (VF == 8 && R > 3) ? 2 : 4;

// e^x for x <= 0, to about one unit in the last place; 0 below -87, where it would soon be subnormal.  NaN stays NaN.
// The series of vexp without what it needs for other x: softmax spends a fifth of its time here.
inline vf exp_down(vf x) {
    vf y = vmax(set1(-87.0f), x);
    vi n = round_int(y * set1(1.44269504088896341f));
    vf nf = to_float(n);
    vf r = fma(nf, set1(-0.693147182464599609375f), y);
    r = fma(nf, set1(1.904654299957767e-9f), r);
    vf p = set1(1.0f / 5040);
    p = fma(p, r, set1(1.0f / 720));
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r * r, r) + set1(1.0f);
    return select(x < set1(-87.0f), zero(), p * as_float(shl<23>(n + iset1(127))));
}

inline float exp1(float x) {
    float t[VF];
    store(t, exp_down(set1(x)));
    return t[0];
}

// Lines that hold n items from p on are fetched while something else is computed.
template <class T> inline void prefetch(const T* p, int n) {
    for (size_t at = 0; at < n * sizeof(T); at += 64) __builtin_prefetch((const char*)p + at, 0, 2);
}

// Rows of values that are read soon, into the nearest cache: each is a line or two of its own.
constexpr int kSoon = 8;
template <class T> inline void soon(const T* p, int n) {
    for (size_t at = 0; at < n * sizeof(T); at += 64) __builtin_prefetch((const char*)p + at, 0, 3);
}

OCTAVO_INLINE vf add_product(vf a, vf b, vf c) { return fma(a, b, c); }
OCTAVO_INLINE vi add_product(vi a, vi b, vi c) { return dot_pairs(a, b, c); }

// acc[r][j] += row(r) * column(j): the fewer of the two wait in registers, the others come one by one.
template <int R, int NV, class V, class Row, class Column>
OCTAVO_INLINE void multiply(V (&acc)[R][NV], Row&& row, Column&& column) {
    if constexpr (R < NV) {
        V b[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) b[r] = row(r);
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) {
            V c = column(j);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) acc[r][j] = add_product(b[r], c, acc[r][j]);
        }
    } else {
        V c[NV];
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) c[j] = column(j);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            V b = row(r);
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) acc[r][j] = add_product(b, c[j], acc[r][j]);
        }
    }
}

// s[r][lane] = sum over d, in order, of q[r][d] * K[d][lane], for the vectors v0 .. v1-1 of a tile.  next: the keys of
// the tile after, to be fetched meanwhile, or null.
template <class T, int R>
void score_rows(const float* q, int64_t ldq, int head_dim, const T* const* k, const T* const* next, int64_t ldk, int v0,
                int v1, float* s) {
    constexpr int NV = kBlockVecs<R>;
    for (int v = v0 / NV * NV; v < v1; v += NV) {
        vf acc[R][NV];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) acc[r][j] = zero();
        const T* p[NV];
        for (int j = 0; j < NV; j++) p[j] = k[v + j];
        for (int64_t d = 0; d < head_dim; d++) {
            if (next)
                for (int j = 0; j < NV; j++) prefetch(next[v + j] + d * ldk, VF);
            multiply<R, NV>(
                acc, [&](int r) { return set1(q[r * ldq + d]); }, [&](int j) { return load_kv(p[j] + d * ldk); });
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) store(s + r * kTile + (v + j) * VF, acc[r][j]);
    }
}

// The same for int8, but for the scale of the query row: each group of dimensions is an exact sum of integers, times
// the key's scale, scales[group][position].  K: pairs of dimensions; q: pairs of int16, in the place of floats.
template <class K, int R>
void score_pairs(const float* q, int64_t ldq, int head_dim, const K* const* k, const K* const* next, int64_t ldk,
                 const float* scales, int v0, int v1, float* s) {
    constexpr int NV = kBlockVecs<R>;
    for (int v = v0 / NV * NV; v < v1; v += NV) {
        vf total[R][NV];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) total[r][j] = zero();
        const K* p[NV];
        for (int j = 0; j < NV; j++) p[j] = k[v + j];
        const float* scale = scales + v * VF;
        for (int64_t d = 0; d < head_dim / 2; scale += kTile) {
            vi acc[R][NV];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 8
                for (int j = 0; j < NV; j++) acc[r][j] = iset1(0);
            for (int64_t end = std::min<int64_t>(d + kKeyGroup / 2, head_dim / 2); d < end; d++) {
                if (next)
                    for (int j = 0; j < NV; j++) prefetch(next[v + j] + d * ldk, VF);
                multiply<R, NV>(
                    acc, [&](int r) { return iset1(int32_t(bits_of(q[r * ldq + d]))); },
                    [&](int j) { return load_keys(p[j] + d * ldk); });
            }
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) {
                vf x = load(scale + j * VF);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) total[r][j] = fma(to_float(acc[r][j]), x, total[r][j]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) store(s + r * kTile + (v + j) * VF, total[r][j]);
    }
}

template <class T, int R, int NV>
void mix_block(const float* p, const T* const* values, const T* const* next, int i0, int i1, int64_t d, float* out,
               int64_t ldo) {
    vf acc[R][NV];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) acc[r][j] = load(out + r * ldo + d + j * VF);
    for (int i = i0; i < i1; i++) {
        const T* row = values[i] + d;
        multiply<R, NV>(
            acc, [&](int r) { return set1(p[r * kTile + i]); }, [&](int j) { return load_kv(row + j * VF); });
        if (next) {
            prefetch(next[i] + d, NV * VF);
            soon(values[std::min(i + kSoon, i1 - 1)] + d, NV * VF);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) store(out + r * ldo + d + j * VF, acc[r][j]);
}

// out[r][d] += sum over the positions i0 .. i1-1 of a tile, in order, of p[r][i] * V[i][d]; width a multiple of VF.
template <class T, int R>
void mix_rows(const float* p, const T* const* values, const T* const* next, int i0, int i1, int64_t width, float* out,
              int64_t ldo) {
    constexpr int NV = kBlockVecs<R>;
    int64_t d = 0;
    for (; d + NV * VF <= width; d += NV * VF) mix_block<T, R, NV>(p, values, next, i0, i1, d, out, ldo);
    for (; d < width; d += VF) mix_block<T, R, 1>(p, values, next, i0, i1, d, out, ldo);
}

template <class T>
using ScoreRows = void (*)(const float*, int64_t, int, const T* const*, const T* const*, int64_t, int, int, float*);
template <class K>
using ScorePairs = void (*)(const float*, int64_t, int, const K* const*, const K* const*, int64_t, const float*, int,
                            int, float*);
template <class T>
using MixRows = void (*)(const float*, const T* const*, const T* const*, int, int, int64_t, float*, int64_t);

template <class T>
constexpr ScoreRows<T> kScore[kBlockRows + 1] = {nullptr,          score_rows<T, 1>, score_rows<T, 2>, score_rows<T, 3>,
                                                 score_rows<T, 4>, score_rows<T, 5>, score_rows<T, 6>};
template <class K>
constexpr ScorePairs<K> kScorePairs[kBlockRows + 1] = {
    nullptr,           score_pairs<K, 1>, score_pairs<K, 2>, score_pairs<K, 3>,
    score_pairs<K, 4>, score_pairs<K, 5>, score_pairs<K, 6>};
template <class T>
constexpr MixRows<T> kMix[kBlockRows + 1] = {nullptr,        mix_rows<T, 1>, mix_rows<T, 2>, mix_rows<T, 3>,
                                             mix_rows<T, 4>, mix_rows<T, 5>, mix_rows<T, 6>};

inline vm between(int a, int b) {  // lanes a .. b-1, for any a and b
    return first(std::clamp(b, 0, VF)) & ~first(std::clamp(a, 0, VF));
}

// fn(v) for the vectors that hold positions a .. b-1 of a tile; WHOLE says that these are all of it.
template <bool WHOLE, class F> OCTAVO_INLINE void each_vector(int a, int b, F&& fn) {
    if constexpr (WHOLE) {
#pragma GCC unroll 8
        for (int v = 0; v < kTileVecs; v++) fn(v);
    } else {
        for (int v = a / VF; v * VF < b; v++) fn(v);
    }
}

// Caps one row's scores s[a .. b-1] of a tile, times `scale`, and returns the largest.  Other lanes of the vectors that
// those touch may hold anything, and become -inf.
template <bool SCALED, bool WHOLE> inline float finish_scores(float* s, int a, int b, float softcap, float scale) {
    vf top = set1(kNone);
    each_vector<WHOLE>(a, b, [&](int v) {
        vf x = load(s + v * VF);
        if constexpr (SCALED) x = x * set1(scale);
        if (softcap != 0) x = set1(softcap) * vtanh(x / set1(softcap));
        int lo = a - v * VF, hi = b - v * VF;
        if (!WHOLE && (lo > 0 || hi < VF)) x = select(between(lo, hi), x, set1(kNone));
        if (SCALED || !WHOLE || softcap != 0) store(s + v * VF, x);
        top = vmax(x, top);
    });
    return hmax(top);
}

// Turns the row's scores, whose largest is `highest`, into weights e^(s - max) in place and adds them to the lanes of
// sum; in place they are then multiplied by the positions' scales.  Returns what older weights must be multiplied by,
// now that the maximum may have risen.
template <bool SCALED, bool WHOLE>
inline float weigh(float* s, int a, int b, float highest, float& max, float* sum, const float* scales) {
    float factor = 1;
    vf total = load(sum);
    if (highest > max) {
        factor = exp1(max - highest);
        total = total * set1(factor);
        max = highest;
    }
    vf here = zero();
    each_vector<WHOLE>(a, b, [&](int v) {
        vf x = exp_down(load(s + v * VF) - set1(max));
        store(s + v * VF, SCALED ? x * load(scales + v * VF) : x);
        here = here + x;
    });
    store(sum, total + here);
    return factor;
}

inline void scale_row(float* row, int64_t width, float factor) {
    for (int64_t d = 0; d < width; d += VF) store(row + d, load(row + d) * set1(factor));
}

// Joins a later partial result (max, sum, out) to an earlier one.
inline void join(float& max, float& sum, float* out, float max2, float sum2, const float* out2, int64_t width) {
    float top = max2 > max ? max2 : max;
    float a = exp1(max - top), b = exp1(max2 - top);
    max = top;
    sum = sum * a + sum2 * b;
    for (int64_t d = 0; d < width; d += VF)
        store(out + d, fma(load(out2 + d), set1(b), load(out + d) * set1(a)));
}

}  // namespace octavo
