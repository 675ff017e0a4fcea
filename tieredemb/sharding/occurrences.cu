// The gradients of occurrences that are sent to the owners of their rows: of each that of its bag.
//
// Compiled for float rows of the width: a group of lanes takes an occurrence.
#include "common.cuh"

constexpr int LANES = UNITS > 16 ? 32 : UNITS > 8 ? 16 : UNITS > 4 ? 8 : UNITS > 2 ? 4 : UNITS;

// rows[k] = the gradient of the bag of occurrence order[k], `grad` (B, total), divided by `share`; of a maximum zero but
// where the occurrence has won. Moves 8 D bytes an occurrence.
extern "C" __global__ void __launch_bounds__(256) occurrences_gradient(
    const i64 *order, i64 n, const int *bag, int batch, const i64 *column, const int *mode, const float *grad,
    i64 total, const int *argmax, float share, float *rows) {
    wait_for_prior_kernel();
    const int lane = threadIdx.x % LANES;
    for (i64 k = thread_index() / LANES; k < n; k += thread_count() / LANES) {
        const i64 i = order[k];
        const int feature = bag[i] / batch, sample = bag[i] - feature * batch;
        const i64 from = sample * total + column[feature];
#ifdef HAS_MAX
        const bool is_maximum = mode[feature] == MAX;
#endif
        for (int unit = lane; unit < UNITS; unit += LANES) {
            float_vector value = load_floats(grad + from + unit * VECTOR);
#pragma unroll
            for (int e = 0; e < VECTOR; e++) {
#ifdef HAS_MAX
                if (is_maximum && argmax[from + unit * VECTOR + e] != (int)i) value.v[e] = 0.0f;
#endif
                if (share != 1.0f) value.v[e] = __fdiv_rn(value.v[e], share);
            }
            *reinterpret_cast<float_vector *>(rows + k * WIDTH + unit * VECTOR) = value;
        }
    }
}
