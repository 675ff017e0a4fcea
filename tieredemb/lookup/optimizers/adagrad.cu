// Adagrad: sum ← sum + g², w ← w − rate · g / (√sum + eps).
#include "recipe.cuh"

struct Recipe : ElementWise {
    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) {
        return hyper.lr / (1.0 + (step - 1.0) * hyper.lr_decay);
    }

    static __device__ __forceinline__ float element(float w, float g, float *sum, float rate, const Numbers &numbers) {
        const float total = __fmaf_rn(g, g, *sum);
        *sum = total;
        return __fmaf_rn(-rate, __fdiv_rn(g, __fadd_rn(__fsqrt_rn(total), numbers.eps)), w);
    }
};

#include "optimizer.cuh"
