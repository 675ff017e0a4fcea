// Moving rows: a victim's row from its slot to cold storage if it is dirty, the missed row from there into the slot.
//
// A group of lanes takes a row, 16 bytes a lane, and keeps ROWS rows in flight. Weights and state are separate arrays
// on both sides; the last word of a cold state is the score.
#include "clients.cuh"
#include "common.cuh"
#include "plan.cuh"

#ifndef STATE
#define STATE 1  // words of optimizer state a row, without the score
#endif
#ifndef ROWS
#define ROWS 2  // rows in flight a group: 4 took a third longer
#endif
constexpr int LANES = UNITS > 16 ? 32 : UNITS > 8 ? 16 : UNITS > 4 ? 8 : UNITS > 2 ? 4 : UNITS;
constexpr int STEPS = (UNITS + LANES - 1) / LANES;
constexpr int WORDS = (STATE + LANES) / LANES;  // of state and score that a lane moves
constexpr bool STATE_AHEAD = WORDS <= 2;        // read with the weights: there are not enough registers for wide states

// For each missed key with a slot: writes the row that was there back, and fills the missed row in. Moves (per
// direction) D · itemsize + 4 (S + 1) bytes a row over PCIe. If there are victims, only `swap_blocks` blocks do all of
// it, unless that is 0: more blocks write no faster, and fill the queues to memory that other kernels wait in. A group
// that has moved its rows takes the next ones, so that blocks which share a multiprocessor with other kernels move
// fewer. untouched[m] says that the row was never written and has to be generated, and these are counted; of a row that
// stays in cold storage (a negative slot) only the score is read. With a `clock`, that of the last plan, the rows are
// those of a plan: a score is the stored one with `remember`, else the lowest; if `scored` it is raised by its use, and
// once more if the next plan, which may be in progress, has used the row, too; the victims' scores are victim_scores.
// Without a clock a score is the stored one. Without missed_keys the host has brought the rows, row m for the m-th key,
// and has those of the victims, which are only counted; without victim_keys no row is evicted. Without `moved` nothing
// is counted; else evicted rows are counted for the client whose rows replace them. Called again, it does nothing.
extern "C" __global__ void __launch_bounds__(1024) rows_swap(
    Moving *moving, const i64 *missed_keys, const int *missed_slots, const i64 *victim_keys, const u32 *victim_scores,
    int swap_blocks, row_t *hot_weight, word_t *hot_state, u32 *score, unsigned char *dirty, row_t *cold_weight,
    word_t *cold_state, unsigned char *untouched, Moved *moved, const Clock *clock, int kind, float unit, int remember,
    int scored) {
    wait_for_prior_kernel();
    if (moving->over) {
        if (thread_index() == 0) moving->untouched = 0;
        return;
    }
    __shared__ int written, clean, fresh, blank;
    __shared__ Tally<OF_SWAPS, 3> tally;
    if (threadIdx.x == 0) written = clean = fresh = blank = 0;
    tally_begin(tally);
    __syncthreads();
    const int n = moving->missed;
    const i64 now = moving->now;
    const int lane = threadIdx.x % LANES;
    const bool in_place = missed_keys != nullptr;
    const int blocks = swap_blocks && moving->needed && swap_blocks < gridDim.x ? swap_blocks : gridDim.x;
    const i64 group = thread_index() / LANES, groups = (i64)blocks * blockDim.x / LANES;
    i64 next = 0;
    for (i64 base = blockIdx.x < blocks ? group * ROWS : n; base < n; base = next) {
        u32 given = 0;
        if (lane == 0) given = atomicAdd(&moving->given, ROWS);
        row_vector in[ROWS][STEPS], out[ROWS][STEPS];
        u32 in_score[ROWS], in_state[ROWS][STATE_AHEAD ? WORDS : 1];
        i64 key[ROWS], victim[ROWS];
        int slot[ROWS];
        bool have[ROWS], is_dirty[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            have[r] = base + r < n;
            slot[r] = have[r] ? missed_slots[base + r] : -1;
            key[r] = !have[r] ? 0 : in_place ? missed_keys[base + r] : base + r;
            victim[r] = have[r] && victim_keys ? victim_keys[base + r] : -1;
            is_dirty[r] = false;
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const u32 *cold = cold_state + key[r] * (STATE + 1);
            if constexpr (STATE_AHEAD) {
#pragma unroll
                for (int k = 0; k < WORDS; k++)
                    if (have[r] && k * LANES + lane <= STATE) in_state[r][k] = cold[k * LANES + lane];
            } else if (have[r]) {
                in_score[r] = cold[STATE];
            }
            if (slot[r] < 0) continue;
#pragma unroll
            for (int s = 0; s < STEPS; s++)
                if (s * LANES + lane < UNITS) in[r][s] = load_row(cold_weight, key[r], s * LANES + lane);
            is_dirty[r] = victim[r] >= 0 && dirty[slot[r]];
            if (is_dirty[r] && in_place) {
#pragma unroll
                for (int s = 0; s < STEPS; s++)
                    if (s * LANES + lane < UNITS) out[r][s] = load_row(hot_weight, slot[r], s * LANES + lane);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if constexpr (STATE_AHEAD)
                in_score[r] = __shfl_sync(group_mask(LANES), in_state[r][STATE / LANES], STATE % LANES, LANES);
            if (slot[r] < 0) continue;
            if (is_dirty[r] && in_place) {
#pragma unroll
                for (int s = 0; s < STEPS; s++)
                    if (s * LANES + lane < UNITS) store_row(cold_weight, victim[r], s * LANES + lane, out[r][s]);
            }
            u32 *home = cold_state + victim[r] * (STATE + 1);
            for (int w = lane; w <= STATE; w += LANES) {
                if (in_place && victim[r] >= 0 && (is_dirty[r] || w == STATE))
                    home[w] = w == STATE ? victim_scores[base + r] : hot_state[(i64)slot[r] * STATE + w];
            }
#pragma unroll
            for (int s = 0; s < STEPS; s++)
                if (s * LANES + lane < UNITS) store_row(hot_weight, slot[r], s * LANES + lane, in[r][s]);
            if constexpr (STATE_AHEAD) {
#pragma unroll
                for (int k = 0; k < WORDS; k++)
                    if (k * LANES + lane < STATE) hot_state[(i64)slot[r] * STATE + k * LANES + lane] = in_state[r][k];
            } else {
                for (int w = lane; w < STATE; w += LANES)
                    hot_state[(i64)slot[r] * STATE + w] = cold_state[key[r] * (STATE + 1) + w];
            }
        }
        __syncwarp(group_mask(LANES));
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (!have[r] || lane != 0) continue;
            untouched[base + r] = in_score[r] == 0;
            if (in_score[r] == 0) atomicAdd(&blank, 1);
            u32 its_score = in_score[r] < MAX_SCORE ? in_score[r] : MAX_SCORE;
            if (clock) {
                if (its_score == 0 || !remember) its_score = MIN_SCORE;
                if (scored) its_score = raised(its_score, now, kind, unit);
            }
            if (slot[r] < 0) {
                if (clock) cold_state[key[r] * (STATE + 1) + STATE] = its_score;
                continue;
            }
            if (in_score[r] == 0) atomicAdd(&fresh, 1);
            if (clock == nullptr) score[slot[r]] = its_score;
            else if (atomicExch(score + slot[r], its_score) == ARRIVING_USED)
                score[slot[r]] = raised(its_score, __ldcg(&clock->now), kind, unit);
            dirty[slot[r]] = in_score[r] == 0;  // a row that was never written is not in cold storage yet
            if (victim[r] >= 0) atomicAdd(is_dirty[r] ? &written : &clean, 1);
            if (moved && (victim[r] >= 0 || in_score[r] == 0)) {
                const Clients &clients = clients_behind(moved);
                tally_row(tally, clients, in_place ? key[r] : clients.keys[slot[r]],
                          {in_score[r] == 0, is_dirty[r], victim[r] >= 0 && !is_dirty[r]});
            }
        }
        next = groups * ROWS + (i64)__shfl_sync(group_mask(LANES), given, 0, LANES);
    }
    __syncthreads();
    if (moved) tally_end(tally, clients_behind(moved));
    if (threadIdx.x != 0) return;
    if (blank) atomicAdd(&moving->untouched, blank);
    __threadfence();
    if (atomicAdd(&moving->through, 1u) == gridDim.x - 1) moving->over = 1;
    if (!moved) return;
    if (fresh) atomicAdd(&moved->generated, (u64)fresh);
    if (written) atomicAdd(&moved->written_back, (u64)written);
    if (clean) atomicAdd(&moved->scores_written, (u64)clean);
}

