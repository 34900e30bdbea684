// aarch64 NEON: 4 lanes.  See vec.h for the vocabulary.
#pragma once

namespace octavo {

#define OCTAVO_ISA "neon"
inline constexpr int VF = 4;

struct vf { float32x4_t v; };
struct vi { int32x4_t v; };
struct vm { uint32x4_t v; };  // all bits of a lane set or clear

OCTAVO_INLINE vf zero() { return {vdupq_n_f32(0)}; }
OCTAVO_INLINE vf set1(float x) { return {vdupq_n_f32(x)}; }
OCTAVO_INLINE vm first(int n) {
    const int32_t lane[4] = {0, 1, 2, 3};
    return {vcltq_s32(vld1q_s32(lane), vdupq_n_s32(n))};
}

OCTAVO_INLINE vf load(const float* p) { return {vld1q_f32(p)}; }
OCTAVO_INLINE void store(float* p, vf x) { vst1q_f32(p, x.v); }
OCTAVO_INLINE vf load_n(const float* p, int n) {
    float t[4] = {};
    std::memcpy(t, p, size_t(n) * 4);
    return load(t);
}
OCTAVO_INLINE void store_n(float* p, vf x, int n) {
    float t[4];
    store(t, x);
    std::memcpy(p, t, size_t(n) * 4);
}

OCTAVO_INLINE vf from_f16(uint16x4_t h) { return {vcvt_f32_f16(vreinterpret_f16_u16(h))}; }
OCTAVO_INLINE vf from_bf16(uint16x4_t h) { return {vreinterpretq_f32_u32(vshll_n_u16(h, 16))}; }
OCTAVO_INLINE uint16x4_t to_f16(vf x) { return vreinterpret_u16_f16(vcvt_f16_f32(x.v)); }
OCTAVO_INLINE uint16x4_t to_bf16(vf x) {
    uint32x4_t u = vreinterpretq_u32_f32(x.v), top = vshrq_n_u32(u, 16);
    uint32x4_t r = vshrq_n_u32(vaddq_u32(u, vaddq_u32(vandq_u32(top, vdupq_n_u32(1)), vdupq_n_u32(0x7fff))), 16);
    return vmovn_u32(vbslq_u32(vceqq_f32(x.v, x.v), r, vorrq_u32(top, vdupq_n_u32(0x40))));
}
OCTAVO_INLINE uint16x4_t load_16_n(const uint16_t* p, int n) {
    uint16_t t[4] = {};
    std::memcpy(t, p, size_t(n) * 2);
    return vld1_u16(t);
}
OCTAVO_INLINE void store_16_n(uint16_t* p, uint16x4_t h, int n) {
    uint16_t t[4];
    vst1_u16(t, h);
    std::memcpy(p, t, size_t(n) * 2);
}
OCTAVO_INLINE vf load_f16(const uint16_t* p) { return from_f16(vld1_u16(p)); }
OCTAVO_INLINE vf load_bf16(const uint16_t* p) { return from_bf16(vld1_u16(p)); }
OCTAVO_INLINE void store_f16(uint16_t* p, vf x) { vst1_u16(p, to_f16(x)); }
OCTAVO_INLINE void store_bf16(uint16_t* p, vf x) { vst1_u16(p, to_bf16(x)); }
OCTAVO_INLINE vf load_f16_n(const uint16_t* p, int n) { return from_f16(load_16_n(p, n)); }
OCTAVO_INLINE vf load_bf16_n(const uint16_t* p, int n) { return from_bf16(load_16_n(p, n)); }
OCTAVO_INLINE void store_f16_n(uint16_t* p, vf x, int n) { store_16_n(p, to_f16(x), n); }
OCTAVO_INLINE void store_bf16_n(uint16_t* p, vf x, int n) { store_16_n(p, to_bf16(x), n); }

OCTAVO_INLINE vf operator+(vf a, vf b) { return {vaddq_f32(a.v, b.v)}; }
OCTAVO_INLINE vf operator-(vf a, vf b) { return {vsubq_f32(a.v, b.v)}; }
OCTAVO_INLINE vf operator*(vf a, vf b) { return {vmulq_f32(a.v, b.v)}; }
OCTAVO_INLINE vf operator/(vf a, vf b) { return {vdivq_f32(a.v, b.v)}; }
OCTAVO_INLINE vf fma(vf a, vf b, vf c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
OCTAVO_INLINE vf neg(vf a) { return {vnegq_f32(a.v)}; }
OCTAVO_INLINE vf abs(vf a) { return {vabsq_f32(a.v)}; }
OCTAVO_INLINE vf vmin(vf a, vf b) { return {vminq_f32(a.v, b.v)}; }
OCTAVO_INLINE vf vmax(vf a, vf b) { return {vmaxq_f32(a.v, b.v)}; }
OCTAVO_INLINE vf vsqrt(vf a) { return {vsqrtq_f32(a.v)}; }

OCTAVO_INLINE vm operator<(vf a, vf b) { return {vcltq_f32(a.v, b.v)}; }
OCTAVO_INLINE vm operator<=(vf a, vf b) { return {vcleq_f32(a.v, b.v)}; }
OCTAVO_INLINE vm operator>(vf a, vf b) { return {vcgtq_f32(a.v, b.v)}; }
OCTAVO_INLINE vm operator>=(vf a, vf b) { return {vcgeq_f32(a.v, b.v)}; }
OCTAVO_INLINE vm operator==(vf a, vf b) { return {vceqq_f32(a.v, b.v)}; }
OCTAVO_INLINE vm operator&(vm a, vm b) { return {vandq_u32(a.v, b.v)}; }
OCTAVO_INLINE vm operator|(vm a, vm b) { return {vorrq_u32(a.v, b.v)}; }
OCTAVO_INLINE vm operator~(vm a) { return {vmvnq_u32(a.v)}; }
OCTAVO_INLINE bool any(vm a) { return vmaxvq_u32(a.v) != 0; }
OCTAVO_INLINE vf select(vm m, vf a, vf b) { return {vbslq_f32(m.v, a.v, b.v)}; }

OCTAVO_INLINE vi iset1(int32_t x) { return {vdupq_n_s32(x)}; }
OCTAVO_INLINE vi iload(const int32_t* p) { return {vld1q_s32(p)}; }
OCTAVO_INLINE void istore(int32_t* p, vi x) { vst1q_s32(p, x.v); }
OCTAVO_INLINE vi operator+(vi a, vi b) { return {vaddq_s32(a.v, b.v)}; }
OCTAVO_INLINE vi operator-(vi a, vi b) { return {vsubq_s32(a.v, b.v)}; }
OCTAVO_INLINE vi operator*(vi a, vi b) { return {vmulq_s32(a.v, b.v)}; }
OCTAVO_INLINE vi operator&(vi a, vi b) { return {vandq_s32(a.v, b.v)}; }
OCTAVO_INLINE vi operator|(vi a, vi b) { return {vorrq_s32(a.v, b.v)}; }
OCTAVO_INLINE vi operator^(vi a, vi b) { return {veorq_s32(a.v, b.v)}; }
OCTAVO_INLINE vm operator<(vi a, vi b) { return {vcltq_s32(a.v, b.v)}; }
OCTAVO_INLINE vm operator==(vi a, vi b) { return {vceqq_s32(a.v, b.v)}; }
OCTAVO_INLINE vi imax(vi a, vi b) { return {vmaxq_s32(a.v, b.v)}; }
OCTAVO_INLINE int32_t himax(vi a) { return vmaxvq_s32(a.v); }
template <int S> OCTAVO_INLINE vi shl(vi a) { return {vshlq_n_s32(a.v, S)}; }
template <int S> OCTAVO_INLINE vi shr(vi a) {
    return {vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v), S))};
}
template <int S> OCTAVO_INLINE vi sra(vi a) { return {vshrq_n_s32(a.v, S)}; }
OCTAVO_INLINE vf to_float(vi a) { return {vcvtq_f32_s32(a.v)}; }
OCTAVO_INLINE vi round_int(vf a) { return {vcvtnq_s32_f32(a.v)}; }
OCTAVO_INLINE vi as_int(vf a) { return {vreinterpretq_s32_f32(a.v)}; }
OCTAVO_INLINE vf as_float(vi a) { return {vreinterpretq_f32_s32(a.v)}; }

OCTAVO_INLINE vf load_i8(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)))};
}
OCTAVO_INLINE vi load_i8_pairs(const int8_t* p) { return {vreinterpretq_s32_s16(vmovl_s8(vld1_s8(p)))}; }
OCTAVO_INLINE vi dot_pairs(vi a, vi b, vi c) {
    int16x8_t x = vreinterpretq_s16_s32(a.v), y = vreinterpretq_s16_s32(b.v);
    int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return {vaddq_s32(c.v, vpaddq_s32(low, high))};
}

}  // namespace octavo
