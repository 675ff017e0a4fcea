// Backward and optimizer in one pass over the segments of a batch (occurrences sorted by home, in order within each).
//
// `segments_find` lists the work: a short segment is one item, a long one an item for each chunk of CHUNK occurrences,
// counted from the segment's start, so that sums depend only on the row's own occurrences. Short ones are at the front
// of the list and chunks, which take longest and so are begun first, at its end. `segments_update` sums an item and
// updates the row, or stores a chunk's sum; `long_segments_update` adds those in order.
//
// The row update itself is in the file that includes this one, `optimizers/<name>.cu`: its `Recipe` (recipe.cuh).
#pragma once
#include "fault.cuh"
#include "rounding.cuh"

#ifndef AHEAD
#define AHEAD 4  // gradient rows in flight
#endif
#ifdef SHARED  // tables have several features, so a row's bags are in several columns
constexpr bool IS_SHARED = true;
#else
constexpr bool IS_SHARED = false;
#endif
#ifdef SEPARATE  // each feature is a table that counts its own steps
constexpr bool IS_SEPARATE = true;
#else
constexpr bool IS_SEPARATE = false;
#endif
// The index of a feature's table in the numbers, histories and steps.
__device__ __forceinline__ int own_of(int feature) { return IS_SEPARATE ? feature : 0; }
// The table of a feature, of all tables that count their own steps: one of `tables`, or, if that is null, the table
// with the feature's own number.
__device__ __forceinline__ int table_of(int feature, const int *tables) {
    return IS_SEPARATE && tables ? tables[feature] : feature;
}

struct Work {
    int items, parts, longs, pad;  // short segments, chunks, long segments
};
struct alignas(16) Item {
    int start, count;  // occurrences in the sorted order
    int home;          // the row; for a chunk the index of its sum
    int feature;       // any feature of the row's table, which has one mode and one rate; for a chunk −1 − feature
};
struct alignas(16) Long {
    int home, first, parts, feature;
};

// Scale of the p-th occurrence in the sorted order.
extern "C" __global__ void scale_gather(const int *order, int n, const float *scale, float *sorted_scale) {
    wait_for_prior_kernel();
    for (i64 p = thread_index(); p < n; p += thread_count()) sorted_scale[p] = scale[order[p]];
}

struct Addresses {
    i64 at[MOST_ADDRESSES];
};

