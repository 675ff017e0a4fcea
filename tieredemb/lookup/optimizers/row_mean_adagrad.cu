// Adagrad by the mean of a row's gradient: sum ← sum + mean², w ← w − rate · mean / (√sum + eps), of all elements alike.
#include "recipe.cuh"

struct Recipe : ElementWise {
    using Whole = float;  // the sum

    static __device__ __forceinline__ Whole whole_of(const float *state) { return *state; }

    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) {
        return hyper.lr / (1.0 + (step - 1.0) * hyper.lr_decay);
    }

    // the move itself
    static __device__ __forceinline__ float row_rate(Whole sum, float *state, const float (*g)[VECTOR], int lane,
                                                     float rate, const Numbers &numbers) {
        float total = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                if (s * LANES + lane < UNITS) total = __fadd_rn(total, g[s][k]);
        const float mean = __fdiv_rn(lanes_sum(total), (float)WIDTH);
        const float squares = __fmaf_rn(mean, mean, sum);
        if (lane == 0) *state = squares;
        return __fmul_rn(rate, __fdiv_rn(mean, __fadd_rn(__fsqrt_rn(squares), numbers.eps)));
    }

    template <class State>
    static __device__ __forceinline__ float element(float w, float g, State &state, float move,
                                                    const Numbers &numbers) {
        return __fsub_rn(w, move);
    }
};

#include "optimizer.cuh"
