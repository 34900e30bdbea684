// AVX2 with FMA and F16C: 8 lanes.  See vec.h for the vocabulary.
#pragma once

namespace octavo {

#if defined(__AVXVNNI__)
#define OCTAVO_ISA "avxvnni"
#else
#define OCTAVO_ISA "v3"
#endif
inline constexpr int VF = 8;

struct vf { __m256 v; };
struct vi { __m256i v; };
struct vm { __m256 v; };  // all bits of a lane set or clear

OCTAVO_INLINE vf zero() { return {_mm256_setzero_ps()}; }
OCTAVO_INLINE vf set1(float x) { return {_mm256_set1_ps(x)}; }
OCTAVO_INLINE __m256i lanes_below(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
OCTAVO_INLINE vm first(int n) { return {_mm256_castsi256_ps(lanes_below(n))}; }

OCTAVO_INLINE vf load(const float* p) { return {_mm256_loadu_ps(p)}; }
OCTAVO_INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x.v); }
OCTAVO_INLINE vf load_n(const float* p, int n) { return {_mm256_maskload_ps(p, lanes_below(n))}; }
OCTAVO_INLINE void store_n(float* p, vf x, int n) { _mm256_maskstore_ps(p, lanes_below(n), x.v); }

OCTAVO_INLINE vf from_f16(__m128i h) { return {_mm256_cvtph_ps(h)}; }
OCTAVO_INLINE vf from_bf16(__m128i h) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
}
OCTAVO_INLINE __m128i to_f16(vf x) { return _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT); }
OCTAVO_INLINE __m128i to_bf16(vf x) {
    __m256i u = _mm256_castps_si256(x.v), top = _mm256_srli_epi32(u, 16);
    __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
    r = _mm256_blendv_epi8(r, nan, _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q)));
    return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
OCTAVO_INLINE vf load_f16(const uint16_t* p) { return from_f16(_mm_loadu_si128((const __m128i*)p)); }
OCTAVO_INLINE vf load_bf16(const uint16_t* p) { return from_bf16(_mm_loadu_si128((const __m128i*)p)); }
OCTAVO_INLINE void store_f16(uint16_t* p, vf x) { _mm_storeu_si128((__m128i*)p, to_f16(x)); }
OCTAVO_INLINE void store_bf16(uint16_t* p, vf x) { _mm_storeu_si128((__m128i*)p, to_bf16(x)); }
OCTAVO_INLINE __m128i load_16_n(const uint16_t* p, int n) {
    alignas(16) uint16_t t[8] = {};
    std::memcpy(t, p, size_t(n) * 2);
    return _mm_load_si128((const __m128i*)t);
}
OCTAVO_INLINE void store_16_n(uint16_t* p, __m128i h, int n) {
    alignas(16) uint16_t t[8];
    _mm_store_si128((__m128i*)t, h);
    std::memcpy(p, t, size_t(n) * 2);
}
OCTAVO_INLINE vf load_f16_n(const uint16_t* p, int n) { return from_f16(load_16_n(p, n)); }
OCTAVO_INLINE vf load_bf16_n(const uint16_t* p, int n) { return from_bf16(load_16_n(p, n)); }
OCTAVO_INLINE void store_f16_n(uint16_t* p, vf x, int n) { store_16_n(p, to_f16(x), n); }
OCTAVO_INLINE void store_bf16_n(uint16_t* p, vf x, int n) { store_16_n(p, to_bf16(x), n); }

