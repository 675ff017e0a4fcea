// What the kernels of a plan share: the counters, and the barrier of their blocks.
#pragma once
#include "score.cuh"

// Counts of moved rows.
struct Moved {
    u64 evicted, generated, written_back, scores_written;
};
// Counters since they were last cleared. The host reads them by these names, in this order.
struct Totals {
    u64 batches, lookups, hits, unique, overflow, filled;
    Moved moved;
};
// A client, one of several that plan with one cache: the counts of its rows, and the time of its last plan.
struct Client {
    Totals totals;
    i64 time;
};
// The clients that plan with a cache: each has a range of keys, and if tables are resident a range of their slots,
// numbered on from the last key. The rows of these ranges are counted as the client's, too.
struct Clients {
    Client *of;
    const i64 *first;  // (ranges + 1,) the starts of the ranges, those of keys before those of slots; then the end
    const i64 *keys;   // of the cached slots
    i64 beyond;        // added to a resident slot to number it on from the keys
    int n, ranges;     // ranges: n, or 2 n
};
struct Counts {
    int missed;      // unique keys without a slot
    int needed;      // of them, those that get the slot of a victim
    int used;        // slots that ever held a row: lower ones are candidates
    int tombstones;  // in the map
    int uncached;    // missed keys that got no slot
    int into_unused;  // missed keys that get a slot never used
    u32 record;      // where the search for the next record starts
    u32 arrivals;    // blocks that have arrived at the barrier
    Totals totals;
    Clients clients;  // right behind the totals: see `clients_behind`
};
// State of moving the rows of a plan, possibly while the next plan is made. Each plan has one, zero at its start.
struct alignas(16) Moving {
    int missed, needed, untouched;  // as in `Counts`; untouched counts while rows move
    u32 through;                    // blocks that have moved their rows
    int published;                  // 1: later plans find the missed keys, and homes are resolved
    int over;                       // 1: all rows have moved; ending the plan again changes nothing
    i64 now;                        // the time of the plan as a score
    u32 given;                      // rows assigned to groups of lanes, after the first row of each
};
// Kernels that get a pointer only to the counts of moved rows find the clients behind them.
static_assert(sizeof(Counts) == 8 * sizeof(int) + sizeof(Totals) + sizeof(Clients), "nothing lies between");
static_assert(sizeof(Totals) == 6 * sizeof(u64) + sizeof(Moved), "nothing lies behind those");
__device__ __forceinline__ const Clients &clients_behind(const Moved *moved) {
    return *reinterpret_cast<const Clients *>(moved + 1);
}

// A barrier of all blocks of a cooperative launch; writes before it are visible after it. `arrivals` starts at 0.
__device__ __forceinline__ void grid_meet(u32 *arrivals) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        const u32 turn = atomicAdd(arrivals, 1u) / gridDim.x;
        while (*(volatile u32 *)arrivals < (turn + 1) * gridDim.x) {
        }
        __threadfence();
    }
    __syncthreads();
}
