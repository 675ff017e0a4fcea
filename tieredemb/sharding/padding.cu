// Exchanges of one size, on a GPU: what `padding` and `request` do on a CPU by operations on tensors.
//
// The requests to a rank lie in a block of `bound` entries, of which the first are ids. The message to it has the
// number of ids of each feature, the block, and how many ids each bag has that the rank pools: with space for `most`
// features, as any rank pools at most, and for as many samples as any rank has.
#include "common.cuh"

// The messages of all ranks for one part: each begins `stride` words behind the one before. The part's entries begin at
// `start` among those of all parts, its features at `first`. Where there are fewer parts, the others have no features.
struct Messages {
    const i64 *values;
    i64 stride, bound, start;
    int features, first;
};

__device__ __forceinline__ const i64 *message_of(const Messages &part, i64 rank) {
    return part.values + rank * part.stride;
}

// What this rank does with the features of all parts, in the order of the collection. `place` (F,): by part, their
// positions in that order · `number` (F,): of those whose bags are pooled here, which one each is, part by part, else −1
// · `pooled` (4, ·): of these, the part, the position among the part's, the position among all features, and how many
// the part has.
struct Pooled {
    const i64 *place, *number, *pooled;
    int count;
};

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

// What is sent of bags that others pool. `held` (receivers + 1,): how many features come before those that each receiver
// pools, of all features in that order, `by_rank` · `offsets`: of bags, feature by feature · `order`: receives which bag
// each one is that comes back, rank by rank, sample by sample · `batch`: samples of this rank · `samples`: of the rank
// that has most · `most`: features that any receiver pools · `copies`: how many ranks get each message. All pointers are
// null where bags are pooled here.
struct SentBags {
    const i64 *held, *by_rank, *offsets;
    i64 *order;
    i64 batch, samples, most;
    int copies;
};

