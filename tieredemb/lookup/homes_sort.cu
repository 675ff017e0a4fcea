// The occurrences of a batch sorted by home, those of a row in their order: a radix sort, the least digit first.
//
// `digits_count` counts the digits of all passes at once. A pass reads every key once: the positions of a tile's keys
// follow from the counts of the tiles before it. Each tile publishes its own count as soon as it has it, and then the
// sum up to itself, so a tile looks back until it finds such a sum. After Adinets and Merrill, "Onesweep: A Faster
// Least Significant Digit Radix Sort for GPUs" (2022), with wide digits: batches are small, and a pass takes as long as
// the steps that wait for each other.
#include "common.cuh"

constexpr int WARPS = SORT_THREADS / 32;
constexpr int DIGITS = 1 << SORT_BITS;
constexpr int EACH = DIGITS / SORT_THREADS;  // digits a thread, in addition to the keys
constexpr int LOOK = 4;  // tiles looked back at in one step: 8 and 12 took longer
constexpr u32 OWN = 1u << 30, UPTO = 2u << 30, COUNT_BITS = OWN - 1;  // a tile publishes its count, or the sum up to it
static_assert(EACH == 8, "counts of a thread's digits are 16 bytes in shared memory, and 32 where tiles publish them");

struct alignas(8) Pair {
    u32 key;
    int place;
};

// Homes in ascending order; DROPPED is the least.
__device__ __forceinline__ u32 key_of(int home) { return (u32)home ^ 0x80000000u; }
__device__ __forceinline__ int digit_of(u32 key, int pass) { return key >> (pass * SORT_BITS) & (DIGITS - 1); }

// `totals`: (SORT_PASSES, DIGITS), added to. Reads 4 bytes an occurrence.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) digits_count(const int *homes, int n, u32 *totals) {
    wait_for_prior_kernel();
    __shared__ u32 count[SORT_PASSES * DIGITS];
    for (int i = threadIdx.x; i < SORT_PASSES * DIGITS; i += SORT_THREADS) count[i] = 0;
    __syncthreads();
    for (i64 i = thread_index(); i < n; i += thread_count()) {
        const u32 key = key_of(homes[i]);
#pragma unroll
        for (int pass = 0; pass < SORT_PASSES; pass++) atomicAdd(count + pass * DIGITS + digit_of(key, pass), 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < SORT_PASSES * DIGITS; i += SORT_THREADS)
        if (count[i]) atomicAdd(totals + i, count[i]);
}

__device__ __forceinline__ void counts_publish(u32 *at, const u32 *count, u32 kind) {
#pragma unroll
    for (int k = 0; k < EACH; k += 4)
        asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at + k), "r"(count[k] | kind),
                     "r"(count[k + 1] | kind), "r"(count[k + 2] | kind), "r"(count[k + 3] | kind)
                     : "memory");
}
__device__ __forceinline__ void counts_read(const u32 *at, u32 *counts) {
#pragma unroll
    for (int k = 0; k < EACH; k += 4)
        asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(counts[k]), "=r"(counts[k + 1]), "=r"(counts[k + 2]), "=r"(counts[k + 3])
                     : "l"(at + k)
                     : "memory");
}

// For each of a thread's digits, how many keys the tiles before have: `tile_counts` is of the first one.
__device__ __forceinline__ void look_back(const u32 *tile_counts, int tile, u32 *before) {
    u32 open = (1u << EACH) - 1;  // digits whose sum is not complete
#pragma unroll
    for (int k = 0; k < EACH; k++) before[k] = 0;
    for (int next = tile - 1; next >= 0 && open;) {
        u32 words[LOOK][EACH];
#pragma unroll
        for (int l = 0; l < LOOK; l++)
            if (next >= l) counts_read(tile_counts + (i64)(next - l) * DIGITS, words[l]);
        int passed = 0;
#pragma unroll
        for (int l = 0; l < LOOK; l++) {
            bool ready = next >= l && passed == l;
#pragma unroll
            for (int k = 0; k < EACH; k++) ready = ready && words[l][k] >= OWN;
            if (!ready) continue;
            passed++;
#pragma unroll
            for (int k = 0; k < EACH; k++) {
                if (!(open >> k & 1)) continue;
                before[k] += words[l][k] & COUNT_BITS;
                if (words[l][k] >= UPTO) open &= ~(1u << k);
            }
        }
        next -= passed;
    }
}

