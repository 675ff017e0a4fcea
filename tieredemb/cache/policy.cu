// The choice of victims as a launch of its own, for plans whose rows are evicted before the map changes; see
// policy.cuh.
#include "common.cuh"
#include "policy.cuh"

// Chooses victims for the missed keys of a plan: as many as there are missed keys beyond the unused slots. 1,024
// threads a block, all blocks resident at once. `selection` is zero at the start.
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
