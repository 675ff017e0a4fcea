// Backward and optimizer in one pass over the segments of a batch (occurrences sorted by home, in order within each).
//
// `segments_find` lists the work: a short segment is one item, a long one an item for each chunk of CHUNK occurrences,
// counted from the segment's start, so that sums depend on nothing but the row's own occurrences. `segments_update`
// sums an item and updates the row, or stores a chunk's sum; `long_segments_update` adds those in order.
#include "common.cuh"

#ifndef STATE
#define STATE 1
#endif
#ifndef KIND
#define KIND 2  // SGD 0, Adagrad 1, row-wise Adagrad 2, Adam 3
#endif
constexpr int CHUNK = 128;
constexpr int LANES = UNITS > 16 ? 32 : UNITS > 8 ? 16 : UNITS > 4 ? 8 : UNITS > 2 ? 4 : UNITS;
constexpr int STEPS = (UNITS + LANES - 1) / LANES;
#ifndef AHEAD
#define AHEAD 4  // gradient rows in flight
#endif

struct Work {
    int items, parts, longs, pad;
};
struct alignas(16) Item {
    int start, count;  // occurrences in the sorted order
    int home;          // the row, or of a chunk where its sum goes, as −1 − part
    int table;
};
struct alignas(16) Long {
    int home, first, parts, table;
};

// sorted_bag[p] = bag of the p-th occurrence in the sorted order.
extern "C" __global__ void occurrences_gather(const i64 *order, const int *bag, int n, int *sorted_bag) {
    for (i64 p = thread_index(); p < n; p += thread_count()) sorted_bag[p] = bag[order[p]];
}

// End of the segment that starts at `start` and is longer than CHUNK, found by the whole warp 32 places at a time.
__device__ __forceinline__ int segment_end(const int *homes, int n, int start, int home) {
    int low = start + CHUNK, high = n;  // homes[low] == home; the end lies in (low, high]
    while (high - low > 1) {
        int step = (high - low + 31) / 32;
        int probe = low + step * (lane_index() + 1);
        bool inside = probe < high && homes[probe] == home;
        int last = __popc(__ballot_sync(FULL_WARP, inside));  // probes are inside up to some lane
        int new_low = low + step * last;
        int beyond = low + step * (last + 1);
        if (beyond < high) high = beyond;
        low = new_low;
        if (step == 1) break;
    }
    return low + 1;
}

extern "C" __global__ void segments_find(const int *homes, int n, const int *sorted_bag, int batch, Work *work,
                                         Item *items, Long *longs) {
    for (i64 base = (i64)blockIdx.x * blockDim.x; base < n; base += thread_count()) {
        int p = (int)base + threadIdx.x;
        int home = p < n ? homes[p] : -1;
        bool head = home >= 0 && (p == 0 || homes[p - 1] != home);
        bool is_long = head && p + CHUNK < n && homes[p + CHUNK] == home;
        bool is_short = head && !is_long;
        // the next head in the warp ends a short segment; the last one of the warp has to look on
        u32 heads = __ballot_sync(FULL_WARP, head || home < 0);
        u32 later = heads & ~((2u << lane_index()) - 1);
        int count = later ? __ffs(later) - 1 - lane_index() : 32 - lane_index();
        if (is_short && !later)
            while (p + count < n && homes[p + count] == home) count++;
        int at = append(&work->items, is_short);
        if (is_short) items[at] = Item{p, count, home, sorted_bag[p] / batch};
        for (u32 todo = __ballot_sync(FULL_WARP, is_long); todo; todo &= todo - 1) {
            int leader = __ffs(todo) - 1;
            int start = __shfl_sync(FULL_WARP, p, leader), row = __shfl_sync(FULL_WARP, home, leader);
            int end = segment_end(homes, n, start, row), parts = (end - start + CHUNK - 1) / CHUNK;
            int table = sorted_bag[start] / batch, first = 0, item = 0;
            if (lane_index() == 0) {
                first = atomicAdd(&work->parts, parts);
                item = atomicAdd(&work->items, parts);
                longs[atomicAdd(&work->longs, 1)] = Long{row, first, parts, table};
            }
            first = __shfl_sync(FULL_WARP, first, 0);
            item = __shfl_sync(FULL_WARP, item, 0);
            for (int c = lane_index(); c < parts; c += 32) {
                int from = start + c * CHUNK;
                items[item + c] = Item{from, end - from < CHUNK ? end - from : CHUNK, -1 - (first + c), table};
            }
        }
    }
}

struct Numbers {
    float eps, one_less_beta1, one_less_beta2, scale;
};

// Sum of a lane's squares over the lanes of the row, the same on every lane: a fixed tree.
__device__ __forceinline__ float lanes_sum(float value) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) value = __fadd_rn(value, __shfl_xor_sync(group_mask(LANES), value, step, LANES));
    return value;
}

// What an update reads of a row besides its gradient; asked for early, as it does not depend on it.
struct Row {
    row_vector weight[STEPS];
    float accumulator;
};
__device__ __forceinline__ Row row_read(const row_t *weight, const float *state, i64 home, int lane) {
    Row row;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        if (s * LANES + lane < UNITS) row.weight[s] = load_row(weight, home, s * LANES + lane);
    row.accumulator = KIND == 2 ? state[home] : 0.0f;
    return row;
}

