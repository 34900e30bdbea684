// How a panel of NR = 16 rows of W lies in memory.
//
// A panel of a float type is K lines of 16 numbers: line k holds W[n0 .. n0+15, k].
//
// A panel of a quantised type is a run of chunks along K.  A chunk is a header of scales and then `groups` groups of
// 32 k each.  Inside a group k goes in 8 steps of 4; the 64 bytes of a step are, for each of 16 columns, the quants of
// 4 successive k, which is what the byte dot products of every instruction set want:
//
//   bytes    (8 bits)   8 lines of 64: step t
//   nibbles  (4 bits)   4 lines of 64: line i holds step 2i in the low halves of its bytes, step 2i+1 in the high ones
//   bits     (5th bit)  8 words of 64 bits: bit i of word t belongs to byte i of step t
//   pairs    (5th, 6th) 2 lines of 64: bits 2u, 2u+1 of byte i of line L belong to byte i of step 4L+u
//
// Header, arrays over the 16 columns:
//
//   Q8_0 Q4_0 Q5_0   f16 d[2 groups]                                             w = d (q - 128 | 8 | 16)
//   Q4_1 Q5_1        f16 d, f16 m                                                w = d q + m
//   Q4_K Q5_K        f16 d, f16 m, (u8 scale, u8 minimum)[8 groups]              w = d scale q - m minimum
//   Q6_K             f16 d, 32 bytes unused, s8 scale[16 halves of groups]       w = d scale (q - 32)
#pragma once

#include <cstdint>

#include "pack.h"
#include "quant.h"

namespace octavo {

struct PanelLayout {
    int groups;  // groups of 32 k in a chunk
    int header;  // bytes
    int group;   // bytes of quants in a group
    int offset;  // log2 of what is subtracted from q, 0 for none
    bool minima;
    int bits;

    constexpr int chunk() const { return header + groups * group; }
    constexpr int high() const { return bits == 8 ? 512 : 256; }  // where the bits or pairs of a group begin
};

constexpr PanelLayout panel_layout(Type t) {
    switch (t) {
        case Type::Q8_0: return {2, 64, 512, 7, false, 8};
        case Type::Q4_0: return {2, 64, 256, 3, false, 4};
        case Type::Q5_0: return {2, 64, 320, 4, false, 5};
        case Type::Q4_1: return {1, 64, 256, 0, true, 4};
        case Type::Q5_1: return {1, 64, 320, 0, true, 5};
        case Type::Q4_K: return {8, 320, 256, 0, true, 4};
        case Type::Q5_K: return {8, 320, 320, 0, true, 5};
        case Type::Q6_K: return {8, 320, 384, 5, false, 6};
        default: return {0, 0, 0, 0, false, 0};
    }
}

// Bytes past the end of the last panel that a kernel may touch by prefetching or by whole-vector loads.
inline constexpr int kPanelSlack = 64;

}  // namespace octavo
