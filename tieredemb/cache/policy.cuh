// The choice of victims: the `needed` slots of lowest (score, last batch) among the occupied, unlocked ones.
//
// Radix select from the highest digit down: digits of the score, then of the last batch. A pass counts a digit among
// the slots that still match the prefix, all blocks synchronise, and each finds the digit that contains the threshold.
// Then one pass emits the victims. All in one cooperative launch: eight would cost the host more than the device.
//
// A kernel that chooses victims has 1,024 threads a block, and all blocks resident at once.
#pragma once
#include "plan.cuh"

constexpr int DIGIT_BITS = 11;
constexpr int BINS = 1 << DIGIT_BITS;
static_assert(BINS == 2 * MEETING_THREADS, "a thread looks at two bins");
constexpr int PER_THREAD = 4;  // slots read in one load

struct Selection {
    int chosen;    // victims emitted
    int ties;      // of them those equal to the threshold
    u32 arrivals;  // blocks that have arrived at the barrier
    int pad;
    int bins[3][BINS];  // for this pass, the next, and the one before, which is being cleared
};

// The threshold, as far as it is found; the same in every block.
struct Threshold {
    int remaining;  // victims still to be found in its bin
    u32 score;      // its digits found so far, in place
    u32 age;
    bool all;    // fewer unlocked rows than are needed: all of them are taken
    bool whole;  // all rows of its score are taken
};

// Order of the last use among unlocked slots; below 2^21 for the first two million batches, which saves a pass.
__device__ __forceinline__ u32 age_rank(int last_batch, const Clock &clock) {
    return (u32)(last_batch - clock.oldest) + (u32)clock.batch;
}
__device__ __forceinline__ bool unlocked(u32 score, int last_batch, const Clock &clock) {
    return score != 0 && last_batch - clock.oldest < 0;  // a score of 0: no row
}

// The four slots from `slot` on of an array over `n` slots; `missing` where there is none.
__device__ __forceinline__ void load_slots(const u32 *array, i64 slot, i64 n, u32 missing, u32 *values) {
    if (slot + PER_THREAD <= n) {
        uint4 v = *reinterpret_cast<const uint4 *>(array + slot);
        values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
    } else {
        for (int k = 0; k < PER_THREAD; k++) values[k] = slot + k < n ? array[slot + k] : missing;
    }
}

// Counts one digit at `shift` of `bits` bits: of the score, or with `by_age` of the age among the slots whose score is
// the threshold's. Reads 8 bytes a slot, 4 if the prefix does not match.
__device__ __forceinline__ void digit_count(int *bins, const Threshold &at, const u32 *score, const int *last_batch,
                                            i64 n, const Clock &clock, int shift, int bits, bool by_age, int *total) {
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) bins[bin] = 0;
    __syncthreads();
    const u32 mask = shift + bits >= 32 ? 0u : ~0u << (shift + bits);
    for (i64 start = (i64)blockIdx.x * blockDim.x; start * PER_THREAD < n; start += thread_count()) {
        i64 slot = (start + threadIdx.x) * PER_THREAD;
        u32 s[PER_THREAD];
        load_slots(score, slot, n, 0, s);
        int digit[PER_THREAD];
        bool any = false;
#pragma unroll
        for (int k = 0; k < PER_THREAD; k++) {
            bool match = s[k] != 0 && (by_age ? s[k] == at.score : (s[k] & mask) == (at.score & mask));
            digit[k] = match ? 0 : -1;
            any |= match;
        }
        if (any) {
            u32 last[PER_THREAD];
            load_slots(reinterpret_cast<const u32 *>(last_batch), slot, n, (u32)clock.oldest, last);
#pragma unroll
            for (int k = 0; k < PER_THREAD; k++) {
                if (digit[k] < 0) continue;
                u32 rank = by_age ? age_rank((int)last[k], clock) : s[k];
                bool match = unlocked(s[k], (int)last[k], clock) && (!by_age || (rank & mask) == (at.age & mask));
                digit[k] = match ? (int)((rank >> shift) & ((1u << bits) - 1)) : -1;
            }
        }
#pragma unroll
        for (int k = 0; k < PER_THREAD; k++) {  // high digits mostly agree: one add for a warp that does
            u32 voters = __ballot_sync(FULL_WARP, digit[k] >= 0);
            if (voters == 0) continue;
            int leader = __ffs(voters) - 1;
            int first = __shfl_sync(FULL_WARP, digit[k], leader);
            if (__all_sync(FULL_WARP, digit[k] < 0 || digit[k] == first)) {
                if (lane_index() == leader) atomicAdd(&bins[first], __popc(voters));
            } else if (digit[k] >= 0) {
                atomicAdd(&bins[digit[k]], 1);
            }
        }
    }
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x)
        if (bins[bin]) atomicAdd(total + bin, bins[bin]);
}

// Finds the digit that contains the threshold, given the counts of all blocks; every block finds the same.
__device__ __forceinline__ void digit_choose(Threshold &at, const int *total, int shift, bool by_age) {
    __shared__ Threshold next;
    if (threadIdx.x == 0) next = at;
    __syncthreads();
    const int even = __ldcg(total + 2 * threadIdx.x), odd = __ldcg(total + 2 * threadIdx.x + 1);
    const int upto = sum_of_threads(even + odd), before = upto - even - odd;
    if (before < at.remaining && upto >= at.remaining) {
        bool is_odd = before + even < at.remaining;
        u32 digit = (u32)(2 * threadIdx.x + is_odd) << shift;
        if (by_age) next.age |= digit;
        else next.score |= digit;
        next.remaining = at.remaining - before - (is_odd ? even : 0);
        next.whole = shift == 0 && next.remaining == (is_odd ? odd : even);
    }
    if (threadIdx.x == blockDim.x - 1 && upto < at.remaining) next.all = true;
    __syncthreads();
    at = next;
    __syncthreads();
}

