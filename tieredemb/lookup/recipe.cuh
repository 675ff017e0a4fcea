// What an optimizer's CUDA recipe is written with. Its file, `optimizers/<name>.cu`, includes this header, defines
//
//     struct Recipe : ElementWise {
//         static double rate(const Hyper &hyper, double step);
//         static float element(float w, float g, float *state, float rate, const Numbers &numbers);
//     };
//
// and includes `optimizer.cuh`, whose kernels call it. All of it runs on the device, in float but for `rate`: the rate of
// a table that takes its `step`-th step, from 1. `element` returns the new weight of an element of weight `w` and summed
// gradient `g`; `state` is its word of the first state tensor, and those of further ones follow WIDTH words apart.
// Results must be the CPU's bits: `__fmaf_rn` where a contraction is wanted, as in the recipe's twin.
#pragma once
#include "common.cuh"

// Lanes that share a row, and steps in which they take its units.
constexpr int LANES = UNITS > 16 ? 32 : UNITS > 8 ? 16 : UNITS > 4 ? 8 : UNITS > 2 ? 4 : UNITS;
constexpr int STEPS = (UNITS + LANES - 1) / LANES;

// By the names that the optimizer's config gives them, in its order (`optimizer.recipe_flags`).
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

// A recipe in which nothing concerns the row as a whole. Others hide these.
struct ElementWise {
    // Whether a row's summed gradient is all that counts, and no row is read or written (lookup/gradient_norm.cu).
    static constexpr bool KEEPS_SUM = false;
    static __device__ __forceinline__ void keep_sum(float *state, const float (*g)[VECTOR], int lane,
                                                    const Numbers &numbers) {}
    struct Whole {};  // what is read of the row's state before its gradient is there
    static __device__ __forceinline__ Whole whole_of(const float *state) { return {}; }
    // Comes before the elements, on all lanes of the row, which hold its summed gradient `g` [STEPS][VECTOR]: the rate of
    // this row.
    static __device__ __forceinline__ float row_rate(Whole whole, float *state, const float (*g)[VECTOR], int lane,
                                                     float rate, const Numbers &numbers) {
        return rate;
    }
};
