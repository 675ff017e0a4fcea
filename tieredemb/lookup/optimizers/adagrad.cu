// Adagrad: g ← g + weight_decay · w, sum ← sum + g², w ← w − rate · g / (√sum + eps).
#include "recipe.cuh"

struct Recipe : ElementWise {
    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) {
        return hyper.lr / (1.0 + (step - 1.0) * hyper.lr_decay);
    }

    template <class State>
    static __device__ __forceinline__ float element(float w, float g, State &state, float rate,
                                                    const Numbers &numbers) {
        const float gradient = numbers.weight_decay != 0.0f ? __fmaf_rn(numbers.weight_decay, w, g) : g;
        const float total = __fmaf_rn(gradient, gradient, state[0]);
        state[0] = total;
        return __fmaf_rn(-rate, __fdiv_rn(gradient, __fadd_rn(__fsqrt_rn(total), numbers.eps)), w);
    }

    // --- with weight decay ---

    static __device__ __forceinline__ void missed_numbers(const Hyper &hyper, Numbers &numbers) {
        numbers.weight_decay = (float)hyper.weight_decay;
    }

    static __device__ __forceinline__ Terms terms(const Hyper &hyper, double step) {
        return {0.0, 1.0, 1.0, 1.0, 1.0, hyper.weight_decay != 0.0 ? 1.0 : 0.0, 0.0};
    }

    template <class State>
    static __device__ __forceinline__ float catch_up(float w, State &state, const MissedSteps &missed,
                                                     const Past &past) {
        for (int step = missed.start + 1; step <= missed.replayed; step++)
            w = element(w, 0.0f, state, past.rates[step], numbers_of(past, step));
        return w;
    }
};

#include "optimizer.cuh"
