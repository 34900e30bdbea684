#include "arena.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace octavo {

namespace {

constexpr size_t kLine = 64, kHugePage = size_t(2) << 20;
// Under a sanitizer each piece is a region, so that reading beyond it is seen.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kRegion = kLine;
#else
constexpr size_t kRegion = size_t(64) << 20;
#endif

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

std::shared_ptr<uint8_t> make_region(size_t bytes) {
#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
    void* p = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    auto* first = (uint8_t*)round_up(size_t(p), kHugePage);
    madvise(first, bytes, MADV_HUGEPAGE);  // where the system has none, ordinary pages do
    return {first, [p, bytes](uint8_t*) { munmap(p, bytes + kHugePage); }};
#else
    auto* p = (uint8_t*)::operator new(bytes, std::align_val_t(kLine));
    std::memset(p, 0, bytes);
    return {p, [](uint8_t* p) { ::operator delete(p, std::align_val_t(kLine)); }};
#endif
}

}  // namespace

std::shared_ptr<uint8_t> Arena::take(size_t bytes) {
    bytes = round_up(bytes, kLine);
    if (bytes > size_ - used_) {
        size_ = std::max(kRegion, bytes);
        region_ = make_region(size_);
        used_ = 0;
    }
    std::shared_ptr<uint8_t> piece(region_, region_.get() + used_);
    used_ += bytes;
    return piece;
}

}  // namespace octavo
