// AVX-512 with VNNI: 64 bytes are one register.  See dot.h.
#pragma once

namespace octavo {

inline constexpr bool signed_bytes = false;

struct bx { __m512i v; };
struct ix { vi v[1]; };
struct xb { __m512i v; };

OCTAVO_INLINE bx bx_load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE bx low_nibbles(bx a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
OCTAVO_INLINE bx high_nibbles(bx a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
OCTAVO_INLINE bx add_bits(bx a, const uint8_t* bits) {
    uint64_t m;
    std::memcpy(&m, bits, 8);
    return {_mm512_mask_add_epi8(a.v, m, a.v, _mm512_set1_epi8(16))};
}
template <int U> OCTAVO_INLINE bx add_pairs(bx a, bx pairs) {
    __m512i p = pairs.v;
    if constexpr (U == 0) p = _mm512_slli_epi16(p, 4);
    if constexpr (U == 1) p = _mm512_slli_epi16(p, 2);
    if constexpr (U == 3) p = _mm512_srli_epi16(p, 2);
    return {_mm512_ternarylogic_epi32(a.v, p, _mm512_set1_epi8(0x30), 0xf8)};  // a | (p & 0x30)
}

OCTAVO_INLINE xb xb_load(const int8_t* p) {
    int32_t w;
    std::memcpy(&w, p, 4);
    return {_mm512_set1_epi32(w)};
}
OCTAVO_INLINE ix ix_set1(int32_t n) { return {{iset1(n)}}; }

template <int BITS> struct Dot {
    __m512i sum;
    OCTAVO_INLINE void start(ix n) { sum = n.v[0].v; }
    template <int T> OCTAVO_INLINE void step(bx u, xb x) { sum = _mm512_dpbusd_epi32(sum, u.v, x.v); }
    OCTAVO_INLINE ix total() const { return {{{sum}}}; }
};

// The sum of each column's four unsigned bytes.
OCTAVO_INLINE bx operator+(bx a, bx b) { return {_mm512_add_epi8(a.v, b.v)}; }
OCTAVO_INLINE ix byte_sums(bx a) {
    return {{{_mm512_dpbusd_epi32(_mm512_setzero_si512(), a.v, _mm512_set1_epi8(1))}}};
}

// Byte J of each column's four, as a number.
template <int J> OCTAVO_INLINE ix bx_byte(bx a) {
    if constexpr (J == 3) return {{shr<24>(vi{a.v})}};
    return {{shr<8 * J>(vi{a.v}) & iset1(255)}};
}

OCTAVO_INLINE ix ix_load_u8(const uint8_t* p) { return {{{_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}}}; }
OCTAVO_INLINE ix ix_load_s8(const uint8_t* p) { return {{{_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}}}; }

// VF numbers in -128..127 to bytes.
OCTAVO_INLINE void store_s8(int8_t* p, vi x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x.v)); }

// Sum of 16 bytes.  psadbw adds unsigned ones, so they are moved up by 128 and the sum back down.
OCTAVO_INLINE int32_t sum16(const int8_t* q) {
    __m128i u = _mm_xor_si128(_mm_loadu_si128((const __m128i*)q), _mm_set1_epi8(-128));
    __m128i s = _mm_sad_epu8(u, _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_srli_si128(s, 8))) - 16 * 128;
}

}  // namespace octavo
