// How long exchanges take on a GPU.
#include "common.cuh"
#include "peer_wait.cuh"

// Writes the present time to `*begin`; or adds the time since then to `*total`, where that is given. Nanoseconds. One
// thread.
extern "C" __global__ void clock_note(u64 *begin, u64 *total) {
    wait_for_prior_kernel();
    const u64 now = nanoseconds();
    if (total) atomicAdd(total, now - *begin);
    else *begin = now;
}
