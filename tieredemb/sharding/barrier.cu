// A barrier of the GPUs of several ranks, in memory that all of them have mapped.
#include "common.cuh"
#include "peer_wait.cuh"

// Memory of a barrier: that of rank k begins at begins[k], and has a word for each rank, which counts its arrivals.
struct Meeting {
    const i64 *begins;
    int ranks, rank;
};

// Arrives once more, and counts that in `*count`; waits until all ranks have arrived as often. What each has launched
// before on its stream is over then, and what it has written is visible here. Adds the nanoseconds of the wait to
// `*waited`. One block with a thread for each rank.
extern "C" __global__ void ranks_meet(Meeting meeting, u64 *count, u64 *waited, Patience patience) {
    wait_for_prior_kernel();
    __shared__ u64 number;
    if (threadIdx.x == 0) number = ++*count;
    __syncthreads();
    const int other = threadIdx.x;
    const u64 begin = nanoseconds();
    if (other < meeting.ranks) {
        store_release(reinterpret_cast<u64 *>(meeting.begins[other]) + meeting.rank, number);
        wait_for_rank(reinterpret_cast<const u64 *>(meeting.begins[meeting.rank]) + other, number, patience, begin);
    }
    __syncthreads();
    if (threadIdx.x == 0) *waited += nanoseconds() - begin;
}
