// aarch64 with the dot product instructions: 64 bytes are four registers.  See dot.h.
#pragma once

namespace octavo {

inline constexpr bool signed_bytes = true;  // sdot multiplies signed by signed; 4 to 6 bits are non-negative anyway

struct bx { uint8x16_t v[4]; };
struct ix { vi v[4]; };
struct xb { int8x16_t v; };

OCTAVO_INLINE bx bx_load(const uint8_t* p) {
    return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
}
OCTAVO_INLINE bx low_nibbles(bx a) {
    for (auto& v : a.v) v = vandq_u8(v, vdupq_n_u8(15));
    return a;
}
OCTAVO_INLINE bx high_nibbles(bx a) {
    for (auto& v : a.v) v = vshrq_n_u8(v, 4);
    return a;
}
OCTAVO_INLINE bx add_bits(bx a, const uint8_t* bits) {
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
    for (int i = 0; i < 4; i++) {
        uint8x16_t m = vcombine_u8(vdup_n_u8(bits[2 * i]), vdup_n_u8(bits[2 * i + 1]));
        a.v[i] = vorrq_u8(a.v[i], vandq_u8(vtstq_u8(m, bit), vdupq_n_u8(16)));
    }
    return a;
}
template <int U> OCTAVO_INLINE bx add_pairs(bx a, bx pairs) {
    for (int i = 0; i < 4; i++) {
        uint8x16_t p = pairs.v[i];
        if constexpr (U == 0) p = vshlq_n_u8(p, 4);
        if constexpr (U == 1) p = vshlq_n_u8(p, 2);
        if constexpr (U == 3) p = vshrq_n_u8(p, 2);
        a.v[i] = vorrq_u8(a.v[i], vandq_u8(p, vdupq_n_u8(0x30)));
    }
    return a;
}

OCTAVO_INLINE xb xb_load(const int8_t* p) {
    int32_t w;
    std::memcpy(&w, p, 4);
    return {vreinterpretq_s8_s32(vdupq_n_s32(w))};
}
OCTAVO_INLINE ix ix_set1(int32_t n) { return {{iset1(n), iset1(n), iset1(n), iset1(n)}}; }

template <int BITS> struct Dot {
    int32x4_t sum[4];
    OCTAVO_INLINE void start(ix n) {
        for (int i = 0; i < 4; i++) sum[i] = n.v[i].v;
    }
    template <int T> OCTAVO_INLINE void step(bx u, xb x) {
        for (int i = 0; i < 4; i++) {
            uint8x16_t s = BITS == 8 ? veorq_u8(u.v[i], vdupq_n_u8(0x80)) : u.v[i];
            sum[i] = vdotq_s32(sum[i], vreinterpretq_s8_u8(s), x.v);
        }
    }
    OCTAVO_INLINE ix total() const { return {{{sum[0]}, {sum[1]}, {sum[2]}, {sum[3]}}}; }
};

// The sum of each column's four unsigned bytes.
OCTAVO_INLINE bx operator+(bx a, bx b) {
    for (int i = 0; i < 4; i++) a.v[i] = vaddq_u8(a.v[i], b.v[i]);
    return a;
}
OCTAVO_INLINE ix byte_sums(bx a) {
    ix r;
    for (int i = 0; i < 4; i++) r.v[i] = {vreinterpretq_s32_u32(vdotq_u32(vdupq_n_u32(0), a.v[i], vdupq_n_u8(1)))};
    return r;
}

template <int J> OCTAVO_INLINE ix bx_byte(bx a) {
    ix r;
    for (int i = 0; i < 4; i++) {
        vi w{vreinterpretq_s32_u8(a.v[i])};
        if constexpr (J > 0) w = shr<(J > 0 ? 8 * J : 1)>(w);
        r.v[i] = w & iset1(255);
    }
    return r;
}

OCTAVO_INLINE ix ix_load_u8(const uint8_t* p) {
    uint8x16_t b = vld1q_u8(p);
    uint16x8_t lo = vmovl_u8(vget_low_u8(b)), hi = vmovl_u8(vget_high_u8(b));
    return {{{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(lo)))},
             {vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(lo)))},
             {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(hi)))},
             {vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(hi)))}}};
}
OCTAVO_INLINE ix ix_load_s8(const uint8_t* p) {
    int8x16_t b = vreinterpretq_s8_u8(vld1q_u8(p));
    int16x8_t lo = vmovl_s8(vget_low_s8(b)), hi = vmovl_s8(vget_high_s8(b));
    return {{{vmovl_s16(vget_low_s16(lo))},
             {vmovl_s16(vget_high_s16(lo))},
             {vmovl_s16(vget_low_s16(hi))},
             {vmovl_s16(vget_high_s16(hi))}}};
}

OCTAVO_INLINE void store_s8(int8_t* p, vi x) {
    int16x4_t h = vmovn_s32(x.v);
    int8x8_t b = vmovn_s16(vcombine_s16(h, h));
    vst1_lane_s32((int32_t*)p, vreinterpret_s32_s8(b), 0);
}

OCTAVO_INLINE int32_t sum16(const int8_t* q) { return vaddlvq_s8(vld1q_s8(q)); }

}  // namespace octavo
