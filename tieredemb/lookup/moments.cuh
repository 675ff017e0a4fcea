// What steps without a gradient do to an element with a running mean of gradients and one of their squares, in closed
// form, behind those that are replayed: the twin of moments_cpu.py. See history.py.
#pragma once
#include "recipe.cuh"

template <class State>
__device__ __forceinline__ float means_catch_up(float w, State &state, const MissedSteps &missed) {
    const float m = state[0], v = state[1];
    state[0] = isfinite(m) ? __fmul_rn(m, missed.first) : nanf("");  // as the first of the steps has it
    state[1] = faded(v, missed.second);
    if (missed.sums == nullptr) return missed.rest_decay != 1.0f ? faded(w, missed.rest_decay) : w;
    const float *of = missed.sums;
    const float x = __fsqrt_rn(v), share = __fdiv_rn(1.0f, __fmaf_rn(x, of[1], of[SUM_EPS]));
    const float q = isfinite(x) ? __fmul_rn(x, share) : 0.0f;  // nothing moves by an infinite mean of squares
    float series = __fmaf_rn(-q, of[7], of[6]);
    series = __fmaf_rn(-q, series, of[5]);
    series = __fmaf_rn(-q, series, of[4]);
    series = __fmaf_rn(-q, series, of[3]);
    series = __fmaf_rn(-q, series, of[2]);
    series = __fmaf_rn(__fmul_rn(q, q), series, 1.0f);
    const float moves = __fmul_rn(__fmul_rn(of[0], series), share);
    w = __fmaf_rn(-moves, m, faded(w, missed.decay));
    return faded(w, missed.rest_decay);
}
