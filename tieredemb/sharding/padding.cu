// Exchanges of one size, on a GPU: what `padding` and `request` do by operations on tensors, for row-wise tables.
//
// The requests to a rank lie in a block of `bound` entries, of which the first are ids. A message has, for each rank,
// the number of ids of each feature, and the block.
#include "common.cuh"

struct Messages {
    const i64 *values;  // (ranks · (features + bound),)
    i64 bound;
    int ranks, features;
};

__device__ __forceinline__ const i64 *message_of(const Messages &received, i64 rank) {
    return received.values + rank * (received.features + received.bound);
}

// The first of `ends`, ascending, that is greater than `number`, or their count.
__device__ __forceinline__ int upper_bound(const i64 *ends, int count, i64 number) {
    int low = 0;
    while (low < count) {
        const int mid = low + (count - low) / 2;
        if (ends[mid] > number) count = mid;
        else low = mid + 1;
    }
    return low;
}

// --- what is sent -----------------------------------------------------------------------------------------------------

// Where the ids requested of each rank begin among all, and end, and the different rows: `begins` (2, ranks + 1).
// `counts`: a row of `stride` for each rank, ids of each feature and then rows of each. One block, one warp.
extern "C" __global__ void blocks_begin(const i64 *counts, i64 stride, int ranks, int features, i64 *begins) {
    wait_for_prior_kernel();
    for (int which = 0; which < 2; which++) {
        i64 begin = 0;
        for (int rank = 0; rank < ranks; rank++) {
            i64 own = 0;
            for (int f = lane_index(); f < features; f += 32) own += counts[rank * stride + which * features + f];
            if (lane_index() == 0) begins[which * (ranks + 1) + rank] = begin;
            begin += __shfl_sync(FULL_WARP, sum_of_lanes(own), 31);
        }
        if (lane_index() == 0) begins[which * (ranks + 1) + ranks] = begin;
    }
}

// Puts requests into blocks: the occurrences `order` to `padded`, and `ids` to `values`, behind the counts of each rank.
// The rest of a block has copies of some value. Homes of occurrences, which are numbers of rows, become entries, where
// each rank sends `rows`. Moves 32 bytes an entry, and 8 an occurrence.
extern "C" __global__ void __launch_bounds__(256) bags_pad(
    const i64 *counts, i64 stride, int features, const i64 *begins, int ranks, i64 bound, i64 rows, const i64 *order,
    i64 n_order, const i64 *ids, i64 n_ids, int *homes, i64 n_homes, i64 *padded, i64 *values) {
    wait_for_prior_kernel();
    const i64 length = features + bound;
    for (i64 k = thread_index(); k < ranks * length; k += thread_count()) {
        const i64 rank = k / length, at = k - rank * length;
        if (at < features) {
            values[k] = counts[rank * stride + at];
            continue;
        }
        const i64 from = begins[rank] + at - features;
        values[k] = n_ids ? ids[from < n_ids ? from : n_ids - 1] : 0;
        padded[rank * bound + at - features] = n_order ? order[from < n_order ? from : n_order - 1] : 0;
    }
    const i64 *first = begins + ranks + 1;
    for (i64 k = thread_index(); k < n_homes; k += thread_count()) {
        const i64 number = homes[k];
        if (number < 0) continue;
        const int found = upper_bound(first + 1, ranks, number), rank = found < ranks ? found : ranks - 1;
        const i64 entry = number - first[rank] + rank * rows;
        homes[k] = (int)(entry < 0 ? 0 : entry < ranks * rows ? entry : ranks * rows - 1);
    }
}

// --- what is received -------------------------------------------------------------------------------------------------

