#include "probe.h"

#include <algorithm>
#include <atomic>
#include <chrono>

#include "threads.h"
#include "vec.h"

namespace octavo {
namespace {

constexpr int kPieces = 32;  // of each thread's share, so that one that is late costs little
constexpr int kChains = 12;  // more than latency times units of any core, few enough to stay in registers

// Seconds that the pieces take together, workers being awake.
template <class F> double timed(Threads& threads, int64_t pieces, F&& run) {
    std::atomic<int> awake{0};
    int count = threads.count();
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(50);
    threads.parallel_for(count, [&](int64_t, int) {
        awake++;
        while (awake < count && std::chrono::steady_clock::now() < end) {}
    });
    auto began = std::chrono::steady_clock::now();
    threads.parallel_for(pieces, run);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

int32_t read_piece(const uint8_t* p, int64_t n) {
    constexpr int64_t bytes = VF * 4;
    vi sum[8];
    for (vi& s : sum) s = iset1(0);
    for (; n >= 8 * bytes; n -= 8 * bytes, p += 8 * bytes) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) sum[j] = sum[j] ^ iload((const int32_t*)(p + j * bytes));
    }
    for (int j = 1; j < 8; j++) sum[0] = sum[0] ^ sum[j];
    return himax(sum[0]);
}

float multiply_piece(int64_t iterations) {
    vf x[kChains];
    for (int j = 0; j < kChains; j++) x[j] = set1(float(j));
    vf a = set1(0.5f), b = set1(1.0f);
    for (int64_t i = 0; i < iterations; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < kChains; j++) x[j] = fma(x[j], a, b);
    }
    for (int j = 1; j < kChains; j++) x[0] = x[0] + x[j];
    return hsum(x[0]);
}

}  // namespace

double probe_read(const uint8_t* data, int64_t n, int threads) {
    Threads team(threads);
    std::atomic<int64_t> sink{0};  // somebody wants the result, so that it is computed
    int64_t pieces = int64_t(kPieces) * threads, step = (n / pieces + 4095) / 4096 * 4096;
    double seconds = timed(team, pieces, [&](int64_t i, int) {
        int64_t from = std::min(n, i * step), to = std::min(n, from + step);
        sink += read_piece(data + from, to - from);
    });
    return double(n) / seconds;
}

double probe_fma(int64_t iterations, int threads) {
    Threads team(threads);
    std::atomic<int64_t> sink{0};
    int64_t step = (iterations + kPieces - 1) / kPieces;
    double seconds = timed(team, int64_t(kPieces) * threads, [&](int64_t, int) {
        FloatMode mode;
        sink += int64_t(multiply_piece(step));
    });
    return 2.0 * kChains * VF * double(step) * kPieces * threads / seconds;
}

}  // namespace octavo
