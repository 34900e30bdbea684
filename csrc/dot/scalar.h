// Plain loops.  See dot.h.
#pragma once

namespace octavo {

inline constexpr bool signed_bytes = false;

struct bx { uint8_t v[64]; };
struct ix { vi v[NR / VF]; };
struct xb { int8_t v[4]; };

OCTAVO_INLINE bx bx_load(const uint8_t* p) {
    bx r;
    std::memcpy(r.v, p, 64);
    return r;
}
OCTAVO_INLINE bx low_nibbles(bx a) {
    for (auto& v : a.v) v &= 15;
    return a;
}
OCTAVO_INLINE bx high_nibbles(bx a) {
    for (auto& v : a.v) v >>= 4;
    return a;
}
OCTAVO_INLINE bx add_bits(bx a, const uint8_t* bits) {
    for (int i = 0; i < 64; i++) a.v[i] = uint8_t(a.v[i] | (bits[i / 8] >> (i % 8) & 1) << 4);
    return a;
}
template <int U> OCTAVO_INLINE bx add_pairs(bx a, bx pairs) {
    for (int i = 0; i < 64; i++) a.v[i] = uint8_t(a.v[i] | (pairs.v[i] >> (2 * U) & 3) << 4);
    return a;
}

OCTAVO_INLINE xb xb_load(const int8_t* p) {
    xb r;
    std::memcpy(r.v, p, 4);
    return r;
}
OCTAVO_INLINE ix ix_set1(int32_t n) {
    ix r;
    for (auto& v : r.v) v = iset1(n);
    return r;
}

template <int BITS> struct Dot {
    int32_t sum[NR];
    OCTAVO_INLINE void start(ix n) {
        for (int i = 0; i < NR; i++) sum[i] = n.v[i / VF].v[i % VF];
    }
    template <int T> OCTAVO_INLINE void step(bx u, xb x) {
        for (int i = 0; i < NR; i++)
            for (int j = 0; j < 4; j++) sum[i] += int32_t(u.v[i * 4 + j]) * int32_t(x.v[j]);
    }
    OCTAVO_INLINE ix total() const {
        ix r;
        for (int i = 0; i < NR; i++) r.v[i / VF].v[i % VF] = sum[i];
        return r;
    }
};

// The sum of each column's four unsigned bytes.
OCTAVO_INLINE bx operator+(bx a, bx b) {
    for (int i = 0; i < 64; i++) a.v[i] = uint8_t(a.v[i] + b.v[i]);
    return a;
}
OCTAVO_INLINE ix byte_sums(bx a) {
    ix r;
    for (int i = 0; i < NR; i++) r.v[i / VF].v[i % VF] = a.v[4 * i] + a.v[4 * i + 1] + a.v[4 * i + 2] + a.v[4 * i + 3];
    return r;
}

template <int J> OCTAVO_INLINE ix bx_byte(bx a) {
    ix r;
    for (int i = 0; i < NR; i++) r.v[i / VF].v[i % VF] = a.v[i * 4 + J];
    return r;
}

OCTAVO_INLINE ix ix_load_u8(const uint8_t* p) {
    ix r;
    for (int i = 0; i < NR; i++) r.v[i / VF].v[i % VF] = p[i];
    return r;
}
OCTAVO_INLINE ix ix_load_s8(const uint8_t* p) {
    ix r;
    for (int i = 0; i < NR; i++) r.v[i / VF].v[i % VF] = int8_t(p[i]);
    return r;
}

OCTAVO_INLINE void store_s8(int8_t* p, vi x) {
    for (int i = 0; i < VF; i++) p[i] = int8_t(x.v[i]);
}

OCTAVO_INLINE int32_t sum16(const int8_t* q) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += q[i];
    return sum;
}

}  // namespace octavo
