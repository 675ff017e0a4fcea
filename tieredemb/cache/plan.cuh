// What the kernels of a plan share: the counters, and where their blocks meet.
#pragma once
#include "score.cuh"

// Rows that moved.
struct Moved {
    u64 evicted, generated, written_back, scores_written;
};
// Counters since they were last cleared. The host reads them by these names, in this order.
struct Totals {
    u64 batches, lookups, hits, unique, overflow, filled;
    Moved moved;
};
// One of several who plan by a cache: what was counted of its rows, and the time of its last plan.
struct Client {
    Totals totals;
    i64 time;
};
// Who plans by a cache: each has a range of keys, and where tables are resident a range of their slots, which count on
// from the last key. The rows of these ranges are counted as its own, too.
struct Clients {
    Client *of;
    const i64 *first;  // (ranges + 1,) where the ranges begin, those of keys before those of slots; and the end
    const i64 *keys;   // of the cached slots
    i64 beyond;        // what makes a resident slot go on from the keys
    int n, ranges;     // ranges: n, or 2 n
};
struct Counts {
    int missed;      // unique keys without a slot
    int needed;      // victims whose slots the rest of them get
    int used;        // slots that ever held a row: those below are candidates
    int tombstones;  // in the map
    int uncached;    // missed keys that got no slot
    int into_unused;  // missed keys that get a slot never used
    u32 record;      // where the next record is looked for
    u32 arrivals;    // blocks that have come to a meeting
    Totals totals;
    Clients clients;  // right behind the totals: see `clients_behind`
};
// What moves the rows of a plan, which may be while the next one is made: what the plan has left. Of each plan its own,
// zeros when it begins.
struct alignas(16) Moving {
    int missed, needed, untouched;  // as in `Counts`; untouched counts while rows move
    u32 through;                    // blocks that have moved their share
    int published;                  // later plans find what was missed, and homes are resolved
    int over;                       // all rows have moved: to end the plan again changes nothing
    i64 now;                        // the time of the plan as a score
    u32 given;                      // rows given out to those who move them, behind the first of each
};
// Kernels that are given no more of the counts than those of rows that moved find the clients behind them.
static_assert(sizeof(Counts) == 8 * sizeof(int) + sizeof(Totals) + sizeof(Clients), "nothing lies between");
static_assert(sizeof(Totals) == 6 * sizeof(u64) + sizeof(Moved), "nothing lies behind those");
__device__ __forceinline__ const Clients &clients_behind(const Moved *moved) {
    return *reinterpret_cast<const Clients *>(moved + 1);
}

// All blocks of a cooperative launch wait for each other; what they wrote before is seen after. `arrivals` starts at 0.
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
