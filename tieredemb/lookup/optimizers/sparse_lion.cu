// Lion over the rows of the batch: c = β1 · m + (1 − β1) · g, w ← w − lr · (sign(c) + weight_decay · w),
// m ← β2 · m + (1 − β2) · g.
#include "recipe.cuh"

struct Recipe : ElementWise {
    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) { return hyper.lr; }

    template <class State>
    static __device__ __forceinline__ float element(float w, float g, State &state, float rate,
                                                    const Numbers &numbers) {
        const float m = state[0];
        const float c = __fmaf_rn(numbers.one_less_beta1, g, __fmul_rn(numbers.beta1, m));
        const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c;  // a NaN stays one
        state[0] = __fmaf_rn(numbers.one_less_beta2, g, __fmul_rn(numbers.beta2, m));
        const float move = numbers.weight_decay != 0.0f ? __fmaf_rn(numbers.weight_decay, w, sign) : sign;  // no 0 · ∞
        return __fmaf_rn(-rate, move, w);
    }
};

#include "optimizer.cuh"