// Writes `count` addresses to `to`. They are arguments, which a graph stores with its launches: a copy from the host
// would read the host's memory again at each replay.
extern "C" __global__ void addresses_set(i64 *to, int count, const __grid_constant__ Addresses given) {
    wait_for_prior_kernel();
    for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = given.at[i];
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

// Lists the work on sorted `homes`; `sorted_bag` is in their order.
extern "C" __global__ void segments_find(const int *homes, int n, const int *sorted_bag, int batch, Work *work,
                                         Item *items, Long *longs) {
    wait_for_prior_kernel();
    for (i64 base = (i64)blockIdx.x * blockDim.x; base < n; base += thread_count()) {
        int p = (int)base + threadIdx.x;
        int home = p < n ? homes[p] : DROPPED;
        int its_bag = p < n ? sorted_bag[p] : 0;
        bool head = home != DROPPED && (p == 0 || homes[p - 1] != home);
        bool is_long = head && p + CHUNK < n && homes[p + CHUNK] == home;
        bool is_short = head && !is_long;
        // the next head in the warp ends a short segment; for the last one the search goes beyond the warp
        u32 heads = __ballot_sync(FULL_WARP, head || home == DROPPED);
        u32 later_heads = heads & ~((2u << lane_index()) - 1);
        int count = later_heads ? __ffs(later_heads) - 1 - lane_index() : 32 - lane_index();
        if (is_short && !later_heads)
            while (p + count < n && homes[p + count] == home) count++;
        int at = append(&work->items, is_short);
        if (is_short) items[at] = Item{p, count, home, its_bag / batch};
        for (u32 todo = __ballot_sync(FULL_WARP, is_long); todo; todo &= todo - 1) {
            int leader = __ffs(todo) - 1;
            int start = __shfl_sync(FULL_WARP, p, leader), row = __shfl_sync(FULL_WARP, home, leader);
            int end = segment_end(homes, n, start, row), parts = (end - start + CHUNK - 1) / CHUNK;
            int feature = __shfl_sync(FULL_WARP, its_bag, leader) / batch, first = 0;
            if (lane_index() == 0) {
                first = atomicAdd(&work->parts, parts);
                longs[atomicAdd(&work->longs, 1)] = Long{row, first, parts, feature};
            }
            first = __shfl_sync(FULL_WARP, first, 0);
            for (int c = lane_index(); c < parts; c += 32) {
                int from = start + c * CHUNK;
                items[n - 1 - (first + c)] = Item{from, end - from < CHUNK ? end - from : CHUNK, first + c, -1 - feature};
            }
        }
    }
}

// Where rows are stored: in slots, or with -DUNCACHED away from them, where a state ends with the row's score.
#ifdef UNCACHED
constexpr bool MAY_BE_AWAY = true;
#else
constexpr bool MAY_BE_AWAY = false;
#endif
struct Rows {
    row_t *weight;
    float *state;
    row_t *away_weight;
    float *away_state;
    const Record *records;
};
struct Place {
    row_t *weight;
    float *state;
    bool is_away;
};
__device__ __forceinline__ Place place_of(const Rows &rows, int home) {
#ifdef UNCACHED
    if (home < 0) {
        i64 row = away_row(rows.records, home);
        return {rows.away_weight + row * WIDTH, rows.away_state + row * (STATE + 1), true};
    }
#endif
    return {rows.weight + (i64)home * WIDTH, rows.state + (i64)home * STATE, false};
}

// The words of state that belong to the elements of a lane's unit, in registers: v[n][k] of the k-th element is that of
// the n-th state tensor.
struct UnitState {
    float v[TENSORS > 0 ? TENSORS : 1][VECTOR];
};
struct ElementState {
    UnitState *of;
    int k;
    __device__ __forceinline__ float &operator[](int n) const { return of->v[n][k]; }
};

// Reads the words of a lane's s-th unit. All lanes of the row call it. In a slot each lane reads its own words, which
// are contiguous. For a row away from the slots each such word would cross PCIe in a request of its own, so the lanes
// read consecutive words there, and then exchange them.
__device__ __forceinline__ UnitState state_read(const Place &place, int s, int lane) {
    UnitState state;
#pragma unroll
    for (int n = 0; n < TENSORS; n++) {
        const float *from = place.state + n * WIDTH + s * LANES * VECTOR;
        if (MAY_BE_AWAY && place.is_away) {
            float given[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                const int word = j * LANES + lane;
                given[j] = s * LANES * VECTOR + word < WIDTH ? from[word] : 0.0f;
            }
#pragma unroll
            for (int k = 0; k < VECTOR; k++) {
                const int word = lane * VECTOR + k;
#pragma unroll
                for (int j = 0; j < VECTOR; j++) {
                    const float word_value = __shfl_sync(group_mask(LANES), given[j], word % LANES, LANES);
                    if (word / LANES == j) state.v[n][k] = word_value;
                }
            }
        } else if (s * LANES + lane < UNITS) {
#pragma unroll
            for (int k = 0; k < VECTOR; k++) state.v[n][k] = from[lane * VECTOR + k];
        }
    }
    return state;
}

// Writes them in the same way.
__device__ __forceinline__ void state_write(const Place &place, int s, int lane, const UnitState &state) {
#pragma unroll
    for (int n = 0; n < TENSORS; n++) {
        float *to = place.state + n * WIDTH + s * LANES * VECTOR;
        if (MAY_BE_AWAY && place.is_away) {
#pragma unroll
            for (int j = 0; j < VECTOR; j++) {
                const int word = j * LANES + lane;
                float own = 0.0f;
#pragma unroll
                for (int k = 0; k < VECTOR; k++) {
                    const float word_value = __shfl_sync(group_mask(LANES), state.v[n][k], word / VECTOR, LANES);
                    if (word % VECTOR == k) own = word_value;
                }
                if (s * LANES * VECTOR + word < WIDTH) to[word] = own;
            }
        } else if (s * LANES + lane < UNITS) {
#pragma unroll
            for (int k = 0; k < VECTOR; k++) to[lane * VECTOR + k] = state.v[n][k];
        }
    }
}

// What an update reads of a row besides its gradient; prefetched, as it does not depend on that.
struct Row {
    row_vector weight[STEPS];
    Recipe::Whole whole;
};
__device__ __forceinline__ Row row_read(const Place &place, int lane) {
    Row row;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        if (s * LANES + lane < UNITS) row.weight[s] = load_row(place.weight, 0, s * LANES + lane);
    row.whole = Recipe::whole_of(place.state);
    return row;
}

// One optimizer step of a row; weights are rounded once. The only update routine: hot, cold, long, short.
__device__ __forceinline__ void row_update(const Place &place, Row row, float (*g)[VECTOR], int lane, float rate,
                                           const Numbers &numbers, const Drawn &drawn) {
    const float row_rate = Recipe::row_rate(row.whole, place.state, g, lane, rate, numbers);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int unit = s * LANES + lane;
        UnitState state = state_read(place, s, lane);
        if (unit < UNITS) {
            float value[VECTOR];
#pragma unroll
            for (int k = 0; k < VECTOR; k++) {
                ElementState of{&state, k};
                value[k] = Recipe::element(to_float(row.weight[s].v[k]), g[s][k], of, row_rate, numbers);
            }
            store_row(place.weight, 0, unit, rounded(value, unit, drawn, drawn.step, DRAW_UPDATE));
        }
        state_write(place, s, lane, state);
    }
}

