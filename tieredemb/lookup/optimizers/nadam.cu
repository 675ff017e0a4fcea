// NAdam: g ← g + weight_decay · w, m and v are running means of g and g²,
// w ← decay · w − (of_mean · m + of_gradient · g) / (√(v / correction2) + eps).
#include "moments.cuh"

struct Recipe : ElementWise {
    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) { return hyper.lr; }

    template <class State>
    static __device__ __forceinline__ float element(float w, float g, State &state, float rate,
                                                    const Numbers &numbers) {
        const float gradient = numbers.weight_decay != 0.0f ? __fmaf_rn(numbers.weight_decay, w, g) : g;
        const float m = __fmaf_rn(__fsub_rn(gradient, state[0]), numbers.one_less_beta1, state[0]);
        const float v = square_mean(state[1], gradient, numbers.one_less_beta2);
        state[0] = m;
        state[1] = v;
        const float nearer = __fmaf_rn(numbers.of_mean, m, __fmul_rn(numbers.of_gradient, gradient));
        const float root = __fsqrt_rn(__fdiv_rn(v, numbers.correction2));
        const float move = __fdiv_rn(nearer, __fadd_rn(root, numbers.eps));
        return __fmaf_rn(w, numbers.decay, -move);
    }

    // µ of a step, and the product of µ over the first steps, until 1 less it is 1
    static __device__ __forceinline__ double momentum(const Hyper &hyper, double step) {
        return hyper.beta1 * (1.0 - 0.5 * pow(0.96, step * hyper.momentum_decay));
    }
    static __device__ __forceinline__ double product(const Hyper &hyper, double steps) {
        const double fall = pow(0.96, hyper.momentum_decay);
        double product = 1.0, power = 1.0;
        for (double step = 0.0; step < steps && product > 1e-20; step += 1.0) {
            if (power < 1e-17) return product * pow(hyper.beta1, steps - step);  // µ is β1 from here on
            power *= fall;
            product *= hyper.beta1 * (1.0 - 0.5 * power);
        }
        return product;
    }
    static __device__ __forceinline__ double decay(const Hyper &hyper) {
        return hyper.decoupled_weight_decay != 0.0 ? 1.0 - hyper.lr * hyper.weight_decay : 1.0;
    }

    // --- rows that miss a step ---

    static constexpr int STEP_NUMBERS = 4;
    static __device__ __forceinline__ void step_numbers(const Hyper &hyper, double step, float *numbers) {
        const double so_far = product(hyper, step), after = momentum(hyper, step + 1.0);
        numbers[0] = (float)(1.0 - pow(hyper.beta2, step));
        numbers[1] = (float)(hyper.lr * (1.0 - momentum(hyper, step)) / (1.0 - so_far));
        numbers[2] = (float)(hyper.lr * after / (1.0 - so_far * after));
        numbers[3] = (float)decay(hyper);
    }

    static __device__ __forceinline__ Terms terms(const Hyper &hyper, double step) {
        const double after = momentum(hyper, step + 1.0);
        const bool coupled = hyper.weight_decay != 0.0 && hyper.decoupled_weight_decay == 0.0;
        return {hyper.lr * after / (1.0 - product(hyper, step) * after), 1.0 / sqrt(1.0 - pow(hyper.beta2, step)),
                hyper.beta1, sqrt(hyper.beta2), decay(hyper), coupled ? 1.0 : 0.0, hyper.eps};
    }

    template <class State>
    static __device__ __forceinline__ float catch_up(float w, State &state, const MissedSteps &missed,
                                                     const Past &past) {
        for (int step = missed.start + 1; step <= missed.replayed; step++)
            w = element(w, 0.0f, state, past.rates[step], numbers_of(past, step));
        if (missed.sums == nullptr || !(state[1] > (float)OVERFLOWING_SQUARES) || !isfinite(state[1]))
            return means_catch_up(w, state, missed);
        for (int step = missed.start + 1; step <= missed.end; step++)
            w = element(w, 0.0f, state, past.rates[step], numbers_of(past, step));
        MissedSteps rest = missed;
        rest.sums = nullptr;
        rest.first = factor_between(past, FIRST_LOG, missed.end, missed.stop);
        rest.second = factor_between(past, SECOND_LOG, missed.end, missed.stop);
        return means_catch_up(w, state, rest);
    }
};

#include "optimizer.cuh"
