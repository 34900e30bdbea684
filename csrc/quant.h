// The weight types: names, block sizes, and what the bits of a block mean.
#pragma once

#include <cstdint>

#include "vec.h"

namespace octavo {

enum class Type { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

struct TypeInfo {
    const char* name;
    Type type;
    int block;  // weights in a block
    int bytes;  // bytes of a block
};

inline constexpr TypeInfo kTypes[] = {
    {"F32", Type::F32, 1, 4},       {"F16", Type::F16, 1, 2},       {"BF16", Type::BF16, 1, 2},
    {"Q8_0", Type::Q8_0, 32, 34},   {"Q4_0", Type::Q4_0, 32, 18},   {"Q4_1", Type::Q4_1, 32, 20},
    {"Q5_0", Type::Q5_0, 32, 22},   {"Q5_1", Type::Q5_1, 32, 24},   {"Q4_K", Type::Q4_K, 256, 144},
    {"Q5_K", Type::Q5_K, 256, 176}, {"Q6_K", Type::Q6_K, 256, 210},
};

inline const TypeInfo& info(Type t) { return kTypes[int(t)]; }

inline bool is_float(Type t) { return t == Type::F32 || t == Type::F16 || t == Type::BF16; }

OCTAVO_INLINE uint16_t load_u16(const uint8_t* p) { return uint16_t(p[0] | p[1] << 8); }

OCTAVO_INLINE uint32_t load_u32(const uint8_t* p) {
    return uint32_t(p[0]) | uint32_t(p[1]) << 8 | uint32_t(p[2]) << 16 | uint32_t(p[3]) << 24;
}

// One block, taken apart: unsigned quants and the fields that scale them, as the file has them.
struct Block {
    uint8_t q[256];
    uint16_t d, m;        // f16: scale, and minimum (Q4_1, Q5_1: added; Q4_K, Q5_K: scale of the minima, subtracted)
    uint8_t sc[16];       // Q4_K, Q5_K: scale of each 32; Q6_K: of each 16 (int8)
    uint8_t mn[8];        // Q4_K, Q5_K: minimum of each 32
};

// 8 six-bit scales and 8 six-bit minima in 12 bytes: the first four of each lie in the low bits of bytes 0-7; of the
// last four, bytes 8-11 hold the low halves and the top two bits of bytes 0-7 the rest.
inline void unpack_scales_k(const uint8_t* s, Block& b) {
    for (int i = 0; i < 4; i++) {
        b.sc[i] = s[i] & 63;
        b.mn[i] = s[i + 4] & 63;
        b.sc[i + 4] = uint8_t((s[i + 8] & 15) | (s[i] >> 6) << 4);
        b.mn[i + 4] = uint8_t((s[i + 8] >> 4) | (s[i + 4] >> 6) << 4);
    }
}

// The low and high halves of 16 bytes.
OCTAVO_INLINE void split_nibbles(const uint8_t* p, uint8_t* low, uint8_t* high) {
    for (int i = 0; i < 16; i += 8) {
        uint64_t u, l, h;
        std::memcpy(&u, p + i, 8);
        l = u & 0x0f0f0f0f0f0f0f0full;
        h = u >> 4 & 0x0f0f0f0f0f0f0f0full;
        std::memcpy(low + i, &l, 8);
        std::memcpy(high + i, &h, 8);
    }
}

// Bit i becomes byte i, 0 or 1 (little-endian, as all machines that have kernels are).
OCTAVO_INLINE uint64_t spread_bits(uint8_t bits) {
    uint64_t one = bits * 0x0101010101010101ull & 0x8040201008040201ull;
    return (one + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
}

OCTAVO_INLINE void unpack_block(Type t, const uint8_t* p, Block& b) {
    switch (t) {
        case Type::Q8_0:
            b.d = load_u16(p);
            for (int i = 0; i < 32; i++) b.q[i] = p[2 + i] ^ 0x80;  // + 128
            break;
        case Type::Q4_0:
        case Type::Q4_1: {
            b.d = load_u16(p);
            if (t == Type::Q4_1) b.m = load_u16(p + 2);
            const uint8_t* qs = p + (t == Type::Q4_1 ? 4 : 2);
            split_nibbles(qs, b.q, b.q + 16);
            break;
        }
        case Type::Q5_0:
        case Type::Q5_1: {
            b.d = load_u16(p);
            if (t == Type::Q5_1) b.m = load_u16(p + 2);
            const uint8_t* rest = p + (t == Type::Q5_1 ? 4 : 2);
            uint32_t high = load_u32(rest);
            split_nibbles(rest + 4, b.q, b.q + 16);
            for (int i = 0; i < 4; i++) {
                uint64_t u;
                std::memcpy(&u, b.q + i * 8, 8);
                u |= spread_bits(uint8_t(high >> (i * 8))) << 4;
                std::memcpy(b.q + i * 8, &u, 8);
            }
            break;
        }
        case Type::Q4_K:
        case Type::Q5_K: {
            b.d = load_u16(p);
            b.m = load_u16(p + 2);
            unpack_scales_k(p + 4, b);
            const uint8_t* high = p + 16;  // Q5_K only: bit g of byte i belongs to weight i of group g
            const uint8_t* qs = t == Type::Q5_K ? p + 48 : p + 16;
            for (int g = 0; g < 8; g++)
                for (int i = 0; i < 32; i++) {
                    uint8_t q = uint8_t(qs[g / 2 * 32 + i] >> (g % 2 * 4)) & 15;
                    if (t == Type::Q5_K) q = uint8_t(q | (high[i] >> g & 1) << 4);
                    b.q[g * 32 + i] = q;
                }
            break;
        }
        case Type::Q6_K: {
            for (int g = 0; g < 8; g++) {  // a group of 32: four to each half of the block
                const uint8_t* low = p + g / 4 * 64 + g % 2 * 32;
                const uint8_t* high = p + 128 + g / 4 * 32;
                const int low_shift = g % 4 / 2 * 4, high_shift = g % 4 * 2;
                for (int i = 0; i < 32; i++)
                    b.q[g * 32 + i] = uint8_t((low[i] >> low_shift & 15) | (high[i] >> high_shift & 3) << 4);
            }
            for (int i = 0; i < 16; i++) b.sc[i] = p[192 + i];
            b.d = load_u16(p + 208);
            break;
        }
        default: break;
    }
}

}  // namespace octavo
