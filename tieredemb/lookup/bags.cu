// A batch of bags on the device: offsets are checked, ids are checked and turned into keys of one key space.
//
// No input is trusted. A fault is marked in `fault`: the batch then reads zeros for bad ids, or nothing at all after
// bad offsets, and updates nothing; `fault_report` tells the host the first one.
#include "common.cuh"
#include "fault.cuh"

constexpr i64 FAR = 1ll << 62;  // a fault at position p is marked as FAR − p, so that the largest is the first

// The features of a key space. `blocks`: for each the number of its block of bags among those given, null if all given
// blocks are of these features, in their order; `features`: their numbers in the collection; `first`, `size`: first key
// and rows of the table of each; `padding`: an id for each, or −1; `resident`: the slot of its table's first row, or
// −1; `separate`: whether each was looked up by itself, so that faults are reported in terms of its own ids and
// offsets.
struct Space {
    const i64 *blocks, *features, *first, *size, *padding, *resident;
    int n_features, separate;
};

// Edge k of the bags of all features; the last one may be omitted and is then the number of ids. Without `offsets` all
// bags have `given` ids, as long as there are some.
struct Edges {
    const i64 *offsets;
    i64 given, n_ids;
    __device__ __forceinline__ i64 operator[](i64 k) const {
        if (offsets) return k < given ? offsets[k] : n_ids;
        return k * given < n_ids ? k * given : n_ids;
    }
};

constexpr i64 MISPLACED = -(1ll << 61), MOST_MISPLACED = 1ll << 60;  // of an edge that should be a first one: + offset

// The inputs of features that were looked up separately. For each, `ids`: the address of its ids; `stride`: from one to
// the next, in elements; `offsets`: the address of its bags' starts, null if all have one length; `start`: the position
// of its ids among all; `n_ids`: their number; `before`: ids of its pool before its own; `edge`: the position of its
// first bag's edge among all edges; `kind`: bits IDS_32, OFFSETS_32 and LAST of its pool, and above them the length of
// its bags.
struct Joined {
    i64 ids[MOST_JOINED], stride[MOST_JOINED], offsets[MOST_JOINED], start[MOST_JOINED], n_ids[MOST_JOINED],
        before[MOST_JOINED], edge[MOST_JOINED], kind[MOST_JOINED];
};

__device__ __forceinline__ i64 integer_at(i64 address, i64 place, bool is_32) {
    return is_32 ? (i64)((const int *)address)[place] : ((const i64 *)address)[place];
}

// Joins the ids of the features and, unless `edges` is null, the edges of their bags, `batch` of each: those of one
// pool behind those of another, and behind the last one of a pool its number of ids. `total`: ids of all, from the
// first one's `start` on. An offset other than 0 of a first bag becomes an edge that every check refuses. Moves 16
// bytes an id and a bag.
extern "C" __global__ void bags_join(const __grid_constant__ Joined joined, int features, i64 total, i64 batch, i64 *ids, i64 *edges) {
    wait_for_prior_kernel();
    const i64 first = joined.start[0], n_edges = edges ? features * batch : 0;
    for (i64 k = thread_index(); k < total + n_edges; k += thread_count()) {
        if (k < total) {
            int f = 0;
            for (int step = 32; step; step /= 2)
                if (f + step < features && joined.start[f + step] - first <= k) f += step;
            const i64 own = k - (joined.start[f] - first);
            ids[first + k] = integer_at(joined.ids[f], own * joined.stride[f], joined.kind[f] & IDS_32);
            continue;
        }
        const i64 f = (k - total) / batch, b = k - total - f * batch;
        const i64 kind = joined.kind[f], before = joined.before[f];
        i64 offset = joined.offsets[f] ? integer_at(joined.offsets[f], b, kind & OFFSETS_32) : b * (kind >> KIND_BITS);
        i64 *edge = edges + joined.edge[f] + b;
        if (b == 0 && offset != 0) {
            offset = offset < -MOST_MISPLACED ? -MOST_MISPLACED : offset > MOST_MISPLACED ? MOST_MISPLACED : offset;
            *edge = MISPLACED + offset;
        } else {
            *edge = before + offset;
        }
        if (b == batch - 1 && kind & LAST) edge[1] = before + joined.n_ids[f];
    }
}

__device__ __forceinline__ void mark(u64 *place, i64 position) { atomicMax(place, (u64)(FAR - position)); }

