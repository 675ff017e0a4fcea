// How weights are rounded into rows: to nearest, or with -DSTOCHASTIC up or down at random, so that their mean is
// unchanged. The CPU twin is rounding_cpu.py; see lookup/rounding.py.
#pragma once
#include "philox.cuh"

#ifdef STOCHASTIC
constexpr bool IS_STOCHASTIC = true;
#else
constexpr bool IS_STOCHASTIC = false;
#endif

// What the random bits of a row depend on. For the features' tables: their first key, the slot of their first row if
// they are resident or −1, the generator's number of the table, and the table's index in `steps` · `ids`: for each
// table two, the generator's number of its first row, and the step from row to row · `key`: of each slot that is not a
// resident table's · `records`: of rows without a slot · `steps`: taken by the tables.
struct Draws {
    u32 seed_low, seed_high;
    const i64 *first, *resident;
    const u32 *number;
    const int *table;
    const i64 *ids, *key;
    const Record *records;
    const i64 *steps;
};

// A row that random bits are drawn for.
struct Drawn {
    u32 seed_low, seed_high, low, high, number, step;
};

// The row at `home`, of the table of `feature`, at the number of steps that the table has taken.
__device__ __forceinline__ Drawn drawn_of(const Draws &draws, int home, int feature) {
    if constexpr (!IS_STOCHASTIC) return {};
    const i64 first_slot = draws.resident[feature];
    i64 row;
    if (home < 0)
        row = draws.records[-2 - (i64)home].key - 1 - draws.first[feature];
    else
        row = first_slot >= 0 ? home - first_slot : draws.key[home] - draws.first[feature];
    const i64 id = draws.ids[2 * feature] + draws.ids[2 * feature + 1] * row;
    return {draws.seed_low, draws.seed_high, (u32)id, (u32)((u64)id >> 32), draws.number[feature],
            (u32)draws.steps[draws.table[feature]]};
}

// A 16-bit float of a finite one is finite; infinities and NaNs stay. `bits`: 16 random ones.
__device__ __forceinline__ u16 stochastic_of(float f, u32 bits) {
    const u32 word = __float_as_uint(f), size = word & 0x7FFFFFFFu, sign = (word >> 16) & 0x8000u;
#if defined(ROW_HALF)
    if (size >= 0x7F800000u) return (u16)(sign | (size > 0x7F800000u ? 0x7E00u : 0x7C00u));
    u32 rounded;
    if (size < 0x38800000u) {  // in steps of 2^-24
        const float scaled = __fmul_rn(__uint_as_float(size), 16777216.0f), down = floorf(scaled);
        rounded = (u32)down + ((bits + (u32)__fmul_rn(__fsub_rn(scaled, down), 65536.0f)) >> 16);
    } else {
        rounded = (size - 0x38000000u + (bits >> 3)) >> 13;
    }
    return (u16)(sign | (rounded < 0x7C00u ? rounded : 0x7BFFu));
#else
    if (size >= 0x7F800000u) return (u16)(sign | (size > 0x7F800000u ? (size >> 16) | 0x40u : 0x7F80u));
    const u32 rounded = (size + bits) >> 16;
    return (u16)(sign | (rounded < 0x7F80u ? rounded : 0x7F7Fu));
#endif
}

#ifdef WIDTH
// The values of one unit of a row, rounded. `purpose`: what they are rounded for; each purpose has random bits of its
// own.
__device__ __forceinline__ row_vector rounded(const float (&values)[VECTOR], int unit, const Drawn &row, u32 step,
                                              u32 purpose) {
    row_vector result;
#ifdef STOCHASTIC
    uint4 random = {};
#pragma unroll
    for (int k = 0; k < VECTOR; k++) {
        const int element = unit * VECTOR + k;
        if (k == 0 || element % DRAWS == 0) {
            const u32 block = (u32)(element / DRAWS) | purpose << 16 | row.high << 18;
            random = philox(row.low, step, row.number, block, row.seed_low, row.seed_high);
        }
        const int pair = element % DRAWS / 2;
        const u32 word = pair == 0 ? random.x : pair == 1 ? random.y : pair == 2 ? random.z : random.w;
        result.v[k] = stochastic_of(values[k], element % 2 ? word >> 16 : word & 0xFFFFu);
    }
#else
#pragma unroll
    for (int k = 0; k < VECTOR; k++) result.v[k] = from_float(values[k]);
#endif
    return result;
}
#endif
