// Vectors of floats for whatever instruction set this file is compiled for.
//
// One vocabulary, four spellings (vec/avx512.h, vec/avx2.h, vec/neon.h, vec/scalar.h), chosen by the compiler's macros;
// OCTAVO_SCALAR forces plain loops.  What every spelling has:
//
//   vf, vi, vm          VF lanes of float, of int32, and a mask
//   set1 zero load store            load_n store_n: the first n lanes only, n in 0..VF; the rest is 0 or untouched
//   load_f16 load_bf16 store_f16 store_bf16 and their _n forms; pointers are uint16_t, stores round to nearest even
//   + - * / neg abs fma(a,b,c)=a*b+c  vmin vmax (b where either is NaN, except NEON: NaN)  vsqrt
//   < <= > >= ==  select(m, a, b)=m?a:b  first(n)  m & m, m | m, ~m  any(m)
//   iset1 iload istore + - * & | ^ shl shr(logical) sra  to_float(vi) round_int(vf) (nearest even) as_int as_float
//   imax himax(largest lane)
//   load_i8: VF int8 as floats    load_i8_pairs: 2 VF int8 as pairs of int16, one in each lane
//   dot_pairs(a,b,c)=c + the sum of the products of a lane's two pairs of int16, wrapping
//
// and, written once below on top of them: hsum hmax (fixed order), vexp, vtanh, vsigmoid.
//
// Sums are only reproducible because nothing here is left to the compiler: fma is always explicit and files are
// compiled with -ffp-contract=off.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#pragma GCC diagnostic push  // gcc 12's own AVX-512 header trips these (its bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif
#if !defined(OCTAVO_SCALAR) && defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OCTAVO_INLINE inline  // all of it inlined and instrumented would take the compiler minutes
#else
#define OCTAVO_INLINE inline __attribute__((always_inline))
#endif

namespace octavo {

// ---- one number at a time: the definition of the 16-bit formats -------------------------------------------------

OCTAVO_INLINE uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

OCTAVO_INLINE float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}

OCTAVO_INLINE float bf16_to_f32(uint16_t h) { return float_of(uint32_t(h) << 16); }

OCTAVO_INLINE uint16_t f32_to_bf16(float x) {
    uint32_t u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);  // keep NaN a NaN: quiet it
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

OCTAVO_INLINE float f16_to_f32(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000) << 16, rest = uint32_t(h & 0x7fff);
    if (rest >= 0x7c00) return float_of(sign | 0x7f800000u | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000u : 0u));
    if (rest >= 0x400) return float_of(sign | ((rest << 13) + (112u << 23)));
    return float_of(sign | bits_of(float(rest) * 0x1p-24f));  // subnormal: rest units of 2^-24, exact
}

OCTAVO_INLINE uint16_t f32_to_f16(float x) {
    uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000, rest = u & 0x7fffffffu;
    if (rest > 0x7f800000u) return uint16_t(sign | 0x7e00 | ((rest >> 13) & 0x3ff));
    if (rest >= 0x477ff000u) return uint16_t(sign | 0x7c00);  // 65520 and up rounds to infinity
    if (rest < 0x38800000u)                                   // below 2^-14: let the adder round to units of 2^-24
        return uint16_t(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000u));
    rest += 0xfffu + ((rest >> 13) & 1);
    return uint16_t(sign | ((rest - (112u << 23)) >> 13));
}

OCTAVO_INLINE int32_t int16_pair(int low, int high) { return int32_t(uint32_t(low & 0xffff) | uint32_t(high) << 16); }

}  // namespace octavo

#if defined(OCTAVO_SCALAR)
#include "vec/scalar.h"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "vec/avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vec/avx2.h"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include "vec/neon.h"
#else
#include "vec/scalar.h"
#endif