__device__ __forceinline__ u32 *clock_of(const Place &place) {
    return reinterpret_cast<u32 *>(place.state + STATE - 1);
}

// Whether a row's state is zeros, except for its clock; all lanes of the row.
__device__ __forceinline__ bool is_still(const Place &place, int lane) {
    bool is_moving = false;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int n = 0; n < TENSORS; n++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                if (s * LANES + lane < UNITS)
                    is_moving |= !(place.state[n * WIDTH + (s * LANES + lane) * VECTOR + k] == 0.0f);
    return !__any_sync(group_mask(LANES), is_moving);
}

// The terms that bring a row from step `last` to step `now`; all lanes of the row.
__device__ __forceinline__ MissedSteps missed_by(const Place &place, int lane, const Past &past, i64 last, i64 now) {
    const int start = (int)(last - past.base), stop = (int)(now - past.base);
    if constexpr (!Recipe::KEEPS_ZEROS) return missed_steps(past, start, stop);
    return is_still(place, lane) ? missed_steps_of_still_row(past, start, stop) : missed_steps(past, start, stop);
}

template <class State>
__device__ __forceinline__ float element_catch_up(float w, State &state, const MissedSteps &missed, const Past &past) {
    if (!missed.is_decay_alone) return Recipe::catch_up(w, state, missed, past);
    return missed.rest_decay != 1.0f ? Recipe::decayed(w, missed.rest_decay) : w;
}

// The weights of a row's units that a lane has, as floats.
__device__ __forceinline__ void row_floats(const Row &row, int lane, float (*value)[VECTOR]) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int k = 0; k < VECTOR; k++)
            if (s * LANES + lane < UNITS) value[s][k] = to_float(row.weight[s].v[k]);
}

// Applies the steps that a row missed to its weights `value`; all lanes of the row.
__device__ __forceinline__ void row_take(const Place &place, float (*value)[VECTOR], int lane, const Past &past,
                                         const MissedSteps &missed) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        UnitState state = state_read(place, s, lane);
        if (s * LANES + lane < UNITS) {
#pragma unroll
            for (int k = 0; k < VECTOR; k++) {
                ElementState of{&state, k};
                value[s][k] = element_catch_up(value[s][k], of, missed, past);
            }
        }
        state_write(place, s, lane, state);
    }
    if (lane == 0 && missed.replayed > missed.start)
        atomicAdd(reinterpret_cast<u64 *>(past.words + HISTORY_REPLAYED), (u64)(missed.replayed - missed.start));
}

// Brings a row to step `now`, and stores `noted` as its step; all lanes of the row. Returns whether it was behind.
// Steps that it must replay one by one come first: see row_miss in optimizer_cpu.py.
__device__ __forceinline__ bool row_make_current(const Place &place, Row &row, int lane, const Past &past, i64 now,
                                                 i64 noted, const Drawn &drawn) {
    const i64 last = *clock_of(place) < past.base ? past.base : *clock_of(place);
    __syncwarp(group_mask(LANES));
    if (lane == 0) *clock_of(place) = (u32)noted;
    if (last >= now) return false;
    float value[STEPS][VECTOR];
    row_floats(row, lane, value);
    const i64 until = past.base + replayed_until(past, (int)(last - past.base), (int)(now - past.base));
    if (until > last) {
        row_take(place, value, lane, past, missed_by(place, lane, past, last, until));
        __syncwarp(group_mask(LANES));
    }
    if (until < now) row_take(place, value, lane, past, missed_by(place, lane, past, until, now));
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        if (s * LANES + lane < UNITS)
            row.weight[s] = rounded(value[s], s * LANES + lane, drawn, (u32)now, DRAW_CATCH_UP);
    return true;
}

// Brings the row at `home` to the steps taken.
__device__ __forceinline__ void row_catch_up(const Rows &rows, int home, int lane, const Past &past, i64 now,
                                             unsigned char *dirty, const Drawn &drawn) {
    const Place place = place_of(rows, home);
    if (*clock_of(place) >= now) return;
    Row row = row_read(place, lane);
    row_make_current(place, row, lane, past, now, now, drawn);
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        if (s * LANES + lane < UNITS) store_row(place.weight, 0, s * LANES + lane, row.weight[s]);
    if (lane == 0 && home >= 0) dirty[home] = 1;
}

