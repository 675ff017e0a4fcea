// How a use raises a row's score, as on the CPU (cache/policy.py), and the clock for it.
#pragma once

struct Clock {
    i64 batch;   // number of the batch being planned
    i64 time;    // its time: the batches that have aged scores
    i64 now;     // the time as a score
    int stamp;   // its number in the form of `last_batch`
    int oldest;  // slots used at or after this batch are locked
};

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
    } else {  // COUNT
        next = (old > MIN_SCORE ? old : MIN_SCORE) + 1;
    }
    return (u32)(next < (i64)MAX_SCORE ? next : (i64)MAX_SCORE);
}
