#include "sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "vec.h"

namespace octavo {
namespace {

constexpr int64_t kPiece = 256;  // elements that are summed in eight chains before they join the running sum
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kGreedyBelow = 1e-5f;  // temperatures under it are as good as none

// ---- passes over a row --------------------------------------------------------------------------------------------

// Largest value, or NaN if there is any.
float largest(const float* x, int64_t n) {
    vf top = set1(kNone), odd = zero();
    for (int64_t i = 0; i < n; i += VF) {
        int k = int(std::min<int64_t>(VF, n - i));
        vf v = k == VF ? load(x + i) : select(first(k), load_n(x + i, k), set1(kNone));
        top = vmax(v, top);
        odd = select(v == v, odd, set1(1.0f));
    }
    return any(odd > zero()) ? std::numeric_limits<float>::quiet_NaN() : hmax(top);
}

bool usable(float top) { return std::isfinite(top); }

int32_t first_of(const float* x, int64_t n, float value) { return int32_t(std::find(x, x + n, value) - x); }

// Sums of x over pieces of kPiece, each in eight chains folded in a fixed order.
void piece_sums(const float* x, int64_t n, std::vector<double>& sums) {
    sums.clear();
    for (int64_t from = 0; from < n; from += kPiece) {
        int64_t to = std::min(n, from + kPiece), i = from;
        double a[8] = {};
        for (; i + 8 <= to; i += 8)
            for (int j = 0; j < 8; j++) a[j] += double(x[i + j]);
        for (int j = 0; i < to; i++, j++) a[j] += double(x[i]);
        sums.push_back(((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])));
    }
}

double total_of(const std::vector<double>& sums) {
    double t = 0;
    for (double s : sums) t += s;
    return t;
}

// out[i] = e^((x[i] - top) / temperature)
void weights(const float* x, int64_t n, float top, float temperature, float* out) {
    for (int64_t i = 0; i < n; i += VF) {
        int k = int(std::min<int64_t>(VF, n - i));
        store_n(out + i, vexp((load_n(x + i, k) - set1(top)) / set1(temperature)), k);
    }
}

// A key that sorts by falling value, then by rising id.  x is not NaN.
uint64_t key_of(float x, int64_t id) {
    uint32_t u = bits_of(x + 0.0f);  // -0 and 0 are equal
    u = u & 0x80000000u ? u : ~u & 0x7fffffffu;
    return uint64_t(u) << 32 | uint32_t(id);
}

int32_t id_of(uint64_t key) { return int32_t(uint32_t(key)); }

// The k best of x[0..n-1], best first, into keys.  Once there are k, only what beats the worst of them is looked at.
void best(const float* x, int64_t n, int64_t k, std::vector<uint64_t>& keys) {
    keys.clear();
    k = std::min(k, n);
    if (k == 0) return;
    size_t room = size_t(k + std::max<int64_t>(k, 1024));
    float bar = kNone;
    bool full = false;  // bar is the k-th best so far
    auto trim = [&] {
        std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end());
        keys.resize(size_t(k));
        bar = x[id_of(keys[size_t(k) - 1])];
        full = true;
    };
    for (int64_t i = 0; i < n; i += VF) {
        int m = int(std::min<int64_t>(VF, n - i));
        if (full && m == VF && !any(load(x + i) > set1(bar))) continue;
        for (int j = 0; j < m; j++)
            if (!full || x[i + j] > bar) keys.push_back(key_of(x[i + j], i + j));
        if (keys.size() >= room) trim();
    }
    if (int64_t(keys.size()) > k) trim();
    std::sort(keys.begin(), keys.end());
}

// out = x where the mask's bit is set, -inf elsewhere.
void masked(const float* x, const uint32_t* mask, int64_t n, float* out) {
    for (int64_t from = 0; from < n; from += 32) {
        uint32_t bits = mask[from / 32];
        int64_t to = std::min(n, from + 32);
        if (bits == 0) std::fill(out + from, out + to, kNone);
        else if (bits == ~0u) std::copy(x + from, x + to, out + from);
        else
            for (int64_t i = from; i < to; i++, bits >>= 1) out[i] = bits & 1 ? x[i] : kNone;
    }
}

// ---- one sample ---------------------------------------------------------------------------------------------------