// Brings every row of a batch to the steps taken, once each. A refused batch (a fault) changes none. If features are
// tables that count their own steps, those of `tables` (`table_of`): the rows of feature `only`, or of all if that is
// negative.
extern "C" __global__ void __launch_bounds__(256) segments_catch_up(
    const Work *work, const Item *items, const Long *longs, const Fault *fault, int only, const int *tables,
    const Past *past, const i64 *steps, row_t *weight, float *state, row_t *away_weight, float *away_state,
    const Record *records, unsigned char *dirty, Draws draws) {
    wait_for_prior_kernel();
    if (fault->id | fault->offset) return;
    const Rows rows{weight, state, away_weight, away_state, records};
    const int lane = threadIdx.x % LANES;
    const i64 groups = thread_count() / LANES;
    for (i64 w = thread_index() / LANES; w < work->items + work->longs; w += groups) {
        const int home = w < work->items ? items[w].home : longs[w - work->items].home;
        const int feature = w < work->items ? items[w].feature : longs[w - work->items].feature;
        if (IS_SEPARATE && only >= 0 && feature != only) continue;
        const int own = own_of(table_of(feature, tables));
        row_catch_up(rows, home, lane, past[own], steps[own], dirty, drawn_of(draws, home, feature));
    }
}

// Replays the steps of a row from `last` to `until` one by one, and stores it.
__device__ __forceinline__ void row_keep(const Place &place, Row &row, int lane, const Past &past, i64 last, i64 until) {
    float value[STEPS][VECTOR];
    row_floats(row, lane, value);
    row_take(place, value, lane, past, missed_by(place, lane, past, last, until));
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        if (s * LANES + lane < UNITS) {
            row.weight[s] = rounded(value[s], s * LANES + lane, {}, 0, DRAW_CATCH_UP);
            store_row(place.weight, 0, s * LANES + lane, row.weight[s]);
        }
}

// Brings rows of float32 (`homes`, int32 (n,)) to the last step that they must replay one by one, before they are read:
// no later read replays these steps again. Later updates give the bits that they would give without this. Arguments as
// those of `rows_read_current`.
extern "C" __global__ void __launch_bounds__(256) rows_keep_replayed(
    const int *homes, i64 n, const int *bag, int batch, const int *tables, const Past *past, const i64 *steps,
    row_t *weight, float *state, row_t *away_weight, float *away_state, const Record *records, unsigned char *dirty) {
    wait_for_prior_kernel();
    const Rows rows{weight, state, away_weight, away_state, records};
    const int lane = threadIdx.x % LANES;
    for (i64 i = thread_index() / LANES; i < n; i += thread_count() / LANES) {
        const int home = homes[i];
        if (home == DROPPED) continue;
        const int table = own_of(table_of(IS_SEPARATE ? bag[i] / batch : 0, tables));
        const Past so_far = past[table];
        const Place place = place_of(rows, home);
        u32 stands = 0;
        if (lane == 0) stands = *(volatile u32 *)clock_of(place);
        stands = __shfl_sync(group_mask(LANES), stands, 0, LANES);
        const i64 last = stands < so_far.base ? so_far.base : stands;
        if (last >= steps[table]) continue;
        const int start = (int)(last - so_far.base), stop = (int)(steps[table] - so_far.base);
        const i64 until = so_far.base + replayed_until(so_far, start, stop);
        if (until <= last) continue;
        u32 found = 0;  // several homes may name one row: the group of lanes that sets its clock updates it
        if (lane == 0) found = atomicCAS(clock_of(place), stands, (u32)until);
        if (__shfl_sync(group_mask(LANES), found, 0, LANES) != stands) continue;
        Row row = row_read(place, lane);
        row_keep(place, row, lane, so_far, last, until);
        if (lane == 0 && home >= 0) dirty[home] = 1;
    }
}

