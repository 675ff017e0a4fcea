// What the kernels of a plan share: the counters, and where their blocks meet.
#pragma once
#include "score.cuh"

// Rows that moved.
struct Moved {
    u64 generated, evicted, written_back, scores_written;
};
// Counters since they were last cleared. The host reads them by these names, in this order.
struct Totals {
    u64 batches, lookups, hits, unique, filled;
    Moved moved;
    u64 overflow;
};
// One of several who plan by a cache: what its plans have counted but for the last one's, and the time of that.
struct Client {
    Totals totals;
    i64 time;
};
struct Counts {
    int missed;      // unique keys without a slot
    int needed;      // victims that make room for them
    int used;        // slots that ever held a row: those below are candidates
    int tombstones;  // in the map
    int slotless;    // missed keys that got no slot
    int room;        // missed keys that get a slot never used
    u32 record;      // where the next record is looked for
    u32 arrivals;    // blocks that have come to a meeting
    int untouched;   // missed rows that were never written
    int pad;
    Totals totals;
    Totals seen;  // of the totals, what clients have been told
    i64 client;   // whose plan was made last: the rest is its
};

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
