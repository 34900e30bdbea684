// y = x . W^T for every weight type.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "buffer.h"
#include "pack.h"
#include "threads.h"

namespace octavo {

// exact: float activations against weights dequantised in registers, one chain of fma over k.
// fast:  activations rounded to 8 bits a row and group of 32, integer dot products; float weight types stay exact.
enum class Mode { exact, fast };

// Scratch memory of gemm, kept between calls; one for each caller that may run at the same time.
struct Workspace {
    Buffer shared;                                 // activations, packed once for all threads
    std::vector<std::unique_ptr<Buffer>> own;      // activations, packed by each thread for itself (few rows)
    std::vector<uint8_t> packed;                   // which threads have done so in this call
};

// y[m, 0 : sum N_i] = x[m, :K] . concat(parts)^T (+ bias) (+ residual[m, :]) for m < M; the parts share K.
// bias has sum N_i floats or is null; residual may be null, and may be y itself.  Row m of y depends on row m of x
// alone, bit for bit: not on M, not on the other rows, not on the number of threads.
// The caller holds a FloatMode.
void gemm(Threads& threads, const float* x, int64_t ldx, int64_t M, const Weight* const* parts, int n_parts,
          const float* bias, const float* residual, int64_t ldr, float* y, int64_t ldy, Mode mode, Workspace& work);

}  // namespace octavo
