// What all kernels share: sizes, row formats, the key hash, warp helpers.
//
// A module is compiled for one row format: -DROW_FLOAT, -DROW_HALF or -DROW_BFLOAT16, and one width, -DWIDTH=D. Rows
// are read in units of VECTOR elements, up to 16 bytes. No header is included, so that no CUDA toolkit is needed.
//
// Numbers that the host knows too (DROPPED, MIN_SCORE, MEAN, …) are those of constants.py, which make constants.cuh.
#pragma once
#include "constants.cuh"

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef u32 word_t;  // of a row's state: a float's bits; in cold storage also the score

[[maybe_unused]] constexpr u32 FULL_WARP = 0xffffffffu;

__device__ __forceinline__ i64 thread_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ i64 thread_count() { return (i64)gridDim.x * blockDim.x; }
__device__ __forceinline__ int lane_index() { return threadIdx.x & 31; }

// The first call of every kernel: a launch may begin before the previous kernel on its stream has ended (`Kernel` in
// compiler.py), and may read what that has written only after this call. The previous kernel has called it, too, so all
// earlier ones have ended: every kernel must call it, whatever it reads. Returns at once if the launch asked for no
// early start.
__device__ __forceinline__ void wait_for_prior_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Home cell of a key: murmur3's finaliser, its high half scaled to the range; the same as on the CPU.
__device__ __forceinline__ i64 first_cell(i64 key, i64 cells) {
    u64 h = (u64)key;
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCDull;
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53ull;
    return (i64)(((h >> 32) * (u64)cells) >> 32);
}

// The sum of `value` over the lanes of the warp up to this one. Whole warps call it.
template <typename T>
__device__ __forceinline__ T sum_of_lanes(T value) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const T left = __shfl_up_sync(FULL_WARP, value, step);
        if (lane_index() >= step) value += left;
    }
    return value;
}

// The same over the threads of a block of 1,024, all of which call it; they synchronise before they call it again.
__device__ __forceinline__ int sum_of_threads(int value) {
    __shared__ int warps[32];
    const int warp = threadIdx.x / 32;
    value = sum_of_lanes(value);
    if (lane_index() == 31) warps[warp] = value;
    __syncthreads();
    if (warp == 0) warps[lane_index()] = sum_of_lanes(warps[lane_index()]);
    __syncthreads();
    return value + (warp ? warps[warp - 1] : 0);
}

// Reserves places in a list for all threads of the block, as many as each wants; returns a thread's first. One atomic a
// block, as a kernel would wait for thousands on one address. All threads of the block call it.
__device__ __forceinline__ int append(int *count, int wanted) {
    __shared__ int before[32];  // wanted by the warps before each
    const int warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    const int upto = sum_of_lanes(wanted);
    if (lane_index() == 31) before[warp] = upto;
    __syncthreads();
    if (warp == 0) {
        const int own = lane_index() < warps ? before[lane_index()] : 0;
        const int sum = sum_of_lanes(own);
        int base = 0;
        if (lane_index() == 31 && sum) base = atomicAdd(count, sum);
        before[lane_index()] = __shfl_sync(FULL_WARP, base, 31) + sum - own;
    }
    __syncthreads();
    const int first = before[warp] + upto - wanted;
    __syncthreads();  // else the next call would overwrite what is read here
    return first;
}

// The lanes that share a row: groups of `lanes` inside a warp may diverge, so each group synchronises by itself.
__device__ __forceinline__ u32 group_mask(int lanes) {
    return lanes == 32 ? FULL_WARP : ((1u << lanes) - 1) << (lane_index() & ~(lanes - 1));
}

// A row that a batch in flight uses in place, as it has no slot; its home is −2 − its number.
struct alignas(16) Record {
    i64 key;  // + 1; 0 is free
    int last_batch;
    int pad;
};
// The row of an uncached home among the rows without slots: its key's, or the record's own if no keys are given.
__device__ __forceinline__ i64 away_row(const Record *records, int home) {
    i64 record = -2 - (i64)home;
    return records ? records[record].key - 1 : record;
}

__device__ __forceinline__ float bits_float(u32 bits) { return __uint_as_float(bits); }

