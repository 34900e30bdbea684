// Sixteen columns at a time: what the GEMM kernels need beyond vec.h, in one shape for every instruction set.
//
//   fx, ix    16 floats, 16 int32, as many vectors as that takes
//   bx        64 bytes: 16 columns x 4 successive k, a step of a panel (panel.h)
//   xb        4 activations (int8), repeated for each column
//   Dot<BITS> the running dot product of one group: start(n), step<T>(u, x) for each step, total()
//   Sums<BITS>  the same with ones, for the steps of a group (BITS = 6: of half a group)
//
// BITS bounds the unsigned weights that are to come.  With BITS = 8 and signed_bytes they are taken as q - 128 and no
// offset may be added; that is how machines without an unsigned-by-signed instruction do it without overflow.
#pragma once

#include "panel.h"
#include "vec.h"

#if defined(OCTAVO_SCALAR)
#include "dot/scalar.h"
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include "dot/avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(__AVX512F__)
#include "dot/avx2.h"
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD) && defined(__aarch64__)
#include "dot/neon.h"
#elif defined(__AVX2__) || defined(__ARM_NEON)
#error "build with OCTAVO_SCALAR, AVX2+FMA+F16C, AVX-512 F/BW/DQ/VL+VNNI, or aarch64 with dotprod"
#else
#include "dot/scalar.h"
#endif

namespace octavo {

inline constexpr int NV = NR / VF;  // float vectors in 16 columns

#define OCTAVO_EACH _Pragma("GCC unroll 16") for (int i = 0; i < NV; i++)

struct fx { vf v[NV]; };

OCTAVO_INLINE fx fx_zero() { fx r; OCTAVO_EACH r.v[i] = zero(); return r; }
OCTAVO_INLINE fx fx_load(const float* p) { fx r; OCTAVO_EACH r.v[i] = load(p + i * VF); return r; }
OCTAVO_INLINE void fx_store(float* p, fx x) { OCTAVO_EACH store(p + i * VF, x.v[i]); }
OCTAVO_INLINE fx fx_load_f16(const uint8_t* p) {
    fx r;
    OCTAVO_EACH r.v[i] = load_f16((const uint16_t*)p + i * VF);
    return r;
}
OCTAVO_INLINE fx fx_load_bf16(const uint8_t* p) {
    fx r;
    OCTAVO_EACH r.v[i] = load_bf16((const uint16_t*)p + i * VF);
    return r;
}
OCTAVO_INLINE fx operator*(fx a, fx b) { OCTAVO_EACH a.v[i] = a.v[i] * b.v[i]; return a; }
OCTAVO_INLINE fx operator*(fx a, vf b) { OCTAVO_EACH a.v[i] = a.v[i] * b; return a; }
OCTAVO_INLINE fx operator+(fx a, fx b) { OCTAVO_EACH a.v[i] = a.v[i] + b.v[i]; return a; }
OCTAVO_INLINE fx fx_neg(fx a) { OCTAVO_EACH a.v[i] = neg(a.v[i]); return a; }
OCTAVO_INLINE fx fx_fma(fx a, fx b, fx c) { OCTAVO_EACH c.v[i] = fma(a.v[i], b.v[i], c.v[i]); return c; }
OCTAVO_INLINE fx fx_fma(fx a, vf b, fx c) { OCTAVO_EACH c.v[i] = fma(a.v[i], b, c.v[i]); return c; }
OCTAVO_INLINE fx fx_float(ix a) { fx r; OCTAVO_EACH r.v[i] = to_float(a.v[i]); return r; }

// Up to 6 bits the steps' bytes cannot overflow when added up: 8 x 15, 8 x 31, 4 x 63.  Bytes go through Dot.
template <int BITS> struct Sums {
    bx bytes;
    ix from;
    OCTAVO_INLINE void start(ix n) { from = n; }
    template <int T> OCTAVO_INLINE void step(bx u) {
        if constexpr (T % (BITS == 6 ? 4 : 8) == 0) bytes = u;
        else bytes = bytes + u;
    }
    OCTAVO_INLINE ix total() const {
        ix r = byte_sums(bytes);
        OCTAVO_EACH r.v[i] = r.v[i] + from.v[i];
        return r;
    }
};
template <> struct Sums<8> {
    Dot<8> dot;
    OCTAVO_INLINE void start(ix n) { dot.start(n); }
    template <int T> OCTAVO_INLINE void step(bx u) {
        constexpr int8_t ones[4] = {1, 1, 1, 1};
        dot.step<T>(u, xb_load(ones));
    }
    OCTAVO_INLINE ix total() const { return dot.total(); }
};

// Columns first..15 of the 16 need not exist in memory.
OCTAVO_INLINE fx fx_load_n(const float* p, int n) {
    fx r;
    OCTAVO_EACH {
        int here = n - i * VF;
        r.v[i] = here >= VF ? load(p + i * VF) : here > 0 ? load_n(p + i * VF, here) : zero();
    }
    return r;
}
OCTAVO_INLINE void fx_store_n(float* p, fx x, int n) {
    OCTAVO_EACH {
        int here = n - i * VF;
        if (here >= VF)
            store(p + i * VF, x.v[i]);
        else if (here > 0)
            store_n(p + i * VF, x.v[i], here);
    }
}

}  // namespace octavo
