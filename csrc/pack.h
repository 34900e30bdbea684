// Weight matrices, rearranged once at load into the order in which the kernels read them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "arena.h"
#include "quant.h"
#include "threads.h"

namespace octavo {

inline constexpr int NR = 16;  // columns (rows of W) in a panel

// One matrix W (N, K) in panels of NR of its rows, in its own (quantised) type; see pack.cpp for the layout.
// Its size is the file's to within 3 % (plus padding of N to a multiple of NR).
struct Weight {
    Type type;
    int64_t N, K;
    int64_t panels;        // ceil(N / NR)
    int64_t panel_bytes;   // a multiple of 64
    size_t nbytes;         // all of it
    std::shared_ptr<uint8_t> storage;

    const uint8_t* panel(int64_t i) const { return storage.get() + i * panel_bytes; }
};

// raw: N rows of K weights as they lie in the file.  Throws std::invalid_argument for an unknown type name and for a K
// that its blocks do not divide.  The caller checks that raw has raw_bytes(type, N, K) bytes.  `read`, if it is there,
// is told from time to time how many bytes of raw, from its start, are needed no more.
std::unique_ptr<Weight> pack(const char* type, const uint8_t* raw, int64_t N, int64_t K, Threads& threads,
                             Arena& arena, const std::function<void(int64_t)>& read = {});

int64_t raw_bytes(const char* type, int64_t N, int64_t K);

// y[i, :K] = float32(W[ids[i], :]) * scale, bit for bit what the format defines.  ids are in 0..N-1 (caller checks).
void embed_rows(const Weight& w, const int32_t* ids, int64_t M, float scale, float* y, int64_t ldy);

}  // namespace octavo