// Writes the weights of the rows of `homes` (int32 (n,)) after the steps taken to `out` (n, D). The rows themselves do
// not change. With `keeps`, if all homes are of different rows, it also does what `rows_keep_replayed` does. Dropped
// rows are not written. `own`: int32 (n,), the position of each row in `out`, or DROPPED · `bag`: the bag of each home,
// `batch` of them a feature · `tables`: see `table_of`.
extern "C" __global__ void __launch_bounds__(256) rows_read_current(
    const int *homes, i64 n, const int *bag, int batch, const int *tables, const Past *past, const i64 *steps,
    row_t *weight, float *state, row_t *away_weight, float *away_state, const Record *records, unsigned char *dirty,
    int keeps, row_t *out, int *own, Draws draws) {
    wait_for_prior_kernel();
    const Rows rows{weight, state, away_weight, away_state, records};
    const int lane = threadIdx.x % LANES;
    for (i64 i = thread_index() / LANES; i < n; i += thread_count() / LANES) {
        const int home = homes[i];
        if (lane == 0) own[i] = home == DROPPED ? DROPPED : (int)i;
        if (home == DROPPED) continue;
        const int feature = IS_SEPARATE || IS_STOCHASTIC ? bag[i] / batch : 0;
        const int table = own_of(table_of(feature, tables));
        const Past so_far = past[table];
        const i64 now = steps[table];
        const Place place = place_of(rows, home);
        Row row = row_read(place, lane);
        i64 last = *clock_of(place) < so_far.base ? so_far.base : *clock_of(place);
        MissedSteps replayed{}, missed{};
        i64 until = last;
        if (last < now)
            until = so_far.base + replayed_until(so_far, (int)(last - so_far.base), (int)(now - so_far.base));
        if (keeps && until > last) {
            __syncwarp(group_mask(LANES));
            row_keep(place, row, lane, so_far, last, until);
            if (lane == 0) *clock_of(place) = (u32)until;
            if (lane == 0 && home >= 0) dirty[home] = 1;
            __syncwarp(group_mask(LANES));
            last = until;
        }
        const bool is_behind = last < now;
        if (is_behind) {
            if (until > last) replayed = missed_steps(so_far, (int)(last - so_far.base), (int)(until - so_far.base));
            if (until == last) missed = missed_by(place, lane, so_far, last, now);
            else if (until < now) missed = missed_steps(so_far, (int)(until - so_far.base), (int)(now - so_far.base));
        }
        const Drawn drawn = drawn_of(draws, home, feature);
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const int unit = s * LANES + lane;
            row_vector value = row.weight[s];
            if (is_behind) {
                UnitState state = state_read(place, s, lane);
                float brought[VECTOR];
#pragma unroll
                for (int k = 0; k < VECTOR; k++) {
                    if (unit >= UNITS) break;
                    ElementState of{&state, k};
                    brought[k] = to_float(value.v[k]);
                    if (until > last) brought[k] = element_catch_up(brought[k], of, replayed, so_far);
                    if (until < now) brought[k] = element_catch_up(brought[k], of, missed, so_far);
                }
                if (unit < UNITS) value = rounded(brought, unit, drawn, (u32)now, DRAW_CATCH_UP);
            }
            if (unit < UNITS) store_row(out, i, unit, value);
        }
    }
}

