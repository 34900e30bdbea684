// What the machine can do at most, for benchmarks to compare kernels with.
#pragma once

#include <cstdint>

namespace octavo {

// Bytes a second that `threads` threads read together, each of n bytes once; n should be many times the last cache.
double probe_read(const uint8_t* data, int64_t n, int threads);

// Floating-point operations a second (two for each fma) of `threads` threads that multiply and add in registers only,
// `iterations` times in each of 12 vectors and thread.
double probe_fma(int64_t iterations, int threads);

}  // namespace octavo
