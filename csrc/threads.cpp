#include "threads.h"

#include <chrono>
#include <stdexcept>

#include "vec.h"

namespace octavo {

namespace {

constexpr auto kSpin = std::chrono::microseconds(100);  // a worker's wait for the next job before it sleeps
constexpr uint64_t kClosed = 1, kOne = 2;
constexpr int kJobShift = 17;

void relax() {
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

uint64_t job_of(uint64_t gate) { return gate >> kJobShift; }
int inside(uint64_t gate) { return int(gate >> 1 & 0xffff); }

}  // namespace

Threads::Threads(int count) : count_(count) {
    if (count < 1 || count > 1024) throw std::invalid_argument("the number of threads must be in 1..1024");
    for (int w = 1; w < count; w++) workers_.emplace_back([this, w] { work(w); });
}

Threads::~Threads() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& t : workers_) t.join();
}

void Threads::take_pieces(int worker) {
    for (;;) {
        int64_t piece = next_.fetch_add(1, std::memory_order_relaxed);
        if (piece >= n_) return;
        try {
            call_(fn_, piece, worker);
        } catch (...) {
            std::lock_guard lock(error_mutex_);
            if (!error_) error_ = std::current_exception();
            next_.store(n_, std::memory_order_relaxed);
        }
    }
}

void Threads::run(int64_t n, Call call, void* fn) {
    if (count_ == 1 || n <= 1) {
        for (int64_t piece = 0; piece < n; piece++) call(fn, piece, 0);
        return;
    }
    call_ = call;
    fn_ = fn;
    n_ = n;
    error_ = nullptr;
    next_.store(0, std::memory_order_relaxed);
    left_.store(0, std::memory_order_relaxed);
    // Sequentially consistent, as in work(): either we see a sleeper or the sleeper sees the new job.
    gate_.store((job_of(gate_.load(std::memory_order_relaxed)) + 1) << kJobShift);
    if (sleeping_.load() > 0) {
        std::lock_guard lock(mutex_);
        wake_.notify_all();
    }
    take_pieces(0);
    int joined = inside(gate_.fetch_or(kClosed));
    for (int spins = 0; left_.load(std::memory_order_acquire) != joined; spins++) {
        if (spins < 2000)
            relax();
        else
            std::this_thread::yield();  // a worker lost its core in the middle of a piece
    }
    if (error_) std::rethrow_exception(error_);
}

void Threads::work(int worker) {
    FloatMode mode;
    uint64_t seen = 0;  // the last job that this worker has had a look at
    while (!stop_.load(std::memory_order_relaxed)) {
        uint64_t gate = gate_.load(std::memory_order_acquire);
        auto deadline = std::chrono::steady_clock::now() + kSpin;
        for (int spins = 1; job_of(gate) == seen; spins++) {
            relax();
            gate = gate_.load(std::memory_order_acquire);
            if (spins % 32 == 0 && std::chrono::steady_clock::now() > deadline) break;
        }
        if (job_of(gate) == seen) {
            std::unique_lock lock(mutex_);
            sleeping_++;
            wake_.wait(lock, [&] { return stop_ || job_of(gate_.load()) != seen; });
            sleeping_--;
            continue;
        }
        seen = job_of(gate);
        while (!(gate & kClosed) && job_of(gate) == seen) {
            if (gate_.compare_exchange_weak(gate, gate + kOne, std::memory_order_acq_rel)) {
                take_pieces(worker);
                left_.fetch_add(1, std::memory_order_release);
                break;
            }
        }
    }
}

}  // namespace octavo