// Sums the gradients of each item. Reads 4 D bytes an occurrence; a short segment's row and state once each way. The
// gradient of a maximum counts if its winner (`argmax`) is the occurrence (`order`) itself. `batch`: bags a feature; 0
// if the gradient has a row for each bag · `grads`: the address of each feature's gradient, of `samples` rows, if they
// are not contiguous in `grad`; such have no maxima · `tables`: of the features, if each is a table that counts its own
// steps; null for tables in the order of the features.
extern "C" __global__ void __launch_bounds__(256) segments_update(
    const Work *work, const Item *items, int n, const int *sorted_bag, int batch, const i64 *column, const float *grad,
    const i64 *grads, int samples, i64 total, const float *sorted_scale, const int *order, const int *argmax,
    const int *mode, row_t *weight, float *state, row_t *away_weight, float *away_state, const Record *records,
    unsigned char *dirty, const float *rate, const Numbers *numbers, const int *tables, float *parts, const Past *past, const i64 *steps,
    Draws draws) {
    wait_for_prior_kernel();
    const int lane = threadIdx.x % LANES;
    const int group = (int)(thread_index() / LANES), groups = (int)(thread_count() / LANES);
    Numbers constants = *numbers;
    const Rows rows{weight, state, away_weight, away_state, records};
    const int chunks = work->parts, count = chunks + work->items;
    const auto item_at = [=](int w) { return items[w < chunks ? n - 1 - w : w - chunks]; };
    Item next = group < count ? item_at(group) : Item{0, 0, 0, 0};
    for (int w = group; w < count; w += groups) {
        const Item item = next;
        if (w + groups < count) next = item_at(w + groups);
        const bool whole = item.feature >= 0;
        const int feature = whole ? item.feature : -1 - item.feature;
        const int own = table_of(feature, tables);
        if constexpr (IS_SEPARATE) constants = numbers[own];
        const i64 shift = (IS_SHARED ? 0 : column[feature] - (i64)feature * batch * total) + lane * VECTOR;
        const auto gradient_at = [=](int bag) {  // of a bag, after `shift`
            if (!IS_SHARED) return (i64)bag * total;
            const int bag_feature = bag / batch;
            return (i64)(bag - bag_feature * batch) * total + column[bag_feature];
        };
        const float *base = grad;
        if (IS_SEPARATE && grads)
            base = reinterpret_cast<const float *>(grads[feature]) - (i64)feature * samples * total;
        base += shift;
        Place place;
        Row row;
        if (whole) {
            place = place_of(rows, item.home);
            if constexpr (!Recipe::KEEPS_SUM) row = row_read(place, lane);
        }
        float acc[STEPS][VECTOR];
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++) acc[s][k] = 0.0f;
        // Bags of LANES occurrences, one a lane: gradients wait for them, so they are read long before.
        const auto bag_at = [=](int p) {
            return LANES >= AHEAD && p + lane < item.count ? sorted_bag[item.start + p + lane] : 0;
        };
        int bags = 0, later_bags = bag_at(0);
        for (int p = 0; p < item.count; p += AHEAD) {
            float_vector g[AHEAD][STEPS];
            float scale[AHEAD];
            if (p % LANES == 0) {
                bags = later_bags;
                later_bags = bag_at(p + LANES);
            }
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (p + a >= item.count) break;
                const int its_bag = LANES >= AHEAD ? __shfl_sync(group_mask(LANES), bags, (p + a) % LANES, LANES)
                                                   : sorted_bag[item.start + p + a];
                const float *from = base + gradient_at(its_bag);
                scale[a] = sorted_scale ? sorted_scale[item.start + p + a] : 1.0f;
#pragma unroll
                for (int s = 0; s < STEPS; s++)
                    if (s * LANES + lane < UNITS)
                        g[a][s] = load_floats(from + s * LANES * VECTOR);
            }
#ifdef HAS_MAX
            if (mode[feature] == MAX)
                for (int a = 0; a < AHEAD; a++) {
                    if (p + a >= item.count) break;
                    const int *winner = argmax + shift + gradient_at(sorted_bag[item.start + p + a]);
                    const int own = order[item.start + p + a];
                    scale[a] = 1.0f;
                    for (int s = 0; s < STEPS; s++)
                        for (int k = 0; k < VECTOR; k++)
                            if (s * LANES + lane < UNITS && winner[s * LANES * VECTOR + k] != own) g[a][s].v[k] = 0.0f;
                }
#endif
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
        if (!whole) {
            float *part = parts + (i64)item.home * WIDTH + lane * VECTOR;
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
        const Drawn drawn = drawn_of(draws, item.home, feature);
        if constexpr (IS_DENSE) {
            const i64 step = steps[own_of(own)];
            row_make_current(place, row, lane, past[own_of(own)], step - 1, step, drawn);
        }
        if constexpr (Recipe::KEEPS_SUM) Recipe::keep_sum(place.state, acc, lane, constants);
        else row_update(place, row, acc, lane, rate[own], constants, drawn);
        if (lane == 0 && item.home >= 0) dirty[item.home] = 1;
    }
}

// Sums of chunks in flight: few rows have a long segment, so a thread may have many registers.
constexpr int PARTS_AHEAD = STEPS * VECTOR <= 4 ? 32 : STEPS * VECTOR <= 8 ? 16 : AHEAD;

// Adds COUNT sums of chunks in order. All are read before the barrier: the compiler would read them one by one, to save
// registers.
template <int COUNT>
__device__ __forceinline__ void parts_add(const float *parts, int lane, float (&acc)[STEPS][VECTOR]) {
    float_vector part[COUNT][STEPS];
#pragma unroll
    for (int c = 0; c < COUNT; c++)
#pragma unroll
        for (int s = 0; s < STEPS; s++)
            if (s * LANES + lane < UNITS) part[c][s] = load_floats(parts + c * WIDTH + (s * LANES + lane) * VECTOR);
    __syncwarp(group_mask(LANES));
#pragma unroll
    for (int c = 0; c < COUNT; c++)
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                if (s * LANES + lane < UNITS) acc[s][k] = __fadd_rn(acc[s][k], part[c][s].v[k]);
}

