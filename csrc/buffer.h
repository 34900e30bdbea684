// Memory aligned to cache lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>

namespace octavo {

// Owns: one block of bytes at a 64-byte boundary; it only grows, and growing drops the contents.
class Buffer {
  public:
    Buffer() = default;
    ~Buffer() { release(); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    uint8_t* reserve(size_t bytes) {
        if (bytes > size_) {
            release();
            data_ = static_cast<uint8_t*>(::operator new(bytes, std::align_val_t(64)));
            size_ = bytes;
        }
        return data_;
    }
    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

  private:
    void release() {
        if (data_) ::operator delete(data_, std::align_val_t(64));
        data_ = nullptr;
        size_ = 0;
    }
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace octavo
