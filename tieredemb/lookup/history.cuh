// What a dense optimizer keeps of its steps, on the device: the twin of history_cpu.py. See history.py.
#pragma once
#include "common.cuh"

// Arrays of `capacity` steps, indexed by the row's last step minus `base`; `windows`: after even steps, and after odd
// ones · `words`: the first step whose sum grows, after even steps and after odd ones; whether the step that was begun
// is taken; how many steps rows had to replay one by one; how many were refused for lack of capacity.
struct Past {
    i64 base, capacity;
    float *rates, *numbers, *sums;
    int *ends;
    double *logs;
    int *coupled;
    double *windows;
    i64 *words;
};

struct Terms {
    double weight, point, first, root_second, decay, coupled, eps;
};

// The terms that bring a row from step `start` to step `stop`, both minus the base.
struct MissedSteps {
    int start, replayed;  // the steps after `start` until `replayed` are replayed one by one
    const float *sums;    // or, where not null, all of them from this expansion
    float first, second;  // factors of the moments: from the last replayed step on, if any
    float decay, rest_decay;  // of the weights: as long as the sum grows, and from then on
    bool is_decay_alone;  // `rest_decay` is all that happens
    int end, stop;        // the last step in which the sum grows, at most `stop`; and the last step
    float counted;        // the value of `second` at `end`
};

__device__ __forceinline__ float factor_between(const Past &past, int which, int start, int stop) {
    return (float)exp(past.logs[(i64)stop * LOGS + which] - past.logs[(i64)start * LOGS + which]);
}

// The last step until `stop` that a row at step `start` must replay one by one, as its decay is part of the gradient;
// `start` if there is none. All minus the base.
__device__ __forceinline__ int replayed_until(const Past &past, int start, int stop) {
    if (past.coupled[stop] == past.coupled[start]) return start;
    while (past.coupled[stop - 1] == past.coupled[stop]) stop--;
    return stop;
}

__device__ __forceinline__ MissedSteps missed_steps(const Past &past, int start, int stop) {
    if (past.coupled[stop] != past.coupled[start] || past.ends[start] < 0)
        return {start, stop, nullptr, 1.0f, 1.0f, 1.0f, 1.0f, false, stop, stop, 1.0f};
    const int end = past.ends[start] > 0 && past.ends[start] < stop ? past.ends[start] : stop;
    const float *sums = past.sums + (i64)start * SUMS;
    const bool series = sums[SUM_IS_SERIES] != 0.0f;
    const int from = series ? start : end;
    if (past.ends[start] == 0)  // the sum grows: its own products are those until now
        return {start,
                from,
                series ? sums : nullptr,
                series ? sums[SUM_FIRST] : 1.0f,
                series ? sums[SUM_SECOND] : 1.0f,
                sums[SUM_DECAY],
                1.0f,
                false,
                stop,
                stop,
                sums[SUM_SECOND]};
    return {start,
            from,
            series ? sums : nullptr,
            factor_between(past, FIRST_LOG, from, stop),
            factor_between(past, SECOND_LOG, from, stop),
            factor_between(past, DECAY_LOG, start, end),
            factor_between(past, DECAY_LOG, end, stop),
            false,
            end,
            stop,
            factor_between(past, SECOND_LOG, start, end)};
}

// The same for a row whose state is zeros, which such steps do not change: only its weights decay, unless their decay
// is part of the gradient.
__device__ __forceinline__ MissedSteps missed_steps_of_still_row(const Past &past, int start, int stop) {
    if (past.coupled[stop] != past.coupled[start]) return missed_steps(past, start, stop);
    return {start, start, nullptr, 1.0f, 1.0f, 1.0f, factor_between(past, DECAY_LOG, start, stop), true, stop, stop, 1.0f};
}

__device__ __forceinline__ double log_of(double factor) { return factor > 1e-300 ? log(factor) : -690.0; }

// Of 9 moments: n! / (k! (n − k)!).
__device__ __forceinline__ double binomial(int n, int k) {
    double value = 1.0;
    for (int i = 1; i <= k; i++) value = value * (n - k + i) / i;
    return value;
}

