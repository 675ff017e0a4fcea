// The interface of an optimizer's CUDA recipe. Its file, `optimizers/<name>.cu`, includes this header, defines
//
//     struct Recipe : ElementWise {
//         static double rate(const Hyper &hyper, double step);
//         template <class State>
//         static float element(float w, float g, State &state, float rate, const Numbers &numbers);
//     };
//
// and includes `optimizer.cuh`, whose kernels call it. All of it runs on the device, in float but for `rate`: the rate of
// a table that takes its `step`-th step, from 1. `element` returns the new weight of an element of weight `w` and summed
// gradient `g`; `state[n]` is its word of the n-th state tensor. The recipe of an optimizer that is dense (-DDENSE) has
// more: see `Sparse`.
// Results must be the CPU's bits: `__fmaf_rn` where a contraction is wanted, as in the recipe's twin.
#pragma once
#include "history.cuh"

// Lanes that share a row, and steps in which they take its units.
constexpr int LANES = UNITS > 16 ? 32 : UNITS > 8 ? 16 : UNITS > 4 ? 8 : UNITS > 2 ? 4 : UNITS;
constexpr int STEPS = (UNITS + LANES - 1) / LANES;

// The names and the order are those of the optimizer's config (`optimizer.recipe_flags`).
struct Hyper {
    double HYPER;  // the param group
};
struct Numbers {
    float NUMBERS;  // what the config derives from it for the update, and the `scale` of the gradients
};

// Sum of a lane's value over the lanes of the row, the same on every lane: a fixed tree.
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        value = __fadd_rn(value, __shfl_xor_sync(group_mask(LANES), value, step, LANES));
    return value;
}

#ifdef DENSE
constexpr bool IS_DENSE = true;  // a row's state ends with the step that it has caught up to
#else
constexpr bool IS_DENSE = false;
#endif
constexpr int TENSORS = (STATE - IS_DENSE) / WIDTH;

constexpr int NUMBER_WORDS = sizeof(Numbers) / sizeof(float) - 1;  // all but the scale
__device__ __forceinline__ Numbers numbers_of(const Past &past, int step) {
    Numbers numbers;
#pragma unroll
    for (int k = 0; k < NUMBER_WORDS; k++)
        reinterpret_cast<float *>(&numbers)[k] = past.numbers[(i64)step * NUMBER_WORDS + k];
    numbers.scale = 1.0f;
    return numbers;
}

// `value`, of a row that missed steps, times the factors of all of them. An infinity stays infinite in each step,
// although the product of many factors may have become a zero.
__device__ __forceinline__ float faded(float value, float factor) {
    return isfinite(value) ? __fmul_rn(value, factor) : value;
}

// The running mean of squares `v`, updated with `share` of the square of `gradient`. It overflows as torch's does,
// which multiplies the gradient by its share first; an infinite mean stays infinite.
__device__ __forceinline__ float square_mean(float v, float gradient, float share) {
    const float found = __fmaf_rn(__fmaf_rn(gradient, gradient, -v), share, v);
    if (isfinite(found)) return found;
    return __fadd_rn(__fmul_rn(__fsub_rn(1.0f, share), v), __fmul_rn(__fmul_rn(share, gradient), gradient));
}

// The default for a recipe that changes only rows of the batch. Recipes of dense optimizers hide these.
struct Sparse {
    static constexpr int STEP_NUMBERS = 0;  // of the numbers, those that change from step to step: the last ones
    static __device__ __forceinline__ void step_numbers(const Hyper &hyper, double step, float *numbers) {}
    // The numbers by which rows that miss a step replay it, where they differ from those of an update.
    static __device__ __forceinline__ void missed_numbers(const Hyper &hyper, Numbers &numbers) {}
    // What a step does to rows that have no gradient (`StepTerms` in config.py).
    static __device__ __forceinline__ Terms terms(const Hyper &hyper, double step) { return {}; }
    // Brings an element to the current step, and returns its new weight.
    template <class State>
    static __device__ __forceinline__ float catch_up(float w, State &state, const MissedSteps &missed,
                                                     const Past &past) {
        return w;
    }
    static constexpr bool KEEPS_ZEROS = true;  // a step without a gradient does not change a state of zeros
    // A weight after missed steps that do nothing but decay it, by `factor` in all, which is not 1.
    static __device__ __forceinline__ float decayed(float w, float factor) { return faded(w, factor); }
};

// The default for a recipe in which nothing depends on the row as a whole. Others hide these.
struct ElementWise : Sparse {
    // Whether only a row's summed gradient counts, and no row is read or written (lookup/gradient_norm.cu).
    static constexpr bool KEEPS_SUM = false;
    static __device__ __forceinline__ void keep_sum(float *state, const float (*g)[VECTOR], int lane,
                                                    const Numbers &numbers) {}
    struct Whole {};  // what is read of the row's state before its gradient is known
    static __device__ __forceinline__ Whole whole_of(const float *state) { return {}; }
    // Called before the elements, on all lanes of the row, which hold its summed gradient `g` [STEPS][VECTOR]: the rate
    // of this row.
    static __device__ __forceinline__ float row_rate(Whole whole, float *state, const float (*g)[VECTOR], int lane,
                                                     float rate, const Numbers &numbers) {
        return rate;
    }
};
