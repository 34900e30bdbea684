// AVX2, with VNNI where the compiler is told of it: 64 bytes are two registers.  See dot.h.
#pragma once

namespace octavo {

#if defined(__AVXVNNI__)
inline constexpr bool signed_bytes = false;
#else
inline constexpr bool signed_bytes = true;
#endif

struct bx { __m256i v[2]; };
struct ix { vi v[2]; };
struct xb { __m256i v; };

OCTAVO_INLINE bx bx_load(const uint8_t* p) {
    return {{_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))}};
}
OCTAVO_INLINE bx low_nibbles(bx a) {
    for (auto& v : a.v) v = _mm256_and_si256(v, _mm256_set1_epi8(15));
    return a;
}
OCTAVO_INLINE bx high_nibbles(bx a) {
    for (auto& v : a.v) v = _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
    return a;
}
// Every byte gets the byte of `bits` that holds its bit, keeps that bit alone, and turns it into 16.
OCTAVO_INLINE bx add_bits(bx a, const uint8_t* bits) {
    const __m256i pick = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3,
                                          3, 3, 3, 3, 3);
    const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201ull));
    for (int i = 0; i < 2; i++) {
        int32_t w;
        std::memcpy(&w, bits + i * 4, 4);
        __m256i m = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(w), pick), bit);
        m = _mm256_and_si256(_mm256_cmpeq_epi8(m, bit), _mm256_set1_epi8(16));
        a.v[i] = _mm256_or_si256(a.v[i], m);
    }
    return a;
}
template <int U> OCTAVO_INLINE bx add_pairs(bx a, bx pairs) {
    for (int i = 0; i < 2; i++) {
        __m256i p = pairs.v[i];
        if constexpr (U == 0) p = _mm256_slli_epi16(p, 4);
        if constexpr (U == 1) p = _mm256_slli_epi16(p, 2);
        if constexpr (U == 3) p = _mm256_srli_epi16(p, 2);
        a.v[i] = _mm256_or_si256(a.v[i], _mm256_and_si256(p, _mm256_set1_epi8(0x30)));
    }
    return a;
}

OCTAVO_INLINE xb xb_load(const int8_t* p) {
    int32_t w;
    std::memcpy(&w, p, 4);
    return {_mm256_set1_epi32(w)};
}
OCTAVO_INLINE ix ix_set1(int32_t n) { return {{iset1(n), iset1(n)}}; }

#if defined(__AVXVNNI__)
template <int BITS> struct Dot {
    __m256i sum[2];
    OCTAVO_INLINE void start(ix n) {
        for (int i = 0; i < 2; i++) sum[i] = n.v[i].v;
    }
    template <int T> OCTAVO_INLINE void step(bx u, xb x) {
        for (int i = 0; i < 2; i++) sum[i] = _mm256_dpbusd_avx_epi32(sum[i], u.v[i], x.v);
    }
    OCTAVO_INLINE ix total() const { return {{{sum[0]}, {sum[1]}}}; }
};
#else
// Pairs of products meet in 16 bits.  A pair is at most 2 * 127 * (2^BITS - 1): 8, 4 and 2 steps of 4, 5 and 6 bits
// fit before they must be widened.  A pair of unsigned bytes would not fit at all; |q - 128| <= 128 times 127 does.
template <int BITS> struct Dot {
    static constexpr int kFit = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;
    __m256i sum[2], part[2];
    OCTAVO_INLINE void start(ix n) {
        for (int i = 0; i < 2; i++) sum[i] = n.v[i].v;
    }
    template <int T> OCTAVO_INLINE void step(bx u, xb x) {
        for (int i = 0; i < 2; i++) {
            __m256i pairs;
            if constexpr (BITS == 8) {
                __m256i s = _mm256_xor_si256(u.v[i], _mm256_set1_epi8(-128));
                pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(s), _mm256_sign_epi8(x.v, s));
            } else {
                pairs = _mm256_maddubs_epi16(u.v[i], x.v);
            }
            part[i] = T % kFit == 0 ? pairs : _mm256_add_epi16(part[i], pairs);
            keep(part[i]);
            if (T % kFit == kFit - 1) {
                sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(part[i], _mm256_set1_epi16(1)));
                keep(sum[i]);
            }
        }
    }
    OCTAVO_INLINE ix total() const { return {{{sum[0]}, {sum[1]}}}; }
};
#endif

// The sum of each column's four unsigned bytes.
OCTAVO_INLINE bx operator+(bx a, bx b) {
    for (int i = 0; i < 2; i++) a.v[i] = _mm256_add_epi8(a.v[i], b.v[i]);
    return a;
}
OCTAVO_INLINE ix byte_sums(bx a) {
    ix r;
    for (int i = 0; i < 2; i++) {
        __m256i pairs = _mm256_maddubs_epi16(a.v[i], _mm256_set1_epi8(1));
        r.v[i] = {_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))};
    }
    return r;
}

template <int J> OCTAVO_INLINE ix bx_byte(bx a) {
    ix r;
    for (int i = 0; i < 2; i++) r.v[i] = shr<8 * J>(vi{a.v[i]}) & iset1(255);
    return r;
}

OCTAVO_INLINE ix ix_load_u8(const uint8_t* p) {
    ix r;
    for (int i = 0; i < 2; i++) r.v[i] = {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + i * 8)))};
    return r;
}
OCTAVO_INLINE ix ix_load_s8(const uint8_t* p) {
    ix r;
    for (int i = 0; i < 2; i++) r.v[i] = {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + i * 8)))};
    return r;
}

OCTAVO_INLINE void store_s8(int8_t* p, vi x) {
    __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(x.v), _mm256_extracti128_si256(x.v, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(h, h));
}

// Sum of 16 bytes.  psadbw adds unsigned ones, so they are moved up by 128 and the sum back down.
OCTAVO_INLINE int32_t sum16(const int8_t* q) {
    __m128i u = _mm_xor_si128(_mm_loadu_si128((const __m128i*)q), _mm_set1_epi8(-128));
    __m128i s = _mm_sad_epu8(u, _mm_setzero_si128());
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_srli_si128(s, 8))) - 16 * 128;
}

}  // namespace octavo