void penalise(const Samples& b, int64_t s, float* x) {
    for (int32_t i = b.bias.offsets[s]; i < b.bias.offsets[s + 1]; i++)
        x[b.bias.ids[i]] = float(double(x[b.bias.ids[i]]) + double(b.bias.values[i]));
    double repetition = b.repetition[s], frequency = b.frequency[s], presence = b.presence[s];
    for (int32_t i = b.history.offsets[s]; i < b.history.offsets[s + 1]; i++) {
        float& at = x[b.history.ids[i]];
        double old = at, count = b.history.values[i];
        at = float((old > 0 ? old / repetition : old * repetition) - frequency * count - presence * (count > 0));
    }
}

// The first id at which the running sum of w exceeds u times the total; ids of weight 0 are never drawn.
int32_t draw(const float* w, int64_t n, double u, std::vector<double>& sums) {
    piece_sums(w, n, sums);
    double goal = u * total_of(sums), running = 0;
    int64_t at = 0, last = -1;
    size_t p = 0;
    while (p + 1 < sums.size() && running + sums[p] <= goal) running += sums[p++];
    for (at = int64_t(p) * kPiece; at < n; at++) {
        if (w[at] == 0) continue;
        last = at;
        running += double(w[at]);
        if (running > goal) break;
    }
    if (last >= 0) return int32_t(last);
    for (at = n - 1; w[at] == 0; at--) {}  // rounding took the goal to the end: the last with any weight
    return int32_t(at);
}

// The last of the shortest run of sorted keys whose weights, added to `before`, reach goal.
uint64_t last_within(const uint64_t* keys, size_t n, const float* w, double before, double goal) {
    size_t i = 0;
    for (before += double(w[id_of(keys[0])]); i + 1 < n && before < goal; before += double(w[id_of(keys[i])])) i++;
    return keys[i];
}

// The last key of the shortest run of the best tokens whose weights reach top_p of their total.
uint64_t nucleus(const float* x, const float* w, int64_t V, double top_p, SampleSpace& space) {
    auto& keys = space.keys;
    piece_sums(w, V, space.sums);
    double total = total_of(space.sums), goal = top_p * total;
    // All tokens lighter than this weigh less than what top-p cuts off, so it cuts them all (half: room for rounding).
    vf light = set1(float(0.5 * (1 - top_p) * total / double(V)));
    keys.clear();
    for (int64_t i = 0; i < V; i += VF) {
        int n = int(std::min<int64_t>(VF, V - i));
        vf weight = load_n(w + i, n);
        if (!any(weight >= light)) continue;
        float t[VF];
        store(t, select(weight >= light, weight, set1(-1.0f)));
        for (int j = 0; j < n; j++)
            if (t[j] >= 0) keys.push_back(key_of(x[i + j], i + j));
    }
    // Halve the range in which the run ends: what is before it is in, in no order, and what is after it is out.
    size_t low = 0, high = keys.size();
    double before = 0;
    while (high - low > 64) {
        size_t middle = low + (high - low) / 2;
        std::nth_element(keys.begin() + low, keys.begin() + middle, keys.begin() + high);
        double mass = 0;
        for (size_t i = low; i < middle; i++) mass += double(w[id_of(keys[i])]);
        if (before + mass >= goal) high = middle;
        else low = middle, before += mass;
    }
    std::sort(keys.begin() + low, keys.begin() + high);
    return last_within(keys.data() + low, high - low, w, before, goal);
}

// The last key that top-k and top-p keep.
uint64_t last_kept(const float* x, const float* w, int64_t V, int64_t top_k, double top_p, SampleSpace& space) {
    if (top_k <= 0 || top_k >= V) return top_p < 1 ? nucleus(x, w, V, top_p, space) : ~uint64_t(0);
    auto& keys = space.keys;
    best(x, V, top_k, keys);
    if (top_p >= 1) return keys.back();
    double total = 0;
    for (uint64_t key : keys) total += double(w[id_of(key)]);
    return last_within(keys.data(), keys.size(), w, 0, top_p * total);
}

int32_t draw_filtered(const float* x, float* w, int64_t V, const Samples& b, int64_t s, SampleSpace& space) {
    uint64_t last = last_kept(x, w, V, b.top_k[s], double(b.top_p[s]), space);
    float min_p = b.min_p[s];  // the best weighs 1, so it always stays
    if (last != ~uint64_t(0)) {
        int32_t id = id_of(last);
        float worst = x[id];
        for (int64_t i = 0; i < V; i++) w[i] = x[i] > worst || (x[i] == worst && i <= id) ? w[i] : 0.0f;
    }
    if (min_p > 0)
        for (int64_t i = 0; i < V; i++) w[i] = w[i] < min_p ? 0.0f : w[i];
    return draw(w, V, uniform(b.seed[s], b.branch[s], b.position[s]), space.sums);
}

