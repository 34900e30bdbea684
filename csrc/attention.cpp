#include "attention.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

constexpr int kTile = 64;      // positions whose scores are computed at a time
constexpr int kSplit = 512;    // positions of one partial result; a multiple of kTile
constexpr int kBlockRows = 6;  // query rows of a register block
constexpr int kUnitRows = 48;  // query rows that share one conversion of a KV tile
constexpr int kTileVecs = kTile / VF;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// Vectors of a register block beside R rows: enough chains to hide the latency of fma, few enough to stay in registers.
template <int R> constexpr int kBlockVecs = (VF == 8 && R > 3) ? 2 : 4;

inline float lane_max(vf x) {
#if defined(OCTAVO_SCALAR)
    return hmax(x);
#elif defined(__AVX512F__)
    return _mm512_reduce_max_ps(x.v);
#elif defined(__AVX2__)
    __m128 h = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
    h = _mm_max_ps(h, _mm_movehl_ps(h, h));
    return _mm_cvtss_f32(_mm_max_ss(h, _mm_shuffle_ps(h, h, 1)));
#else
    return hmax(x);
#endif
}

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

// ---- register blocks ----------------------------------------------------------------------------------------------

// Lines that hold n items from p on are fetched while something else is computed.
template <class T> inline void prefetch(const T* p, int n) {
    for (size_t at = 0; at < n * sizeof(T); at += 64) __builtin_prefetch((const char*)p + at, 0, 2);
}

