// The choice of victims as a launch of its own, for rows that leave before anything changes hands; see policy.cuh.
#include "common.cuh"
#include "policy.cuh"

// Chooses victims for what a plan has missed: as many as there are missed keys beyond the unused slots. 1,024 threads a
// block, all blocks resident at once. `selection` comes as zeros.
extern "C" __global__ void __launch_bounds__(MEETING_THREADS)
    victims_select(Selection *selection, Counts *counts, const Clock *clock, const u32 *score, const int *last_batch,
                   int capacity, float unit, int by_age, int in_parts, int *victims) {
    wait_for_prior_kernel();
    const Wanted wanted = slots_wanted(counts, capacity);
    if (thread_index() == 0) {
        counts->needed = wanted.needed;
        counts->into_unused = wanted.into_unused;
    }
    if (wanted.needed)
        victims_choose(selection, *clock, score, last_batch, wanted, unit, by_age, in_parts, victims);
}