// Adds the chunks of each long segment in order and updates its row.
extern "C" __global__ void __launch_bounds__(256) long_segments_update(
    const Work *work, const Long *longs, const float *parts, row_t *weight, float *state, row_t *away_weight,
    float *away_state, const Record *records, unsigned char *dirty, const float *rate, const Numbers *numbers,
    const int *tables, const Past *past, const i64 *steps, Draws draws) {
    wait_for_prior_kernel();
    const int lane = threadIdx.x % LANES;
    const i64 group = thread_index() / LANES, groups = thread_count() / LANES;
    Numbers constants = *numbers;
    const Rows rows{weight, state, away_weight, away_state, records};
    for (i64 w = group; w < work->longs; w += groups) {
        Long segment = longs[w];
        const int own = table_of(segment.feature, tables);
        if constexpr (IS_SEPARATE) constants = numbers[own];
        float acc[STEPS][VECTOR];
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++) acc[s][k] = 0.0f;
        const float *own_parts = parts + (i64)segment.first * WIDTH;
        i64 c = 0;
        for (; c + PARTS_AHEAD <= segment.parts; c += PARTS_AHEAD)
            parts_add<PARTS_AHEAD>(own_parts + c * WIDTH, lane, acc);
        for (; c + AHEAD <= segment.parts; c += AHEAD) parts_add<AHEAD>(own_parts + c * WIDTH, lane, acc);
        for (; c < segment.parts; c++) parts_add<1>(own_parts + c * WIDTH, lane, acc);
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int k = 0; k < VECTOR; k++) acc[s][k] = __fmul_rn(acc[s][k], constants.scale);
        const Place place = place_of(rows, segment.home);
        Row row;
        if constexpr (!Recipe::KEEPS_SUM) row = row_read(place, lane);
        const Drawn drawn = drawn_of(draws, segment.home, segment.feature);
        if constexpr (IS_DENSE) {
            const i64 step = steps[own_of(own)];
            row_make_current(place, row, lane, past[own_of(own)], step - 1, step, drawn);
        }
        if constexpr (Recipe::KEEPS_SUM) Recipe::keep_sum(place.state, acc, lane, constants);
        else row_update(place, row, acc, lane, rate[own], constants, drawn);
        if (lane == 0 && segment.home >= 0) dirty[segment.home] = 1;
    }
}

// Scales the row at `home` down to `max_norm` if its norm exceeds it, as torch.embedding_renorm_ does; the norm in
// double, by a fixed tree over the lanes.
__device__ __forceinline__ void row_limit_norm(const Rows &rows, int home, int lane, double max_norm, double norm_type,
                                               unsigned char *dirty, const Drawn &drawn) {
    const Place place = place_of(rows, home);
    const bool largest = norm_type > 1e300;
    row_vector weight[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        if (s * LANES + lane < UNITS) weight[s] = load_row(place.weight, 0, s * LANES + lane);
    double norm = 0.0;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int k = 0; k < VECTOR; k++)
            if (s * LANES + lane < UNITS) {
                double size = fabs((double)to_float(weight[s].v[k]));
                if (largest) norm = size > norm ? size : norm;
                else norm += norm_type == 2.0 ? size * size : pow(size, norm_type);
            }
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) {
        double other = __shfl_xor_sync(group_mask(LANES), norm, step, LANES);
        norm = largest ? (other > norm ? other : norm) : norm + other;
    }
    if (!largest) norm = norm_type == 2.0 ? sqrt(norm) : pow(norm, 1.0 / norm_type);
    if (!(norm > max_norm)) return;
    const float factor = (float)(max_norm / (norm + 1e-7));
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        const int unit = s * LANES + lane;
        if (unit >= UNITS) break;
        float value[VECTOR];
#pragma unroll
        for (int k = 0; k < VECTOR; k++) value[k] = __fmul_rn(to_float(weight[s].v[k]), factor);
        store_row(place.weight, 0, unit, rounded(value, unit, drawn, drawn.step, DRAW_LIMIT));
    }
    if (lane == 0 && home >= 0) dirty[home] = 1;
}

// Limits the norm of every row of a batch, once each. A refused batch (a fault) changes none.
extern "C" __global__ void __launch_bounds__(256) segments_limit_norm(
    const Work *work, const Item *items, const Long *longs, const Fault *fault, double max_norm, double norm_type,
    row_t *weight, float *state, row_t *away_weight, float *away_state, const Record *records, unsigned char *dirty,
    Draws draws) {
    wait_for_prior_kernel();
    if (fault->id | fault->offset) return;
    const Rows rows{weight, state, away_weight, away_state, records};
    const int lane = threadIdx.x % LANES;
    const i64 groups = thread_count() / LANES;
    for (i64 w = thread_index() / LANES; w < work->items; w += groups)
        row_limit_norm(rows, items[w].home, lane, max_norm, norm_type, dirty,
                       drawn_of(draws, items[w].home, items[w].feature));
    for (i64 w = thread_index() / LANES; w < work->longs; w += groups)
        row_limit_norm(rows, longs[w].home, lane, max_norm, norm_type, dirty,
                       drawn_of(draws, longs[w].home, longs[w].feature));
}

