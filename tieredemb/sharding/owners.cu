// Which rank owns the row of each occurrence, the row's number there, and how many ids are requested of each rank; the
// occurrences in the order of their owners; and which one is the first of its row, where a row comes back once.
//
// Firsts are found by open addressing with linear probing: a cell holds an occurrence + 1, at the end the first one of
// its row, in whichever order threads run.
#include "common.cuh"

// Of each feature of a key space: the first key of its table, the table's number in the collection, and the rank that
// holds the table whole, or −1 where it is row-wise over all `ranks`.
struct RowOwners {
    const i64 *first, *table, *owner;
    int ranks;
};

// Adds one to counts[where] for each lane of a warp whose `where` is not negative. Occurrences of a feature lie
// together, so that most lanes are counted in a few atomics. Whole warps call it.
__device__ __forceinline__ void count_alike(i64 *counts, int where) {
    const u32 alike = __match_any_sync(FULL_WARP, where);
    if (where >= 0 && __ffs(alike) - 1 == lane_index()) atomicAdd((u64 *)(counts + where), (u64)__popc(alike));
}

// The cell of the key of occurrence i, which holds that occurrence or an earlier one from then on.
__device__ __forceinline__ int enter(int *cells, i64 n_cells, const i64 *keys, int i) {
    const i64 key = keys[i];
    i64 at = first_cell(key, n_cells);
    while (true) {
        int seen = __ldcg(cells + at);
        if (seen == EMPTY_CELL) seen = atomicCAS(cells + at, EMPTY_CELL, i + 1);
        if (seen == EMPTY_CELL) return (int)at;
        if (keys[seen - 1] == key) {
            if (i + 1 < seen) atomicMin(cells + at, i + 1);
            return (int)at;
        }
        at = at + 1 == n_cells ? 0 : at + 1;
    }
}

// Writes, for each occurrence, the rank that owns its row, or `ranks` where nothing is looked up, and the row's number
// there; and its cell, where `cells` are given. Adds to `counts`, which has a row of `stride` for each rank, how many
// occurrences of each feature it owns; writes how many it owns of each 32 occurrences to `of_chunks`, (ranks + 1,
// chunks), where that is given. Cells and chunks must be zero. Moves 12 + 12 bytes an occurrence, with cells 12 more at
// random.
extern "C" __global__ void owners_find(const i64 *keys, const int *bag, i64 n, i64 batch, RowOwners row_owners,
                                       int *owner, i64 *local, i64 *counts, i64 stride, int *cells, i64 n_cells,
                                       int *cell, int *of_chunks, i64 chunks) {
    wait_for_prior_kernel();
    for (i64 base = (i64)blockIdx.x * blockDim.x; base < n; base += thread_count()) {  // whole warps
        const i64 i = base + threadIdx.x;
        const i64 key = i < n ? keys[i] : -1;
        int rank = i < n ? row_owners.ranks : -1, feature = 0;
        if (key >= 0) {
            feature = bag[i] / (int)batch;
            const i64 row = key - row_owners.first[feature];
            rank = (int)row_owners.owner[feature];
            local[i] = rank < 0 ? row / row_owners.ranks : row;
            if (rank < 0) rank = (int)((row + row_owners.table[feature]) % row_owners.ranks);
        }
        if (i < n) owner[i] = rank;
        if (of_chunks) {
            const u32 alike = __match_any_sync(FULL_WARP, rank);
            if (rank >= 0 && __ffs(alike) - 1 == lane_index()) of_chunks[rank * chunks + i / 32] = __popc(alike);
        }
        if (cells && key >= 0) cell[i] = enter(cells, n_cells, keys, (int)i);
        count_alike(counts, key >= 0 ? rank * (int)stride + feature : -1);
    }
}

// Sorts the occurrences by their owners, stably: writes which occurrence each position has to `order`, and the position
// of each occurrence to `place`. `ends`: the running sum of what `owners_find` has written `of_chunks`. Where `cells`
// are given, writes 1 to `is_first`, by position, for the first occurrence of each row, else 0, and adds these to
// `counts`, as `owners_find`. Moves 16 bytes an occurrence, with cells 16 more, half of them at random.
extern "C" __global__ void order_find(const int *owner, const int *bag, i64 n, i64 batch, int ranks, const int *ends,
                                      i64 chunks, const int *cells, const int *cell, i64 *order, int *place,
                                      int *is_first, i64 *counts, i64 stride) {
    wait_for_prior_kernel();
    for (i64 base = (i64)blockIdx.x * blockDim.x; base < n; base += thread_count()) {  // whole warps
        const i64 i = base + threadIdx.x;
        const int rank = i < n ? owner[i] : -1;
        const u32 alike = __match_any_sync(FULL_WARP, rank), before = alike & ((1u << lane_index()) - 1);
        int where = -1;
        if (rank >= 0) {
            const int k = ends[rank * chunks + i / 32] - __popc(alike) + __popc(before);
            order[k] = i;
            place[i] = k;
            if (cells) {
                const bool first = rank < ranks && cells[cell[i]] == i + 1;
                if (first) where = rank * (int)stride + bag[i] / (int)batch;
                is_first[k] = first;
            }
        }
        if (cells) count_alike(counts, where);
    }
}

// Writes what is requested, in that order: the rows' numbers, and as homes of the occurrences the positions of their
// rows among those that will be received; where nothing is looked up, homes stay. Where `cells` are given, one row is
// received for all its occurrences, and the numbers of those that are not the first are inverted. `firsts`: running sum
// of `is_first`.
extern "C" __global__ void requests_place(const int *owner, const i64 *local, i64 n, int ranks, const int *cells,
                                          const int *cell, const int *place, const int *firsts, i64 *ids, int *homes) {
    wait_for_prior_kernel();
    for (i64 i = thread_index(); i < n; i += thread_count()) {
        if (owner[i] >= ranks) continue;
        const int first = cells ? cells[cell[i]] - 1 : (int)i;
        ids[place[i]] = first == i ? local[i] : ~local[i];
        homes[i] = cells ? firsts[place[first]] - 1 : place[i];
    }
}