OCTAVO_INLINE vf operator+(vf a, vf b) { return {_mm256_add_ps(a.v, b.v)}; }
OCTAVO_INLINE vf operator-(vf a, vf b) { return {_mm256_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE vf operator*(vf a, vf b) { return {_mm256_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE vf operator/(vf a, vf b) { return {_mm256_div_ps(a.v, b.v)}; }
OCTAVO_INLINE vf fma(vf a, vf b, vf c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
OCTAVO_INLINE vf neg(vf a) { return {_mm256_xor_ps(a.v, _mm256_set1_ps(-0.0f))}; }
OCTAVO_INLINE vf abs(vf a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
OCTAVO_INLINE vf vmin(vf a, vf b) { return {_mm256_min_ps(a.v, b.v)}; }
OCTAVO_INLINE vf vmax(vf a, vf b) { return {_mm256_max_ps(a.v, b.v)}; }
OCTAVO_INLINE vf vsqrt(vf a) { return {_mm256_sqrt_ps(a.v)}; }

OCTAVO_INLINE vm operator<(vf a, vf b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
OCTAVO_INLINE vm operator<=(vf a, vf b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)}; }
OCTAVO_INLINE vm operator>(vf a, vf b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)}; }
OCTAVO_INLINE vm operator>=(vf a, vf b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)}; }
OCTAVO_INLINE vm operator==(vf a, vf b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ)}; }
OCTAVO_INLINE vm operator&(vm a, vm b) { return {_mm256_and_ps(a.v, b.v)}; }
OCTAVO_INLINE vm operator|(vm a, vm b) { return {_mm256_or_ps(a.v, b.v)}; }
OCTAVO_INLINE vm operator~(vm a) { return {_mm256_xor_ps(a.v, _mm256_castsi256_ps(_mm256_set1_epi32(-1)))}; }
OCTAVO_INLINE bool any(vm a) { return _mm256_movemask_ps(a.v) != 0; }
OCTAVO_INLINE vf select(vm m, vf a, vf b) { return {_mm256_blendv_ps(b.v, a.v, m.v)}; }

OCTAVO_INLINE vi iset1(int32_t x) { return {_mm256_set1_epi32(x)}; }
OCTAVO_INLINE vi iload(const int32_t* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
OCTAVO_INLINE void istore(int32_t* p, vi x) { _mm256_storeu_si256((__m256i*)p, x.v); }
OCTAVO_INLINE vi operator+(vi a, vi b) { return {_mm256_add_epi32(a.v, b.v)}; }
OCTAVO_INLINE vi operator-(vi a, vi b) { return {_mm256_sub_epi32(a.v, b.v)}; }
OCTAVO_INLINE vi operator*(vi a, vi b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
OCTAVO_INLINE vi operator&(vi a, vi b) { return {_mm256_and_si256(a.v, b.v)}; }
OCTAVO_INLINE vi operator|(vi a, vi b) { return {_mm256_or_si256(a.v, b.v)}; }
OCTAVO_INLINE vi operator^(vi a, vi b) { return {_mm256_xor_si256(a.v, b.v)}; }
OCTAVO_INLINE vm operator<(vi a, vi b) { return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.v, a.v))}; }
OCTAVO_INLINE vm operator==(vi a, vi b) { return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(a.v, b.v))}; }
OCTAVO_INLINE vi imax(vi a, vi b) { return {_mm256_max_epi32(a.v, b.v)}; }
OCTAVO_INLINE int32_t himax(vi a) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
}
template <int S> OCTAVO_INLINE vi shl(vi a) { return {_mm256_slli_epi32(a.v, S)}; }
template <int S> OCTAVO_INLINE vi shr(vi a) { return {_mm256_srli_epi32(a.v, S)}; }
template <int S> OCTAVO_INLINE vi sra(vi a) { return {_mm256_srai_epi32(a.v, S)}; }
OCTAVO_INLINE vf to_float(vi a) { return {_mm256_cvtepi32_ps(a.v)}; }
OCTAVO_INLINE vi round_int(vf a) { return {_mm256_cvtps_epi32(a.v)}; }  // FloatMode keeps the mode at nearest even
OCTAVO_INLINE vi as_int(vf a) { return {_mm256_castps_si256(a.v)}; }
OCTAVO_INLINE vf as_float(vi a) { return {_mm256_castsi256_ps(a.v)}; }

OCTAVO_INLINE vf load_i8(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)))};
}
OCTAVO_INLINE vi load_i8_pairs(const int8_t* p) { return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p))}; }
#if defined(__AVXVNNI__)
OCTAVO_INLINE vi dot_pairs(vi a, vi b, vi c) { return {_mm256_dpwssd_avx_epi32(c.v, a.v, b.v)}; }
#else
// GCC would add many integers in another order, a tree of all of them at once, and spill most.
OCTAVO_INLINE void keep(__m256i& sum) { asm("" : "+x"(sum)); }
OCTAVO_INLINE vi dot_pairs(vi a, vi b, vi c) {
    __m256i sum = _mm256_add_epi32(c.v, _mm256_madd_epi16(a.v, b.v));
    keep(sum);
    return {sum};
}
#endif

}  // namespace octavo
