// The key-value cache as the kernels see it: blocks of equal bytes, each holding, layer after layer,
//
//   K [kv_heads][head_dim][block_size]     V [kv_heads][block_size][head_dim]
//
// in one of three types of floats, arithmetic being in float32 whatever the type; or in int8 as
//
//   K [kv_heads][head_dim / 2][block_size][2]     V [kv_heads][block_size][head_dim]
//   scales [kv_heads][key groups, then 1][block_size], bfloat16
//
// where each token and head has a scale for V and one for every 32 dimensions of K (a few dimensions of K may be far
// larger than all others), largest / 127: what is stored depends on that token alone.  Pairs of K's dimensions lie
// together, since scores of int8 are sums of integer products, two at a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "buffer.h"
#include "vec.h"

namespace octavo {

using std::int64_t;

enum class KVType { f32, f16, bf16, i8 };

// 16-bit elements as types of their own, so that templates can tell them apart.
struct F16 { uint16_t bits; };
struct BF16 { uint16_t bits; };
struct I8 { int8_t value; };
struct I8Pair { int8_t low, high; };     // two dimensions of a key
struct I16Pair { int32_t both; };        // the same, widened

OCTAVO_INLINE vf load_kv(const float* p) { return load(p); }
OCTAVO_INLINE vf load_kv(const F16* p) { return load_f16(&p->bits); }
OCTAVO_INLINE vf load_kv(const BF16* p) { return load_bf16(&p->bits); }
OCTAVO_INLINE vf load_kv_n(const float* p, int n) { return load_n(p, n); }
OCTAVO_INLINE vf load_kv_n(const F16* p, int n) { return load_f16_n(&p->bits, n); }
OCTAVO_INLINE vf load_kv_n(const BF16* p, int n) { return load_bf16_n(&p->bits, n); }
OCTAVO_INLINE void store_kv_n(float* p, vf x, int n) { store_n(p, x, n); }
OCTAVO_INLINE void store_kv_n(F16* p, vf x, int n) { store_f16_n(&p->bits, x, n); }
OCTAVO_INLINE void store_kv_n(BF16* p, vf x, int n) { store_bf16_n(&p->bits, x, n); }

OCTAVO_INLINE vf load_kv(const I8* p) { return load_i8(&p->value); }
OCTAVO_INLINE vf load_kv_n(const I8* p, int n) {
    float t[VF] = {};
    for (int i = 0; i < n; i++) t[i] = p[i].value;
    return load(t);
}

// One vector of keys: floats of one dimension, or pairs of integers of two.
template <class K> OCTAVO_INLINE vf load_keys(const K* p) { return load_kv(p); }
OCTAVO_INLINE vi load_keys(const I8Pair* p) { return load_i8_pairs(&p->low); }
OCTAVO_INLINE vi load_keys(const I16Pair* p) { return iload(&p->both); }

// How K is stored, and how once converted; how many dimensions an item holds.
template <class T> struct Stored {
    using Key = T;
    using Wide = float;
    static constexpr int dims = 1;
};
template <> struct Stored<I8> {
    using Key = I8Pair;
    using Wide = I16Pair;
    static constexpr int dims = 2;
};

constexpr int kKeyGroup = 32;  // dimensions of an int8 key that share a scale

struct KVLayout {
    int block_size, kv_heads, head_dim, layers_per_block;
    KVType type;

    int64_t item_bytes() const { return type == KVType::f32 ? 4 : type == KVType::i8 ? 1 : 2; }
    int64_t head_items() const { return int64_t(head_dim) * block_size; }
    int64_t plane_bytes() const { return kv_heads * head_items() * item_bytes(); }
    int key_groups() const { return type == KVType::i8 ? (head_dim + kKeyGroup - 1) / kKeyGroup : 0; }
    int64_t head_scales() const { return type == KVType::i8 ? int64_t(key_groups() + 1) * block_size : 0; }
    int64_t scale_bytes() const { return kv_heads * head_scales() * int64_t(sizeof(uint16_t)); }
    int64_t layer_bytes() const { return 2 * plane_bytes() + scale_bytes(); }
    int64_t block_bytes() const { return layer_bytes() * layers_per_block; }
};

// One layer's keys and values inside the pool.
template <class T> struct Planes {
    using Key = typename Stored<T>::Key;
    uint8_t* k;  // of block 0
    int64_t block_bytes, plane_bytes, head_bytes, head_scales;

    Planes(const KVLayout& layout, uint8_t* blocks, int place)
        : k(blocks + place * layout.layer_bytes()),
          block_bytes(layout.block_bytes()),
          plane_bytes(layout.plane_bytes()),
          head_bytes(layout.head_items() * layout.item_bytes()),
          head_scales(layout.head_scales()) {}

    Key* keys(int64_t block, int head) const { return (Key*)(k + block * block_bytes + head * head_bytes); }
    T* values(int64_t block, int head) const {
        return (T*)(k + block * block_bytes + plane_bytes + head * head_bytes);
    }
    // Of int8: those of K, group after group, then those of V.
    uint16_t* scales(int64_t block, int head) const {
        return (uint16_t*)(k + block * block_bytes + 2 * plane_bytes) + head * head_scales;
    }
};

// Calls f with a null T* of the element type, so that one generic lambda serves all.
template <class F> void with_type(KVType type, F&& f) {
    switch (type) {
        case KVType::f32: f((float*)nullptr); break;
        case KVType::f16: f((F16*)nullptr); break;
        case KVType::bf16: f((BF16*)nullptr); break;
        case KVType::i8: f((I8*)nullptr); break;
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
