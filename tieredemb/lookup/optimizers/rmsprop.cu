// RMSprop: g ← g + weight_decay · w, v is the running mean of g², centered by that of g: v − mean²;
// buffer ← momentum · buffer + g / (√v + eps), w ← w − lr · buffer, or without a momentum w ← w − lr · g / (√v + eps).
#include "recipe.cuh"

struct Recipe : ElementWise {
    // of the state: the mean of squares, then that of gradients and then the momentum, where there is room for them
    static constexpr int AVERAGE = TENSORS > 1 ? 1 : 0, BUFFER = TENSORS - 1;

    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) { return hyper.lr; }

    static __device__ __forceinline__ bool is_centered(const Numbers &numbers) {
        return TENSORS > 1 && numbers.centered != 0.0f;
    }
    static __device__ __forceinline__ bool has_buffer(const Numbers &numbers) {
        return TENSORS > 1 && numbers.momentum != 0.0f;
    }

    template <class State>
    static __device__ __forceinline__ float element(float w, float g, State &state, float rate,
                                                    const Numbers &numbers) {
        const float gradient = numbers.weight_decay != 0.0f ? __fmaf_rn(numbers.weight_decay, w, g) : g;
        float v = __fmaf_rn(__fmul_rn(numbers.one_less_alpha, gradient), gradient, __fmul_rn(numbers.alpha, state[0]));
        state[0] = v;
        if (is_centered(numbers)) {
            const float mean = __fmaf_rn(__fsub_rn(gradient, state[AVERAGE]), numbers.one_less_alpha, state[AVERAGE]);
            state[AVERAGE] = mean;
            v = __fmaf_rn(-mean, mean, v);  // all of it rounded as torch's: of equal gradients hardly anything is left
        }
        float move = __fdiv_rn(gradient, __fadd_rn(__fsqrt_rn(v), numbers.eps));
        if (has_buffer(numbers)) {
            move = __fmaf_rn(numbers.momentum, state[BUFFER], move);
            state[BUFFER] = move;
        }
        return __fmaf_rn(-rate, move, w);
    }

    // --- rows that miss a step ---

    static constexpr int STEP_NUMBERS = 0;

    static __device__ __forceinline__ Terms terms(const Hyper &hyper, double step) {
        const bool moves = hyper.momentum != 0.0, centers = hyper.centered != 0.0;
        // rows whose state has room for what a step does not use keep that as it is: no factor says so
        const bool uses_all = TENSORS == 1 + moves + centers;
        const bool coupled = hyper.weight_decay != 0.0 || !uses_all;
        return {moves ? hyper.lr : 0.0, moves ? 0.0 : 1.0, moves ? hyper.momentum : 1.0, sqrt(hyper.alpha), 1.0,
                coupled ? 1.0 : 0.0, 0.0};
    }

    template <class State>
    static __device__ __forceinline__ float catch_up(float w, State &state, const MissedSteps &missed,
                                                     const Past &past) {
        if (missed.sums == nullptr) {
            for (int step = missed.start + 1; step <= missed.replayed; step++)
                w = element(w, 0.0f, state, past.rates[step], numbers_of(past, step));
            return w;
        }
        const Numbers numbers = numbers_of(past, missed.start + 1);  // each of the steps uses all that there is
        state[0] = faded(state[0], missed.second);
        if (is_centered(numbers))
            state[AVERAGE] = isfinite(state[AVERAGE]) ? __fmul_rn(state[AVERAGE], missed.second) : nanf("");
        if (has_buffer(numbers)) {
            w = __fmaf_rn(-missed.sums[0], state[BUFFER], w);
            state[BUFFER] = faded(state[BUFFER], missed.first);
        }
        return w;
    }
};

#include "optimizer.cuh"
