// Initial values on the GPU: Philox4x32-10, AS 241, the same bits as `initial_cpu.py`.
//
// Every float operation is spelled as the correctly rounded one that the CPU runs, in the CPU's order. A group of lanes
// takes a row, four columns a lane and Philox block. Writes D · itemsize + 4 S bytes a row and reads next to nothing.
#include "philox.cuh"

constexpr int QUADS = (WIDTH + 3) / 4;
static_assert(UNITS * VECTOR == WIDTH, "rows of another width");
constexpr int LANES = QUADS > 16 ? 32 : QUADS > 8 ? 16 : QUADS > 4 ? 8 : QUADS > 2 ? 4 : QUADS > 1 ? 2 : 1;

struct alignas(4 * sizeof(row_t)) row_quad {
    row_t v[4];
};

// What a row is generated from: what all words of state start as (but the last one, where that is the step that the row
// stands at), the seed, and the key space's tables, sorted by their first key; `ids`: of each two, what the generator
// calls its first row, and by how much it counts on from row to row.
struct Generator {
    u32 state_word, seed_low, seed_high;
    int n_tables, has_last_step;
    const i64 *start, *ids;
    const u32 *number;
    const int *kind;
    const float *params;
    const i64 *padding_key;
};

// Natural logarithm of a normal positive float (Cephes logf).
__device__ __forceinline__ float log_of(float x) {
    u32 bits = __float_as_uint(x);
    int exponent = (int)(bits >> 23) - 126;
    float m = __uint_as_float((bits & 0x007FFFFFu) | 0x3F000000u);
    if (m < 0.70710677f) {
        exponent -= 1;
        m = __fadd_rn(m, m);
    }
    m = __fsub_rn(m, 1.0f);
    float z = __fmul_rn(m, m);
    float y = 7.0376836292e-2f;
    y = __fmaf_rn(y, m, -1.1514610310e-1f);
    y = __fmaf_rn(y, m, 1.1676998740e-1f);
    y = __fmaf_rn(y, m, -1.2420140846e-1f);
    y = __fmaf_rn(y, m, 1.4249322787e-1f);
    y = __fmaf_rn(y, m, -1.6668057665e-1f);
    y = __fmaf_rn(y, m, 2.0000714765e-1f);
    y = __fmaf_rn(y, m, -2.4999993993e-1f);
    y = __fmaf_rn(y, m, 3.3333331174e-1f);
    y = __fmul_rn(__fmul_rn(y, m), z);
    float e = __int2float_rn(exponent);
    y = __fmaf_rn(e, -2.12194440e-4f, y);
    y = __fmaf_rn(-0.5f, z, y);
    return __fmaf_rn(e, 0.693359375f, __fadd_rn(m, y));
}

__device__ __forceinline__ float cubic(float r, float a, float b, float c, float d) {
    return __fmaf_rn(__fmaf_rn(__fmaf_rn(a, r, b), r, c), r, d);
}
__device__ __forceinline__ float square(float r, float a, float b, float c) {
    return __fmaf_rn(__fmaf_rn(a, r, b), r, c);
}

// Standard normal value of 32 random bits: the sign from the highest, a tail probability from the others.
__device__ __forceinline__ float normal_of(u32 bits) {
    float tail = __fmaf_rn(__uint2float_rn(bits & 0x7FFFFFFFu), 0x1p-32f, 0x1p-33f);  // (0, 0.5]
    float q = __fsub_rn(0.5f, tail), n, d;
    if (q <= 0.425f) {
        float r = __fmaf_rn(-q, q, 0.180625f);
        n = __fmul_rn(q, cubic(r, 5.9109374720e1f, 1.5929113202e2f, 5.0434271938e1f, 3.3871327179f));
        d = cubic(r, 6.7187563600e1f, 7.8757757664e1f, 1.7895169469e1f, 1.0f);
    } else {
        float r = __fsqrt_rn(-log_of(tail));
        if (r <= 5.0f) {
            r = __fsub_rn(r, 1.6f);
            n = cubic(r, 1.7023821103e-1f, 1.3067284816f, 2.7568153900f, 1.4234372777f);
            d = square(r, 1.2021132975e-1f, 7.3700164250e-1f, 1.0f);
        } else {
            r = __fsub_rn(r, 5.0f);
            n = cubic(r, 1.7337203997e-2f, 4.2868294337e-1f, 3.0812263860f, 6.6579051150f);
            d = square(r, 1.2258202635e-2f, 2.4197894225e-1f, 1.0f);
        }
    }
    float value = __fdiv_rn(n, d);
    return bits >> 31 ? -value : value;
}

