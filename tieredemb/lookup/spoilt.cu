// Gradients that were multiplied by what is not finite: whether their step can be taken.
#include "common.cuh"
#include "fault.cuh"

// `spoilt`: float (n), NaN of tables whose gradients were. A step can be taken where every row takes part in it
// (`is_dense`) and all tables of one step counter are spoilt alike, or each has one of its own (`separate`); or where
// none is. `found_inf`: of a scaler, or null: then there is no step, and nothing to report. Writes to `skipped` what
// `step_begin` takes as `found_inf`; to `factors`, float (n) or null, what it takes as such; and the first spoilt table
// of a step that is refused, or that of `tables` (int, n), to the host, unless it has a report that it has not read.
// One warp.
extern "C" __global__ void spoilt_refuse(const float *spoilt, int n, const int *tables, int is_dense, int separate,
                                         const float *found_inf, float *skipped, float *factors,
                                         volatile Report *report) {
    wait_for_prior_kernel();
    int first = n, count = 0;
    for (int start = 0; start < n; start += 32) {
        const int i = start + threadIdx.x;
        const bool is_spoilt = i < n && spoilt[i] != spoilt[i];
        if (factors && i < n) factors[i] = is_spoilt ? spoilt[i] : 1.0f;
        const u32 found = __ballot_sync(FULL_WARP, is_spoilt);
        if (found && first == n) first = start + __ffs(found) - 1;
        count += __popc(found);
    }
    if (threadIdx.x != 0) return;
    const bool was_skipped = found_inf && *found_inf != 0.0f;
    const bool is_refused = count != 0 && !(is_dense && (separate || count == n));
    *skipped = was_skipped || is_refused ? 1.0f : 0.0f;
    if (was_skipped || !is_refused || report->state != 0) return;
    report->kind = SPOILT;
    report->feature = tables ? tables[first] : first;
    report->value = is_dense;
    __threadfence_system();
    report->state = 1;
}
