// Finds rows of consecutive keys: in slots, or in cold storage that kernels can read.
#include "common.cuh"
#include "slot_map.cuh"

// Finds the homes of the n keys from `first` on. Row i is in a slot, or has home −2 − i, and records[i] names its key.
// If `untouched` is given, it is set for each row to whether it was never written, and `some`, zero at the start,
// counts those. `stride`: words of a cold state, which ends with the score.
extern "C" __global__ void range_find(const Cell *cells, i64 n_cells, i64 first, i64 n, int *homes, Record *records,
                                      const word_t *cold_state, i64 stride, unsigned char *untouched, int *some) {
    wait_for_prior_kernel();
    for (i64 i = thread_index(); i < n; i += thread_count()) {
        const i64 key = first + i;
        const int slot = find_slot(cells, n_cells, key);
        homes[i] = slot >= 0 ? slot : (int)(-2 - i);
        records[i] = Record{key + 1};
        if (!untouched) continue;
        const bool fresh = slot < 0 && cold_state[(key + 1) * stride - 1] == 0;
        untouched[i] = fresh;
        if (fresh) atomicAdd(some, 1);
    }
}

// Gives the untouched rows, which were generated, the lowest score: from then on they count as written.
extern "C" __global__ void range_begin(i64 first, i64 n, const unsigned char *untouched, word_t *cold_state,
                                       i64 stride) {
    wait_for_prior_kernel();
    for (i64 i = thread_index(); i < n; i += thread_count())
        if (untouched[i]) cold_state[(first + i + 1) * stride - 1] = MIN_SCORE;
}
