// SGD: g ← g + weight_decay · w, buffer ← momentum · buffer + share · g, w ← w − lr · buffer, or with nesterov
// w ← w − lr · (g + momentum · buffer), or without a momentum w ← w − lr · g.
#include "recipe.cuh"

struct Recipe : ElementWise {
    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) { return hyper.lr; }

    template <class State>
    static __device__ __forceinline__ float element(float w, float g, State &state, float rate,
                                                    const Numbers &numbers) {
        if (numbers.weight_decay != 0.0f) g = __fmaf_rn(numbers.weight_decay, w, g);
#ifdef DENSE
        if (TENSORS > 0 && numbers.momentum != 0.0f) {
            const float buffer = __fmaf_rn(numbers.share, g, __fmul_rn(numbers.momentum, state[0]));
            state[0] = buffer;
            g = numbers.nesterov != 0.0f ? __fmaf_rn(numbers.momentum, buffer, g) : buffer;
        }
#endif
        return __fmaf_rn(-rate, g, w);
    }

    // --- with momentum or weight decay of every row ---

    static constexpr int STEP_NUMBERS = 1;
    static __device__ __forceinline__ void step_numbers(const Hyper &hyper, double step, float *numbers) {
        numbers[0] = step == 1.0 ? 1.0f : (float)(1.0 - hyper.dampening);
    }

    static __device__ __forceinline__ void missed_numbers(const Hyper &hyper, Numbers &numbers) {
        numbers.weight_decay = (float)hyper.weight_decay;
    }

    static __device__ __forceinline__ Terms terms(const Hyper &hyper, double step) {
        const double decay = 1.0 - hyper.lr * hyper.weight_decay;
        if (TENSORS == 0) return {0.0, 1.0, 1.0, 1.0, decay, 0.0, 0.0};
        const double weight = hyper.lr * (hyper.nesterov != 0.0 ? hyper.momentum : 1.0);
        const bool coupled = hyper.weight_decay != 0.0 || hyper.momentum == 0.0;
        return {weight, 1.0, hyper.momentum, 1.0, decay, coupled ? 1.0 : 0.0, 0.0};
    }

    template <class State>
    static __device__ __forceinline__ float catch_up(float w, State &state, const MissedSteps &missed,
                                                     const Past &past) {
        if (missed.sums == nullptr) {
            for (int step = missed.start + 1; step <= missed.replayed; step++)
                w = element(w, 0.0f, state, past.rates[step], numbers_of(past, step));
            return w;
        }
        w = __fmul_rn(w, missed.decay);
        if (TENSORS > 0) {
            w = __fmaf_rn(-missed.sums[0], state[0], w);
            state[0] = faded(state[0], missed.first);
        }
        return __fmul_rn(w, missed.rest_decay);
    }

    // by its own part of the gradient, which of an infinity is one, and leaves no number
    static __device__ __forceinline__ float decayed(float w, float factor) {
        return isfinite(w) ? __fmul_rn(w, factor) : nanf("");
    }
};

#include "optimizer.cuh"