// Options that the host sets, and schedulers change now and then: the optimizer's `Hyper`, and behind it all `Numbers`
// but the scale.
constexpr int CHANGING = IS_DENSE ? Recipe::STEP_NUMBERS : 0;  // how many of the numbers depend on the step
constexpr int HYPERS = sizeof(Hyper) / sizeof(double), CONSTANTS = NUMBER_WORDS - CHANGING;
struct Options {
    double v[12];
};
static_assert(HYPERS + CONSTANTS <= 12, "more numbers than the host sets");
extern "C" __global__ void options_set(Options *options, double v0, double v1, double v2, double v3, double v4,
                                       double v5, double v6, double v7, double v8, double v9, double v10, double v11) {
    wait_for_prior_kernel();
    *options = Options{v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11};
}

// Numbers of an update, from the host's options and the steps that each table has taken. A batch that was refused, and
// one whose gradient is not finite under a scaler, leaves no work. `tables`: those that take the step, if each counts
// its own; else all take it · `factors`: float (n_tables,), for each NaN or 1, see `refuse_spoilt`, or null; if all
// tables have one step counter, the first is for all. One block.
extern "C" __global__ void step_begin(const Options *options, i64 *steps, const int *tables, int n_tables,
                                      const Fault *faults, int n_faults, const float *found_inf,
                                      const float *grad_scale, const float *factors, float *rate, Numbers *numbers,
                                      Work *work, const Past *past) {
    wait_for_prior_kernel();
    bool refused = found_inf && *found_inf != 0.0f;
    for (int f = 0; f < n_faults; f++) refused = refused || faults[f].id != 0 || faults[f].offset != 0;
    const int clocks = IS_SEPARATE ? n_tables : 1;
    const auto table_at = [=](int i) { return IS_SEPARATE ? tables[i] : i; };
    if constexpr (IS_DENSE) {
        bool lacks_capacity = false;
        for (int i = threadIdx.x; i < clocks; i += blockDim.x)
            lacks_capacity |= steps[table_at(i)] + 1 - past[table_at(i)].base >= past[table_at(i)].capacity;
        const bool is_full = __syncthreads_or(lacks_capacity) && !refused;
        refused = refused || is_full;
        for (int i = threadIdx.x; i < clocks; i += blockDim.x) {
            past[table_at(i)].words[HISTORY_TAKEN] = !refused;
            if (is_full) past[table_at(i)].words[HISTORY_REFUSED] += 1;
        }
    }
    if (refused) {
        if (threadIdx.x == 0) work->items = work->parts = work->longs = 0;
        return;
    }
    const Hyper hyper = *reinterpret_cast<const Hyper *>(options);
    for (int i = threadIdx.x; i < n_tables; i += blockDim.x) {
        const int t = table_at(i);
        const i64 step = steps[t] += 1;
        rate[t] = (float)Recipe::rate(hyper, (double)step);
        if (!IS_SEPARATE && i > 0) continue;
        float *own = reinterpret_cast<float *>(numbers + own_of(t));
#pragma unroll
        for (int k = 0; k < CONSTANTS; k++) own[k] = (float)options->v[HYPERS + k];
        if constexpr (IS_DENSE) Recipe::step_numbers(hyper, (double)step, own + CONSTANTS);
        const float scale = grad_scale ? (float)(1.0 / (double)*grad_scale) : 1.0f;
        numbers[own_of(t)].scale = factors ? __fmul_rn(scale, factors[i]) : scale;
    }
}

// After the update of a step that was begun: keeps what rows that it did not reach will need. A block for each of
// `tables`, or one if all tables have one step counter.
extern "C" __global__ void step_end(const Options *options, const i64 *steps, const int *tables, const float *rate,
                                    const Numbers *numbers, const Past *past) {
    wait_for_prior_kernel();
    const int table = IS_SEPARATE ? tables[blockIdx.x] : 0;
    const Past so_far = past[table];
    if (!so_far.words[HISTORY_TAKEN]) return;
    const i64 step = steps[table];
    const int at = (int)(step - so_far.base);
    const Hyper hyper = *reinterpret_cast<const Hyper *>(options);
    // else the step stores no number in rows that miss it: their gradient was 0 · scale
    const bool is_finite = isfinite(numbers[table].scale);
    if (threadIdx.x == 0) {
        Numbers missed = numbers[table];
        Recipe::missed_numbers(hyper, missed);
        so_far.rates[at] = rate[table];
#pragma unroll
        for (int k = 0; k < NUMBER_WORDS; k++)
            so_far.numbers[(i64)at * NUMBER_WORDS + k] =
                is_finite ? reinterpret_cast<const float *>(&missed)[k] : nanf("");
    }
    Terms terms = Recipe::terms(hyper, (double)step);
    if (!is_finite) terms.coupled = 1.0;
    step_append(so_far, at, terms);
}
