// Operators that work on one row (token) at a time.
#pragma once

#include <deque>

#include "kv.h"
#include "threads.h"

namespace octavo {

// y = x / sqrt(mean(x^2) + eps) * weight (+ residual), RMS norm (Zhang and Sennrich 2019).
void norm(Threads& threads, const float* x, int64_t ldx, int64_t M, int64_t D, const float* weight, float eps,
          const float* residual, int64_t ldr, float* y, int64_t ldy);

enum class Activation { silu, gelu_tanh };

// y[m, f] = act(x[m, f]) * x[m, F + f].
void gate(Threads& threads, const float* x, int64_t ldx, int64_t M, int64_t F, Activation act, float* y, int64_t ldy);

// x = cap * tanh(x / cap), in place.
void soft_cap(Threads& threads, float* x, int64_t n, float cap);

// table[m] = half cosines, then half sines, times scale, of the angles float32(position) * inv_freq.
void rope_angles(Threads& threads, const int32_t* positions, int64_t M, const float* inv_freq, int half, float scale,
                 float* table);

struct RopeWrite {
    int heads, half;      // half: rotated pairs (i, i + half); dimensions from 2 * half on stay
    const float* q_norm;  // [head_dim] each, or null
    const float* k_norm;
    float eps;
};

// Splits qkv into heads, norms and rotates queries (into out) and keys, and writes keys and values into blocks[m],
// slot positions[m] % block_size.  All arrays start at the first token, M of them.
void rope_write(Threads& threads, std::deque<Buffer>& space, const RopeWrite& op, const KVLayout& layout,
                uint8_t* blocks, int place, const int32_t* block_of, const int32_t* positions, int64_t M,
                const float* qkv, int64_t ldx, const float* angles, float* out, int64_t ldo);

}  // namespace octavo
