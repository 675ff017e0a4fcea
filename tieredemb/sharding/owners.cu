// Which rank owns the row of each occurrence, what it calls the row, and how many each rank is asked for.
#include "common.cuh"

// Of the features of a key space: the first key of the table of each, the number of that in the collection, and the rank
// that holds it whole, or −1 where its rows are dealt out to all `ranks`.
struct Dealt {
    const i64 *first, *table, *owner;
    int n_features, ranks;
};

// Of each occurrence the rank that owns its row, or `ranks` where nothing is looked up, and the row's number there. Adds
// to `counts`, of each rank a row of `stride`, how many occurrences of each feature it owns. Moves 12 + 12 bytes an
// occurrence. Occurrences of a feature lie together, so that the lanes of a warp count most of theirs in a few atomics.
extern "C" __global__ void owners_find(const i64 *keys, const int *bag, i64 n, i64 batch, Dealt dealt, int *owner,
                                       i64 *local, i64 *counts, i64 stride) {
    wait_for_prior_kernel();
    for (i64 base = (i64)blockIdx.x * blockDim.x; base < n; base += thread_count()) {  // whole warps
        const i64 i = base + threadIdx.x;
        const i64 key = i < n ? keys[i] : -1;
        int rank = dealt.ranks, feature = 0;
        if (key >= 0) {
            feature = bag[i] / (int)batch;
            const i64 row = key - dealt.first[feature];
            rank = (int)dealt.owner[feature];
            local[i] = rank < 0 ? row / dealt.ranks : row;
            if (rank < 0) rank = (int)((row + dealt.table[feature]) % dealt.ranks);
        }
        if (i < n) owner[i] = rank;
        const u32 alike = __match_any_sync(FULL_WARP, key >= 0 ? rank * dealt.n_features + feature : -1);
        if (key >= 0 && __ffs(alike) - 1 == lane_index())
            atomicAdd((u64 *)(counts + rank * stride + feature), (u64)__popc(alike));
    }
}

// What is asked for, in the order that occurrences are sorted to, by owner: `owner`, sorted, and `order`, which
// occurrence each is. Writes the rows' numbers, and as homes of the occurrences where their rows will be among those that
// come. Others keep theirs.
extern "C" __global__ void asked_place(const int *owner, const i64 *order, const i64 *local, i64 n, int ranks, i64 *ids,
                                       int *homes) {
    wait_for_prior_kernel();
    for (i64 k = thread_index(); k < n; k += thread_count()) {
        if (owner[k] >= ranks) return;  // nor do those behind it ask for anything
        const i64 i = order[k];
        ids[k] = local[i];
        homes[i] = (int)k;
    }
}