__device__ __forceinline__ void sums_write(const double *entry, float *sums) {
    const double total = entry[MOMENTS_AT], unit = entry[UNIT_AT];
    if (total == 0.0) {
        sums[0] = 0.0f;
        sums[1] = (float)unit;
        for (int k = 2; k < ORDERS - 1; k++) sums[k] = 0.0f;
        sums[SUM_IS_SERIES] = 1.0f;
        return;
    }
    const double mean = entry[MOMENTS_AT + 1] / total;
    sums[0] = (float)total;
    sums[1] = (float)(unit * (1.0 + mean));
    double central = 0.0, scale = unit;
    for (int k = 2; k < ORDERS; k++) {
        scale *= unit;
        double power = 1.0;
        central = 0.0;
        for (int i = k; i >= 0; i--) {  // of the mean's power k − i
            central += binomial(k, i) * entry[MOMENTS_AT + i] / total * power;
            power *= -mean;
        }
        if (k < ORDERS - 1) sums[k] = (float)(scale * central);
    }
    const double error = fabs(central) / pow(1.0 + mean, (double)(ORDERS - 1));
    sums[SUM_IS_SERIES] = error < SERIES_ERROR ? 1.0f : 0.0f;
}

// Stores step `at`, minus the base. All threads of one block.
__device__ __forceinline__ void step_append(const Past &past, int at, const Terms &terms) {
    const bool is_coupled = terms.coupled != 0.0 || !(terms.decay > 0.0);
    const bool is_still = terms.weight == 0.0 && terms.first == 1.0;
    const double *before = past.windows + (i64)((at - 1) % 2) * WINDOW * ENTRY;
    double *after = past.windows + (i64)(at % 2) * WINDOW * ENTRY;
    int first = (int)past.words[HISTORY_FIRST + (at - 1) % 2];
    if (threadIdx.x == 0) {
        double *log_now = past.logs + (i64)at * LOGS;
        const double *log_then = log_now - LOGS;
        log_now[FIRST_LOG] = log_then[FIRST_LOG] + log_of(terms.first);
        log_now[SECOND_LOG] = log_then[SECOND_LOG] + 2.0 * log_of(terms.root_second);
        log_now[DECAY_LOG] = log_then[DECAY_LOG] + log_of(terms.decay);
        past.coupled[at] = past.coupled[at - 1] + (is_coupled ? 1 : 0);
        past.ends[at] = 0;
    }
    for (int s = first + (int)threadIdx.x; s < at; s += blockDim.x) {
        const double *old = before + (s % WINDOW) * ENTRY;
        double *entry = after + (s % WINDOW) * ENTRY;
        float *sums = past.sums + (i64)s * SUMS;
        const bool fresh = s == at - 1;  // its entry begins here
        const double one = fresh ? terms.first : old[FIRST_PRODUCT] * terms.first;
        const double two = fresh ? terms.root_second : old[SECOND_PRODUCT] * terms.root_second;
        const double point = two * terms.point, unit = fresh ? point : old[UNIT_AT];
        const bool other_eps = !fresh && old[EPS_AT] != terms.eps;
        entry[FIRST_PRODUCT] = one;
        entry[SECOND_PRODUCT] = two;
        entry[DECAY_PRODUCT] = fresh ? terms.decay : old[DECAY_PRODUCT] * terms.decay;
        entry[UNIT_AT] = unit;
        entry[EPS_AT] = other_eps ? nan("") : terms.eps;  // another eps in between: replayed from now on
        double weight = terms.weight * one;
        const double off = unit != 0.0 ? point / unit - 1.0 : 0.0;  // 0: moves have no second moment in them
        for (int k = 0; k < ORDERS; k++) {
            entry[MOMENTS_AT + k] = (fresh ? 0.0 : old[MOMENTS_AT + k] * terms.decay) + weight;
            weight *= off;
        }
        sums_write(entry, sums);
        sums[SUM_EPS] = (float)terms.eps;
        sums[SUM_FIRST] = (float)one;
        sums[SUM_SECOND] = (float)(two * two);
        sums[SUM_DECAY] = (float)entry[DECAY_PRODUCT];
        if (other_eps) sums[SUM_IS_SERIES] = 0.0f;
        past.ends[s] = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (; first < at; first++) {
            const double *entry = after + (first % WINDOW) * ENTRY;
            const double beside = entry[UNIT_AT] != 0.0 ? entry[SECOND_PRODUCT] : 1.0;
            if (is_still || entry[FIRST_PRODUCT] < SUM_ENDS_AT * beside)
                past.ends[first] = at;
            else if (at - first >= WINDOW)
                past.ends[first] = -1;
            else
                break;
        }
        past.words[HISTORY_FIRST + at % 2] = first;
    }
}