// One optimizer step of a row; weights are rounded once. The only update routine: hot, cold, long, short.
__device__ __forceinline__ void row_update(row_t *weight, float *state, i64 home, Row row, float (*g)[VECTOR], int lane,
                                           float rate, const Numbers &numbers) {
    float step_size = rate;
    if (KIND == 2) {
        float squares = 0.0f;
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                if (s * LANES + lane < UNITS) squares = __fmaf_rn(g[s][k], g[s][k], squares);
        float total = __fadd_rn(row.accumulator, __fdiv_rn(lanes_sum(squares), (float)WIDTH));
        if (lane == 0) state[home] = total;
        step_size = __fdiv_rn(rate, __fadd_rn(__fsqrt_rn(total), numbers.eps));
    }
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int unit = s * LANES + lane;
        if (unit >= UNITS) break;
        row_vector value = row.weight[s];
#pragma unroll
        for (int k = 0; k < VECTOR; k++) {
            float w = to_float(value.v[k]), d = g[s][k];
            if (KIND == 0 || KIND == 2) {
                w = __fmaf_rn(-step_size, d, w);
            } else if (KIND == 1) {
                float *sum = state + home * STATE + unit * VECTOR + k;
                float total = __fmaf_rn(d, d, *sum);
                *sum = total;
                w = __fmaf_rn(-rate, __fdiv_rn(d, __fadd_rn(__fsqrt_rn(total), numbers.eps)), w);
            } else {
                float *m_at = state + home * STATE + unit * VECTOR + k, *v_at = m_at + WIDTH;
                float m = __fmaf_rn(__fsub_rn(d, *m_at), numbers.one_less_beta1, *m_at);
                float v = __fmaf_rn(__fmaf_rn(d, d, -*v_at), numbers.one_less_beta2, *v_at);
                *m_at = m;
                *v_at = v;
                w = __fmaf_rn(-rate, __fdiv_rn(m, __fadd_rn(__fsqrt_rn(v), numbers.eps)), w);
            }
            value.v[k] = from_float(w);
        }
        store_row(weight, home, unit, value);
    }
}

// Sums the gradients of each item. Reads 4 D bytes an occurrence; a short segment's row and state once each way.
extern "C" __global__ void __launch_bounds__(256) segments_update(
    const Work *work, const Item *items, const int *sorted_bag, int batch, const i64 *column, const float *grad,
    i64 total, const float *sorted_scale, row_t *weight, float *state, unsigned char *dirty, const float *rate,
    const Numbers *numbers, float *parts) {
    const int lane = threadIdx.x % LANES;
    const int group = (int)(thread_index() / LANES), groups = (int)(thread_count() / LANES);
    const Numbers constants = *numbers;
    const int count = work->items;
    Item next = group < count ? items[group] : Item{0, 0, 0, 0};
    for (int w = group; w < count; w += groups) {
        const Item item = next;
        if (w + groups < count) next = items[w + groups];
        const float *base = grad + column[item.table] - (i64)item.table * batch * total + lane * VECTOR;
        Row row;
        if (item.home >= 0) row = row_read(weight, state, item.home, lane);
        float acc[STEPS][VECTOR];
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++) acc[s][k] = 0.0f;
        for (int p = 0; p < item.count; p += AHEAD) {
            float_vector g[AHEAD][STEPS];
            float scale[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (p + a >= item.count) break;
                const float *from = base + (i64)sorted_bag[item.start + p + a] * total;
                scale[a] = sorted_scale ? sorted_scale[item.start + p + a] : 1.0f;
#pragma unroll
                for (int s = 0; s < STEPS; s++)
                    if (s * LANES + lane < UNITS)
                        g[a][s] = *reinterpret_cast<const float_vector *>(from + s * LANES * VECTOR);
            }
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (p + a >= item.count) break;
#pragma unroll
                for (int s = 0; s < STEPS; s++)
#pragma unroll
                    for (int k = 0; k < VECTOR; k++)
                        if (s * LANES + lane < UNITS)
                            acc[s][k] = sorted_scale ? __fmaf_rn(g[a][s].v[k], scale[a], acc[s][k])
                                                     : __fadd_rn(acc[s][k], g[a][s].v[k]);
            }
        }
        if (item.home < 0) {
            float *part = parts + (i64)(-1 - item.home) * WIDTH + lane * VECTOR;
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int k = 0; k < VECTOR; k++)
                    if (s * LANES + lane < UNITS) part[s * LANES * VECTOR + k] = acc[s][k];
            continue;
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++) acc[s][k] = __fmul_rn(acc[s][k], constants.scale);
        row_update(weight, state, item.home, row, acc, lane, rate[item.table], constants);
        if (lane == 0) dirty[item.home] = 1;
    }
}

// Adds the chunks of each long segment in order and updates its row.
extern "C" __global__ void __launch_bounds__(256) long_segments_update(
    const Work *work, const Long *longs, const float *parts, row_t *weight, float *state,
    unsigned char *dirty, const float *rate, const Numbers *numbers) {
    const int lane = threadIdx.x % LANES;
    const i64 group = thread_index() / LANES, groups = thread_count() / LANES;
    const Numbers constants = *numbers;
    for (i64 w = group; w < work->longs; w += groups) {
        Long segment = longs[w];
        float acc[STEPS][VECTOR];
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++) acc[s][k] = 0.0f;
        for (int c = 0; c < segment.parts; c++)
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int k = 0; k < VECTOR; k++)
                    if (s * LANES + lane < UNITS)
                        acc[s][k] = __fadd_rn(
                            acc[s][k], parts[(i64)(segment.first + c) * WIDTH + (s * LANES + lane) * VECTOR + k]);
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++) acc[s][k] = __fmul_rn(acc[s][k], constants.scale);
        Row row = row_read(weight, state, segment.home, lane);
        row_update(weight, state, segment.home, row, acc, lane, rate[segment.table], constants);
        if (lane == 0) dirty[segment.home] = 1;
    }
}
