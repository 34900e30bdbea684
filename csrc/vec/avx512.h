// AVX-512 (F, BW, DQ, VL): 16 lanes.  See vec.h for the vocabulary.
#pragma once

namespace octavo {

#define OCTAVO_ISA "avx512"
inline constexpr int VF = 16;

struct vf { __m512 v; };
struct vi { __m512i v; };
struct vm { __mmask16 v; };

OCTAVO_INLINE vf zero() { return {_mm512_setzero_ps()}; }
OCTAVO_INLINE vf set1(float x) { return {_mm512_set1_ps(x)}; }
OCTAVO_INLINE vm first(int n) { return {__mmask16((1u << n) - 1)}; }

OCTAVO_INLINE vf load(const float* p) { return {_mm512_loadu_ps(p)}; }
OCTAVO_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x.v); }
OCTAVO_INLINE vf load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n).v, p)}; }
OCTAVO_INLINE void store_n(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, first(n).v, x.v); }

OCTAVO_INLINE vf from_f16(__m256i h) { return {_mm512_cvtph_ps(h)}; }
OCTAVO_INLINE vf from_bf16(__m256i h) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
OCTAVO_INLINE __m256i to_f16(vf x) { return _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
OCTAVO_INLINE __m256i to_bf16(vf x) {
    __m512i u = _mm512_castps_si512(x.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __m512i nan = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), nan));
}
OCTAVO_INLINE vf load_f16(const uint16_t* p) { return from_f16(_mm256_loadu_si256((const __m256i*)p)); }
OCTAVO_INLINE vf load_bf16(const uint16_t* p) { return from_bf16(_mm256_loadu_si256((const __m256i*)p)); }
OCTAVO_INLINE vf load_f16_n(const uint16_t* p, int n) { return from_f16(_mm256_maskz_loadu_epi16(first(n).v, p)); }
OCTAVO_INLINE vf load_bf16_n(const uint16_t* p, int n) { return from_bf16(_mm256_maskz_loadu_epi16(first(n).v, p)); }
OCTAVO_INLINE void store_f16(uint16_t* p, vf x) { _mm256_storeu_si256((__m256i*)p, to_f16(x)); }
OCTAVO_INLINE void store_bf16(uint16_t* p, vf x) { _mm256_storeu_si256((__m256i*)p, to_bf16(x)); }
OCTAVO_INLINE void store_f16_n(uint16_t* p, vf x, int n) { _mm256_mask_storeu_epi16(p, first(n).v, to_f16(x)); }
OCTAVO_INLINE void store_bf16_n(uint16_t* p, vf x, int n) { _mm256_mask_storeu_epi16(p, first(n).v, to_bf16(x)); }

OCTAVO_INLINE vf operator+(vf a, vf b) { return {_mm512_add_ps(a.v, b.v)}; }
OCTAVO_INLINE vf operator-(vf a, vf b) { return {_mm512_sub_ps(a.v, b.v)}; }
OCTAVO_INLINE vf operator*(vf a, vf b) { return {_mm512_mul_ps(a.v, b.v)}; }
OCTAVO_INLINE vf operator/(vf a, vf b) { return {_mm512_div_ps(a.v, b.v)}; }
OCTAVO_INLINE vf fma(vf a, vf b, vf c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
OCTAVO_INLINE vf neg(vf a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
OCTAVO_INLINE vf abs(vf a) { return {_mm512_abs_ps(a.v)}; }
OCTAVO_INLINE vf vmin(vf a, vf b) { return {_mm512_min_ps(a.v, b.v)}; }
OCTAVO_INLINE vf vmax(vf a, vf b) { return {_mm512_max_ps(a.v, b.v)}; }
OCTAVO_INLINE vf vsqrt(vf a) { return {_mm512_sqrt_ps(a.v)}; }

OCTAVO_INLINE vm operator<(vf a, vf b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
OCTAVO_INLINE vm operator<=(vf a, vf b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
OCTAVO_INLINE vm operator>(vf a, vf b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
OCTAVO_INLINE vm operator>=(vf a, vf b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ)}; }
OCTAVO_INLINE vm operator==(vf a, vf b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
OCTAVO_INLINE vm operator&(vm a, vm b) { return {__mmask16(a.v & b.v)}; }
OCTAVO_INLINE vm operator|(vm a, vm b) { return {__mmask16(a.v | b.v)}; }
OCTAVO_INLINE vm operator~(vm a) { return {__mmask16(~a.v)}; }
OCTAVO_INLINE bool any(vm a) { return a.v != 0; }
OCTAVO_INLINE vf select(vm m, vf a, vf b) { return {_mm512_mask_mov_ps(b.v, m.v, a.v)}; }

OCTAVO_INLINE vi iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
OCTAVO_INLINE vi iload(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
OCTAVO_INLINE void istore(int32_t* p, vi x) { _mm512_storeu_si512(p, x.v); }
OCTAVO_INLINE vi operator+(vi a, vi b) { return {_mm512_add_epi32(a.v, b.v)}; }
OCTAVO_INLINE vi operator-(vi a, vi b) { return {_mm512_sub_epi32(a.v, b.v)}; }
OCTAVO_INLINE vi operator*(vi a, vi b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
OCTAVO_INLINE vi operator&(vi a, vi b) { return {_mm512_and_si512(a.v, b.v)}; }
OCTAVO_INLINE vi operator|(vi a, vi b) { return {_mm512_or_si512(a.v, b.v)}; }
OCTAVO_INLINE vi operator^(vi a, vi b) { return {_mm512_xor_si512(a.v, b.v)}; }
OCTAVO_INLINE vm operator<(vi a, vi b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
OCTAVO_INLINE vm operator==(vi a, vi b) { return {_mm512_cmpeq_epi32_mask(a.v, b.v)}; }
OCTAVO_INLINE vi imax(vi a, vi b) { return {_mm512_max_epi32(a.v, b.v)}; }
OCTAVO_INLINE int32_t himax(vi a) { return _mm512_reduce_max_epi32(a.v); }
template <int S> OCTAVO_INLINE vi shl(vi a) { return {_mm512_slli_epi32(a.v, S)}; }
template <int S> OCTAVO_INLINE vi shr(vi a) { return {_mm512_srli_epi32(a.v, S)}; }
template <int S> OCTAVO_INLINE vi sra(vi a) { return {_mm512_srai_epi32(a.v, S)}; }
OCTAVO_INLINE vf to_float(vi a) { return {_mm512_cvtepi32_ps(a.v)}; }
OCTAVO_INLINE vi round_int(vf a) {
    return {_mm512_cvt_roundps_epi32(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
OCTAVO_INLINE vi as_int(vf a) { return {_mm512_castps_si512(a.v)}; }
OCTAVO_INLINE vf as_float(vi a) { return {_mm512_castsi512_ps(a.v)}; }

OCTAVO_INLINE vf load_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
OCTAVO_INLINE vi load_i8_pairs(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
OCTAVO_INLINE vi dot_pairs(vi a, vi b, vi c) { return {_mm512_dpwssd_epi32(c.v, a.v, b.v)}; }

}  // namespace octavo
