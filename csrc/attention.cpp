#include "attention.h"

#include <cstring>
#include <utility>
#include <vector>

#include "attention_rows.h"

namespace octavo {
namespace {

constexpr int kSplit = 512;    // positions of one partial result; a multiple of kTile
constexpr int kUnitRows = 96;  // query rows that share one conversion of a KV tile, at most and if work is plenty

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
template <class K, class V> struct Tile {
    const K* keys[kTileVecs] = {};
    const V* values[kTile] = {};
};

// Views into one thread's scratch memory.
struct Scratch {
    float *q, *scores, *keys, *values, *out, *total, *sums, *key_scales, *value_scales;
    float *max, *total_max, *total_sum, *q_scale;
    Scratch(Buffer& buffer, int64_t rows, int64_t width) {
        float* p = floats(buffer, rows * (3 * width + kTile + VF + 4) + (2 * width + width / kKeyGroup + 2) * kTile);
        auto take = [&p](int64_t n) { return std::exchange(p, p + n); };
        q = take(rows * width);
        scores = take(rows * kTile);
        keys = take(width * kTile);
        values = take(width * kTile);
        out = take(rows * width);
        total = take(rows * width);
        sums = take(rows * VF);
        key_scales = take((width / kKeyGroup + 1) * kTile);
        value_scales = take(kTile);
        max = take(rows);
        total_max = take(rows);
        total_sum = take(rows);
        q_scale = take(rows);
    }
};

// A query row as pairs of int16 in place; returns its scale.  A value that is not finite makes that NaN.
float quantise_query(float* q, int hd, int64_t width) {
    constexpr float most = 32767;  // times 127, times kKeyGroup, is far below 2^31
    vf top = zero(), spoiled = zero();
    for (int64_t d = 0; d < width; d += VF) {
        vf v = load(q + d);
        top = vmax(abs(v), top);
        spoiled = fma(v, zero(), spoiled);
    }
    float largest = hmax(top), scale = largest / most + hsum(spoiled);
    vf inverse = set1(largest > 0 ? most / largest : 0.0f);
    int32_t t[2 * VF];
    for (int64_t d = 0; d < hd; d += 2 * VF) {
        for (int64_t i : {d, d + VF})
            istore(t + i - d, i < width ? round_int(load(q + i) * inverse) : iset1(0));
        for (int64_t i = d / 2; i < d / 2 + VF && i < width; i++)
            q[i] = float_of(uint32_t(int16_pair(t[2 * (i - d / 2)], t[2 * (i - d / 2) + 1])));
    }
    return scale;
}

template <class T> class Kernel {
    using Key = typename Stored<T>::Key;
    using WideKey = typename Stored<T>::Wide;
    static constexpr bool kScaled = std::is_same_v<T, I8>;

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
                if constexpr (kScaled) w.q_scale[t * group_ + g] = quantise_query(to, hd, width_);
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
        Tile<Key, T> tiles[2];
        if (direct) point(u, head, from / kTile * kTile, tiles[0]);
        for (int tile = from / kTile * kTile; tile < to; tile += kTile) {
            if constexpr (kScaled) load_scales(w, u, head, tile);
            if (direct) {
                bool more = tile + kTile < u.high;
                if (more) point(u, head, tile + kTile, tiles[1]);
                run_tile<Key, T>(w, u, tile, tiles[0], more ? &tiles[1] : nullptr, layout_.block_size);
                if (more) std::swap(tiles[0], tiles[1]);
                continue;
            }
            if (aligned) convert(w, u, head, tile);
            else gather(w, u, head, tile);
            Tile<WideKey, float> converted;
            for (int v = 0; v < kTileVecs; v++) converted.keys[v] = (const WideKey*)w.keys + v * VF;
            for (int i = 0; i < kTile; i++) converted.values[i] = w.values + i * width_;
            run_tile<WideKey, float>(w, u, tile, converted, nullptr, kTile);
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
    void point(const Unit& u, int head, int tile, Tile<Key, T>& at) const {
        int bs = layout_.block_size, hd = layout_.head_dim;
        auto [lo, hi] = part(u, tile);
        for (int i = lo; i < hi;) {
            int slot = (tile + i) % bs, n = std::min(bs - slot, hi - i);
            int64_t block = block_at(u, tile + i);
            const T* p = planes_.values(block, head) + int64_t(slot) * hd;
            for (int j = 0; j < n; j++) at.values[i + j] = p + int64_t(j) * hd;
            if constexpr (kScaled) prefetch(planes_.scales(block, head), int(planes_.head_scales));
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

    void load_scales(Scratch& w, const Unit& u, int head, int tile) const {
        int bs = layout_.block_size;
        auto [lo, hi] = part(u, tile);
        for (int i = lo; i < hi;) {
            int slot = (tile + i) % bs, n = std::min(bs - slot, hi - i);
            const uint16_t* scales = planes_.scales(block_at(u, tile + i), head) + slot;
            for (int g = 0; g < layout_.key_groups(); g++, scales += bs)
                for (int j = 0; j < n; j++) w.key_scales[g * kTile + i + j] = bf16_to_f32(scales[j]);
            for (int j = 0; j < n; j++) w.value_scales[i + j] = bf16_to_f32(scales[j]);
            i += n;
        }
    }

    // Copies a tile's keys and values as float32; those of int8 as pairs of int16, and as floats without their scale.
    void convert(Scratch& w, const Unit& u, int head, int tile) const {
        Tile<Key, T> at;
        point(u, head, tile, at);
        auto [lo, hi] = part(u, tile);
        for (int64_t d = 0; d < key_steps(); d++)
            for (int v = lo / VF; v * VF < hi; v++)
                store_wide(w.keys + d * kTile + v * VF, load_keys(at.keys[v] + d * layout_.block_size));
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
            const Key* k = planes_.keys(block, head) + slot;
            const T* v = planes_.values(block, head) + int64_t(slot) * hd;
            for (int64_t d = 0; d < key_steps(); d++) widen(k + d * bs, n, w.keys + d * kTile + i);
            for (int j = 0; j < n; j++)
                for (int d = 0; d < hd; d += VF)
                    store(w.values + (i + j) * width_ + d, load_kv_n(v + int64_t(j) * hd + d, std::min(VF, hd - d)));
            i += n;
        }
    }

    static void store_wide(float* to, vf x) { store(to, x); }
    static void store_wide(float* to, vi x) { store(to, as_float(x)); }
    template <class K> static void widen(const K* k, int n, float* to) { store_n(to, load_kv_n(k, n), n); }
    static void widen(const I8Pair* k, int n, float* to) {
        for (int j = 0; j < n; j++) to[j] = float_of(uint32_t(int16_pair(k[j].low, k[j].high)));
    }

    int key_steps() const { return layout_.head_dim / Stored<T>::dims; }

    // Scores, weights and outputs of all rows of the unit over one tile.
    template <class K, class V>
    void run_tile(Scratch& w, const Unit& u, int tile, const Tile<K, V>& at, const Tile<K, V>* next,
                  int64_t ldk) const {
        const K* const* next_keys = next ? next->keys : nullptr;
        const V* const* next_values = next ? next->values : nullptr;
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
            int v0 = any_a / VF, v1 = (any_b + VF - 1) / VF, hd = layout_.head_dim;
            const float* q = w.q + r0 * width_;
            if constexpr (kScaled) kScorePairs<K>[n](q, width_, hd, at.keys, next_keys, ldk, w.key_scales, v0, v1, s);
            else kScore<K>[n](q, width_, hd, at.keys, next_keys, ldk, v0, v1, s);
            if (all_a == 0 && all_b == kTile) soften<true>(w, r0, n, a, b);
            else soften<false>(w, r0, n, a, b);
            // Positions in order for each row: its own before the shared run, the shared run, its own after.
            if (all_a >= all_b) all_a = all_b = kTile;
            auto mix = [&](int r, int count, int i0, int i1, const V* const* fetch) {
                if (i0 < i1) kMix<V>[count](s + r * kTile, at.values, fetch, i0, i1, width_, out + r * width_, width_);
            };
            for (int r = 0; r < n; r++) mix(r, 1, a[r], std::min(b[r], all_a), nullptr);
            mix(0, n, all_a, all_b, next_values);
            for (int r = 0; r < n; r++) mix(r, 1, std::max(a[r], all_b), b[r], nullptr);
        }
    }

    // Scores of the rows r0 .. r0+n-1 to weights, and what they have mixed so far to the new maximum.
    template <bool WHOLE> void soften(Scratch& w, int r0, int n, const int* a, const int* b) const {
        float* s = w.scores + r0 * kTile;
        float highest[kBlockRows];
        for (int r = 0; r < n; r++)
            highest[r] = finish_scores<kScaled, WHOLE>(s + r * kTile, a[r], b[r], op_.softcap, w.q_scale[r0 + r]);
        for (int r = 0; r < n; r++) {
            if (a[r] >= b[r]) continue;
            float f = weigh<kScaled, WHOLE>(s + r * kTile, a[r], b[r], highest[r], w.max[r0 + r],
                                            w.sums + (r0 + r) * VF, w.value_scales);
            if (f != 1) scale_row(w.out + (r0 + r) * width_, width_, f);
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
    int unit_rows = kUnitRows;
    while (unit_rows > 24 && (last - first) * op.heads < int64_t(4) * threads.count() * unit_rows) unit_rows /= 2;
    unit_rows = std::max(unit_rows, group);
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
