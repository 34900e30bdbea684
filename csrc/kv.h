// The key-value cache as the kernels see it: blocks of equal bytes, each holding, layer after layer,
//
//   K [kv_heads][head_dim][block_size]     V [kv_heads][block_size][head_dim]
//
// in one of three element types.  Arithmetic is in float32 whatever the type.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "buffer.h"
#include "vec.h"

namespace octavo {

using std::int64_t;

enum class KVType { f32, f16, bf16 };

// 16-bit elements as types of their own, so that templates can tell them apart.
struct F16 { uint16_t bits; };
struct BF16 { uint16_t bits; };

OCTAVO_INLINE vf load_kv(const float* p) { return load(p); }
OCTAVO_INLINE vf load_kv(const F16* p) { return load_f16(&p->bits); }
OCTAVO_INLINE vf load_kv(const BF16* p) { return load_bf16(&p->bits); }
OCTAVO_INLINE vf load_kv_n(const float* p, int n) { return load_n(p, n); }
OCTAVO_INLINE vf load_kv_n(const F16* p, int n) { return load_f16_n(&p->bits, n); }
OCTAVO_INLINE vf load_kv_n(const BF16* p, int n) { return load_bf16_n(&p->bits, n); }
OCTAVO_INLINE void store_kv_n(float* p, vf x, int n) { store_n(p, x, n); }
OCTAVO_INLINE void store_kv_n(F16* p, vf x, int n) { store_f16_n(&p->bits, x, n); }
OCTAVO_INLINE void store_kv_n(BF16* p, vf x, int n) { store_bf16_n(&p->bits, x, n); }

struct KVLayout {
    int block_size, kv_heads, head_dim, layers_per_block;
    KVType type;

    int64_t item_bytes() const { return type == KVType::f32 ? 4 : 2; }
    int64_t head_items() const { return int64_t(head_dim) * block_size; }
    int64_t plane_bytes() const { return kv_heads * head_items() * item_bytes(); }
    int64_t block_bytes() const { return 2 * plane_bytes() * layers_per_block; }
};

// One layer's keys and values inside the pool.
template <class T> struct Planes {
    uint8_t* k;  // of block 0
    int64_t block_bytes, plane_bytes, head_items;

    Planes(const KVLayout& layout, uint8_t* blocks, int place)
        : k(blocks + place * 2 * layout.plane_bytes()),
          block_bytes(layout.block_bytes()),
          plane_bytes(layout.plane_bytes()),
          head_items(layout.head_items()) {}

    T* keys(int64_t block, int head) const { return (T*)(k + block * block_bytes) + head * head_items; }
    T* values(int64_t block, int head) const { return (T*)(k + block * block_bytes + plane_bytes) + head * head_items; }
};

// Calls f with a null T* of the element type, so that one generic lambda serves all three.
template <class F> void with_type(KVType type, F&& f) {
    switch (type) {
        case KVType::f32: f((float*)nullptr); break;
        case KVType::f16: f((F16*)nullptr); break;
        case KVType::bf16: f((BF16*)nullptr); break;
    }
}

// Rows s of a step: tokens starts[s] .. starts[s+1]-1 at consecutive positions; logical block b of row s is
// ids[offsets[s] + b].
struct Table {
    const int32_t* ids;
    const int32_t* offsets;
    int64_t size;  // of ids
};

struct Rows {
    const int32_t* positions;  // [M]
    const int32_t* starts;     // [S + 1]
    int64_t count;             // S
};

inline float* floats(Buffer& buffer, int64_t n) { return (float*)buffer.reserve(size_t(n) * sizeof(float)); }

inline int64_t round_up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

}  // namespace octavo
