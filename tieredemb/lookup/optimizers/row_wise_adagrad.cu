// Row-wise Adagrad: sum ← sum + mean of g² over the row, w ← w − lr / (√sum + eps) · g.
#include "recipe.cuh"

struct Recipe : ElementWise {
    using Whole = float;  // the sum

    static __device__ __forceinline__ Whole whole_of(const float *state) { return *state; }

    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) { return hyper.lr; }

    static __device__ __forceinline__ float row_rate(Whole sum, float *state, const float (*g)[VECTOR], int lane,
                                                     float rate, const Numbers &numbers) {
        float squares = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                if (s * LANES + lane < UNITS) squares = __fmaf_rn(g[s][k], g[s][k], squares);
        const float total = __fadd_rn(sum, __fdiv_rn(lanes_sum(squares), (float)WIDTH));
        if (lane == 0) *state = total;
        return __fdiv_rn(rate, __fadd_rn(__fsqrt_rn(total), numbers.eps));
    }

    template <class State>
    static __device__ __forceinline__ float element(float w, float g, State &state, float rate,
                                                    const Numbers &numbers) {
        return __fmaf_rn(-rate, g, w);
    }
};

#include "optimizer.cuh"
