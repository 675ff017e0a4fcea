// Pooled lookup of all bags of all features in one launch: sum, mean, max, weighted.
//
// A group of lanes takes BAGS consecutive bags of one feature, and AHEAD ids of each at a time, so that several rows are
// in flight before the first is used; a lane holds 16 bytes of the row. Sums run in float in the order of the ids and
// are rounded once.
#include "common.cuh"
#include "spread.cuh"

constexpr int LANES = UNITS > 16 ? 32 : UNITS > 8 ? 16 : UNITS > 4 ? 8 : UNITS > 2 ? 4 : UNITS;
constexpr int STEPS = (UNITS + LANES - 1) / LANES;
#ifndef BAGS
#define BAGS 4
#endif
constexpr int AHEAD = BAGS == 1 ? 4 : 1;  // several bags are short ones
#ifdef HAS_MAX  // without it no table takes maxima: fewer registers, so more rows in flight
constexpr bool MAXIMA = true;
#else
constexpr bool MAXIMA = false;
#endif

__device__ __forceinline__ void add_row(float *acc, row_vector row, float weight) {
#pragma unroll
    for (int k = 0; k < VECTOR; k++) acc[k] = __fmaf_rn(weight, to_float(row.v[k]), acc[k]);
}

// The homes of the AHEAD ids of a bag from `i` on.
__device__ __forceinline__ void read_homes(const int *homes, i64 i, i64 end, int (&found)[AHEAD]) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++) found[a] = i + a < end ? homes[i + a] : DROPPED;
}

// A unit of each of their rows.
__device__ __forceinline__ void read_rows(const row_t *weight, const row_t *away, const Record *records,
                                          const int (&homes)[AHEAD], int unit, row_vector (&rows)[AHEAD]) {
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
        if (homes[a] != DROPPED) rows[a] = load_home(weight, away, records, homes[a], unit);
}

// out (B, total): columns column[f] … of row b are for bag f · B + b; or of row f · below + b, if the features' rows
// are below each other. `stride`: how far the offsets of a feature lie behind those of the one before: B, or B + 1.
// Moves D · itemsize bytes an occurrence and a bag.
extern "C" __global__ void __launch_bounds__(256) bags_pool(
    const row_t *weight, const row_t *away, const Record *records, const int *homes, const i64 *offsets, i64 stride,
    i64 batch, i64 bags, const int *mode, const i64 *column, i64 below, const float *sample_weights, out_t *out,
    i64 total, int *argmax) {
    wait_for_prior_kernel();
    const int lane = threadIdx.x % LANES;
    const i64 group = thread_index() / LANES;
    const u32 groups_a_feature = (u32)((batch + BAGS - 1) / BAGS);
    const i64 feature = (u32)group / groups_a_feature;
    const i64 first = (group - feature * groups_a_feature) * BAGS;  // sample of the first bag
    if (feature * batch >= bags) return;
    const int kind = mode[feature];
    i64 begin[BAGS + 1];  // of each bag among the ids, and of the next
#pragma unroll
    for (int b = 0; b <= BAGS; b++)
        begin[b] = offsets[feature * stride + (first + b < batch ? first + b : batch)];
    int first_homes[BAGS][AHEAD];
#pragma unroll
    for (int b = 0; b < BAGS; b++) read_homes(homes, begin[b], begin[b + 1], first_homes[b]);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int unit = s * LANES + lane;
        if (unit >= UNITS) break;
        row_vector first_rows[BAGS][AHEAD];
#pragma unroll
        for (int b = 0; b < BAGS; b++) read_rows(weight, away, records, first_homes[b], unit, first_rows[b]);
#pragma unroll
        for (int b = 0; b < BAGS; b++) {
            if (first + b >= batch) break;
            float acc[VECTOR];
            int winner[VECTOR], count = 0;
#pragma unroll
            for (int k = 0; k < VECTOR; k++) acc[k] = 0.0f, winner[k] = -1;
            const auto take = [&](i64 i, row_vector row) {
                if (MAXIMA && kind == MAX) {
#pragma unroll
                    for (int k = 0; k < VECTOR; k++) {
                        float value = to_float(row.v[k]);
                        if (count == 0 || value > acc[k] || (value != value && acc[k] == acc[k])) {
                            acc[k] = value;
                            winner[k] = (int)i;
                        }
                    }
                } else {
                    add_row(acc, row, sample_weights ? sample_weights[i] : 1.0f);
                }
                count++;
            };
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                if (first_homes[b][a] != DROPPED) take(begin[b] + a, first_rows[b][a]);
            for (i64 i = begin[b] + AHEAD; i < begin[b + 1]; i += AHEAD) {
                int later_homes[AHEAD];
                row_vector rows[AHEAD];
                read_homes(homes, i, begin[b + 1], later_homes);
                read_rows(weight, away, records, later_homes, unit, rows);
#pragma unroll
                for (int a = 0; a < AHEAD; a++)
                    if (later_homes[a] != DROPPED) take(i + a, rows[a]);
            }
            out_vector result;
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                result.v[k] = output_of(kind == MEAN && count > 1 ? __fdiv_rn(acc[k], (float)count) : acc[k]);
            i64 at = (feature * below + first + b) * total + column[feature] + unit * VECTOR;
            store_streaming(out + at, result);  // read by other kernels, later: the cache is for rows
            if (MAXIMA && argmax && kind == MAX) {
#pragma unroll
                for (int k = 0; k < VECTOR; k++) argmax[at + k] = winner[k];
            }
        }
    }
}

