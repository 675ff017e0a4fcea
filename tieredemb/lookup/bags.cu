// A batch of bags on the device: offsets checked, ids checked and turned into keys of one key space.
//
// Nothing here trusts its input. A fault leaves its mark in `fault`: the batch then reads zeros for bad ids, or nothing
// at all after bad offsets, and updates nothing; `fault_report` tells the host which was the first.
#include "common.cuh"

constexpr i64 FAR = 1ll << 62;  // a fault at position p is marked as FAR − p, so that the largest is the first
constexpr int BAD_ID = 1, BAD_OFFSET = 2;

struct Fault {
    u64 id, offset;
    u32 finished;  // blocks of `bags_fill`
    u32 pad;
};
struct Report {  // in host memory
    i64 state, kind, table, position, value, before, ids, edges;
};

// Edge k of the bags of all tables; the last one may be left out and is then the number of ids.
struct Edges {
    const i64 *offsets;
    i64 given, n_ids;
    __device__ __forceinline__ i64 operator[](i64 k) const { return k < given ? offsets[k] : n_ids; }
};

__device__ __forceinline__ void mark(u64 *place, i64 position) { atomicMax(place, (u64)(FAR - position)); }

// Checks the edges: they must rise from 0 to at most n_ids, to n_ids itself with `exact`. Writes those of the chosen
// tables alone (all of them where `tables` is null), as if only their ids had been given: int64 (chosen · batch + 1).
// Reads and writes 8 bytes a bag.
extern "C" __global__ void offsets_check(const i64 *offsets, i64 given, i64 n_ids, i64 n_edges, int exact, i64 batch,
                                         const i64 *tables, int n_tables, Fault *fault, i64 *local) {
    const Edges edges{offsets, given, n_ids};
    const i64 bags = batch * n_tables;
    for (i64 k = thread_index(); k < n_edges; k += thread_count()) {
        i64 at = edges[k], before = k ? edges[k - 1] : 0;
        bool bad = k == 0 ? at != 0 : at < before;
        if (k == n_edges - 1) bad = bad || at > n_ids || (exact && at != n_ids);
        if (bad) mark(&fault->offset, k);
        if (!tables) local[k] = at;
    }
    if (!tables) return;
    for (i64 bag = thread_index(); bag <= bags; bag += thread_count()) {
        i64 edge = 0, last = bag / (batch ? batch : 1);
        for (i64 j = 0; j < last && j < n_tables; j++) edge += edges[(tables[j] + 1) * batch] - edges[tables[j] * batch];
        if (last < n_tables) edge += edges[tables[last] * batch + (bag - last * batch)] - edges[tables[last] * batch];
        local[bag] = edge;
    }
}

// Largest bag with local[bag] ≤ k, found by a warp in steps of 32; local[0] is 0 ≤ k.
__device__ __forceinline__ i64 bag_of(const i64 *local, i64 bags, i64 k) {
    i64 low = 0, high = bags + 1;  // local[low] ≤ k; high lies beyond
    while (high - low > 1) {
        i64 step = (high - low + 31) / 32, probe = low + step * (lane_index() + 1);
        bool inside = probe < high && local[probe] <= k;
        int last = __popc(__ballot_sync(FULL_WARP, inside));  // probes are inside up to some lane
        i64 beyond = low + step * (last + 1);
        low += step * last;
        if (beyond < high) high = beyond;
        if (step == 1) break;
    }
    return low;
}

// Tells the host of the first fault that it has not been told of. One thread, after all others.
__device__ void fault_report(const volatile Fault *fault, const i64 *ids, const Edges &edges, i64 n_edges, i64 batch,
                             volatile Report *report) {
    if ((fault->id | fault->offset) == 0 || report->state != 0) return;
    const bool bad_offset = fault->offset != 0;
    const i64 at = FAR - (i64)(bad_offset ? fault->offset : fault->id);
    report->kind = bad_offset ? BAD_OFFSET : BAD_ID;
    report->position = at;
    report->ids = edges.n_ids;
    report->edges = n_edges;
    if (bad_offset) {
        report->value = edges[at];
        report->before = at ? edges[at - 1] : 0;
    } else {
        i64 low = 0, high = n_edges;  // the bag of the id, and so its table
        while (high - low > 1) {
            i64 middle = (low + high) / 2;
            if (edges[middle] <= at) low = middle;
            else high = middle;
        }
        report->table = low / (batch ? batch : 1);
        report->value = ids[at];
    }
    __threadfence_system();
    report->state = 1;
}

// Keys, homes and bags of all occurrences. A home is the slot of a resident table's row, −1 for a key to be looked up,
// DROPPED for padding, bad ids and what lies beyond the last bag; after a bad offset there are no bags. 256 threads a
// block. Moves 8 + 16 bytes an occurrence.
extern "C" __global__ void __launch_bounds__(256) bags_fill(
    const i64 *ids, const i64 *offsets, i64 given, i64 n_ids, i64 *local, i64 batch, const i64 *tables,
    int n_tables, const i64 *start, const i64 *padding, const i64 *resident, i64 *keys, int *homes, int *bag,
    i64 *position, i64 n_edges, Fault *fault, Report *report) {
    __shared__ i64 range[2];
    const Edges edges{offsets, given, n_ids};
    const bool lost = fault->offset != 0;
    const i64 bags = batch * n_tables, count = lost ? 0 : local[bags];
    for (i64 bag = thread_index(); lost && bag <= bags; bag += thread_count()) local[bag] = 0;
    for (i64 base = (i64)blockIdx.x * blockDim.x; base < n_ids; base += thread_count()) {
        __syncthreads();
        if (base < count && threadIdx.x < 64) {
            i64 wanted = base + (threadIdx.x < 32 ? 0 : blockDim.x - 1);
            i64 found = bag_of(local, bags, wanted < count ? wanted : count - 1);
            if (lane_index() == 0) range[threadIdx.x / 32] = found;
        }
        __syncthreads();
        const i64 k = base + threadIdx.x;
        if (k >= n_ids) continue;
        if (k >= count) {
            keys[k] = -1;
            homes[k] = DROPPED;
            bag[k] = 0;
            if (position) position[k] = 0;
            continue;
        }
        i64 low = range[0], high = range[1] + 1;
        while (high - low > 1) {
            i64 middle = (low + high) / 2;
            if (local[middle] <= k) low = middle;
            else high = middle;
        }
        const int j = (int)(low / batch);
        const i64 i = position ? edges[tables[j] * batch + (low - j * batch)] + k - local[low] : k;
        const i64 row = ids[i], rows = start[j + 1] - start[j];
        const bool good = row >= 0 && row < rows, real = good && row != padding[j];
        if (!good) mark(&fault->id, i);
        keys[k] = real && resident[j] < 0 ? start[j] + row : -1;
        homes[k] = !real ? DROPPED : resident[j] < 0 ? -1 : (int)(resident[j] + row);
        bag[k] = (int)low;
        if (position) position[k] = i;
    }
    __syncthreads();
    __threadfence();
    if (threadIdx.x == 0 && atomicAdd(&fault->finished, 1u) == gridDim.x - 1) {
        fault->finished = 0;
        fault_report(fault, ids, edges, n_edges, batch, report);
    }
}

// Passes a report on to the host, unless it has one that it has not read.
extern "C" __global__ void fault_tell(const i64 *report, volatile i64 *host) {
    if (thread_index() != 0 || report[0] == 0 || host[0] != 0) return;
    for (int word = 1; word < 8; word++) host[word] = report[word];
    __threadfence_system();
    host[0] = 1;
}
