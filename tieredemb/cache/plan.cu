// Planning a batch on the device: find and lock what is resident, claim what is missed, pair it with slots.
//
// Nothing here waits for the host: counts live in `Counts`, the batch number in `Clock`.
#include "common.cuh"

struct Clock {
    i64 batch;    // number of the batch being planned
    i64 now;      // its clock as a score
    int stamp;    // its number as `last_batch` holds it
    int oldest;   // slots used at or after this batch are locked
};

struct Counts {
    int missed;      // unique keys without a slot
    int needed;      // victims that make room for them
    int free_slots;  // freed slots on the stack
    int used;        // slots that ever held a row: those below are candidates
    int tombstones;
    int slotless;    // missed keys that got no slot
    int pad[2];
    u64 lookups, hits, unique, filled, evicted, written_back, overflow, batches;  // totals
};

struct alignas(16) Claim {
    i64 key;  // + 1; 0 is free
    int missed;
    int pad;
};
struct alignas(16) Cell {
    i64 key;
    int slot;
    int spare;
};
constexpr i64 EMPTY = 0;
constexpr i64 TOMBSTONE = -1;
constexpr u32 MIN_SCORE = 1u, MAX_SCORE = 0xffffffffu;
constexpr int AGED = 0, CLOCK = 2;  // else an exact count

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

// Starts a plan: the next batch number, zero counts. `lag` batches before it may still be in flight.
extern "C" __global__ void plan_begin(Clock *clock, Counts *counts, float units_per_batch, int lag) {
    clock->batch += 1;
    double now = (double)MIN_SCORE + floor((double)clock->batch * (double)units_per_batch);
    clock->now = now < (double)MAX_SCORE ? (i64)now : (i64)MAX_SCORE;
    clock->stamp = (int)(u32)(u64)clock->batch;
    clock->oldest = clock->stamp - lag;
    counts->missed = counts->slotless = counts->needed = 0;
    counts->batches += 1;
}

// Finds each key; the first thread that meets a resident row in this batch locks it and raises its score. A missed key
// is claimed once; homes[i] then names its claim, as −2 − cell, until `homes_resolve`.
extern "C" __global__ void keys_find(const Cell *cells, i64 n_cells, const i64 *keys, i64 n, const Clock *clock,
                                     int *last_batch, u32 *score, int kind, float unit, Claim *claims, i64 n_claims,
                                     int *homes, i64 *missed_keys, Counts *counts) {
    __shared__ int block_lookups, block_hits, block_unique;
    if (threadIdx.x == 0) block_lookups = block_hits = block_unique = 0;
    __syncthreads();
    const int stamp = clock->stamp;
    const i64 now = clock->now;
    for (i64 start = (i64)blockIdx.x * blockDim.x; start < n; start += thread_count()) {
        i64 i = start + threadIdx.x;
        i64 key = i < n ? keys[i] : -1;
        bool hit = false, first = false, won = false;
        i64 at = 0;
        if (key >= 0) {
            i64 cell = first_cell(key, n_cells);
            int slot = -1;
            while (true) {
                int4 raw = *reinterpret_cast<const int4 *>(cells + cell);
                i64 found = (i64)((u64)(u32)raw.x | ((u64)(u32)raw.y << 32));
                if (found == key + 1) {
                    slot = raw.z;
                    break;
                }
                if (found == EMPTY) break;
                cell = cell + 1 == n_cells ? 0 : cell + 1;
            }
            hit = slot >= 0;
            if (hit) {
                homes[i] = slot;
                if (__ldcg(last_batch + slot) != stamp) first = atomicExch(last_batch + slot, stamp) != stamp;
                if (first) score[slot] = raised(score[slot], now, kind, unit);
            } else {
                at = (i64)(((u64)key * 0x9E3779B97F4A7C15ull) >> 32) & (n_claims - 1);
                while (true) {
                    i64 seen = __ldcg(&claims[at].key);
                    if (seen == EMPTY) {
                        seen = (i64)atomicCAS(reinterpret_cast<u64 *>(&claims[at].key), (u64)EMPTY, (u64)(key + 1));
                        won = seen == EMPTY;
                        if (won) break;
                    }
                    if (seen == key + 1) break;
                    at = (at + 1) & (n_claims - 1);
                }
                homes[i] = (int)(-2 - at);
            }
        } else if (i < n) {
            homes[i] = DROPPED;
        }
        int m = append(&counts->missed, won);
        if (won) {
            missed_keys[m] = key;
            claims[at].missed = m;
        }
        u32 lookups = __ballot_sync(FULL_WARP, key >= 0), hits = __ballot_sync(FULL_WARP, hit);
        u32 unique = __ballot_sync(FULL_WARP, first || won);
        if (lane_index() == 0 && lookups) {
            atomicAdd(&block_lookups, __popc(lookups));
            atomicAdd(&block_hits, __popc(hits));
            atomicAdd(&block_unique, __popc(unique));
        }
    }
    __syncthreads();
    if (threadIdx.x == 0 && block_lookups) {
        atomicAdd(&counts->lookups, (u64)block_lookups);
        atomicAdd(&counts->hits, (u64)block_hits);
        atomicAdd(&counts->unique, (u64)block_unique);
    }
}