// Checks the edges: they must rise from 0 to at most n_ids, or exactly to n_ids with `exact`. Writes those of the
// features of the space, as if only their ids had been given: int64 (features · batch + 1). Reads and writes 8 bytes a
// bag.
extern "C" __global__ void offsets_check(const i64 *offsets, i64 given, i64 n_ids, i64 n_edges, int exact, i64 batch,
                                         Space space, Fault *fault, i64 *local) {
    wait_for_prior_kernel();
    const Edges edges{offsets, given, n_ids};
    const i64 *blocks = space.blocks;
    const i64 bags = batch * space.n_features;
    for (i64 k = thread_index(); k < n_edges; k += thread_count()) {
        i64 at = edges[k], before = k ? edges[k - 1] : 0;
        bool bad = k == 0 ? at != 0 : at < before;
        if (k == n_edges - 1) bad = bad || at > n_ids || (exact && at != n_ids);
        if (bad) mark(&fault->offset, k);
        if (!blocks) local[k] = at;
    }
    if (!blocks) return;
    for (i64 bag = thread_index(); bag <= bags; bag += thread_count()) {
        i64 edge = 0, last = bag / (batch ? batch : 1);
        for (i64 j = 0; j < last && j < space.n_features; j++)
            edge += edges[(blocks[j] + 1) * batch] - edges[blocks[j] * batch];
        if (last < space.n_features)
            edge += edges[blocks[last] * batch + (bag - last * batch)] - edges[blocks[last] * batch];
        local[bag] = edge;
    }
}

constexpr int STAGED = 512;        // edges that it reads into shared memory: all among its ids, if no bag is empty
constexpr int NEAR = 32;           // features likewise

struct Table {
    i64 first, rows, padding, slot;  // the first row's key, and its slot if the table is resident, else −1
};
__device__ __forceinline__ Table table_of(const Space &space, u32 feature) {
    return {space.first[feature], space.size[feature], space.padding[feature], space.resident[feature]};
}

// The bag of occurrence k is between: local[low] ≤ k < local[high]. Bags are numbered by an int.
struct Span {
    u32 low, high;
};

// A span of at most STAGED − FILL_THREADS bags, found by all threads of the block: each reads an edge in a step,
// `probed` in the first, where it is the same for every k. Stays within the bags, even if the edges are wrong.
__device__ __forceinline__ Span bags_around(const i64 *local, u32 bags, i64 probed, i64 k) {
    Span span{0, bags};
    bool inside = probed <= k;
    u32 step = (bags + FILL_THREADS - 1) / FILL_THREADS;
    while (true) {
        span.low += step * __syncthreads_count(inside);  // those before the bag
        if (span.low + step < span.high) span.high = span.low + step;
        if (span.high - span.low <= STAGED - FILL_THREADS) return span;
        step = (span.high - span.low + FILL_THREADS - 1) / FILL_THREADS;
        const u32 probe = span.low + step * (threadIdx.x + 1);
        inside = probe < span.high && local[probe] <= k;
    }
}

// Reports the first fault that was not reported yet to the host. Called by one thread, after all others.
__device__ void fault_report(const volatile Fault *fault, const i64 *ids, const Edges &edges, i64 n_edges, i64 batch,
                             const Space &space, volatile Report *report) {
    if ((fault->id | fault->offset) == 0 || report->state != 0) return;
    const bool bad_offset = fault->offset != 0;
    const i64 at = FAR - (i64)(bad_offset ? fault->offset : fault->id);
    report->kind = bad_offset ? BAD_OFFSET : BAD_ID;
    report->position = at;
    report->ids = edges.n_ids;
    report->edges = n_edges;
    if (bad_offset && space.separate) {
        i64 f = at / batch;  // if the edge of a first bag is right, the last bag before it is wrong
        const bool first_is_wrong = at == f * batch && edges[at] < 0;
        if (at == f * batch && !first_is_wrong) f--;
        const i64 start = f * batch == at ? 0 : edges[f * batch];
        const i64 end = (f + 1) * batch < n_edges - 1 ? edges[(f + 1) * batch] : edges.n_ids;
        report->position = at - f * batch;
        report->value = first_is_wrong ? edges[at] - MISPLACED : edges[at] - start;
        report->before = f * batch == at ? 0 : edges[at - 1] - start;
        report->ids = end - start;
        report->edges = batch + 1;
    } else if (bad_offset) {
        report->value = edges[at];
        report->before = at ? edges[at - 1] : 0;
    } else {
        i64 low = 0, high = n_edges;  // the bag of the id, and so its feature
        while (high - low > 1) {
            i64 middle = (low + high) / 2;
            if (edges[middle] <= at) low = middle;
            else high = middle;
        }
        i64 feature = low / (batch ? batch : 1);
        if (space.blocks) {
            int j = 0;
            while (j < space.n_features - 1 && space.blocks[j] != feature) j++;
            feature = space.features[j];
        }
        report->feature = feature;
        report->value = ids[at];
        if (space.separate) report->position = at - edges[feature * batch];
    }
    __threadfence_system();
    report->state = 1;
}

// Bag of the id base + threadIdx.x, given the edges from `low` on, a bag at or before that of `base`.
__device__ __forceinline__ u32 bag_of(const i64 *local, u32 bags, i64 probed, i64 base, i64 count, u32 low,
                                      const int *staged) {
    u32 high = bags;
    if (staged[STAGED - 1] < FILL_THREADS)  // many empty bags among the block's ids
        high = bags_around(local, bags, probed, (count - base < FILL_THREADS ? count : base + FILL_THREADS) - 1).high;
    int passed = 0;
    for (int step = STAGED / 2; step; step /= 2)
        if (staged[passed + step - 1] <= (int)threadIdx.x) passed += step;
    passed += staged[passed] <= (int)threadIdx.x;
    low += passed;
    while (passed == STAGED && low + 1 < high) {
        const u32 middle = low + (high - low) / 2;
        if (local[middle] <= base + threadIdx.x) low = middle;
        else high = middle;
    }
    return low;
}

