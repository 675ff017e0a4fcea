// How the GPUs of several ranks wait for each other, by words in memory that all of them have mapped.

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

// When a wait ends without the other rank. `ended`, in the host's memory: not zero once no kernel waits for a rank any
// more; results have no meaning then. After `longest` nanoseconds the kernel fails, and with it the process, as NCCL's
// kernels do.
struct Patience {
    const int *ended;
    u64 longest;
};

// Waits until another rank has arrived `number` times, which it counts in `arrivals`, in this GPU's memory. `begin`: of
// the wait.
__device__ __forceinline__ void wait_for_rank(const u64 *arrivals, u64 number, const Patience &patience, u64 begin) {
    for (unsigned poll = 1; load_acquire(arrivals) < number; poll++) {
        if (poll % POLLS) continue;
        if (*static_cast<const volatile int *>(patience.ended)) break;
        if (nanoseconds() - begin > patience.longest) __trap();
    }
}
