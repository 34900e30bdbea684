// y = x . W^T for every weight type.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "buffer.h"
#include "pack.h"
#include "threads.h"

namespace octavo {

// exact: float activations against weights dequantised in registers, one chain of fma over k.
// fast:  activations rounded to 8 bits a row and group of 32, integer dot products; float weight types stay exact.
enum class Mode { exact, fast };

// Scratch memory of gemm, kept between calls; one for each caller that may run at the same time.
struct Workspace {
    struct alignas(64) Worker {
        Buffer own;                     // activations, packed by a thread for itself (few rows)
        bool packed = false;            // in this call
        Buffer unpacked;                // panels that several tiles share
        std::atomic<int64_t> next{0};   // piece of the thread's run of pieces
    };
    Buffer shared;  // activations, packed once for all threads
    std::unique_ptr<Worker[]> workers;
    int count = 0;

    void begin(int threads) {
        if (count < threads) {
            workers = std::make_unique<Worker[]>(size_t(threads));
            count = threads;
        }
        for (int w = 0; w < threads; w++) workers[w].packed = false;
    }
};

// y[m, 0 : sum N_i] = x[m, :K] . concat(parts)^T (+ bias) (+ residual[m, :]) for m < M; the parts share K.
// bias has sum N_i floats or is null; residual may be null, and may be y itself.  Row m of y depends on row m of x
// alone, bit for bit: not on M, not on the other rows, not on the number of threads.
// The caller holds a FloatMode.
void gemm(Threads& threads, const float* x, int64_t ldx, int64_t M, const Weight* const* parts, int n_parts,
          const float* bias, const float* residual, int64_t ldr, float* y, int64_t ldy, Mode mode, Workspace& work);

}  // namespace octavo
