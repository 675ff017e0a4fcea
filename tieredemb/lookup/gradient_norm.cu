// Norms of the rows' gradients: an "update" that, of a row's summed gradient, stores Σ |g|^p, a float64 in two words of
// state, or max |g| for an infinite p. Moves 4 D bytes an occurrence and 8 a row.
#include "recipe.cuh"

struct Recipe : ElementWise {
    static constexpr bool KEEPS_SUM = true;

    static __device__ __forceinline__ double rate(const Hyper &hyper, double step) { return 0.0; }

    template <class State>
    static __device__ __forceinline__ float element(float w, float g, State &state, float rate,
                                                    const Numbers &numbers) {
        return w;
    }

    static __device__ __forceinline__ void keep_sum(float *state, const float (*g)[VECTOR], int lane,
                                                    const Numbers &numbers) {
        const bool largest = isinf(numbers.p);
        double total = 0.0;
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                if (s * LANES + lane < UNITS) {
                    const double size = fabs((double)g[s][k]);
                    if (largest) total = size > total || size != size ? size : total;
                    else total += numbers.p == 2.0f ? size * size : numbers.p == 1.0f ? size : pow(size, (double)numbers.p);
                }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2) {
            const double other = __shfl_xor_sync(group_mask(LANES), total, step, LANES);
            total = !largest ? total + other : other > total || other != other ? other : total;
        }
        if (lane == 0) *reinterpret_cast<double *>(state) = total;
    }
};

#include "optimizer.cuh"
