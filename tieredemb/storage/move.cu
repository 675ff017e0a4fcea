// Moving rows: a victim's row from its slot to cold storage if it is dirty, the missed row from there into the slot.
//
// A group of lanes takes a row, 16 bytes a lane, and keeps ROWS rows in flight. Weights and state are arrays of their
// own on both sides. 8 blocks of 1,024 threads saturate PCIe and leave the other multiprocessors to the lookup.
#include "common.cuh"

#ifndef STATE
#define STATE 1  // words of optimizer state a row, without the score
#endif
#ifndef ROWS
#define ROWS 4  // rows in flight a group
#endif
constexpr int LANES = UNITS >= 32 ? 32 : UNITS > 16 ? 32 : UNITS > 8 ? 16 : UNITS > 4 ? 8 : UNITS > 2 ? 4 : UNITS;
constexpr int STEPS = (UNITS + LANES - 1) / LANES;
constexpr u32 MIN_SCORE = 1u;

// For each missed key with a slot: write back what was there, bring the row in. Moves (per direction) D · itemsize +
// 4 (S + 1) bytes a row over PCIe. untouched[m] says that the row was never written and has to be generated.
extern "C" __global__ void __launch_bounds__(1024) rows_swap(
    const int *count, const i64 *missed_keys, const int *missed_slots, const i64 *victim_keys, row_t *hot_weight,
    u32 *hot_state, u32 *score, unsigned char *dirty, row_t *cold_weight, u32 *cold_state, unsigned char *untouched,
    u64 *written_back) {
    const int n = *count;
    const int lane = threadIdx.x % LANES;
    const i64 group = thread_index() / LANES, groups = thread_count() / LANES;
    for (i64 base = group * ROWS; base < n; base += groups * ROWS) {
        row_vector in[ROWS][STEPS], out[ROWS][STEPS];
        u32 in_score[ROWS];
        i64 key[ROWS], victim[ROWS];
        int slot[ROWS];
        bool is_dirty[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            bool have = base + r < n;
            slot[r] = have ? missed_slots[base + r] : -1;
            key[r] = have ? missed_keys[base + r] : 0;
            victim[r] = have ? victim_keys[base + r] : -1;
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (slot[r] < 0) continue;
#pragma unroll
            for (int s = 0; s < STEPS; s++)
                if (s * LANES + lane < UNITS) in[r][s] = load_row(cold_weight, key[r], s * LANES + lane);
            in_score[r] = cold_state[key[r] * (STATE + 1) + STATE];
            is_dirty[r] = victim[r] >= 0 && dirty[slot[r]];
            if (is_dirty[r]) {
#pragma unroll
                for (int s = 0; s < STEPS; s++)
                    if (s * LANES + lane < UNITS) out[r][s] = load_row(hot_weight, slot[r], s * LANES + lane);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (slot[r] < 0) continue;
            if (is_dirty[r]) {
#pragma unroll
                for (int s = 0; s < STEPS; s++)
                    if (s * LANES + lane < UNITS) store_row(cold_weight, victim[r], s * LANES + lane, out[r][s]);
            }
            u32 *home = cold_state + victim[r] * (STATE + 1);
            for (int w = lane; w <= STATE; w += LANES) {
                u32 word = w == STATE ? score[slot[r]] : hot_state[(i64)slot[r] * STATE + w];
                if (victim[r] >= 0 && (is_dirty[r] || w == STATE)) home[w] = word;
            }
#pragma unroll
            for (int s = 0; s < STEPS; s++)
                if (s * LANES + lane < UNITS) store_row(hot_weight, slot[r], s * LANES + lane, in[r][s]);
            for (int w = lane; w < STATE; w += LANES)
                hot_state[(i64)slot[r] * STATE + w] = cold_state[key[r] * (STATE + 1) + w];
        }
        __syncwarp(group_mask(LANES));
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (slot[r] < 0 || lane != 0) continue;
            score[slot[r]] = in_score[r] ? in_score[r] : MIN_SCORE;
            untouched[base + r] = in_score[r] == 0;
            dirty[slot[r]] = in_score[r] == 0;
            if (is_dirty[r]) atomicAdd(written_back, 1ull);
        }
    }
}
