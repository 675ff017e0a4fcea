// Adam and AdamW over all rows: g ← g + weight_decay · w (that of rows in use, or of those that miss a step), m and v are running means of g and g²,
// w ← decay · w − rate · m / (√v + step_eps).
#include "moments.cuh"

struct Recipe : ElementWise {
    // lr / (1 − β1^t) · √(1 − β2^t): √v is not corrected for its bias, but eps is in its place
    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) {
        return hyper.lr * sqrt(1.0 - pow(hyper.beta2, step)) / (1.0 - pow(hyper.beta1, step));
    }

    template <class State>
    static __device__ __forceinline__ float element(float w, float g, State &state, float rate,
                                                    const Numbers &numbers) {
        const float gradient = numbers.weight_decay != 0.0f ? __fmaf_rn(numbers.weight_decay, w, g) : g;
        const float m = __fmaf_rn(__fsub_rn(gradient, state[0]), numbers.one_less_beta1, state[0]);
        const float v = square_mean(state[1], gradient, numbers.one_less_beta2);
        state[0] = m;
        state[1] = v;
        return __fmaf_rn(-rate, __fdiv_rn(m, __fadd_rn(__fsqrt_rn(v), numbers.step_eps)), __fmul_rn(w, numbers.decay));
    }

    static constexpr int STEP_NUMBERS = 2;
    static __device__ __forceinline__ void step_numbers(const Hyper &hyper, double step, float *numbers) {
        numbers[0] = (float)(hyper.eps * sqrt(1.0 - pow(hyper.beta2, step)));
        numbers[1] = (float)decay(hyper);
    }

    static __device__ __forceinline__ void missed_numbers(const Hyper &hyper, Numbers &numbers) {
#ifndef DECOUPLED
        numbers.weight_decay = (float)hyper.weight_decay;
#endif
    }

    static __device__ __forceinline__ double decay(const Hyper &hyper) {
#ifdef DECOUPLED
        return 1.0 - hyper.lr * hyper.weight_decay;
#else
        return 1.0;
#endif
    }

    static __device__ __forceinline__ Terms terms(const Hyper &hyper, double step) {
#ifdef DECOUPLED
        const double coupled = 0.0;
#else
        const double coupled = hyper.weight_decay != 0.0 ? 1.0 : 0.0;
#endif
        return {hyper.lr / (1.0 - pow(hyper.beta1, step)), 1.0 / sqrt(1.0 - pow(hyper.beta2, step)), hyper.beta1,
                sqrt(hyper.beta2), decay(hyper), coupled, hyper.eps};
    }

    template <class State>
    static __device__ __forceinline__ float catch_up(float w, State &state, const MissedSteps &missed,
                                                     const Past &past) {
        for (int step = missed.start + 1; step <= missed.replayed; step++)
            w = element(w, 0.0f, state, past.rates[step], numbers_of(past, step));
        return means_catch_up(w, state, missed);
    }
};

#include "optimizer.cuh"