// The ids of one rank and one feature are a piece; pieces lie feature by feature, and in these rank by rank. Writes
// where each ends among all ids, `ends`, and how much further its ids lie among the entries, `shift`; where features
// begin and end, `edges` (features + 1,); and how many ids each rank's block has, `ids` (ranks,). One block of 1,024
// threads.
extern "C" __global__ void __launch_bounds__(1024) pieces_find(Messages received, i64 *ends, i64 *shift, i64 *edges,
                                                               i64 *ids) {
    wait_for_prior_kernel();
    __shared__ int so_far;
    const int ranks = received.ranks, features = received.features;
    for (int rank = threadIdx.x / 32; rank < ranks; rank += 32) {  // whatever was received, nobody reads beyond a block
        i64 done = 0;
        for (int base = 0; base < features; base += 32) {
            const int f = base + lane_index();
            i64 own = f < features ? message_of(received, rank)[f] : 0;
            own = own < 0 ? 0 : own < received.bound ? own : received.bound;
            const i64 upto = done + sum_of_lanes(own), end = upto < received.bound ? upto : received.bound;
            const i64 begin = upto - own < received.bound ? upto - own : received.bound;
            if (f < features) {
                ends[(i64)f * ranks + rank] = end - begin;
                shift[(i64)f * ranks + rank] = rank * received.bound + begin;
            }
            done = __shfl_sync(FULL_WARP, end, 31);
        }
        if (lane_index() == 0) ids[rank] = done;
    }
    if (threadIdx.x == 0) edges[0] = so_far = 0;
    __syncthreads();
    const i64 pieces = (i64)features * ranks;
    for (i64 base = 0; base < pieces; base += blockDim.x) {
        const i64 piece = base + threadIdx.x;
        const int own = piece < pieces ? (int)ends[piece] : 0, end = so_far + sum_of_threads(own);
        if (piece < pieces) {
            ends[piece] = end;
            shift[piece] -= end - own;
            if (piece % ranks == ranks - 1) edges[piece / ranks + 1] = end;
        }
        __syncthreads();  // all have read
        if (threadIdx.x == blockDim.x - 1) so_far = end;
        __syncthreads();
    }
}

// Writes 1 to `is_first` for each entry whose row goes back, as it is requested there first, else 0; and zeros to
// `picked`, (n_picked,), which `ids_join` fills. `ids`: how many each rank's block has.
extern "C" __global__ void __launch_bounds__(256) firsts_mark(Messages received, const i64 *ids, int *is_first,
                                                              i64 *picked, i64 n_picked) {
    wait_for_prior_kernel();
    for (i64 k = thread_index(); k < n_picked; k += thread_count()) picked[k] = 0;
    for (i64 entry = thread_index(); entry < received.ranks * received.bound; entry += thread_count()) {
        const i64 rank = entry / received.bound, at = entry - rank * received.bound;
        is_first[entry] = at < ids[rank] && message_of(received, rank)[received.features + at] >= 0;
    }
}

// Sorts the ids by piece. Writes, for each position, the entry to `joined`, and to `entry`, which is `entries` behind
// the last id; the id; and its row of the output. Writes to `picked`, which must be zero, the position of the id of each
// row that goes back: one for each entry, or, where `firsts` is given, the running sum of `is_first`, one for each first
// id, `rows` for each rank. Moves 36 bytes an entry, and 8 or 12 more at random.
extern "C" __global__ void __launch_bounds__(256) ids_join(Messages received, const i64 *ends, const i64 *shift,
                                                           const int *firsts, i64 rows, i64 *joined, i64 *entry,
                                                           i64 *ids, int *row, i64 *picked) {
    wait_for_prior_kernel();
    const i64 entries = received.ranks * received.bound;
    const int pieces = received.features * received.ranks;
    for (i64 number = thread_index(); number < entries; number += thread_count()) {
        const int found = upper_bound(ends, pieces, number), piece = found < pieces ? found : pieces - 1;
        const bool is_id = found < pieces;
        i64 at = shift[piece] + number;
        at = at < entries ? at : entries - 1;
        const i64 rank = at / received.bound;
        const i64 id = message_of(received, rank)[received.features + at - rank * received.bound];
        joined[number] = at;
        entry[number] = is_id ? at : entries;
        row[number] = (int)(is_id ? at : entries - 1);
        ids[number] = firsts ? id ^ (id >> 63) : id;  // inverted if it was requested before
        if (!is_id) continue;
        if (!firsts) picked[at] = number;
        else if (id >= 0) {
            const i64 back = firsts[at] - 1 - (rank ? firsts[rank * received.bound - 1] : 0);
            if (back < rows) picked[rank * rows + back] = number;
        }
    }
}