// Puts requests into blocks: the occurrences `order` to `padded`, and `ids` to `messages`, behind the counts of each
// rank, and before the lengths of its bags. `apart`: words from one message to the next. The rest of a block has copies
// of some value. Homes of occurrences, which are numbers of rows, become entries, where each rank sends `rows`; or,
// where `rows` is −1, one for each id: then no id is inverted. Features of which nothing is requested have bags without
// ids, and so have samples of other ranks. Moves 32 bytes an entry, 8 an occurrence, and 32 a bag that others pool.
extern "C" __global__ void __launch_bounds__(256) bags_pad(
    const i64 *counts, i64 stride, int features, const i64 *begins, int ranks, i64 bound, i64 rows, const i64 *order,
    i64 n_order, const i64 *ids, i64 n_ids, int *homes, i64 n_homes, SentBags bags, i64 *padded, i64 *messages,
    i64 apart) {
    wait_for_prior_kernel();
    const i64 length = features + bound, lengths = bags.most * bags.samples;
    for (i64 k = thread_index(); k < ranks * bags.copies * length; k += thread_count()) {
        const i64 receiver = k / length, rank = receiver % ranks, at = k - receiver * length;
        i64 &to = messages[receiver * apart + at];
        if (at < features) {
            to = counts[rank * stride + at];
            continue;
        }
        const i64 from = begins[rank] + at - features, id = n_ids ? ids[from < n_ids ? from : n_ids - 1] : 0;
        to = rows < 0 ? id ^ (id >> 63) : id;
        if (receiver < ranks) {
            padded[rank * bound + at - features] = n_order ? order[from < n_order ? from : n_order - 1] : 0;
        }
    }
    for (i64 k = thread_index(); k < ranks * bags.copies * lengths; k += thread_count()) {  // where others pool more
        const i64 receiver = k / lengths, at = k - receiver * lengths;
        const i64 own = (bags.held[receiver + 1] - bags.held[receiver]) * bags.samples;
        if (at >= own) messages[receiver * apart + length + at] = 0;
    }
    const i64 n_bags = bags.held ? features * bags.samples : 0;
    for (i64 k = thread_index(); k < n_bags; k += thread_count()) {
        const int j = (int)(k / bags.samples), rank = ranks > 1 ? upper_bound(bags.held + 1, ranks, j) : 0;
        const i64 f = bags.by_rank[j], sample = k - j * bags.samples, held = bags.held[rank];
        const i64 bag = sample < bags.batch ? f * bags.batch + sample : -1;
        bags.order[held * bags.samples + sample * (bags.held[rank + 1] - held) + j - held] = bag;
        i64 count = 0;
        if (bag >= 0 && counts[rank * stride + f]) {
            const i64 end = bags.offsets[bag + 1] < n_homes ? bags.offsets[bag + 1] : n_homes;
            for (i64 i = bags.offsets[bag] > 0 ? bags.offsets[bag] : 0; i < end; i++) count += homes[i] >= 0;
        }
        for (int copy = 0; copy < bags.copies; copy++)
            messages[(rank + copy) * apart + length + k - held * bags.samples] = count;
    }
    if (rows < 0) {
        const i64 n = begins[ranks] < n_order ? begins[ranks] : n_order;
        for (i64 k = thread_index(); k < n; k += thread_count()) {
            const int found = upper_bound(begins + 1, ranks, k), rank = found < ranks ? found : ranks - 1;
            const i64 entry = k - begins[rank];
            homes[order[k]] = (int)(rank * bound + (entry < bound ? entry : bound - 1));
        }
        return;
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
// begin and end, `edges` (features + 1,); and how many ids each block has, `ids` (parts, ranks). One block of 1,024
// threads.
extern "C" __global__ void __launch_bounds__(1024) pieces_find(Messages a, Messages b, Messages c, int ranks,
                                                               Pooled pooled, i64 *ends, i64 *shift, i64 *edges,
                                                               i64 *ids) {
    wait_for_prior_kernel();
    __shared__ int so_far;
    const Messages parts[MOST_PARTS] = {a, b, c};
    for (int k = threadIdx.x / 32; k < MOST_PARTS * ranks; k += 32) {
        const Messages part = parts[k / ranks];
        const int rank = k % ranks;
        const i64 bound = part.bound;
        i64 done = 0;
        for (int base = 0; base < part.features; base += 32) {  // whatever was received, nobody reads beyond a block
            const int f = base + lane_index();
            i64 own = f < part.features ? message_of(part, rank)[f] : 0;
            own = own < 0 ? 0 : own < bound ? own : bound;
            const i64 upto = done + sum_of_lanes(own), end = upto < bound ? upto : bound;
            const i64 begin = upto - own < bound ? upto - own : bound;
            if (f < part.features) {
                const i64 piece = pooled.place[part.first + f] * ranks + rank;
                ends[piece] = end - begin;
                shift[piece] = part.start + rank * bound + begin;
            }
            done = __shfl_sync(FULL_WARP, end, 31);
        }
        if (lane_index() == 0) ids[k] = done;
    }
    if (threadIdx.x == 0) edges[0] = so_far = 0;
    __syncthreads();
    const i64 pieces = (i64)(a.features + b.features + c.features) * ranks;
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

// Writes to `marks`, of which a running sum is made: for each of the `n_firsts` entries of part `a` 1 where its row goes
// back, as it is requested there first, else 0; and behind these the lengths of all bags that are pooled here. Writes
// zeros to `picked`, (n_picked,), which `ids_join` fills. `ids`: how many each block has.
extern "C" __global__ void __launch_bounds__(256) marks_write(Messages a, Messages b, Messages c, int ranks,
                                                              i64 samples, Pooled pooled, const i64 *ids, i64 n_firsts,
                                                              int *marks, i64 *picked, i64 n_picked) {
    wait_for_prior_kernel();
    for (i64 k = thread_index(); k < n_picked; k += thread_count()) picked[k] = 0;
    for (i64 entry = thread_index(); entry < n_firsts; entry += thread_count()) {
        const i64 rank = entry / a.bound, at = entry - rank * a.bound;
        marks[entry] = at < ids[rank] && message_of(a, rank)[a.features + at] >= 0;
    }
    const Messages parts[MOST_PARTS] = {a, b, c};
    const i64 all = ranks * samples;
    for (i64 bag = thread_index(); bag < pooled.count * all; bag += thread_count()) {
        const i64 h = bag / all, at = bag - h * all, rank = at / samples;
        const Messages part = parts[pooled.pooled[h]];
        const i64 *lengths = message_of(part, rank) + part.features + part.bound;
        const i64 length = lengths[pooled.pooled[pooled.count + h] * samples + at - rank * samples];
        marks[n_firsts + bag] = (int)(length < 0 ? 0 : length < part.bound ? length : part.bound);
    }
}

// Writes where bags begin among all ids to `begins`, and behind those of a feature where the last one ends. `sums`: the
// running sum of `marks` · `all`: samples of all ranks. No bag reads beyond its feature.
extern "C" __global__ void __launch_bounds__(256) bags_begin(i64 all, Pooled pooled, const i64 *edges, i64 n_firsts,
                                                             const int *sums, i64 *begins) {
    wait_for_prior_kernel();
    const i64 *feature = pooled.pooled + 2 * pooled.count;
    for (i64 bag = thread_index(); bag < pooled.count * all; bag += thread_count()) {
        const i64 h = bag / all, of_feature = n_firsts + h * all, of_bag = n_firsts + bag, end = edges[feature[h] + 1];
        const i64 before = (of_bag ? sums[of_bag - 1] : 0) - (of_feature ? sums[of_feature - 1] : 0);
        const i64 begin = edges[feature[h]] + (before > 0 ? before : 0);  // a sum may overflow where offsets are wrong
        begins[bag + h] = begin < end ? begin : end;
        if (bag == (h + 1) * all - 1) begins[bag + h + 1] = end;
    }
}

// Sorts the ids by piece. Writes, for each position, the entry among those of all parts to `joined`, which is their
// number behind the last id; the id; and its row of the output: bags of each part, sample by sample, and below them a
// row for each entry of part `a`, if that is row-wise (`rows` ≥ 0). Writes to `picked`, which must be zero, the position
// of the id of each row that goes back: one for each entry, or, where `rows` is positive, one for each first id, `rows`
// for each rank. `begins`: of bags (`bags_begin`) · `all`: samples of all ranks. Moves 28 bytes an entry, and 8 or 12
// more at random.
extern "C" __global__ void __launch_bounds__(256) ids_join(
    Messages a, Messages b, Messages c, int ranks, i64 all, Pooled pooled, const i64 *ends, const i64 *shift,
    const int *sums, const i64 *begins, i64 rows, i64 *joined, i64 *ids, int *row, i64 *picked) {
    wait_for_prior_kernel();
    const Messages parts[MOST_PARTS] = {a, b, c};
    const int pieces = (a.features + b.features + c.features) * ranks;
    const i64 entries = ranks * (a.bound + b.bound + c.bound);
    const i64 bags = pooled.count * all, last = bags + (rows < 0 ? 0 : ranks * a.bound - 1);
    for (i64 number = thread_index(); number < entries; number += thread_count()) {
        const int piece = upper_bound(ends, pieces, number);
        if (piece == pieces) {
            joined[number] = entries;
            row[number] = (int)last;
            ids[number] = 0;
            continue;
        }
        const i64 at = shift[piece] + number;
        const int which = at < b.start ? 0 : at < c.start ? 1 : 2;
        const Messages part = parts[which];
        const i64 rank = piece % ranks, of_part = at - part.start;
        const i64 id = message_of(part, rank)[part.features + of_part - rank * part.bound];
        joined[number] = at;
        ids[number] = id ^ (id >> 63);  // inverted if it was requested before
        const i64 h = pooled.number[piece / ranks];
        if (h >= 0) {
            const i64 *its = pooled.pooled + h;
            const int found = upper_bound(begins + h * (all + 1), (int)all, number);
            const i64 sample = found > 0 ? found - 1 : 0, of_part = its[pooled.count];
            row[number] = (int)((h - of_part) * all + sample * its[3 * pooled.count] + of_part);
            continue;
        }
        if (rows < 0 || which) {
            row[number] = (int)last;
            continue;
        }
        row[number] = (int)(bags + of_part);
        if (!rows) picked[of_part] = number;
        else if (id >= 0) {
            const i64 back = sums[of_part] - 1 - (rank ? sums[rank * part.bound - 1] : 0);
            if (back < rows) picked[rank * rows + back] = number;
        }
    }
}