// Keys, homes and bags of all occurrences. A home is the slot of a resident table's row, −1 for a key to be looked up,
// DROPPED for padding, bad ids, what lies beyond the last bag, and the rest of the `capacity`, which is n_ids or more;
// after a bad offset there are no bags. 256 threads a block. Moves 8 + 16 bytes an occurrence.
//
// The time of a small batch is that of loads that wait for each other. So a block searches its first bag in 256 places
// at once, then reads edges and tables from there on into shared memory, where each id finds its own.
extern "C" __global__ void __launch_bounds__(FILL_THREADS) bags_fill(
    const i64 *ids, const i64 *offsets, i64 given, i64 n_ids, i64 capacity, i64 *local, i64 batch, Space space,
    i64 *keys, int *homes, int *bag, i64 *position, i64 n_edges, Fault *fault, Report *report) {
    wait_for_prior_kernel();
    __shared__ int staged[STAGED];  // how many of the block's ids are before the edge, at least 0, at most all
    __shared__ Table near[NEAR];
    const Edges edges{offsets, given, n_ids};
    const u32 bags = (u32)(batch * space.n_features), probe = (bags + FILL_THREADS - 1) / FILL_THREADS * (threadIdx.x + 1);
    const i64 end = local[bags], probed = probe < bags ? local[probe] : n_ids;
    const bool lost = fault->offset != 0;
    const i64 count = lost ? 0 : end < n_ids ? end : n_ids;
    for (i64 bag = thread_index(); lost && bag <= bags; bag += thread_count()) local[bag] = 0;
    for (i64 base = (i64)blockIdx.x * FILL_THREADS; base < capacity; base += thread_count()) {
        const i64 k = base + threadIdx.x;
        i64 i = k, id = !position && k < n_ids ? ids[k] : -1;
        u32 own = 0, near_feature = 0;
        if (base < count) {
            const u32 low = bags_around(local, bags, probed, base).low;
            near_feature = low / (u32)batch;
            for (int e = threadIdx.x; e < STAGED; e += FILL_THREADS) {
                const i64 edge = (i64)low + 1 + e, before = edge < bags ? local[edge] - base : FILL_THREADS;
                staged[e] = before < 0 ? 0 : before < FILL_THREADS ? (int)before : FILL_THREADS;
            }
            if (threadIdx.x < NEAR && near_feature + threadIdx.x < space.n_features)
                near[threadIdx.x] = table_of(space, near_feature + threadIdx.x);
            __syncthreads();
            own = bag_of(local, bags, probed, base, count, low, staged);
        }
        if (k < count) {
            const u32 j = own / (u32)batch;
            const Table table = j - near_feature < NEAR ? near[j - near_feature] : table_of(space, j);
            if (position) {
                i = edges[space.blocks[j] * batch + (own - j * batch)] + k - local[own];
                id = ids[i];
                position[k] = i;
            }
            const bool good = id >= 0 && id < table.rows, real = good && id != table.padding;
            if (!good) mark(&fault->id, i);
            keys[k] = real && table.slot < 0 ? table.first + id : -1;
            homes[k] = !real ? DROPPED : table.slot < 0 ? -1 : (int)(table.slot + id);
            bag[k] = (int)own;
        } else if (k < capacity) {
            keys[k] = -1;
            homes[k] = DROPPED;
            bag[k] = 0;
            if (position) position[k] = 0;
        }
        __syncthreads();  // else the next edges would overwrite those that are read here; and all marks are set
    }
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(&fault->finished, 1u) == gridDim.x - 1) {
        fault->finished = 0;
        fault_report(fault, ids, edges, n_edges, batch, space, report);
    }
}

// Writes the bag that each occurrence k would have if the sample row[k], of `rows`, were its own; where no `row` is
// given, the sample k. Moves 12 bytes an occurrence.
extern "C" __global__ void bags_number(const int *bag, i64 n, i64 batch, const int *row, i64 rows, int *own) {
    wait_for_prior_kernel();
    for (i64 k = thread_index(); k < n; k += thread_count())
        own[k] = bag[k] / (int)batch * (int)rows + (row ? row[k] : (int)k);
}

// Passes a report on to the host, unless it has one that it has not read.
extern "C" __global__ void fault_tell(const i64 *report, volatile i64 *host) {
    wait_for_prior_kernel();
    if (thread_index() != 0 || report[0] == 0 || host[0] != 0) return;
    for (int word = 1; word < (int)(sizeof(Report) / sizeof(i64)); word++) host[word] = report[word];
    __threadfence_system();
    host[0] = 1;
}
