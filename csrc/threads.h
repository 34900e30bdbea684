// A team of threads that works through numbered pieces together with its caller.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace octavo {

// Owns: count - 1 worker threads.  Promises: parallel_for returns when every piece has run exactly once; which thread
// runs which piece is open, so pieces must not depend on it; a worker that wakes too late is not waited for.
//
// One caller at a time.  Waiting spins for some tens of microseconds (a decode step has hundreds of short jobs), then
// sleeps, so that an idle engine costs nothing.
class Threads {
  public:
    explicit Threads(int count);
    ~Threads();
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    int count() const { return count_; }

    // Calls fn(int64_t piece, int worker) for pieces 0..n-1; worker is in 0..count-1, the caller is 0.  The first
    // exception that a piece throws is rethrown here once all running pieces have ended; the rest are skipped.
    template <class F> void parallel_for(int64_t n, F&& fn) {
        using Fn = std::remove_reference_t<F>;
        run(n, [](void* f, int64_t piece, int worker) { (*static_cast<Fn*>(f))(piece, worker); }, (void*)&fn);
    }

  private:
    using Call = void (*)(void* fn, int64_t piece, int worker);

    void run(int64_t n, Call call, void* fn);
    void work(int worker);
    void take_pieces(int worker);

    int count_;
    std::vector<std::thread> workers_;
    Call call_ = nullptr;
    void* fn_ = nullptr;
    int64_t n_ = 0;
    std::exception_ptr error_;
    std::mutex error_mutex_;

    // The gate holds (job number << 8 | workers inside) << 1 | closed; a worker joins by adding one to it while it is
    // open, so a job that has been closed is never joined late.
    alignas(64) std::atomic<uint64_t> gate_{1};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> left_{0};
    alignas(64) std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
};

}  // namespace octavo
