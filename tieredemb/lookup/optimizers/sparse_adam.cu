// Adam over the rows of the batch: m and v are running means of g and g², w ← w − rate · m / (√v + eps).
#include "recipe.cuh"

struct Recipe : ElementWise {
    // with the corrections of both means' bias, as torch.optim.SparseAdam has them
    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) {
        return hyper.lr * sqrt(1.0 - pow(hyper.beta2, step)) / (1.0 - pow(hyper.beta1, step));
    }

    template <class State>
    static __device__ __forceinline__ float element(float w, float g, State &state, float rate,
                                                    const Numbers &numbers) {
        const float m = __fmaf_rn(__fsub_rn(g, state[0]), numbers.one_less_beta1, state[0]);
        const float square = __fmul_rn(g, g);  // where it is infinite torch's difference is one
        const float difference = isfinite(square) ? __fmaf_rn(g, g, -state[1]) : __fsub_rn(square, state[1]);
        const float v = __fmaf_rn(difference, numbers.one_less_beta2, state[1]);
        state[0] = m;
        state[1] = v;
        return __fmaf_rn(-rate, __fdiv_rn(m, __fadd_rn(__fsqrt_rn(v), numbers.eps)), w);
    }
};

#include "optimizer.cuh"
