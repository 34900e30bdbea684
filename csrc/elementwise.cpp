#include "elementwise.h"

#include <cmath>
#include <cstring>

namespace octavo {
namespace {

// Runs f(first row, last row + 1) over pieces of about 16k elements: small work stays on the calling thread.
template <class F> void by_rows(Threads& threads, int64_t rows, int64_t row_items, F&& f) {
    int64_t piece = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, row_items));
    threads.parallel_for((rows + piece - 1) / piece,
                         [&](int64_t i, int) { f(i * piece, std::min(rows, (i + 1) * piece)); });
}

// Sum of squares by lanes in four chains, folded in a fixed order; a short last vector counts as zeros.
inline float sum_of_squares(const float* x, int64_t n) {
    vf a[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 4 * VF <= n; i += 4 * VF)
        for (int j = 0; j < 4; j++) {
            vf v = load(x + i + j * VF);
            a[j] = fma(v, v, a[j]);
        }
    for (int j = 0; i < n; i += VF, j++) {
        vf v = load_n(x + i, int(std::min<int64_t>(VF, n - i)));
        a[j] = fma(v, v, a[j]);
    }
    return hsum((a[0] + a[1]) + (a[2] + a[3]));
}

inline void norm_row(const float* x, int64_t D, const float* weight, float eps, const float* residual, float* y) {
    vf r = set1(1.0f / std::sqrt(sum_of_squares(x, D) / float(D) + eps));
    for (int64_t i = 0; i < D; i += VF) {
        int n = int(std::min<int64_t>(VF, D - i));
        vf v = load_n(x + i, n) * r * load_n(weight + i, n);
        if (residual) v = v + load_n(residual + i, n);
        store_n(y + i, v, n);
    }
}

// One head's vector, normed if weight is given (into scratch), and rotated, from x to y.
inline void rotate_head(const float* x, int head_dim, const float* weight, float eps, const float* cosines, int half,
                        float* scratch, float* y) {
    if (weight) {
        norm_row(x, head_dim, weight, eps, nullptr, scratch);
        x = scratch;
    }
    const float* sines = cosines + half;
    for (int i = 0; i < half; i += VF) {
        int n = std::min(VF, half - i);
        vf a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cosines + i, n), s = load_n(sines + i, n);
        store_n(y + i, fma(a, c, neg(b * s)), n);
        store_n(y + half + i, fma(b, c, a * s), n);
    }
    std::memcpy(y + 2 * half, x + 2 * half, sizeof(float) * (head_dim - 2 * half));
}

template <Activation A> inline vf activate(vf x) {
    if constexpr (A == Activation::silu) return x / (set1(1.0f) + vexp(neg(x)));
    vf inner = set1(0.7978845608028654f) * fma(set1(0.044715f) * x * x, x, x);
    return set1(0.5f) * x * (set1(1.0f) + vtanh(inner));
}

template <Activation A> void gate_row(const float* x, int64_t F, float* y) {
    for (int64_t i = 0; i < F; i += VF) {
        int n = int(std::min<int64_t>(VF, F - i));
        store_n(y + i, activate<A>(load_n(x + i, n)) * load_n(x + F + i, n), n);
    }
}

constexpr int kWriteTokens = 16;

// Keys and values of up to kWriteTokens tokens into their blocks.  keys: [tokens][kv_heads * head_dim], rotated.
template <class T>
void write_tokens(const KVLayout& layout, const Planes<T>& planes, const int32_t* block_of, const int32_t* positions,
                  int tokens, const float* keys, const float* values, int64_t ldv, T* scratch) {
    int hd = layout.head_dim, bs = layout.block_size, kv = layout.kv_heads * hd;
    for (int t = 0; t < tokens; t++) {
        for (int i = 0; i < kv; i += VF) {
            int n = std::min(VF, kv - i);
            store_kv_n(scratch + t * kv + i, load_n(keys + int64_t(t) * kv + i, n), n);
        }
        int slot = positions[t] % bs;
        for (int h = 0; h < layout.kv_heads; h++)
            for (int d = 0; d < hd; d += VF) {
                int n = std::min(VF, hd - d);
                T* to = planes.values(block_of[t], h) + int64_t(slot) * hd + d;
                store_kv_n(to, load_n(values + t * ldv + h * hd + d, n), n);
            }
    }
    // K is transposed: a run of tokens in one block writes its slots of a dimension side by side.
    for (int t = 0; t < tokens;) {
        int slot = positions[t] % bs, n = 1;
        while (t + n < tokens && block_of[t + n] == block_of[t] && positions[t + n] == positions[t] + n) n++;
        for (int h = 0; h < layout.kv_heads; h++) {
            T* to = planes.keys(block_of[t], h) + slot;
            const T* from = scratch + t * kv + h * hd;
            for (int64_t d = 0; d < hd; d++)
                for (int j = 0; j < n; j++) to[d * bs + j] = from[int64_t(j) * kv + d];
        }
        t += n;
    }
}

// n floats as int8 times what it returns, largest / 127 in bfloat16.  A value that is not finite makes that NaN.
uint16_t quantise(const float* x, int n, int8_t* q) {
    vf top = zero(), spoiled = zero();
    for (int i = 0; i < n; i += VF) {
        vf v = load_n(x + i, std::min(VF, n - i));
        top = vmax(abs(v), top);
        spoiled = fma(v, zero(), spoiled);
    }
    uint16_t stored = f32_to_bf16(hmax(top) / 127.0f + hsum(spoiled));
    float scale = bf16_to_f32(stored);
    if (!(scale > 0)) {
        std::memset(q, 0, size_t(n));
        return stored;
    }
    int32_t t[VF];
    for (int i = 0; i < n; i += VF) {
        int lanes = std::min(VF, n - i);
        vf v = load_n(x + i, lanes) / set1(scale);
        istore(t, round_int(vmin(set1(127.0f), vmax(set1(-127.0f), v))));
        for (int j = 0; j < lanes; j++) q[i + j] = int8_t(t[j]);
    }
    return stored;
}