// acc[r][j] += row(r) * column(j): the fewer of the two wait in registers, the others come one by one.
template <int R, int NV, class Row, class Column>
OCTAVO_INLINE void multiply(vf (&acc)[R][NV], Row&& row, Column&& column) {
    if constexpr (R < NV) {
        vf b[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) b[r] = row(r);
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) {
            vf c = column(j);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) acc[r][j] = fma(b[r], c, acc[r][j]);
        }
    } else {
        vf c[NV];
#pragma GCC unroll 8
        for (int j = 0; j < NV; j++) c[j] = column(j);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vf b = row(r);
#pragma GCC unroll 8
            for (int j = 0; j < NV; j++) acc[r][j] = fma(b, c[j], acc[r][j]);
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
        if (next) prefetch(next[i] + d, NV * VF);
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
template <class T>
using MixRows = void (*)(const float*, const T* const*, const T* const*, int, int, int64_t, float*, int64_t);

template <class T>
constexpr ScoreRows<T> kScore[kBlockRows + 1] = {nullptr,          score_rows<T, 1>, score_rows<T, 2>, score_rows<T, 3>,
                                                 score_rows<T, 4>, score_rows<T, 5>, score_rows<T, 6>};
template <class T>
constexpr MixRows<T> kMix[kBlockRows + 1] = {nullptr,        mix_rows<T, 1>, mix_rows<T, 2>, mix_rows<T, 3>,
                                             mix_rows<T, 4>, mix_rows<T, 5>, mix_rows<T, 6>};

inline vm between(int a, int b) {  // lanes a .. b-1, for any a and b
    return first(std::clamp(b, 0, VF)) & ~first(std::clamp(a, 0, VF));
}

// Caps one row's scores s[a .. b-1] of a tile and returns the largest.  Other lanes of the vectors that those touch may
// hold anything, and become -inf.
inline float finish_scores(float* s, int a, int b, float softcap) {
    vf top = set1(kNone);
    for (int v = a / VF; v * VF < b; v++) {
        vf x = load(s + v * VF);
        if (softcap != 0) x = set1(softcap) * vtanh(x / set1(softcap));
        int lo = a - v * VF, hi = b - v * VF;
        if (lo > 0 || hi < VF) x = select(between(lo, hi), x, set1(kNone));
        store(s + v * VF, x);
        top = vmax(x, top);
    }
    return lane_max(top);
}

// Turns the row's scores, whose largest is `highest`, into weights e^(s - max) in place and adds them to the lanes of
// sum.  Returns what older weights must be multiplied by, now that the maximum may have risen.
inline float weigh(float* s, int a, int b, float highest, float& max, float* sum) {
    float factor = 1;
    vf total = load(sum);
    if (highest > max) {
        factor = exp1(max - highest);
        total = total * set1(factor);
        max = highest;
    }
    vf here = zero();
    for (int v = a / VF; v * VF < b; v++) {
        vf x = exp_down(load(s + v * VF) - set1(max));
        store(s + v * VF, x);
        here = here + x;
    }
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

// ---- units of work ------------------------------------------------------------------------------------------------

// Consecutive tokens of one row: with the query heads of one KV head they make up to kUnitRows query rows.
struct Unit {
    int32_t row;
    int32_t token, tokens;        // index of the first among the step's tokens, and how many
    int32_t position;             // of the first
    int32_t low, high;            // positions that take part for any of them: low .. high-1
    int first_split() const { return low / kSplit; }
    int splits() const { return (high - 1) / kSplit - first_split() + 1; }
};

// Where a tile's keys and values are: keys for each vector of positions (a dimension further is ldk items on), values
// for each position.
template <class T> struct Tile {
    const T* keys[kTileVecs] = {};
    const T* values[kTile] = {};
};

// Views into one thread's scratch memory.
struct Scratch {
    float *q, *scores, *keys, *values, *out, *total, *sums;
    float *max, *total_max, *total_sum;
    Scratch(Buffer& buffer, int64_t rows, int64_t width) {
        float* p = floats(buffer, rows * (3 * width + kTile + VF + 4) + 2 * width * kTile);
        auto take = [&p](int64_t n) { return std::exchange(p, p + n); };
        q = take(rows * width);
        scores = take(rows * kTile);
        keys = take(width * kTile);
        values = take(width * kTile);
        out = take(rows * width);
        total = take(rows * width);
        sums = take(rows * VF);
        max = take(rows);
        total_max = take(rows);
        total_sum = take(rows);
    }
};

template <class T> class Kernel {
  public:
    Kernel(const Attention& op, const KVLayout& layout, uint8_t* blocks, int place, const Table& table)
        : op_(op),
          layout_(layout),
          planes_(layout, blocks, place),
          table_(table),
          group_(op.heads / layout.kv_heads),
          width_(round_up(layout.head_dim, VF)) {}

    int64_t width() const { return width_; }
    int group() const { return group_; }

    // Scaled query rows of the unit: row r = token r / group, head r % group.
    void load_queries(Scratch& w, const Unit& u, int head, const float* q, int64_t ldq) const {
        int hd = layout_.head_dim;
        for (int t = 0; t < u.tokens; t++)
            for (int g = 0; g < group_; g++) {
                const float* from = q + t * ldq + (int64_t(head) * group_ + g) * hd;
                float* to = w.q + (t * group_ + g) * width_;
                for (int d = 0; d < hd; d += VF) {
                    int n = std::min(VF, hd - d);
                    store(to + d, load_n(from + d, n) * set1(op_.scale));
                }
            }
    }

    // Partial result of every row of the unit over one split: w.max, w.out, and the sum's lanes in w.sums.
    void run_split(Scratch& w, const Unit& u, int head, int split) const {
        int rows = u.tokens * group_;
        std::fill(w.max, w.max + rows, kNone);
        std::memset(w.sums, 0, sizeof(float) * rows * VF);
        std::memset(w.out, 0, sizeof(float) * rows * width_);
        int from = std::max(u.low, split * kSplit), to = std::min(u.high, (split + 1) * kSplit);
        bool aligned = layout_.block_size % VF == 0 && layout_.head_dim % VF == 0;
        bool shared = rows > kBlockRows && !std::is_same_v<T, float>;  // converting once pays
        bool direct = aligned && !shared;
        Tile<T> tiles[2];
        if (direct) point(u, head, from / kTile * kTile, tiles[0]);
        for (int tile = from / kTile * kTile; tile < to; tile += kTile) {
            if (direct) {
                bool more = tile + kTile < u.high;
                if (more) point(u, head, tile + kTile, tiles[1]);
                run_tile<T>(w, u, tile, tiles[0], more ? &tiles[1] : nullptr, layout_.block_size);
                if (more) std::swap(tiles[0], tiles[1]);
                continue;
            }
            if (aligned) convert(w, u, head, tile);
            else gather(w, u, head, tile);
            Tile<float> converted;
            for (int v = 0; v < kTileVecs; v++) converted.keys[v] = w.keys + v * VF;
            for (int i = 0; i < kTile; i++) converted.values[i] = w.values + i * width_;
            run_tile<float>(w, u, tile, converted, nullptr, kTile);
        }
    }

    // Whether a row of the unit sees anything of a split.
    bool sees(const Unit& u, int r, int split) const {
        auto [low, high] = range(u, r);
        return low < (split + 1) * kSplit && high > split * kSplit;
    }

    float sum_of(const Scratch& w, int r) const { return hsum(load(w.sums + r * VF)); }

  private:
    // Positions that row r of the unit attends to.
    std::pair<int, int> range(const Unit& u, int r) const {
        int high = u.position + r / group_ + 1;
        return {op_.window ? std::max(0, high - op_.window) : 0, high};
    }

    int64_t block_at(const Unit& u, int position) const {
        return table_.ids[table_.offsets[u.row] + position / layout_.block_size];
    }

    // Where the positions low .. high-1 of a unit lie in a tile.
    static std::pair<int, int> part(const Unit& u, int tile) {
        return {std::max(u.low - tile, 0), std::min(u.high - tile, kTile)};
    }

    // Points at the keys and values of a tile inside their blocks.  Vectors of keys without a position to read point at
    // one that has: their lanes are masked later.
    void point(const Unit& u, int head, int tile, Tile<T>& at) const {
        int bs = layout_.block_size, hd = layout_.head_dim;
        auto [lo, hi] = part(u, tile);
        for (int i = lo; i < hi;) {
            int slot = (tile + i) % bs, n = std::min(bs - slot, hi - i);
            const T* p = planes_.values(block_at(u, tile + i), head) + int64_t(slot) * hd;
            for (int j = 0; j < n; j++) at.values[i + j] = p + int64_t(j) * hd;
            i += n;
        }
        int v0 = lo / VF, v1 = (hi + VF - 1) / VF;
        for (int v = v0; v < v1; v++) {
            int p = tile + v * VF;
            at.keys[v] = planes_.keys(block_at(u, p), head) + p % bs;
        }
        for (int v = 0; v < v0; v++) at.keys[v] = at.keys[v0];
        for (int v = v1; v < kTileVecs; v++) at.keys[v] = at.keys[v0];
    }

    // Copies a tile's keys and values as float32.
    void convert(Scratch& w, const Unit& u, int head, int tile) const {
        Tile<T> at;
        point(u, head, tile, at);
        auto [lo, hi] = part(u, tile);
        for (int64_t d = 0; d < layout_.head_dim; d++)
            for (int v = lo / VF; v * VF < hi; v++)
                store(w.keys + d * kTile + v * VF, load_kv(at.keys[v] + d * layout_.block_size));
        for (int i = lo; i < hi; i++)
            for (int64_t d = 0; d < width_; d += VF) store(w.values + i * width_ + d, load_kv(at.values[i] + d));
    }

    // The same out of blocks of any size and for any head_dim; values are padded to whole vectors.
    void gather(Scratch& w, const Unit& u, int head, int tile) const {
        int bs = layout_.block_size, hd = layout_.head_dim;
        auto [lo, hi] = part(u, tile);
        for (int i = lo; i < hi;) {
            int slot = (tile + i) % bs, n = std::min({bs - slot, hi - i, VF});
            int64_t block = block_at(u, tile + i);
            const T* k = planes_.keys(block, head) + slot;
            const T* v = planes_.values(block, head) + int64_t(slot) * hd;
            for (int64_t d = 0; d < hd; d++) store_n(w.keys + d * kTile + i, load_kv_n(k + d * bs, n), n);
            for (int j = 0; j < n; j++)
                for (int d = 0; d < hd; d += VF)
                    store(w.values + (i + j) * width_ + d, load_kv_n(v + int64_t(j) * hd + d, std::min(VF, hd - d)));
            i += n;
        }
    }

    // Scores, weights and outputs of all rows of the unit over one tile.
    template <class E>
    void run_tile(Scratch& w, const Unit& u, int tile, const Tile<E>& at, const Tile<E>* next, int64_t ldk) const {
        const E* const* next_keys = next ? next->keys : nullptr;
        const E* const* next_values = next ? next->values : nullptr;
        int rows = u.tokens * group_;
        for (int r0 = 0; r0 < rows; r0 += kBlockRows) {
            int n = std::min(kBlockRows, rows - r0);
            int a[kBlockRows], b[kBlockRows];              // each row's positions in the tile
            int all_a = 0, all_b = kTile;                  // those that all rows share
            int any_a = kTile, any_b = 0;
            for (int r = 0; r < n; r++) {
                auto [low, high] = range(u, r0 + r);
                a[r] = std::clamp(low - tile, 0, kTile);
                b[r] = std::clamp(high - tile, 0, kTile);
                all_a = std::max(all_a, a[r]);
                all_b = std::min(all_b, b[r]);
                if (a[r] < b[r]) any_a = std::min(any_a, a[r]), any_b = std::max(any_b, b[r]);
            }
            if (any_a >= any_b) continue;
            float* s = w.scores + r0 * kTile;
            float* out = w.out + r0 * width_;
            kScore<E>[n](w.q + r0 * width_, width_, layout_.head_dim, at.keys, next_keys, ldk, any_a / VF,
                         (any_b + VF - 1) / VF, s);
            float highest[kBlockRows];
            for (int r = 0; r < n; r++) highest[r] = finish_scores(s + r * kTile, a[r], b[r], op_.softcap);
            for (int r = 0; r < n; r++) {
                if (a[r] >= b[r]) continue;
                float f = weigh(s + r * kTile, a[r], b[r], highest[r], w.max[r0 + r], w.sums + (r0 + r) * VF);
                if (f != 1) scale_row(out + r * width_, width_, f);
            }
            // Positions in order for each row: its own before the shared run, the shared run, its own after.
            if (all_a >= all_b) all_a = all_b = kTile;
            auto mix = [&](int r, int count, int i0, int i1, const E* const* fetch) {
                if (i0 < i1) kMix<E>[count](s + r * kTile, at.values, fetch, i0, i1, width_, out + r * width_, width_);
            };
            for (int r = 0; r < n; r++) mix(r, 1, a[r], std::min(b[r], all_a), nullptr);
            mix(0, n, all_a, all_b, next_values);
            for (int r = 0; r < n; r++) mix(r, 1, std::max(a[r], all_b), b[r], nullptr);
        }
    }

    Attention op_;
    KVLayout layout_;
    Planes<T> planes_;
    Table table_;
    int group_;
    int64_t width_;
};

std::vector<Unit> cut(const Rows& rows, int64_t first, int64_t last, int window, int unit_tokens) {
    std::vector<Unit> units;
    for (int64_t s = 0; s < rows.count; s++) {
        int64_t from = std::max<int64_t>(rows.starts[s], first), to = std::min<int64_t>(rows.starts[s + 1], last);
        for (int64_t t = from; t < to; t += unit_tokens) {
            int n = int(std::min<int64_t>(unit_tokens, to - t)), p = rows.positions[t];
            units.push_back({int32_t(s), int32_t(t), n, p, window ? std::max(0, p + 1 - window) : 0, p + n});
        }
    }
    return units;
}

struct Output {
    float* out;  // of the first token of the unit
    int64_t ld;
    int head, group, head_dim;

    void write(int r, const float* row, float sum) const {
        float* to = out + r / group * ld + (int64_t(head) * group + r % group) * head_dim;
        vf inverse = set1(1.0f / sum);
        for (int d = 0; d < head_dim; d += VF) store_n(to + d, load(row + d) * inverse, std::min(VF, head_dim - d));
    }
};

// All splits of a unit, one after the other.
template <class T> void run_whole(const Kernel<T>& kernel, Scratch& w, const Unit& u, const Output& output) {
    int rows = u.tokens * kernel.group();
    int64_t width = kernel.width();
    for (int i = 0; i < u.splits(); i++) {
        int split = u.first_split() + i;
        kernel.run_split(w, u, output.head, split);
        for (int r = 0; r < rows; r++) {
            if (!kernel.sees(u, r, split)) continue;
            float sum = kernel.sum_of(w, r), *out = w.out + r * width, *total = w.total + r * width;
            if (i == 0 || !kernel.sees(u, r, split - 1)) {
                w.total_max[r] = w.max[r];
                w.total_sum[r] = sum;
                std::memcpy(total, out, sizeof(float) * width);
            } else {
                join(w.total_max[r], w.total_sum[r], total, w.max[r], sum, out, width);
            }
        }
    }
    for (int r = 0; r < rows; r++) output.write(r, w.total + r * width, w.total_sum[r]);
}

// The same by parts: one split into memory, and later the join of all splits of a unit.  A row's part is its output,
// then maximum and sum; VF more floats keep parts aligned.
template <class T>
void run_part(const Kernel<T>& kernel, Scratch& w, const Unit& u, int head, int split, float* part) {
    int64_t width = kernel.width(), ld = width + VF;
    kernel.run_split(w, u, head, split);
    for (int r = 0; r < u.tokens * kernel.group(); r++) {
        std::memcpy(part + r * ld, w.out + r * width, sizeof(float) * width);
        part[r * ld + width] = w.max[r];
        part[r * ld + width + 1] = kernel.sum_of(w, r);
    }
}

template <class T> void join_parts(const Kernel<T>& kernel, const Unit& u, float* parts, const Output& output) {
    int64_t width = kernel.width(), ld = width + VF;
    int rows = u.tokens * kernel.group();
    for (int r = 0; r < rows; r++) {
        float* total = nullptr;
        for (int i = 0; i < u.splits(); i++) {
            if (!kernel.sees(u, r, u.first_split() + i)) continue;
            float* part = parts + (int64_t(i) * rows + r) * ld;
            if (!total) total = part;
            else join(total[width], total[width + 1], total, part[width], part[width + 1], part, width);
        }
        output.write(r, total, total[width + 1]);
    }
}

}  // namespace

void attend(Threads& threads, AttentionSpace& space, const Attention& op, const KVLayout& layout, uint8_t* blocks,
            int place, const Table& table, const Rows& rows, int64_t first, int64_t last, const float* q, int64_t ldq,
            float* out, int64_t ldo) {
    int group = op.heads / layout.kv_heads, heads = layout.kv_heads;
    int unit_rows = std::max(kUnitRows, group);
    std::vector<Unit> units = cut(rows, first, last, op.window, unit_rows / group);
    int64_t n = int64_t(units.size()) * heads;
    while (int(space.scratch.size()) < threads.count()) space.scratch.emplace_back();
    with_type(layout.type, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        Kernel<T> kernel(op, layout, blocks, place, table);
        auto output_of = [&](const Unit& u, int head) {
            return Output{out + (u.token - first) * ldo, ldo, head, group, layout.head_dim};
        };
        auto queries = [&](Scratch& w, const Unit& u, int head) {
            kernel.load_queries(w, u, head, q + (u.token - first) * ldq, ldq);
        };
        std::vector<int64_t> part_at{0};  // first split of each unit among all splits
        for (const Unit& u : units) part_at.push_back(part_at.back() + u.splits());
        bool few = threads.count() > 1 && n < 4 * threads.count() && part_at.back() > int64_t(units.size());
        if (!few) {
            threads.parallel_for(n, [&](int64_t i, int worker) {
                i = n - 1 - i;  // the last tokens of a prompt see most: longest first
                const Unit& u = units[i / heads];
                int head = int(i % heads);
                Scratch w(space.scratch[worker], unit_rows, kernel.width());
                queries(w, u, head);
                run_whole(kernel, w, u, output_of(u, head));
            });
            return;
        }
        int64_t part_floats = 0;
        for (const Unit& u : units) part_floats = std::max<int64_t>(part_floats, u.tokens * group);
        part_floats *= kernel.width() + VF;
        float* parts = floats(space.partials, part_at.back() * heads * part_floats);
        // Parts of a unit and head lie together: [unit][head][split][row].
        auto parts_of = [&](int64_t unit, int head) {
            return parts + (part_at[unit] * heads + int64_t(head) * units[unit].splits()) * part_floats;
        };
        threads.parallel_for(part_at.back() * heads, [&](int64_t i, int worker) {
            int64_t at = i / heads, unit = 0;
            int head = int(i % heads);
            while (part_at[unit + 1] <= at) unit++;
            const Unit& u = units[unit];
            int64_t split = at - part_at[unit];
            Scratch w(space.scratch[worker], unit_rows, kernel.width());
            queries(w, u, head);
            int64_t rows_here = int64_t(u.tokens) * group;
            run_part(kernel, w, u, head, u.first_split() + int(split),
                     parts_of(unit, head) + split * rows_here * (kernel.width() + VF));
        });
        threads.parallel_for(n, [&](int64_t i, int) {
            int64_t unit = i / heads;
            join_parts(kernel, units[unit], parts_of(unit, int(i % heads)), output_of(units[unit], int(i % heads)));
        });
    });
}

}  // namespace octavo
