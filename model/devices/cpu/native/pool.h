// A pool of threads for work that is cut into phases, and phases into pieces.
//
// Threads take neighbouring pieces of the open phase, many at first and few towards its end; the thread that completes the last piece opens
// the next phase. No thread waits for another as such, only for pieces that have been taken: one that has lost its processor delays the others
// by those that it took, and when it is back it goes on with the phase that is open then. Invariant: a piece is computed once, after all
// pieces of the phases before.
#pragma once

#include <cstdint>

struct Phase {
    void (*compute)(const void *work, int64_t begin, int64_t end);  // Items begin .. end of the phase.
    const void *work;
    int64_t num_items, piece_size = 1;  // A piece has piece_size items, the last one perhaps fewer.
};

// Returns when all phases are computed. One call at a time uses the pool; one that finds it in use computes everything itself.
void compute_phases(const Phase *phases, int64_t num_phases, int64_t num_threads);

// A phase of its own: compute(begin, end) for all items.
template <class Compute> void compute_items(int64_t num_items, int64_t num_threads, const Compute &compute, int64_t piece_size = 1) {
    const Phase phase = {[](const void *work, int64_t begin, int64_t end) { (*(const Compute *)work)(begin, end); }, &compute, num_items, piece_size};
    compute_phases(&phase, 1, num_threads);
}
