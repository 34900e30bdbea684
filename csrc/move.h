// Copies of whole blocks: copy-on-write, swap, demotion, promotion.
#pragma once

#include <cstdint>

#include "threads.h"

namespace octavo {

// target[to] = source[from] for n pairs (from, to), as if one after the other.  The caller checks the bounds,
// and that the pools are one and the same or do not overlap.
void move_blocks(Threads& threads, const uint8_t* source, uint8_t* target, int64_t block_bytes, const int64_t* pairs,
                 int64_t n);

}  // namespace octavo