// Writes slots back, and keeps their rows: slot first_slot + i, or slots[i], for i < n, and i < *count if that is
// given, to cold row keys[i], or first_key + i without keys; negative keys are skipped. A dirty row is written whole
// and becomes clean, of a clean one only the score is written. If `was_dirty` is given, the destination is a buffer,
// whose row i is for the i-th slot; `was_dirty` gets the dirty flags, and those of the slots stay. Without `moved`
// nothing is counted.
extern "C" __global__ void __launch_bounds__(1024) rows_write_back(
    const int *count, i64 n, i64 first_slot, i64 first_key, const int *slots, const i64 *keys, const row_t *hot_weight,
    const word_t *hot_state, const u32 *score, unsigned char *dirty, row_t *cold_weight, word_t *cold_state,
    unsigned char *was_dirty, Moved *moved) {
    wait_for_prior_kernel();
    __shared__ int written, clean;
    __shared__ Tally<OF_WRITES, 2> tally;
    if (threadIdx.x == 0) written = clean = 0;
    tally_begin(tally);
    __syncthreads();
    if (count && *count < n) n = *count;
    const int lane = threadIdx.x % LANES;
    const i64 group = thread_index() / LANES, groups = thread_count() / LANES;
    for (i64 i = group; i < n; i += groups) {
        const i64 slot = slots ? slots[i] : first_slot + i, key = keys ? keys[i] : first_key + i;
        if (key < 0 || slot < 0) continue;
        const bool is_dirty = dirty[slot];
        if (!is_dirty && !keys) continue;  // without keys: rows of resident tables, whose scores do not change
        if (is_dirty)
#pragma unroll
            for (int s = 0; s < STEPS; s++)
                if (s * LANES + lane < UNITS)
                    store_row(cold_weight, was_dirty ? i : key, s * LANES + lane,
                              load_row(hot_weight, slot, s * LANES + lane));
        u32 *home = cold_state + (was_dirty ? i : key) * (STATE + 1);
        for (int w = lane; w <= STATE; w += LANES)
            if (is_dirty || w == STATE) home[w] = w == STATE ? score[slot] : hot_state[slot * STATE + w];
        __syncwarp(group_mask(LANES));
        if (lane != 0) continue;
        if (was_dirty) was_dirty[i] = is_dirty;
        else dirty[slot] = 0;
        atomicAdd(is_dirty ? &written : &clean, 1);
        if (moved) tally_row(tally, clients_behind(moved), key, {is_dirty, !is_dirty});
    }
    __syncthreads();
    if (moved) tally_end(tally, clients_behind(moved));
    if (threadIdx.x != 0 || !moved) return;
    if (written) atomicAdd(&moved->written_back, (u64)written);
    if (clean) atomicAdd(&moved->scores_written, (u64)clean);
}

