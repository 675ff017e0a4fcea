// The gradients of occurrences, which are those of their bags, to be sent to the owners of their rows; and bags that
// their owners have pooled.
//
// Compiled for rows of one width, of floats, or of what bags are pooled to: a group of lanes takes a row.
#include "common.cuh"
#include "spread.cuh"

constexpr int LANES = UNITS > 16 ? 32 : UNITS > 8 ? 16 : UNITS > 4 ? 8 : UNITS > 2 ? 4 : UNITS;

// Bags and their gradient, `grad` (B, total).
struct Bags {
    const int *bag;  // of each occurrence; null where the bags themselves are sent
    int batch;
    const i64 *column;
    const int *mode;
    const float *grad;
    i64 total;
    const int *argmax;
};

// row = the gradient of the bag of occurrence i, divided by `share`; for a maximum, zero where another one was larger.
// Zero for bag −1, which is of a sample that only other ranks have.
__device__ __forceinline__ void write_gradient(const Bags &bags, i64 i, float share, float *row) {
    const bool is_there = i >= 0;
    const int bag = bags.bag ? bags.bag[i] : is_there ? (int)i : 0;
    const int feature = bag / bags.batch, sample = bag - feature * bags.batch;
    const i64 from = sample * bags.total + bags.column[feature];
#ifdef HAS_MAX
    const bool is_maximum = bags.mode[feature] == MAX;
#endif
    for (int unit = threadIdx.x % LANES; unit < UNITS; unit += LANES) {
        float_vector value = {};
        if (is_there) value = load_floats(bags.grad + from + unit * VECTOR);
#pragma unroll
        for (int e = 0; e < VECTOR; e++) {
#ifdef HAS_MAX
            if (is_maximum && bags.argmax[from + unit * VECTOR + e] != (int)i) value.v[e] = 0.0f;
#endif
            if (share != 1.0f) value.v[e] = __fdiv_rn(value.v[e], share);
        }
        *reinterpret_cast<float_vector *>(row + unit * VECTOR) = value;
    }
}

// rows[k] = the gradient of occurrence order[k]. Moves 8 D bytes an occurrence.
extern "C" __global__ void __launch_bounds__(256) occurrences_gradient(
    const i64 *order, i64 n, const int *bag, int batch, const i64 *column, const int *mode, const float *grad,
    i64 total, const int *argmax, float share, float *rows) {
    wait_for_prior_kernel();
    const Bags bags = {bag, batch, column, mode, grad, total, argmax};
    for (i64 k = thread_index() / LANES; k < n; k += thread_count() / LANES)
        write_gradient(bags, order[k], share, rows + k * WIDTH);
}

// The same, written to the memory of several ranks (`to`), as many to each.
extern "C" __global__ void __launch_bounds__(256) occurrences_spread(
    const i64 *order, i64 n, const int *bag, int batch, const i64 *column, const int *mode, const float *grad,
    i64 total, const int *argmax, float share, Spread to) {
    wait_for_prior_kernel();
    const Bags bags = {bag, batch, column, mode, grad, total, argmax};
    for (i64 k = thread_index() / LANES; k < n; k += thread_count() / LANES) {
        const Target<float> target = target_of<float>(to, k, WIDTH);
        write_gradient(bags, order[target.row], share, target.to);
    }
    publish_rows();
}

// The gradients of bags, to the owners, in whose memory, begins[·], the ones of each rank lie behind those of the ranks
// before. `held` (receivers + 1,): of all features, in the order of the owners, how many come before those of each one;
// none has more than `most` bags, of as many `samples` as any rank has · `order` (n,): repeated where each rank owns
// all. One receiver after another, so that a GPU writes to all of them at the same time.
extern "C" __global__ void __launch_bounds__(256) bags_send(const i64 *order, i64 n, i64 most, int batch, i64 samples,
                                                            const i64 *column, const float *grad, i64 total,
                                                            float share, const i64 *begins, const i64 *held,
                                                            int receivers, int rank) {
    wait_for_prior_kernel();
    const Bags bags = {nullptr, batch, column, nullptr, grad, total, nullptr};
    for (i64 k = thread_index() / LANES; k < most * receivers; k += thread_count() / LANES) {
        const i64 place = k / receivers;
        const int to = (int)(k - place * receivers);
        const i64 before = held[to] * samples, own = held[to + 1] * samples - before;
        if (place >= own) continue;
        write_gradient(bags, order[(before + place) % n], share,
                       reinterpret_cast<float *>(begins[to]) + (rank * own + place) * WIDTH);
    }
    publish_rows();
}

// Rows that lie rank by rank, to the memory of these ranks. Moves 2 D · itemsize bytes a row.
extern "C" __global__ void __launch_bounds__(256) bags_spread(const row_t *rows, i64 n, Spread to) {
    wait_for_prior_kernel();
    for (i64 k = thread_index() / LANES; k < n; k += thread_count() / LANES) {
        const Target<row_t> target = target_of<row_t>(to, k, WIDTH);
        for (int unit = threadIdx.x % LANES; unit < UNITS; unit += LANES)
            store_row(target.to, 0, unit, load_row(rows, target.row, unit));
    }
    publish_rows();
}

// Puts received bags into the columns of their features: rows[k], which are bag order[k], to `out` (B, total); bag −1
// is of a sample that only other ranks have. Moves 2 D · itemsize bytes a bag.
extern "C" __global__ void __launch_bounds__(256) bags_unpack(const i64 *order, i64 n, int batch, const i64 *column,
                                                              const row_t *rows, row_t *out, i64 total) {
    wait_for_prior_kernel();
    for (i64 k = thread_index() / LANES; k < n; k += thread_count() / LANES) {
        const int bag = (int)order[k], feature = bag / batch, sample = bag - feature * batch;
        if (bag < 0) continue;
        row_t *to = out + sample * total + column[feature];
        for (int unit = threadIdx.x % LANES; unit < UNITS; unit += LANES) {
            const row_vector value = load_row(rows, k, unit);
#ifdef UNALIGNED
#pragma unroll
            for (int e = 0; e < VECTOR; e++) to[unit * VECTOR + e] = value.v[e];
#else
            store_row(to, 0, unit, value);
#endif
        }
    }
}
