// Adamax: g ← g + weight_decay · w, m is the running mean of g, u ← max(β2 · u, |g| + eps), w ← w − rate · m / u.
#include "recipe.cuh"

struct Recipe : ElementWise {
    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) {
        return hyper.lr / (1.0 - pow(hyper.beta1, step));
    }

    // The larger one; none where either is no number.
    static __device__ __forceinline__ float larger(float value, float other) {
        return other > value || isnan(other) ? other : value;
    }

    template <class State>
    static __device__ __forceinline__ float element(float w, float g, State &state, float rate,
                                                    const Numbers &numbers) {
        const float gradient = numbers.weight_decay != 0.0f ? __fmaf_rn(numbers.weight_decay, w, g) : g;
        const float m = __fmaf_rn(__fsub_rn(gradient, state[0]), numbers.one_less_beta1, state[0]);
        const float u = larger(__fmul_rn(state[1], numbers.maximum_decay), __fadd_rn(fabsf(gradient), numbers.largest_eps));
        state[0] = m;
        state[1] = u;
        return __fmaf_rn(-rate, __fdiv_rn(m, u), w);
    }

    // --- rows that miss a step ---

    static constexpr int STEP_NUMBERS = 0;
    static constexpr bool KEEPS_ZEROS = false;  // u is eps after any

    // While u is above eps, a step moves by m / u times a number that falls by β1/β2 a step.
    static __device__ __forceinline__ Terms terms(const Hyper &hyper, double step) {
        const bool falls = hyper.beta1 < hyper.beta2, coupled = hyper.weight_decay != 0.0 || !falls;
        return {hyper.lr / (1.0 - pow(hyper.beta1, step)), 0.0, falls ? hyper.beta1 / hyper.beta2 : 1.0,
                sqrt(hyper.beta2), 1.0, coupled ? 1.0 : 0.0, 0.0};
    }

    template <class State>
    static __device__ __forceinline__ float catch_up(float w, State &state, const MissedSteps &missed,
                                                     const Past &past) {
        if (missed.sums == nullptr) {
            for (int step = missed.start + 1; step <= missed.replayed; step++)
                w = element(w, 0.0f, state, past.rates[step], numbers_of(past, step));
            return w;
        }
        const float m = state[0], u = state[1], eps = numbers_of(past, missed.stop).largest_eps;
        const bool is_one_eps = eps == numbers_of(past, missed.start + 1).largest_eps;
        if (is_one_eps && (m == 0.0f || __fmul_rn(u, missed.counted) >= eps)) {
            if (m != 0.0f) {
                w = __fmaf_rn(-missed.sums[0], __fdiv_rn(m, u), w);
                state[0] = isfinite(m) ? __fmul_rn(m, __fmul_rn(missed.first, missed.second)) : nanf("");
            }
            state[1] = larger(faded(u, missed.second), eps);
            return w;
        }
        // u has fallen to eps while the moves still count
        for (int step = missed.start + 1; step <= missed.end; step++)
            w = element(w, 0.0f, state, past.rates[step], numbers_of(past, step));
        if (missed.end < missed.stop) {
            const float fallen = factor_between(past, SECOND_LOG, missed.end, missed.stop);
            state[0] = __fmul_rn(state[0], __fmul_rn(factor_between(past, FIRST_LOG, missed.end, missed.stop), fallen));
            state[1] = larger(faded(state[1], fallen), eps);
        }
        return w;
    }
};

#include "optimizer.cuh"
