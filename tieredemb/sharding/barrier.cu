// A barrier of the GPUs of several ranks, in memory that all of them have mapped.
#include "common.cuh"

// Memory of a barrier: that of rank k begins at begins[k], and has a word for each rank, which counts its arrivals.
struct Meeting {
    const i64 *begins;
    int ranks, rank;
};

constexpr unsigned POLLS = 1 << 10;  // between two reads of the host's memory, which take longer

__device__ __forceinline__ void store_release(u64 *to, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

__device__ __forceinline__ u64 load_acquire(const u64 *from) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Arrives once more, and counts that in `*count`; waits until all ranks have arrived as often. What each has launched
// before on its stream is over then, and what it has written is visible here. Adds the nanoseconds of the wait to
// `*waited`. `*ended`, in the host's memory: not zero once the kernel must wait for no rank any more; results have no
// meaning then. After `patience` nanoseconds the kernel fails, and with it the process, as NCCL's kernels do. One block
// with a thread for each rank.
extern "C" __global__ void ranks_meet(Meeting meeting, u64 *count, u64 *waited, const int *ended, u64 patience) {
    wait_for_prior_kernel();
    __shared__ u64 number;
    if (threadIdx.x == 0) number = ++*count;
    __syncthreads();
    const int other = threadIdx.x;
    const u64 begin = nanoseconds();
    if (other < meeting.ranks) {
        store_release(reinterpret_cast<u64 *>(meeting.begins[other]) + meeting.rank, number);
        const u64 *arrivals = reinterpret_cast<const u64 *>(meeting.begins[meeting.rank]) + other;
        for (unsigned poll = 1; load_acquire(arrivals) < number; poll++) {
            if (poll % POLLS) continue;
            if (*static_cast<const volatile int *>(ended)) break;
            if (nanoseconds() - begin > patience) __trap();
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) *waited += nanoseconds() - begin;
}