// How many victims the missed keys need, given the slots that are free.
extern "C" __global__ void room_count(Counts *counts, int capacity) {
    int room = counts->free_slots + capacity - counts->used;
    counts->needed = counts->missed > room ? counts->missed - room : 0;
}

// Pairs missed keys with freed slots, fresh slots and victims; takes the slots over from the victims' keys.
// missed_slots[m]: the slot, or −1 · victim_keys[m]: the key that was there, or −1.
extern "C" __global__ void missed_assign(Counts *counts, int capacity, const int *free_stack, const int *victims,
                                         const int *chosen, const i64 *missed_keys, Cell *cells, i64 n_cells,
                                         i64 *slot_keys, int *last_batch, const Clock *clock, int *missed_slots,
                                         i64 *victim_keys) {
    const int freed = counts->free_slots, used = counts->used, fresh = capacity - used;
    const int missed = counts->missed, n_victims = *chosen;
    for (i64 m = thread_index(); m < missed; m += thread_count()) {
        int slot = -1;
        i64 victim = -1;
        if (m < freed) {
            slot = free_stack[freed - 1 - m];
        } else if (m - freed < fresh) {
            slot = used + (int)(m - freed);
        } else if (m - freed - fresh < n_victims) {
            slot = victims[m - freed - fresh];
            victim = slot_keys[slot];
            i64 at = first_cell(victim, n_cells);
            while (cells[at].key != victim + 1) at = at + 1 == n_cells ? 0 : at + 1;
            cells[at].key = TOMBSTONE;
        }
        missed_slots[m] = slot;
        victim_keys[m] = victim;
        if (slot >= 0) {
            slot_keys[slot] = missed_keys[m];
            last_batch[slot] = clock->stamp;
        }
    }
}

// Publishes the missed keys' new slots.
extern "C" __global__ void missed_publish(Cell *cells, i64 n_cells, const i64 *missed_keys, const int *missed_slots,
                                          const Counts *counts) {
    for (i64 m = thread_index(); m < counts->missed; m += thread_count()) {
        if (missed_slots[m] < 0) continue;
        i64 wanted = missed_keys[m] + 1, at = first_cell(missed_keys[m], n_cells);
        while (true) {
            i64 seen = __ldcg(&cells[at].key);
            if (seen == EMPTY || seen == TOMBSTONE) {
                if ((i64)atomicCAS(reinterpret_cast<u64 *>(&cells[at].key), (u64)seen, (u64)wanted) == seen) break;
            }
            at = at + 1 == n_cells ? 0 : at + 1;
        }
        cells[at].slot = missed_slots[m];
    }
}

// Home of every occurrence of a missed key, from its claim.
extern "C" __global__ void homes_resolve(int *homes, i64 n, const Claim *claims, const int *missed_slots) {
    for (i64 i = thread_index(); i < n; i += thread_count()) {
        int home = homes[i];
        if (home < -1 && home != DROPPED) homes[i] = missed_slots[claims[-2 - home].missed];
    }
}

// Ends a plan: what the slots' stacks have become.
extern "C" __global__ void plan_end(Counts *counts, int capacity, const int *chosen) {
    int missed = counts->missed, from_stack = missed < counts->free_slots ? missed : counts->free_slots;
    int fresh = capacity - counts->used, taken = missed - from_stack < fresh ? missed - from_stack : fresh;
    int victims = counts->needed ? *chosen : 0;
    counts->free_slots -= from_stack;
    counts->used += taken;
    counts->tombstones += victims;
    counts->slotless = missed - from_stack - taken - victims;
    counts->filled += (u64)(missed - counts->slotless);
    counts->evicted += (u64)victims;
    counts->overflow += (u64)counts->slotless;
}