// How many missed keys a plan has, and which slots they get.
struct Wanted {
    int missed, used;
    int into_unused;  // of them, those that get a slot never used
    int needed;  // and those that get a victim's slot
};
__device__ __forceinline__ Wanted slots_wanted(const Counts *counts, int capacity) {
    const int missed = counts->missed, used = counts->used, free = capacity - used;
    const int needed = missed > free ? missed - free : 0;
    return {missed, used, missed - needed, needed};
}

// Where victims are searched: among all slots used; or, with `in_parts`, in a part that holds many times the victims
// needed and that is another one for each plan. Else many plans of one step would each search all slots.
constexpr i64 LEAST_PART = 1 << 18, PART_SHARE = 32;
struct Part {
    int first, count;
};
__device__ __forceinline__ Part part_of(const Clock &clock, const Wanted &wanted, int in_parts) {
    const i64 used = wanted.used, share = PART_SHARE * wanted.needed;
    const i64 size = share > LEAST_PART ? share : LEAST_PART;
    if (!in_parts || used <= size) return {0, wanted.used};
    i64 first = clock.batch % ((used + size - 1) / size) * size;
    if (first > used - size) first = used - size;
    first -= first % PER_THREAD;
    return {(int)first, (int)size};
}

// Appends the victims' slots to `victims`. Of rows whose score is the threshold's the oldest are taken with `by_age`,
// any without.
__device__ __forceinline__ void victims_emit(Selection *selection, const Threshold &at, const u32 *score,
                                             const int *last_batch, const Part &part, const Clock &clock, bool by_age,
                                             int needed, int *victims) {
    const i64 n = part.count;
    for (i64 start = (i64)blockIdx.x * blockDim.x; start * PER_THREAD < n; start += thread_count()) {
        const i64 slot = (start + threadIdx.x) * PER_THREAD;
        u32 s[PER_THREAD];
        load_slots(score, slot, n, 0, s);
        bool any = false;
#pragma unroll
        for (int k = 0; k < PER_THREAD; k++) any |= s[k] != 0 && (at.all || s[k] <= at.score);
        u32 goes = 0;
        if (any) {
            u32 last[PER_THREAD];
            load_slots(reinterpret_cast<const u32 *>(last_batch), slot, n, (u32)clock.oldest, last);
#pragma unroll
            for (int k = 0; k < PER_THREAD; k++) {
                if (!(at.all || s[k] <= at.score) || !unlocked(s[k], (int)last[k], clock)) continue;
                const u32 rank = age_rank((int)last[k], clock);
                bool leaves = at.all || s[k] < at.score || (by_age && rank < at.age);
                if (!leaves && (!by_age || rank == at.age)) leaves = atomicAdd(&selection->ties, 1) < at.remaining;
                if (leaves) goes |= 1u << k;
            }
        }
        int place = append(&selection->chosen, __popc(goes));
#pragma unroll
        for (int k = 0; k < PER_THREAD; k++)
            if (goes >> k & 1 && place < needed) victims[place++] = part.first + (int)(slot + k);
    }
}

// Chooses the victims wanted, at least one, or as many as are unlocked where they are searched. `selection` is zero at
// the start; after the last barrier of all blocks its `chosen` is their number.
__device__ __forceinline__ void victims_choose(Selection *selection, const Clock &clock, const u32 *score,
                                               const int *last_batch, const Wanted &wanted, float unit, int by_age,
                                               int in_parts, int *victims) {
    __shared__ int bins[BINS];
    const Part part = part_of(clock, wanted, in_parts);
    const int n = part.count, needed = wanted.needed;
    score += part.first;
    last_batch += part.first;
    float highest = (float)clock.now + 32.0f * unit;  // a count of 2^32 uses is 32 units above the clock
    const u32 top_score = highest < 4.0e9f ? (u32)highest : 0xffffffffu;
    const u32 top_age = clock.batch < 0x7fffffff ? 2u * (u32)clock.batch : 0xffffffffu;
    Threshold at{needed, 0u, 0u, false, false};
    int pass = 0;
    bool skips = true;  // top digits expected to be zero; if they are not (a clock was set back), it starts again
    for (int round = 0; round < (by_age ? 6 : 3); round++) {
        const bool ages = round >= 3;
        const int shift = round % 3 == 0 ? 21 : round % 3 == 1 ? 10 : 0, bits = shift ? 11 : 10;
        if (at.all && skips && round > 0) {
            at = Threshold{needed, 0u, 0u, false, false};
            skips = false;
            round = -1;
            continue;
        }
        if (at.all || (ages && at.whole)) break;
        if (skips && shift == 21 && ((ages ? top_age : top_score) >> shift) == 0) continue;  // all digits are zero
        int *total = selection->bins[pass % 3], *cleared = selection->bins[(pass + 2) % 3];
        digit_count(bins, at, score, last_batch, n, clock, shift, bits, ages, total);
        grid_meet(&selection->arrivals);
        digit_choose(at, total, shift, ages);
        if (blockIdx.x == 0)
            for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) cleared[bin] = 0;
        pass++;
    }
    if (at.whole && by_age && at.age == 0) at.age = 0xffffffffu, at.remaining = 0x7fffffff;
    victims_emit(selection, at, score, last_batch, part, clock, by_age, needed, victims);
}