// rows[i] = the row of homes[picked[i]], or of homes[i] where `picked` is null; zeros for padding.
extern "C" __global__ void __launch_bounds__(256) rows_gather(const row_t *weight, const row_t *away,
                                                              const Record *records, const int *homes,
                                                              const i64 *picked, i64 n, row_t *rows) {
    wait_for_prior_kernel();
    const int lane = threadIdx.x % LANES;
    for (i64 i = thread_index() / LANES; i < n; i += thread_count() / LANES) {
        const int home = homes[picked ? picked[i] : i];
        for (int unit = lane; unit < UNITS; unit += LANES) {
            row_vector row = {};
            if (home != DROPPED) row = load_home(weight, away, records, home, unit);
            store_row(rows, i, unit, row);
        }
    }
}

// The same, divided evenly among the ranks; `to`: the memory of each.
extern "C" __global__ void __launch_bounds__(256) rows_spread(const row_t *weight, const row_t *away,
                                                              const Record *records, const int *homes,
                                                              const i64 *picked, i64 n, Spread to) {
    wait_for_prior_kernel();
    const int lane = threadIdx.x % LANES;
    for (i64 i = thread_index() / LANES; i < n; i += thread_count() / LANES) {
        const Target<row_t> target = target_of<row_t>(to, i, WIDTH);
        const int home = homes[picked[target.row]];
        for (int unit = lane; unit < UNITS; unit += LANES) {
            row_vector row = {};
            if (home != DROPPED) row = load_home(weight, away, records, home, unit);
            store_row(target.to, 0, unit, row);
        }
    }
    publish_rows();
}

// gradient[i] = inner product of rows[i] with the gradient of its bag: a fixed tree over the lanes.
extern "C" __global__ void __launch_bounds__(256) weights_gradient(const row_t *rows, const int *homes, const int *bag,
                                                                   i64 n, int batch, const i64 *column,
                                                                   const float *grad, i64 total, float *gradient) {
    wait_for_prior_kernel();
    const int lane = threadIdx.x % LANES;
    for (i64 i = thread_index() / LANES; i < n; i += thread_count() / LANES) {
        const bool real = homes[i] != DROPPED;
        const int feature = real ? bag[i] / batch : 0, sample = real ? bag[i] - feature * batch : 0;
        const float *from = grad + (i64)sample * total + column[feature];
        float sum = 0.0f;
        for (int unit = lane; real && unit < UNITS; unit += LANES) {
            row_vector row = load_row(rows, i, unit);
#pragma unroll
            for (int k = 0; k < VECTOR; k++) sum = __fmaf_rn(to_float(row.v[k]), from[unit * VECTOR + k], sum);
        }
#pragma unroll
        for (int step = LANES / 2; step > 0; step /= 2)
            sum = __fadd_rn(sum, __shfl_xor_sync(group_mask(LANES), sum, step, LANES));
        if (lane == 0) gradient[i] = sum;
    }
}

// scale[i] = one over the bag's size where the table takes means, else 1. A warp a bag.
extern "C" __global__ void __launch_bounds__(256) bags_mean_scale(const int *homes, const i64 *offsets, i64 stride,
                                                                  i64 batch, i64 bags, const int *mode, float *scale) {
    wait_for_prior_kernel();
    for (i64 bag = thread_index() / 32; bag < bags; bag += thread_count() / 32) {
        const i64 feature = bag / batch, at = feature * stride + bag - feature * batch;
        const i64 begin = offsets[at], end = offsets[at + 1];
        int count = 1;
        if (mode[feature] == MEAN) {
            count = 0;
            for (i64 base = begin; base < end; base += 32) {
                bool real = base + lane_index() < end && homes[base + lane_index()] != DROPPED;
                count += __popc(__ballot_sync(FULL_WARP, real));
            }
        }
        const float share = __fdiv_rn(1.0f, (float)(count > 1 ? count : 1));
        for (i64 i = begin + lane_index(); i < end; i += 32) scale[i] = share;
    }
}
