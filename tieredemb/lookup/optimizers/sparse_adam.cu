// Adam over the rows of the batch: m and v are running means of g and g², w ← w − rate · m / (√v + eps).
#include "recipe.cuh"

struct Recipe : ElementWise {
    // with the corrections of both means' bias, as torch.optim.SparseAdam has them
    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) {
        return hyper.lr * sqrt(1.0 - pow(hyper.beta2, step)) / (1.0 - pow(hyper.beta1, step));
    }

    static __device__ __forceinline__ float element(float w, float g, float *m_at, float rate, const Numbers &numbers) {
        float *v_at = m_at + WIDTH;
        const float m = __fmaf_rn(__fsub_rn(g, *m_at), numbers.one_less_beta1, *m_at);
        const float v = __fmaf_rn(__fmaf_rn(g, g, -*v_at), numbers.one_less_beta2, *v_at);
        *m_at = m;
        *v_at = v;
        return __fmaf_rn(-rate, __fdiv_rn(m, __fadd_rn(__fsqrt_rn(v), numbers.eps)), w);
    }
};

#include "optimizer.cuh"
