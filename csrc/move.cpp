#include "move.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace octavo {
namespace {

// Whether the pairs may be copied in any order: no target twice, and in one pool none that is also read.
bool independent(const int64_t* pairs, int64_t n, bool same_pool) {
    std::vector<int64_t> targets(n);
    for (int64_t i = 0; i < n; i++) targets[i] = pairs[2 * i + 1];
    std::sort(targets.begin(), targets.end());
    if (std::adjacent_find(targets.begin(), targets.end()) != targets.end()) return false;
    if (same_pool)
        for (int64_t i = 0; i < n; i++)
            if (std::binary_search(targets.begin(), targets.end(), pairs[2 * i])) return false;
    return true;
}

}  // namespace

void move_blocks(Threads& threads, const uint8_t* source, uint8_t* target, int64_t block_bytes, const int64_t* pairs,
                 int64_t n) {
    auto copy = [&](int64_t i, int) {
        const uint8_t* from = source + pairs[2 * i] * block_bytes;
        uint8_t* to = target + pairs[2 * i + 1] * block_bytes;
        if (from != to) std::memcpy(to, from, size_t(block_bytes));
    };
    if (n > 1 && independent(pairs, n, source == target)) threads.parallel_for(n, copy);
    else
        for (int64_t i = 0; i < n; i++) copy(i, 0);
}

}  // namespace octavo
