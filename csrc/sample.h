// Draws tokens from logits, and scores given ones; octavo.kernels.backend.SampleBatch defines every step.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "threads.h"

namespace octavo {

// Ragged arrays: entries of sample s are offsets[s] .. offsets[s+1]-1.
template <class V> struct Ragged {
    const int32_t* offsets;
    const int32_t* ids;
    const V* values;
};

struct Samples {
    int64_t count;
    const int32_t* row;
    const float *temperature;
    const int32_t* top_k;
    const float *top_p, *min_p, *repetition, *presence, *frequency;
    const uint64_t* seed;
    const int32_t *branch, *position, *logprobs;
    Ragged<float> bias;
    Ragged<int32_t> history;
    const int32_t* mask;    // which of the masks holds for each sample, -1: none
    const uint32_t* masks;  // [n, mask_words], bit t % 32 of word t / 32 set: token t may be drawn
    int64_t mask_words;     // 32 * mask_words >= V
};

// Arrays over samples; top_ids and top_logprobs have `top` columns.
struct Drawn {
    int32_t* token;
    float* logprob;
    int32_t* rank;
    int32_t* top_ids;
    float* top_logprobs;
    int64_t top;
};

// One thread's memory.
struct SampleSpace {
    std::vector<float> values;
    std::vector<double> sums;
    std::vector<uint64_t> keys;
};

// logits: float32 [R, V]; the caller has checked rows, ids and offsets.
void sample(Threads& threads, std::deque<SampleSpace>& space, const float* logits, int64_t V, const Samples& samples,
            const Drawn& out);

// Log-probability and rank of targets[r] under row r, and the best `out.top`.
void score(Threads& threads, std::deque<SampleSpace>& space, const float* logits, int64_t R, int64_t V,
           const int32_t* targets, const Drawn& out);

// A number in [0, 1) made of its arguments alone: Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011).
double uniform(uint64_t seed, int32_t branch, int32_t position);

}  // namespace octavo