int32_t choose(const float* row, float top, int64_t V, const Samples& b, int64_t s, SampleSpace& space) {
    if (!usable(top)) return -1;
    const float* x = row;
    bool changed = b.bias.offsets[s] < b.bias.offsets[s + 1] || b.history.offsets[s] < b.history.offsets[s + 1] ||
                   b.mask[s] >= 0;
    float temperature = b.temperature[s];
    space.values.resize(size_t(2 * V));
    if (changed) {
        if (b.mask[s] >= 0) masked(row, b.masks + b.mask[s] * b.mask_words, V, space.values.data());
        else std::memcpy(space.values.data(), row, sizeof(float) * size_t(V));
        penalise(b, s, space.values.data());
        x = space.values.data();
        top = largest(x, V);
        if (!usable(top)) return -1;
    }
    if (temperature < kGreedyBelow) return first_of(x, V, top);
    float* w = space.values.data() + V;
    weights(x, V, top, temperature, w);
    return draw_filtered(x, w, V, b, s, space);
}

// ---- reports ------------------------------------------------------------------------------------------------------

void clear(const Drawn& out, int64_t s) {
    out.logprob[s] = 0;
    out.rank[s] = 0;
    std::fill_n(out.top_ids + s * out.top, out.top, -1);
    std::fill_n(out.top_logprobs + s * out.top, out.top, kNone);
}

// Log-probability and rank of a token under a usable row, and its best.
void report(const float* row, float top, int64_t V, int32_t token, const Drawn& out, int64_t s, SampleSpace& space) {
    space.values.resize(size_t(2 * V));
    weights(row, V, top, 1.0f, space.values.data());
    piece_sums(space.values.data(), V, space.sums);
    double log_total = std::log(total_of(space.sums));
    auto logprob = [&](int32_t id) { return float(double(row[id]) - double(top) - log_total); };
    float value = row[token];
    int32_t rank = 1;
    for (int64_t i = 0; i < V; i++) rank += row[i] > value;
    for (int64_t i = 0; i < token; i++) rank += row[i] == value;
    out.logprob[s] = logprob(token);
    out.rank[s] = rank;
    best(row, V, out.top, space.keys);
    for (int64_t i = 0; i < out.top; i++) {
        int32_t id = id_of(space.keys[size_t(i)]);
        out.top_ids[s * out.top + i] = id;
        out.top_logprobs[s * out.top + i] = logprob(id);
    }
}

void make_room(std::deque<SampleSpace>& space, Threads& threads) {
    while (int(space.size()) < threads.count()) space.emplace_back();
}

}  // namespace

void sample(Threads& threads, std::deque<SampleSpace>& space, const float* logits, int64_t V, const Samples& samples,
            const Drawn& out) {
    make_room(space, threads);
    threads.parallel_for(samples.count, [&](int64_t s, int worker) {
        const float* row = logits + samples.row[s] * V;
        float top = largest(row, V);
        out.token[s] = choose(row, top, V, samples, s, space[worker]);
        clear(out, s);
        if (samples.logprobs[s] >= 0 && out.token[s] >= 0) report(row, top, V, out.token[s], out, s, space[worker]);
    });
}

void score(Threads& threads, std::deque<SampleSpace>& space, const float* logits, int64_t R, int64_t V,
           const int32_t* targets, const Drawn& out) {
    make_room(space, threads);
    threads.parallel_for(R, [&](int64_t r, int worker) {
        const float* row = logits + r * V;
        float top = largest(row, V);
        out.token[r] = usable(top) ? targets[r] : -1;
        clear(out, r);
        if (usable(top)) report(row, top, V, targets[r], out, r, space[worker]);
    });
}

double uniform(uint64_t seed, int32_t branch, int32_t position) {
    uint32_t c[4] = {uint32_t(position), uint32_t(branch), 0, 0};
    uint32_t k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = uint64_t(0xD2511F53u) * c[0], p1 = uint64_t(0xCD9E8D57u) * c[2];
        uint32_t n0 = uint32_t(p1 >> 32) ^ c[1] ^ k[0], n2 = uint32_t(p0 >> 32) ^ c[3] ^ k[1];
        c[0] = n0, c[1] = uint32_t(p1), c[2] = n2, c[3] = uint32_t(p0);
        k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
    }
    return double((uint64_t(c[0]) << 32 | c[1]) >> 11) * 0x1p-53;
}

}  // namespace octavo