// One pass, over the digit number `pass`: the first reads `homes`, the others pairs; the last writes the sorted homes,
// and the occurrences and bags in their order, the others pairs. `totals`: as counted · `begun`: for each pass the
// number of tiles that were begun, and `tile_counts`, (SORT_PASSES, tiles, DIGITS): zeros. A block a tile, in the order
// in which blocks begin, so that none waits for one that does not run. Moves 16 bytes an occurrence.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) digits_sort(
    int pass, const int *homes, const Pair *from, int n, const u32 *totals, int *begun, u32 *tile_counts, Pair *to,
    const int *bag, int *sorted_homes, int *order, int *sorted_bag) {
    wait_for_prior_kernel();
    tile_counts += (i64)pass * gridDim.x * DIGITS;
    __shared__ alignas(16) u16 counts[WARPS][DIGITS];
    __shared__ alignas(16) u32 first[DIGITS];
    __shared__ u32 of_warps[WARPS];
    __shared__ int its_tile;
    const int warp = threadIdx.x / 32, lane = lane_index(), digits = EACH * threadIdx.x;
    if (threadIdx.x == 0) its_tile = atomicAdd(begun + pass, 1);
#pragma unroll
    for (int w = 0; w < WARPS; w++) *reinterpret_cast<uint4 *>(&counts[w][digits]) = uint4{0, 0, 0, 0};
    __syncthreads();
    const int tile = its_tile;
    const i64 start = (i64)tile * SORT_THREADS * SORT_ITEMS + warp * 32 * SORT_ITEMS + lane;
    Pair own[SORT_ITEMS];
    u16 rank[SORT_ITEMS];
#pragma unroll
    for (int i = 0; i < SORT_ITEMS; i++) {
        const i64 at = start + i * 32;
        own[i] = Pair{~0u, 0};  // beyond the last occurrence, and last among those of its digit
        if (at < n) own[i] = pass == 0 ? Pair{key_of(homes[at]), (int)at} : from[at];
    }
#pragma unroll
    for (int i = 0; i < SORT_ITEMS; i++) {
        const int digit = digit_of(own[i].key, pass);
        const u32 peers = __match_any_sync(FULL_WARP, digit);
        const int before = counts[warp][digit];
        __syncwarp();
        if (lane == __ffs(peers) - 1) counts[warp][digit] = (u16)(before + __popc(peers));
        __syncwarp();
        rank[i] = (u16)(before + __popc(peers & ((1u << lane) - 1)));
    }
    __syncthreads();
    uint4 pairs = {0, 0, 0, 0};  // of counts, two a word, which do not overflow
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        uint4 *at = reinterpret_cast<uint4 *>(&counts[w][digits]);
        const uint4 here = *at;
        *at = pairs;
        pairs.x += here.x, pairs.y += here.y, pairs.z += here.z, pairs.w += here.w;
    }
    u32 count[EACH] = {pairs.x & 0xffff, pairs.x >> 16, pairs.y & 0xffff, pairs.y >> 16,
                       pairs.z & 0xffff, pairs.z >> 16, pairs.w & 0xffff, pairs.w >> 16};
    counts_publish(tile_counts + (i64)tile * DIGITS + digits, count, tile == 0 ? UPTO : OWN);
    u32 total[EACH], upto = 0;
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        total[k] = totals[pass * DIGITS + digits + k];
        upto += total[k];
    }
    const u32 its_own = upto;
    upto = sum_of_lanes(upto);
    if (lane == 31) of_warps[warp] = upto;
    u32 before[EACH];
    look_back(tile_counts + digits, tile, before);
    __syncthreads();
    u32 begin = upto - its_own;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        if (w < warp) begin += of_warps[w];
#pragma unroll
    for (int k = 0; k < EACH; k++) {
        first[digits + k] = begin + before[k];
        begin += total[k];
        count[k] += before[k];
    }
    if (tile > 0) counts_publish(tile_counts + (i64)tile * DIGITS + digits, count, UPTO);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SORT_ITEMS; i++) {
        if (start + i * 32 >= n) continue;
        const int digit = digit_of(own[i].key, pass);
        const u32 at = first[digit] + counts[warp][digit] + rank[i];
        if (pass < SORT_PASSES - 1) {
            to[at] = own[i];
            continue;
        }
        sorted_homes[at] = (int)(own[i].key ^ 0x80000000u);
        order[at] = own[i].place;
        sorted_bag[at] = bag[own[i].place];
    }
}

// The sorted occurrences in 32 bits, and their bags in their order. Moves 20 bytes an occurrence.
extern "C" __global__ void __launch_bounds__(SORT_THREADS) bags_place(const i64 *places, int n, const int *bag,
                                                                      int *order, int *sorted_bag) {
    wait_for_prior_kernel();
    for (i64 i = thread_index(); i < n; i += thread_count()) {
        order[i] = (int)places[i];
        sorted_bag[i] = bag[places[i]];
    }
}