// The initial value that 32 random bits stand for: normal (mean a, deviation b), or uniform in [a, b).
__device__ __forceinline__ float value_of(u32 bits, int kind, float a, float b) {
    if (kind == NORMAL) return __fmaf_rn(normal_of(bits), b, a);
    return __fmaf_rn(__fmul_rn(__uint2float_rn(bits >> 8), 0x1p-24f), __fsub_rn(b, a), a);
}

// The last table that starts at or before `key`.
__device__ __forceinline__ int table_of(i64 key, const Generator &from) {
    int low = 0, high = from.n_tables;
    while (low < high) {
        int middle = (low + high) / 2;
        if (from.start[middle] <= key)
            low = middle + 1;
        else
            high = middle;
    }
    return low - 1;
}

__device__ __forceinline__ void store_quad(row_t *weight, int quad, const row_quad &value) {
    if constexpr (WIDTH % 4 == 0) {
        *reinterpret_cast<row_quad *>(weight + 4 * quad) = value;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (4 * quad + i < WIDTH) weight[4 * quad + i] = value.v[i];
    }
}

// One row by the LANES lanes of a group: its weights to `weight`, and the first words of `state`.
__device__ __forceinline__ void row_generate(i64 key, row_t *weight, u32 *state, int state_words,
                                             const Generator &from) {
    const int lane = threadIdx.x % LANES;
    for (int w = lane; w < state_words; w += LANES)
        state[w] = from.has_last_step && w == state_words - 1 ? 0 : from.state_word;
    const int table = table_of(key, from);
    const bool padding = key == from.padding_key[table];
    const u64 id = (u64)(from.ids[2 * table] + from.ids[2 * table + 1] * (key - from.start[table]));
    const u32 number = from.number[table];
    const int kind = from.kind[table];
    const float a = from.params[2 * table], b = from.params[2 * table + 1];
    for (int quad = lane; quad < QUADS; quad += LANES) {
        uint4 r = philox((u32)id, (u32)(id >> 32), (u32)quad, number, from.seed_low, from.seed_high);
        const u32 bits[4] = {r.x, r.y, r.z, r.w};
        row_quad value;
#pragma unroll
        for (int i = 0; i < 4; i++) value.v[i] = from_float(padding ? 0.0f : value_of(bits[i], kind, a, b));
        store_quad(weight, quad, value);
    }
}

// The rows never written among the missed: of each untouched m < *count the row of keys[m], into hot slot slots[m], or
// where that is negative into the row keys[m] of the cold ones, or with a home of −2 − r and not `by_key` row r, whose last
// state word, the score, is left alone. Where `some` is given and zero there are none.
extern "C" __global__ void __launch_bounds__(256) rows_generate(
    const int *count, const int *some, const i64 *keys, const int *slots, const unsigned char *untouched,
    row_t *hot_weight, word_t *hot_state, row_t *cold_weight, word_t *cold_state, int by_key, int state_words,
    Generator from) {
    wait_for_prior_kernel();
    if (some && *some == 0) return;
    const int n = *count;
    const i64 groups = thread_count() / LANES;
    for (i64 m = thread_index() / LANES; m < n; m += groups) {
        if (!untouched[m]) continue;
        const i64 key = keys[m], slot = slots[m];
        const bool hot = slot >= 0;
        const i64 cold = by_key ? key : -2 - slot;
        row_t *weight = hot ? hot_weight + slot * WIDTH : cold_weight + cold * WIDTH;
        u32 *state = hot ? hot_state + slot * state_words : cold_state + cold * (state_words + 1);
        row_generate(key, weight, state, state_words, from);
    }
}

// A range of rows: of the keys first_key … first_key + n - 1 into the rows from first_row on of hot arrays.
extern "C" __global__ void __launch_bounds__(256) rows_generate_range(
    i64 first_key, i64 first_row, i64 n, row_t *weight, word_t *state, int state_words, Generator from) {
    wait_for_prior_kernel();
    const i64 groups = thread_count() / LANES;
    for (i64 i = thread_index() / LANES; i < n; i += groups) {
        const i64 row = first_row + i;
        row_generate(first_key + i, weight + row * WIDTH, state + row * state_words, state_words, from);
    }
}
