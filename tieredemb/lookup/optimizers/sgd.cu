// SGD: w ← w − lr · g.
#include "recipe.cuh"

struct Recipe : ElementWise {
    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) { return hyper.lr; }

    static __device__ __forceinline__ float element(float w, float g, float *state, float rate,
                                                    const Numbers &numbers) {
        return __fmaf_rn(-rate, g, w);
    }
};

#include "optimizer.cuh"
