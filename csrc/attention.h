// Paged attention for any mix of rows (prefill chunks and decode steps are not told apart).
#pragma once

#include <deque>

#include "kv.h"
#include "threads.h"

namespace octavo {

struct Attention {
    int heads;
    float scale;
    int window;     // 0: all earlier positions
    float softcap;  // 0: none
};

// Working memory, one part for each thread.
struct AttentionSpace {
    std::deque<Buffer> scratch;
    Buffer partials;
};

// Causal attention of tokens first .. last-1; q and out [last - first, heads * head_dim] hold those tokens only.
//
// Flash-style (Dao et al. 2022) over block tables (Kwon et al. 2023).  A query row visits KV tiles of 64 positions
// that start at multiples of 64, keeps a running maximum, sum and output, and starts afresh at multiples of 512; such
// partial results are joined in order.  That is the same arithmetic however rows are cut into chunks, blocks or
// threads, so the output depends on the row's own query, keys and values only.
void attend(Threads& threads, AttentionSpace& space, const Attention& op, const KVLayout& layout, uint8_t* blocks,
            int place, const Table& table, const Rows& rows, int64_t first, int64_t last, const float* q, int64_t ldq,
            float* out, int64_t ldo);

}  // namespace octavo
