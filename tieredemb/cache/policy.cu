// Which rows leave: the `needed` slots of lowest (score, last batch) among the occupied, unlocked ones.
//
// Radix select from the highest digit down: digits of the score, then of the last batch. A pass counts a digit among
// the slots that still match the prefix; its last block finds the digit in which the threshold lies. All counts stay
// on the device, and a pass with nothing to decide returns at once. Then one pass emits the victims.
#include "common.cuh"
#include "plan.cuh"

constexpr int DIGIT_BITS = 11;
constexpr int BINS = 1 << DIGIT_BITS;
constexpr int PER_THREAD = 4;  // slots read in one load

struct Selection {
    int remaining;  // victims still to be found in the bin of the threshold
    u32 score;      // digits of the threshold found so far, in place
    u32 age;
    int all;        // fewer unlocked rows than are needed: all of them go
    int finished;   // blocks that have finished the pass
    int ties;       // victims taken among those equal to the threshold
    int chosen;     // victims emitted
    u32 highest;    // no score is higher
    int bins[BINS];
};
// Order of the last use among unlocked slots; below 2^21 for the first two million batches, which saves a pass.
__device__ __forceinline__ u32 age_rank(int last_batch, const Clock &clock) {
    return (u32)(last_batch - clock.oldest) + (u32)clock.batch;
}
__device__ __forceinline__ bool unlocked(u32 score, int last_batch, const Clock &clock) {
    return score != 0 && last_batch - clock.oldest < 0;  // a score of 0: no row
}

extern "C" __global__ void victims_begin(Selection *selection, const int *needed, const Clock *clock, float unit) {
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) selection->bins[bin] = 0;
    if (threadIdx.x == 0) {
        selection->remaining = *needed;
        selection->score = selection->age = 0;
        selection->all = selection->finished = selection->ties = selection->chosen = 0;
        // a count of 2^32 uses lies 32 units above the clock
        float highest = (float)clock->now + 32.0f * unit;
        selection->highest = highest < 4.0e9f ? (u32)highest : 0xffffffffu;
    }
}

// Inclusive sums of bins by a block of 1,024 threads, two bins a thread; returns the sum up to bin 2 t + 1.
__device__ __forceinline__ int block_scan(int value) {
    __shared__ int warps[32];
    int lane = lane_index(), warp = threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(FULL_WARP, value, step);
        if (lane >= step) value += other;
    }
    if (lane == 31) warps[warp] = value;
    __syncthreads();
    if (warp == 0) {
        int sum = warps[lane];
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(FULL_WARP, sum, step);
            if (lane >= step) sum += other;
        }
        warps[lane] = sum;
    }
    __syncthreads();
    return value + (warp ? warps[warp - 1] : 0);
}

