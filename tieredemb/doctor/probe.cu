// Random rows between cold memory and the GPU, as plainly as a kernel can move them: what the doctor measures a tier with.
//
// A group of lanes takes a row, 16 bytes a lane, and keeps ROWS rows in flight; 8 blocks of 1,024 threads saturate PCIe,
// and are what the library moves rows with. Reads and writes D · itemsize bytes a row.
#include "common.cuh"

constexpr int ROWS = 4;
constexpr int LANES = UNITS > 16 ? 32 : UNITS > 8 ? 16 : UNITS > 4 ? 8 : UNITS > 2 ? 4 : UNITS;
constexpr int STEPS = (UNITS + LANES - 1) / LANES;

// Row `from(i)` of `source` to row `to(i)` of `target`, for each i < n.
template <class From, class To>
__device__ __forceinline__ void rows_move(i64 n, const row_t *source, row_t *target, From from, To to) {
    const int lane = threadIdx.x % LANES;
    const i64 group = thread_index() / LANES, groups = thread_count() / LANES;
    for (i64 base = group * ROWS; base < n; base += groups * ROWS) {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int unit = s * LANES + lane;
            if (unit >= UNITS) continue;
            row_vector held[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (base + r < n) held[r] = load_row(source, from(base + r), unit);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (base + r < n) store_row(target, to(base + r), unit, held[r]);
        }
    }
}

// out[i] = cold[keys[i]]
extern "C" __global__ void __launch_bounds__(1024)
    rows_gather(const i64 *keys, i64 n, const row_t *cold, row_t *out) {
    wait_for_prior_kernel();
    rows_move(n, cold, out, [=](i64 i) { return keys[i]; }, [](i64 i) { return i; });
}

// cold[keys[i]] = in[i]
extern "C" __global__ void __launch_bounds__(1024)
    rows_scatter(const i64 *keys, i64 n, row_t *cold, const row_t *in) {
    wait_for_prior_kernel();
    rows_move(n, in, cold, [](i64 i) { return i; }, [=](i64 i) { return keys[i]; });
}
