// An all-to-all of the GPUs of several ranks, in blocks of one size, through memory that all of them have mapped.
#include "common.cuh"
#include "peer_wait.cuh"

// That memory of rank k begins at begins[k], and has a region for each rank that sends: REGION_HEAD words, of which the
// first counts the sender's arrivals, and two blocks of `capacity` words, which exchanges use alternately. So a rank may
// write exchange n while another one still copies exchange n - 1. It begins n once all have arrived at n - 1, and so
// have copied n - 2, whose block it overwrites.
struct Regions {
    const i64 *begins;
    i64 capacity;
    int ranks, rank;
};

__device__ __forceinline__ i64 *region_of(const Regions &regions, int receiver, int sender) {
    return reinterpret_cast<i64 *>(regions.begins[receiver]) + sender * (REGION_HEAD + 2 * regions.capacity);
}

// Sends each rank its block of `given` (ranks, each), and copies to `received`, of the same shape, what all have sent
// to this one. `*number`: of exchanges so far · `blocks`: how many of the grid have sent, and how many are through; both
// zero again at the end. Adds the nanoseconds of the wait to `*waited`. A grid that fits the GPU beside other kernels,
// as its blocks wait for each other.
extern "C" __global__ void blocks_exchange(Regions regions, const i64 *given, i64 *received, i64 each, u64 *number,
                                           int *blocks, u64 *waited, Patience patience) {
    wait_for_prior_kernel();
    const u64 present = *number + 1;  // written by the last block that is through, which has waited for this read
    const i64 begin = REGION_HEAD + (present & 1) * regions.capacity;
    for (int step = 1; step <= regions.ranks; step++) {  // from the next rank on: each rank begins with another one
        const int to = (regions.rank + step) % regions.ranks;
        i64 *out = region_of(regions, to, regions.rank) + begin;
        for (i64 k = thread_index(); k < each; k += thread_count()) out[k] = given[to * each + k];
    }
    __threadfence_system();
    __syncthreads();
    __shared__ bool is_last;
    if (threadIdx.x == 0) {
        __threadfence_system();
        is_last = atomicAdd(&blocks[0], 1) == (int)gridDim.x - 1;
        __threadfence_system();
    }
    __syncthreads();
    const u64 start = nanoseconds();
    for (int other = threadIdx.x; other < regions.ranks; other += blockDim.x) {
        if (is_last) store_release(reinterpret_cast<u64 *>(region_of(regions, other, regions.rank)), present);
    }
    for (int other = threadIdx.x; other < regions.ranks; other += blockDim.x) {
        const i64 *arrivals = region_of(regions, regions.rank, other);
        wait_for_rank(reinterpret_cast<const u64 *>(arrivals), present, patience, start);
    }
    __syncthreads();
    if (thread_index() == 0) *waited += nanoseconds() - start;
    for (int from = 0; from < regions.ranks; from++) {
        const i64 *in = region_of(regions, regions.rank, from) + begin;
        for (i64 k = thread_index(); k < each; k += thread_count()) received[from * each + k] = in[k];
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(&blocks[1], 1) == (int)gridDim.x - 1) {
        blocks[0] = blocks[1] = 0;
        *number = present;
    }
}
