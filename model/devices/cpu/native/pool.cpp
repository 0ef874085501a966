#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include <pthread.h>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
static void relax() { _mm_pause(); }
#else
static void relax() {}
#endif

constexpr int RELAXED_SPINS = 64;  // A microsecond or two; after these a waiting thread offers its processor to others.
constexpr auto IDLE = std::chrono::microseconds(200);  // From one step of a small model to the next.

static std::atomic<int64_t> num_computed{0};

// A number that grows while a call computes.
extern "C" int64_t num_phases_computed() { return num_computed.load(std::memory_order_relaxed); }

static int64_t num_pieces(const Phase &phase) { return (phase.num_items + phase.piece_size - 1) / phase.piece_size; }

static void compute_pieces(const Phase &phase, int64_t first, int64_t count) {
    phase.compute(phase.work, first * phase.piece_size, std::min(phase.num_items, (first + count) * phase.piece_size));
}

struct Pool {
    // The number of the open phase since the process began, in the upper 32 bits, and how many of its pieces have not been taken. A thread takes
    // a piece by one exchange of both, so that it cannot take one of a phase that it has not seen.
    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<int64_t> num_done{0};
    // Of the call that has the pool: written before its first ticket, and read by threads that have taken a piece of it.
    alignas(64) const Phase *phases = nullptr;
    uint32_t first = 0;
    std::atomic<uint32_t> end{0};
    std::atomic<int64_t> num_threads{1};

    std::mutex in_use, sleep;
    std::condition_variable wake;
    std::atomic<int64_t> num_asleep{0};
    int64_t num_started = 1;

    // Opens the phase with this number, or one after it: a phase of one piece is computed here and now.
    void open(uint32_t number) {
        for (; number != end.load(std::memory_order_relaxed); number++) {
            const Phase &phase = phases[number - first];
            const int64_t count = num_pieces(phase);
            num_computed.fetch_add(1, std::memory_order_relaxed);
            if (count > 1) {
                num_done.store(0, std::memory_order_relaxed);
                ticket.store(uint64_t(number) << 32 | uint64_t(count), std::memory_order_release);
                return;
            }
            if (count) compute_pieces(phase, 0, 1);
        }
        ticket.store(uint64_t(number) << 32, std::memory_order_release);
    }

    // Takes and computes a share of the pieces left of the open phase: neighbouring ones, which are read as one stream, and fewer towards the
    // end, so that all threads end together. False if none is left.
    bool work() {
        uint64_t seen = ticket.load(std::memory_order_acquire);
        int64_t left, taken;
        do {
            left = int64_t(uint32_t(seen));
            if (!left) return false;
            taken = std::max<int64_t>(1, left / (2 * num_threads.load(std::memory_order_relaxed)));
        } while (!ticket.compare_exchange_weak(seen, seen - uint64_t(taken), std::memory_order_acquire, std::memory_order_acquire));
        const uint32_t number = uint32_t(seen >> 32);
        const Phase &phase = phases[number - first];
        const int64_t count = num_pieces(phase);
        compute_pieces(phase, count - left, taken);
        if (num_done.fetch_add(taken, std::memory_order_acq_rel) + taken == count) open(number + 1);
        return true;
    }

    // Whether there is nothing to do for the thread with this number. Those beyond the call's number of threads are left from other calls.
    bool is_idle(int64_t index) const { return is_over() || index >= num_threads.load(std::memory_order_relaxed); }

    bool is_over() const { return uint32_t(ticket.load(std::memory_order_acquire) >> 32) == end.load(); }

    void serve(int64_t index) {
        auto idle_since = std::chrono::steady_clock::now();
        for (int64_t spins = 0;; spins++) {
            if (index < num_threads.load(std::memory_order_relaxed) && work()) {
                spins = 0;
                continue;
            }
            relax();
            if (spins < RELAXED_SPINS) continue;
            if (spins == RELAXED_SPINS || !is_idle(index)) idle_since = std::chrono::steady_clock::now();
            std::this_thread::yield();
            if (std::chrono::steady_clock::now() - idle_since < IDLE) continue;
            std::unique_lock<std::mutex> lock(sleep);
            num_asleep.fetch_add(1);
            wake.wait(lock, [&] { return !is_idle(index); });
            num_asleep.fetch_sub(1);
            spins = 0;
        }
    }

    void start(int64_t count) {
        try {
            for (; num_started < count; num_started++) std::thread(&Pool::serve, this, num_started).detach();
        } catch (const std::exception &) {
        }  // Those that the system allows, by number and by memory, share the work.
        num_threads.store(count, std::memory_order_relaxed);
    }

    void compute(const Phase *given, int64_t num_phases, int64_t count) {
        start(count);
        phases = given;
        first = end.load(std::memory_order_relaxed);
        end.store(first + uint32_t(num_phases));
        open(first);
        if (num_asleep.load()) {
            { std::lock_guard<std::mutex> lock(sleep); }  // A thread between its last look and its sleep has the lock.
            wake.notify_all();
        }
        for (int64_t spins = 0; !is_over(); spins++) {
            if (work())
                spins = 0;
            else if (spins < RELAXED_SPINS)
                relax();
            else
                std::this_thread::yield();
        }
    }
};

// Never destroyed: its threads wait in it until the process ends. A process that was forked has none of these threads, and perhaps locks that
// they held: it begins with another pool.
static Pool &pool() {
    static std::atomic<Pool *> found{nullptr};
    static const int registered = pthread_atfork(nullptr, nullptr, [] { found.store(new Pool); });
    (void)registered;
    Pool *seen = found.load();
    if (seen) return *seen;
    Pool *made = new Pool;
    if (found.compare_exchange_strong(seen, made)) return *made;
    delete made;  // Another thread was first.
    return *seen;
}

void compute_phases(const Phase *phases, int64_t num_phases, int64_t num_threads) {
    Pool &found = pool();
    std::unique_lock<std::mutex> lock(found.in_use, std::try_to_lock);
    if (num_threads > 1 && lock.owns_lock()) return found.compute(phases, num_phases, num_threads);
    for (int64_t i = 0; i < num_phases; i++, num_computed.fetch_add(1, std::memory_order_relaxed))
        if (phases[i].num_items) compute_pieces(phases[i], 0, num_pieces(phases[i]));
}
