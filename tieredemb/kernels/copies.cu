// Copies of several tensors by one launch.
#include "common.cuh"

// Of each tensor where it is, where it is copied to, and how many bytes it has; behind the last one zeros.
struct Copies {
    i64 source[MOST_COPIED], target[MOST_COPIED], bytes[MOST_COPIED];
};

// Copies a tensor in units of a T, and what is left at its end byte by byte.
template <typename T>
__device__ __forceinline__ void copy_in_units(const void *source, void *target, i64 bytes, i64 first, i64 step) {
    const i64 units = bytes / (i64)sizeof(T);
#pragma unroll 4
    for (i64 k = first; k < units; k += step) static_cast<T *>(target)[k] = static_cast<const T *>(source)[k];
    for (i64 k = units * (i64)sizeof(T) + first; k < bytes; k += step)
        static_cast<char *>(target)[k] = static_cast<const char *>(source)[k];
}

// Copies `count` tensors, in the largest units that their addresses allow. The grid has as many blocks for each.
extern "C" __global__ void tensors_copy(Copies copies, int count) {
    wait_for_prior_kernel();
    const int one = blockIdx.x % count;
    const void *source = reinterpret_cast<const void *>(copies.source[one]);
    void *target = reinterpret_cast<void *>(copies.target[one]);
    const i64 bytes = copies.bytes[one], both = copies.source[one] | copies.target[one];
    const i64 first = (i64)(blockIdx.x / count) * blockDim.x + threadIdx.x;
    const i64 step = (i64)(gridDim.x / count) * blockDim.x;
    if (both % sizeof(int4) == 0) copy_in_units<int4>(source, target, bytes, first, step);
    else if (both % sizeof(i64) == 0) copy_in_units<i64>(source, target, bytes, first, step);
    else if (both % sizeof(int) == 0) copy_in_units<int>(source, target, bytes, first, step);
    else copy_in_units<char>(source, target, bytes, first, step);
}