// The same as int8, each token and head with its scales.
void write_tokens(const KVLayout& layout, const Planes<I8>& planes, const int32_t* block_of, const int32_t* positions,
                  int tokens, const float* keys, const float* values, int64_t ldv, I8* scratch) {
    int hd = layout.head_dim, bs = layout.block_size;
    int8_t* q = &scratch->value;
    for (int t = 0; t < tokens; t++)
        for (int h = 0; h < layout.kv_heads; h++) {
            int slot = positions[t] % bs;
            uint16_t* scales = planes.scales(block_of[t], h) + slot;
            const float* key = keys + (int64_t(t) * layout.kv_heads + h) * hd;
            for (int d = 0; d < hd; d += kKeyGroup, scales += bs)
                *scales = quantise(key + d, std::min(kKeyGroup, hd - d), q + d);
            I8Pair* to = planes.keys(block_of[t], h) + slot;
            for (int64_t d = 0; d < hd / 2; d++) to[d * bs] = {q[2 * d], q[2 * d + 1]};
            *scales = quantise(values + t * ldv + h * hd, hd, q);
            std::memcpy(planes.values(block_of[t], h) + int64_t(slot) * hd, q, size_t(hd));
        }
}

}  // namespace

void norm(Threads& threads, const float* x, int64_t ldx, int64_t M, int64_t D, const float* weight, float eps,
          const float* residual, int64_t ldr, float* y, int64_t ldy) {
    by_rows(threads, M, D, [&](int64_t from, int64_t to) {
        for (int64_t m = from; m < to; m++)
            norm_row(x + m * ldx, D, weight, eps, residual ? residual + m * ldr : nullptr, y + m * ldy);
    });
}

void gate(Threads& threads, const float* x, int64_t ldx, int64_t M, int64_t F, Activation act, float* y, int64_t ldy) {
    by_rows(threads, M, 4 * F, [&](int64_t from, int64_t to) {
        for (int64_t m = from; m < to; m++) {
            if (act == Activation::silu) gate_row<Activation::silu>(x + m * ldx, F, y + m * ldy);
            else gate_row<Activation::gelu_tanh>(x + m * ldx, F, y + m * ldy);
        }
    });
}

void soft_cap(Threads& threads, float* x, int64_t n, float cap) {
    constexpr int64_t piece = 4096;
    threads.parallel_for((n + piece - 1) / piece, [&](int64_t p, int) {
        int64_t end = std::min(n, (p + 1) * piece);
        for (int64_t i = p * piece; i < end; i += VF) {
            int k = int(std::min<int64_t>(VF, end - i));
            store_n(x + i, set1(cap) * vtanh(load_n(x + i, k) / set1(cap)), k);
        }
    });
}

void rope_angles(Threads& threads, const int32_t* positions, int64_t M, const float* inv_freq, int half, float scale,
                 float* table) {
    by_rows(threads, M, 64 * half, [&](int64_t from, int64_t to) {
        for (int64_t m = from; m < to; m++) {
            float* row = table + m * 2 * half;
            float position = float(positions[m]);
            for (int i = 0; i < half; i++) {
                double angle = position * inv_freq[i];  // a product rounded to float32, as checkpoints expect it
                row[i] = float(std::cos(angle) * scale);
                row[half + i] = float(std::sin(angle) * scale);
            }
        }
    });
}

void rope_write(Threads& threads, std::deque<Buffer>& space, const RopeWrite& op, const KVLayout& layout,
                uint8_t* blocks, int place, const int32_t* block_of, const int32_t* positions, int64_t M,
                const float* qkv, int64_t ldx, const float* angles, float* out, int64_t ldo) {
    while (int(space.size()) < threads.count()) space.emplace_back();
    int hd = layout.head_dim;
    int64_t kv = int64_t(layout.kv_heads) * hd;
    with_type(layout.type, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        Planes<T> planes(layout, blocks, place);
        threads.parallel_for((M + kWriteTokens - 1) / kWriteTokens, [&](int64_t piece, int worker) {
            float* keys = floats(space[worker], 2 * kWriteTokens * kv + hd);
            T* stored = (T*)(keys + kWriteTokens * kv);
            float* scratch = keys + 2 * kWriteTokens * kv;
            int64_t first = piece * kWriteTokens;
            int tokens = int(std::min<int64_t>(kWriteTokens, M - first));
            for (int t = 0; t < tokens; t++) {
                const float* x = qkv + (first + t) * ldx;
                const float* turn = angles + (first + t) * 2 * op.half;
                for (int h = 0; h < op.heads; h++)
                    rotate_head(x + h * hd, hd, op.q_norm, op.eps, turn, op.half, scratch,
                                out + (first + t) * ldo + h * hd);
                for (int h = 0; h < layout.kv_heads; h++)
                    rotate_head(x + (op.heads + h) * hd, hd, op.k_norm, op.eps, turn, op.half, scratch,
                                keys + t * kv + h * hd);
            }
            write_tokens(layout, planes, block_of + first, positions + first, tokens, keys,
                         qkv + first * ldx + op.heads * hd + kv, ldx, stored);
        });
    });
}

}  // namespace octavo