namespace octavo {

OCTAVO_INLINE vf& operator+=(vf& a, vf b) { return a = a + b; }
OCTAVO_INLINE vf& operator-=(vf& a, vf b) { return a = a - b; }
OCTAVO_INLINE vf& operator*=(vf& a, vf b) { return a = a * b; }

struct Add {
    OCTAVO_INLINE static float of(float a, float b) { return a + b; }
#if defined(__AVX2__) && !defined(OCTAVO_SCALAR)
    OCTAVO_INLINE static __m128 of(__m128 a, __m128 b) { return _mm_add_ps(a, b); }
    OCTAVO_INLINE static __m256 of(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
#endif
};
struct Larger {
    OCTAVO_INLINE static float of(float a, float b) { return a > b ? a : b; }
#if defined(__AVX2__) && !defined(OCTAVO_SCALAR)
    OCTAVO_INLINE static __m128 of(__m128 a, __m128 b) { return _mm_max_ps(a, b); }
    OCTAVO_INLINE static __m256 of(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
#endif
};

// One number of all lanes: halves are folded onto each other, always in this order.
template <class Op> OCTAVO_INLINE float fold(vf x) {
#if defined(__AVX2__) && !defined(OCTAVO_SCALAR)
#if defined(__AVX512F__)
    __m256 eight = Op::of(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
#else
    __m256 eight = x.v;
#endif
    __m128 four = Op::of(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = Op::of(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(Op::of(two, _mm_movehdup_ps(two)));
#else
    float t[VF];
    store(t, x);
    for (int h = VF / 2; h; h /= 2)
        for (int i = 0; i < h; i++) t[i] = Op::of(t[i], t[i + h]);
    return t[0];
#endif
}

OCTAVO_INLINE float hsum(vf x) { return fold<Add>(x); }

// Largest lane; NaN lanes are passed over or returned, unspecified which.
OCTAVO_INLINE float hmax(vf x) { return fold<Larger>(x); }

// e^x to about one unit in the last place.  -inf gives 0, +inf gives inf, NaN stays NaN, results below 2^-126 are
// rounded as subnormals.  x = n ln2 + r with |r| <= ln2/2; e^r by its series to r^7 (remainder 5e-9 relative).
OCTAVO_INLINE vf vexp(vf x) {
    x = vmin(set1(89.0f), vmax(set1(-104.0f), x));  // in this argument order NaN passes through
    vi n = round_int(x * set1(1.44269504088896341f));
    vf nf = to_float(n);
    vf r = fma(nf, set1(-0.693147182464599609375f), x);
    r = fma(nf, set1(1.904654299957767e-9f), r);
    vf p = set1(1.0f / 5040);
    p = fma(p, r, set1(1.0f / 720));
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r * r, r) + set1(1.0f);
    // 2^n in two factors, since n reaches from -150 to 128
    vi half = sra<1>(n);
    vf s1 = as_float(shl<23>(half + iset1(127)));
    vf s2 = as_float(shl<23>(n - half + iset1(127)));
    return p * s1 * s2;
}

// 1 / (1 + e^-x)
OCTAVO_INLINE vf vsigmoid(vf x) { return set1(1.0f) / (set1(1.0f) + vexp(neg(x))); }

// tanh to about two units in the last place: an odd series below 0.5, e^2x above.
OCTAVO_INLINE vf vtanh(vf x) {
    vf a = abs(x), s = x * x;
    vf p = set1(0.00693413f);
    p = fma(p, s, set1(-0.02146709f));
    p = fma(p, s, set1(0.05393304f));
    p = fma(p, s, set1(-0.13333224f));
    p = fma(p, s, set1(0.33333333f));
    vf small = fma(neg(p) * s, x, x);
    vf big = set1(1.0f) - set1(2.0f) / (vexp(a + a) + set1(1.0f));
    big = select(x < zero(), neg(big), big);
    return select(a < set1(0.5f), small, big);
}

// Rounding mode and subnormals as IEEE 754 has them, for as long as this object lives: hosts change them (some
// libraries set flush-to-zero on whatever thread calls them), and results would change with it.
class FloatMode {
  public:
#if defined(__SSE2__)
    FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~FloatMode() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#elif defined(__aarch64__)
    FloatMode() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
    }
    ~FloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

  private:
    uint64_t saved_;
#else
    FloatMode() {}
#endif
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;
};

}  // namespace octavo
