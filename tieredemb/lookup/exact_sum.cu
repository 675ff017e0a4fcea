// Sums of float64 numbers that do not depend on the order: the twin of exact_sum_cpu.py. See exact_sum.py.
#include "common.cuh"

constexpr i64 LOW = 0xFFFFFFFFll;

__device__ __forceinline__ void digit_add(i64 *digit, i64 value) {
    if (value) atomicAdd(reinterpret_cast<u64 *>(digit), (u64)value);
}

// Adds one number, 0 or above, to a sum in shared or global memory.
__device__ __forceinline__ void value_add(i64 *digits, double value) {
    const i64 bits = __double_as_longlong(value);
    i64 exponent = bits >> 52;
    if (exponent == 0x7FF) return digit_add(digits + (value != value ? EXACT_NANS : EXACT_INFINITIES), 1);
    i64 fraction = bits & ((1ll << 52) - 1);
    if (exponent > 0) {
        fraction |= 1ll << 52;
        exponent--;
    }
    const int first = (int)(exponent >> 5), shift = (int)(exponent & 31);  // in units of 2^-1074
    const i64 low = (fraction & LOW) << shift, high = (fraction >> 32) << shift;
    digit_add(digits + first, low & LOW);
    digit_add(digits + first + 1, (low >> 32) + (high & LOW));
    digit_add(digits + first + 2, high >> 32);
}

// Adds `values` (n,), none negative, to the sums that `of` names. Neighbours mostly belong to one sum, and are of
// similar size: so a block adds those of its first number's sum in shared memory, and adds each digit to global memory
// once. Moves 16 bytes a number.
extern "C" __global__ void values_add(const double *values, const i64 *of, i64 n, i64 *sums) {
    wait_for_prior_kernel();
    __shared__ i64 own[EXACT_WORDS];
    for (i64 base = (i64)blockIdx.x * blockDim.x; base < n; base += thread_count()) {
        const i64 i = base + threadIdx.x, sum = of[base];
        for (int k = threadIdx.x; k < EXACT_WORDS; k += blockDim.x) own[k] = 0;
        __syncthreads();
        if (i < n && values[i] != 0.0) value_add(of[i] == sum ? own : sums + of[i] * EXACT_WORDS, values[i]);
        __syncthreads();
        for (int k = threadIdx.x; k < EXACT_WORDS; k += blockDim.x) digit_add(sums + sum * EXACT_WORDS + k, own[k]);
        __syncthreads();  // else the next numbers would overwrite what is read here
    }
}

// The sums (n, EXACT_WORDS), rounded.
extern "C" __global__ void sums_round(const i64 *sums, i64 n, double *found) {
    wait_for_prior_kernel();
    for (i64 s = thread_index(); s < n; s += thread_count()) {
        const i64 *digits = sums + s * EXACT_WORDS;
        double total = 0.0;
        i64 carry = 0;
        for (int k = 0; k < EXACT_DIGITS; k++) {
            const i64 digit = digits[k] + carry;
            carry = digit >> 32;
            total += ldexp((double)(digit & LOW), 32 * k - 1074);
        }
        if (digits[EXACT_INFINITIES] > 0 || carry > 0) total = __longlong_as_double(0x7FF0000000000000ll);
        found[s] = digits[EXACT_NANS] > 0 ? nan("") : total;
    }
}