// Reports to the host what a plan of n ids moves. `report`, int64 (4 + 2 n): the number of missed keys, M, how many of
// them get slots never used, the number of victims, and `number`, which the last block writes after all else; from 4 on
// the M missed keys, and from 4 + n on the M victims' keys, −1 where a key has none. `is_dirty`, (n,): whether the row
// in that slot is to be written back. `finished`, the number of blocks that are done, is 0 before and after.
extern "C" __global__ void missed_report(const int *missed, const int *into_unused, const int *needed,
                                         const int *chosen, i64 n, const i64 *missed_keys, const i64 *victim_keys,
                                         const int *missed_slots, const unsigned char *dirty, i64 *report,
                                         unsigned char *is_dirty, i64 number, u32 *finished) {
    wait_for_prior_kernel();
    const int m = *missed, leaving = *needed < *chosen ? *needed : *chosen;
    for (i64 i = thread_index(); i < m; i += thread_count()) {
        report[REPORT_WORDS + i] = missed_keys[i];
        report[REPORT_WORDS + n + i] = victim_keys[i];
        is_dirty[i] = missed_slots[i] >= 0 && dirty[missed_slots[i]];
    }
    if (thread_index() == 0) report[0] = m, report[1] = *into_unused, report[2] = leaving;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x != 0 || atomicAdd(finished, 1u) != gridDim.x - 1) return;
    *finished = 0;
    __threadfence_system();
    *(volatile i64 *)(report + REPORT_NUMBER) = number;
}
