// Plain loops over 8 lanes, for machines that none of the other files fits.  See vec.h for the vocabulary.
#pragma once

#include <cmath>

namespace octavo {

#define OCTAVO_ISA "scalar"
inline constexpr int VF = 8;

struct vf { float v[VF]; };
struct vi { int32_t v[VF]; };
struct vm { uint32_t v[VF]; };  // all bits of a lane set or clear

#define OCTAVO_LANES for (int i = 0; i < VF; i++)

OCTAVO_INLINE vf set1(float x) { vf r; OCTAVO_LANES r.v[i] = x; return r; }
OCTAVO_INLINE vf zero() { return set1(0.0f); }
OCTAVO_INLINE vm first(int n) { vm r; OCTAVO_LANES r.v[i] = i < n ? ~0u : 0u; return r; }

OCTAVO_INLINE vf load(const float* p) { vf r; OCTAVO_LANES r.v[i] = p[i]; return r; }
OCTAVO_INLINE void store(float* p, vf x) { OCTAVO_LANES p[i] = x.v[i]; }
OCTAVO_INLINE vf load_n(const float* p, int n) { vf r; OCTAVO_LANES r.v[i] = i < n ? p[i] : 0.0f; return r; }
OCTAVO_INLINE void store_n(float* p, vf x, int n) { for (int i = 0; i < n; i++) p[i] = x.v[i]; }

OCTAVO_INLINE vf load_f16_n(const uint16_t* p, int n) {
    vf r;
    OCTAVO_LANES r.v[i] = i < n ? f16_to_f32(p[i]) : 0.0f;
    return r;
}
OCTAVO_INLINE vf load_bf16_n(const uint16_t* p, int n) {
    vf r;
    OCTAVO_LANES r.v[i] = i < n ? bf16_to_f32(p[i]) : 0.0f;
    return r;
}
OCTAVO_INLINE void store_f16_n(uint16_t* p, vf x, int n) { for (int i = 0; i < n; i++) p[i] = f32_to_f16(x.v[i]); }
OCTAVO_INLINE void store_bf16_n(uint16_t* p, vf x, int n) { for (int i = 0; i < n; i++) p[i] = f32_to_bf16(x.v[i]); }
OCTAVO_INLINE vf load_f16(const uint16_t* p) { return load_f16_n(p, VF); }
OCTAVO_INLINE vf load_bf16(const uint16_t* p) { return load_bf16_n(p, VF); }
OCTAVO_INLINE void store_f16(uint16_t* p, vf x) { store_f16_n(p, x, VF); }
OCTAVO_INLINE void store_bf16(uint16_t* p, vf x) { store_bf16_n(p, x, VF); }

OCTAVO_INLINE vf operator+(vf a, vf b) { OCTAVO_LANES a.v[i] += b.v[i]; return a; }
OCTAVO_INLINE vf operator-(vf a, vf b) { OCTAVO_LANES a.v[i] -= b.v[i]; return a; }
OCTAVO_INLINE vf operator*(vf a, vf b) { OCTAVO_LANES a.v[i] *= b.v[i]; return a; }
OCTAVO_INLINE vf operator/(vf a, vf b) { OCTAVO_LANES a.v[i] /= b.v[i]; return a; }
// The product of two floats is exact in double, so this is an fma but for one rare double rounding, and vectorises;
// a call of fmaf for each lane would not.
OCTAVO_INLINE vf fma(vf a, vf b, vf c) {
    OCTAVO_LANES c.v[i] = float(double(a.v[i]) * double(b.v[i]) + double(c.v[i]));
    return c;
}
OCTAVO_INLINE vf neg(vf a) { OCTAVO_LANES a.v[i] = -a.v[i]; return a; }
OCTAVO_INLINE vf abs(vf a) { OCTAVO_LANES a.v[i] = float_of(bits_of(a.v[i]) & 0x7fffffffu); return a; }
OCTAVO_INLINE vf vmin(vf a, vf b) { OCTAVO_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
OCTAVO_INLINE vf vmax(vf a, vf b) { OCTAVO_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
OCTAVO_INLINE vf vsqrt(vf a) { OCTAVO_LANES a.v[i] = std::sqrt(a.v[i]); return a; }

OCTAVO_INLINE vm operator<(vf a, vf b) { vm r; OCTAVO_LANES r.v[i] = a.v[i] < b.v[i] ? ~0u : 0u; return r; }
OCTAVO_INLINE vm operator<=(vf a, vf b) { vm r; OCTAVO_LANES r.v[i] = a.v[i] <= b.v[i] ? ~0u : 0u; return r; }
OCTAVO_INLINE vm operator>(vf a, vf b) { return b < a; }
OCTAVO_INLINE vm operator>=(vf a, vf b) { return b <= a; }
OCTAVO_INLINE vm operator==(vf a, vf b) { vm r; OCTAVO_LANES r.v[i] = a.v[i] == b.v[i] ? ~0u : 0u; return r; }
OCTAVO_INLINE vm operator&(vm a, vm b) { OCTAVO_LANES a.v[i] &= b.v[i]; return a; }
OCTAVO_INLINE vm operator|(vm a, vm b) { OCTAVO_LANES a.v[i] |= b.v[i]; return a; }
OCTAVO_INLINE vm operator~(vm a) { OCTAVO_LANES a.v[i] = ~a.v[i]; return a; }
OCTAVO_INLINE bool any(vm a) { uint32_t t = 0; OCTAVO_LANES t |= a.v[i]; return t != 0; }
OCTAVO_INLINE vf select(vm m, vf a, vf b) { OCTAVO_LANES a.v[i] = m.v[i] ? a.v[i] : b.v[i]; return a; }

// Integer lanes wrap as the vector units' do; unsigned arithmetic says so to the compiler.
#define OCTAVO_WRAP(op) OCTAVO_LANES a.v[i] = int32_t(uint32_t(a.v[i]) op uint32_t(b.v[i])); return a
OCTAVO_INLINE vi iset1(int32_t x) { vi r; OCTAVO_LANES r.v[i] = x; return r; }
OCTAVO_INLINE vi iload(const int32_t* p) { vi r; OCTAVO_LANES r.v[i] = p[i]; return r; }
OCTAVO_INLINE void istore(int32_t* p, vi x) { OCTAVO_LANES p[i] = x.v[i]; }
OCTAVO_INLINE vi operator+(vi a, vi b) { OCTAVO_WRAP(+); }
OCTAVO_INLINE vi operator-(vi a, vi b) { OCTAVO_WRAP(-); }
OCTAVO_INLINE vi operator*(vi a, vi b) { OCTAVO_WRAP(*); }
OCTAVO_INLINE vi operator&(vi a, vi b) { OCTAVO_WRAP(&); }
OCTAVO_INLINE vi operator|(vi a, vi b) { OCTAVO_WRAP(|); }
OCTAVO_INLINE vi operator^(vi a, vi b) { OCTAVO_WRAP(^); }
OCTAVO_INLINE vm operator<(vi a, vi b) { vm r; OCTAVO_LANES r.v[i] = a.v[i] < b.v[i] ? ~0u : 0u; return r; }
OCTAVO_INLINE vm operator==(vi a, vi b) { vm r; OCTAVO_LANES r.v[i] = a.v[i] == b.v[i] ? ~0u : 0u; return r; }
OCTAVO_INLINE vi imax(vi a, vi b) { OCTAVO_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
OCTAVO_INLINE int32_t himax(vi a) { int32_t m = a.v[0]; OCTAVO_LANES m = m > a.v[i] ? m : a.v[i]; return m; }
template <int S> OCTAVO_INLINE vi shl(vi a) { OCTAVO_LANES a.v[i] = int32_t(uint32_t(a.v[i]) << S); return a; }
template <int S> OCTAVO_INLINE vi shr(vi a) { OCTAVO_LANES a.v[i] = int32_t(uint32_t(a.v[i]) >> S); return a; }
template <int S> OCTAVO_INLINE vi sra(vi a) { OCTAVO_LANES a.v[i] = a.v[i] >> S; return a; }
OCTAVO_INLINE vf to_float(vi a) { vf r; OCTAVO_LANES r.v[i] = float(a.v[i]); return r; }
// Nearest even for |a| < 2^22 (all callers' range) by adding 1.5 * 2^23; outside it the result is meaningless.
OCTAVO_INLINE vi round_int(vf a) {
    vi r;
    OCTAVO_LANES r.v[i] = int32_t(bits_of(a.v[i] + 12582912.0f) - 0x4b400000u);
    return r;
}
OCTAVO_INLINE vi as_int(vf a) { vi r; OCTAVO_LANES r.v[i] = int32_t(bits_of(a.v[i])); return r; }
OCTAVO_INLINE vf as_float(vi a) { vf r; OCTAVO_LANES r.v[i] = float_of(uint32_t(a.v[i])); return r; }

OCTAVO_INLINE vf load_i8(const int8_t* p) { vf r; OCTAVO_LANES r.v[i] = float(p[i]); return r; }
OCTAVO_INLINE vi load_i8_pairs(const int8_t* p) {
    vi r;
    OCTAVO_LANES r.v[i] = int16_pair(p[2 * i], p[2 * i + 1]);
    return r;
}
OCTAVO_INLINE vi dot_pairs(vi a, vi b, vi c) {
    OCTAVO_LANES {
        int32_t low = int32_t(int16_t(a.v[i])) * int16_t(b.v[i]), high = (a.v[i] >> 16) * (b.v[i] >> 16);
        c.v[i] = int32_t(uint32_t(c.v[i]) + uint32_t(low) + uint32_t(high));
    }
    return c;
}

#undef OCTAVO_WRAP
#undef OCTAVO_LANES

}  // namespace octavo
