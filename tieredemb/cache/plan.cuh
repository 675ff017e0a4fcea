// What the kernels of a plan share: the clock, the counters, scores, records of slotless rows.
#pragma once

struct Clock {
    i64 batch;   // number of the batch being planned
    i64 now;     // its clock as a score
    int stamp;   // its number as `last_batch` holds it
    int oldest;  // slots used at or after this batch are locked
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
    // totals
    u64 batches, lookups, hits, unique, filled, generated, evicted, written_back, scores_written, overflow;
};

[[maybe_unused]] constexpr u32 MIN_SCORE = 1u, MAX_SCORE = 0xffffffffu;
[[maybe_unused]] constexpr int AGED = 0, CLOCK = 2;  // else an exact count
[[maybe_unused]] constexpr int NEVER = -2147483647 - 1;

// Score of a row after one more use at clock `now`: LRFU in forward-decay form (cache/policy.py).
__device__ __forceinline__ u32 raised(u32 score, i64 now, int kind, float unit) {
    i64 old = score, next;
    if (kind == AGED) {
        next = old > now ? old : now;
        if (old > MIN_SCORE) {
            float distance = (float)(next - (old < now ? old : now)) / unit;
            next += (i64)(unit * log2f(1.0f + exp2f(-distance)) + 0.5f);
        }
    } else if (kind == CLOCK) {
        next = now;
    } else {
        next = (old > MIN_SCORE ? old : MIN_SCORE) + 1;
    }
    return (u32)(next < (i64)MAX_SCORE ? next : (i64)MAX_SCORE);
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
