// Memory of all weights, in large regions that ask the system for huge pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace octavo {

// Owns: the region that it hands pieces out of.  Promises: a piece begins at a 64-byte boundary and is zero where nobody
// has written; a region is freed with the last piece of it.
//
// A decoded token reads every weight once.  In pages of 4 KiB that is a walk through the page tables every 4 KiB, and a
// matrix of a small model is too small to have huge pages of its own.  Address space that no piece has touched costs no
// memory.
class Arena {
  public:
    std::shared_ptr<uint8_t> take(size_t bytes);

  private:
    std::shared_ptr<uint8_t> region_;
    size_t used_ = 0, size_ = 0;
};

}  // namespace octavo