__device__ __forceinline__ u16 half_of(float f) {
    u16 v;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
    return v;
}
__device__ __forceinline__ u16 bfloat16_of(float f) {  // to nearest even; a NaN stays a NaN
    u32 bits = __float_as_uint(f);
    u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (u16)((bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits >> 16) | 0x40u : rounded);
}

#if defined(ROW_HALF)
typedef u16 row_t;
__device__ __forceinline__ float to_float(row_t v) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
    return f;
}
__device__ __forceinline__ row_t from_float(float f) { return half_of(f); }
#elif defined(ROW_BFLOAT16)
typedef u16 row_t;
__device__ __forceinline__ float to_float(row_t v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ row_t from_float(float f) { return bfloat16_of(f); }
#else
typedef float row_t;
__device__ __forceinline__ float to_float(row_t v) { return v; }
__device__ __forceinline__ row_t from_float(float f) { return f; }
#endif

// Outputs have the dtype of the rows, or the one that -DOUT_FLOAT, -DOUT_HALF or -DOUT_BFLOAT16 selects.
#if defined(OUT_FLOAT)
typedef float out_t;
__device__ __forceinline__ out_t output_of(float f) { return f; }
#elif defined(OUT_HALF)
typedef u16 out_t;
__device__ __forceinline__ out_t output_of(float f) { return half_of(f); }
#elif defined(OUT_BFLOAT16)
typedef u16 out_t;
__device__ __forceinline__ out_t output_of(float f) { return bfloat16_of(f); }
#else
typedef row_t out_t;
__device__ __forceinline__ out_t output_of(float f) { return from_float(f); }
#endif

#ifdef WIDTH
// Elements that a thread reads at once: the most that 16 bytes hold and that divide the width.
__host__ __device__ constexpr int lanes_of(int width) {
    int n = 16 / (int)sizeof(row_t);
    while (width % n != 0) n /= 2;
    return n;
}
constexpr int VECTOR = lanes_of(WIDTH);
constexpr int UNITS = WIDTH / VECTOR;  // vectors in a row

struct alignas(VECTOR * sizeof(row_t)) row_vector {
    row_t v[VECTOR];
};
struct alignas(VECTOR * 4 > 16 ? 16 : VECTOR * 4) float_vector {
    float v[VECTOR];
};
struct alignas(VECTOR * sizeof(out_t) > 16 ? 16 : VECTOR * sizeof(out_t)) out_vector {
    out_t v[VECTOR];
};

__device__ __forceinline__ row_vector load_row(const row_t *rows, i64 row, int unit) {
    return *reinterpret_cast<const row_vector *>(rows + row * WIDTH + unit * VECTOR);
}
__device__ __forceinline__ void store_row(row_t *rows, i64 row, int unit, row_vector value) {
    *reinterpret_cast<row_vector *>(rows + row * WIDTH + unit * VECTOR) = value;
}
__device__ __forceinline__ row_vector load_home(const row_t *hot, const row_t *away, const Record *records, int home,
                                                int unit) {
#ifdef UNCACHED
    if (home < 0) return load_row(away, away_row(records, home), unit);
#endif
    return load_row(hot, home, unit);
}
// Outputs and their gradients are contiguous, so a row of them may have any alignment: -DUNALIGNED reads and writes
// them one element at a time.
__device__ __forceinline__ float_vector load_floats(const float *at) {
#ifdef UNALIGNED
    float_vector value;
#pragma unroll
    for (int k = 0; k < VECTOR; k++) value.v[k] = at[k];
    return value;
#else
    return *reinterpret_cast<const float_vector *>(at);
#endif
}
// Stores around the caches what is not read again soon.
__device__ __forceinline__ void store_streaming(out_t *at, out_vector value) {
#ifdef UNALIGNED
#pragma unroll
    for (int k = 0; k < VECTOR; k++) at[k] = value.v[k];
    return;
#endif
    if (sizeof(out_vector) % 16 == 0) {
#pragma unroll
        for (int part = 0; part < (int)sizeof(out_vector) / 16; part++)
            __stcs(reinterpret_cast<int4 *>(at) + part, reinterpret_cast<int4 *>(&value)[part]);
        return;
    }
    *reinterpret_cast<out_vector *>(at) = value;
}
#endif