// One digit at `shift` of `bits` bits: of the score, or with `by_age` of the age among the slots whose score is the
// threshold's. 1,024 threads a block. Reads 8 bytes a slot, 4 where the prefix does not match.
extern "C" __global__ void __launch_bounds__(1024)
    victims_count(Selection *selection, const u32 *score, const int *last_batch, const int *used, const Clock *at,
                  int shift, int bits, int by_age) {
    __shared__ int bins[BINS];
    __shared__ bool last_block;
    const Clock clock = *at;
    const u32 top = by_age ? (clock.batch < 0x7fffffff ? 2u * (u32)clock.batch : 0xffffffffu) : selection->highest;
    if (selection->remaining == 0 || selection->all) return;
    if (shift > 0 && (top >> shift) == 0 && shift + bits == 32) return;  // all digits are zero
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) bins[bin] = 0;
    __syncthreads();
    const u32 mask = shift + bits >= 32 ? 0u : ~0u << (shift + bits);
    const u32 score_prefix = selection->score, age_prefix = selection->age;
    const i64 n = *used;
    for (i64 start = (i64)blockIdx.x * blockDim.x; start * PER_THREAD < n; start += thread_count()) {
        i64 slot = (start + threadIdx.x) * PER_THREAD;
        u32 s[PER_THREAD];
        if (slot + PER_THREAD <= n) {
            uint4 v = *reinterpret_cast<const uint4 *>(score + slot);
            s[0] = v.x, s[1] = v.y, s[2] = v.z, s[3] = v.w;
        } else {
            for (int k = 0; k < PER_THREAD; k++) s[k] = slot + k < n ? score[slot + k] : 0;
        }
        int digit[PER_THREAD];
        bool any = false;
#pragma unroll
        for (int k = 0; k < PER_THREAD; k++) {
            bool match = s[k] != 0 && (by_age ? s[k] == score_prefix : (s[k] & mask) == (score_prefix & mask));
            digit[k] = match ? 0 : -1;
            any |= match;
        }
        if (any) {
            int last[PER_THREAD];
            if (slot + PER_THREAD <= n) {
                int4 v = *reinterpret_cast<const int4 *>(last_batch + slot);
                last[0] = v.x, last[1] = v.y, last[2] = v.z, last[3] = v.w;
            } else {
                for (int k = 0; k < PER_THREAD; k++) last[k] = slot + k < n ? last_batch[slot + k] : clock.oldest;
            }
#pragma unroll
            for (int k = 0; k < PER_THREAD; k++) {
                if (digit[k] < 0) continue;
                u32 rank = by_age ? age_rank(last[k], clock) : s[k];
                bool match = unlocked(s[k], last[k], clock) && (!by_age || (rank & mask) == (age_prefix & mask));
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
        if (bins[bin]) atomicAdd(&selection->bins[bin], bins[bin]);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last_block = atomicAdd(&selection->finished, 1) == gridDim.x - 1;
    __syncthreads();
    if (!last_block) return;

    const int even = __ldcg(&selection->bins[2 * threadIdx.x]), odd = __ldcg(&selection->bins[2 * threadIdx.x + 1]);
    selection->bins[2 * threadIdx.x] = selection->bins[2 * threadIdx.x + 1] = 0;
    const int remaining = selection->remaining;
    const int upto = block_scan(even + odd), before = upto - even - odd;
    __syncthreads();
    if (before < remaining && upto >= remaining) {
        bool is_odd = before + even < remaining;
        u32 digit = (u32)(2 * threadIdx.x + is_odd) << shift;
        if (by_age) selection->age |= digit;
        else selection->score |= digit;
        selection->remaining = remaining - before - (is_odd ? even : 0);
    }
    if (threadIdx.x == blockDim.x - 1 && upto < remaining) selection->all = 1;
    if (threadIdx.x == 0) selection->finished = 0;
}

// Appends the victims' slots to `victims`; selection->chosen becomes their number. Of rows whose score is the
// threshold's the oldest go with `by_age`, any without.
extern "C" __global__ void __launch_bounds__(1024)
    victims_emit(Selection *selection, const u32 *score, const int *last_batch, const int *used, const Clock *at,
                 const int *needed, int *victims, int by_age) {
    if (*needed == 0) return;
    const Clock clock = *at;
    const u32 threshold = selection->score, age = selection->age;
    const int ties = selection->remaining;
    const bool all = selection->all;
    const i64 n = *used;
    for (i64 start = (i64)blockIdx.x * blockDim.x; start < n; start += thread_count()) {
        i64 slot = start + threadIdx.x;
        bool goes = false;
        if (slot < n) {
            u32 s = score[slot];
            if (s != 0 && (all || s <= threshold)) {
                int last = last_batch[slot];
                if (unlocked(s, last, clock)) {
                    u32 rank = age_rank(last, clock);
                    goes = all || s < threshold || (by_age && rank < age);
                    if (!goes && (!by_age || rank == age)) goes = atomicAdd(&selection->ties, 1) < ties;
                }
            }
        }
        int place = append(&selection->chosen, goes);
        if (goes) victims[place] = (int)slot;
    }
}
