// Counts for each of several clients that plan with one cache, in addition to the totals. Without -DCLIENTS all of this
// does nothing.
//
// The owner of a row is found by its key, or by its slot if that is a resident table's. A block keeps its counts in
// lines of shared memory, one for each client that it finds, and adds them to the clients' counts once, at its end:
// most blocks find one client or a few.
#pragma once
#include "common.cuh"
#include "plan.cuh"

// The counts of a kernel are contiguous in `Totals`: the first word of them.
[[maybe_unused]] constexpr int OF_LOOKUPS = 1, OF_MISSES = 4, OF_SWAPS = 7, OF_WRITES = 8;

#ifdef CLIENTS
constexpr int LINES = 64;  // if there are more clients, several share a line, used by the first that a block finds

// The counts of a block: `KINDS` words of the totals from `FIRST` on. In shared memory.
template <int FIRST, int KINDS>
struct Tally {
    int client[LINES];  // + 1; 0 is none
    int counted[LINES][KINDS];
};

template <int FIRST>
__device__ __forceinline__ u64 *words_of(const Clients &clients, int client) {
    return reinterpret_cast<u64 *>(&clients.of[client].totals) + FIRST;
}

// All threads of the block call it, and synchronise before one of them counts.
template <int FIRST, int KINDS>
__device__ __forceinline__ void tally_begin(Tally<FIRST, KINDS> &tally) {
    int *words = reinterpret_cast<int *>(&tally);
    for (int at = threadIdx.x; at < LINES * (1 + KINDS); at += blockDim.x) words[at] = 0;
}

// One thread counts `more` of a kind for a client.
template <int FIRST, int KINDS>
__device__ __forceinline__ void tally_add(Tally<FIRST, KINDS> &tally, const Clients &clients, int client, int kind,
                                          int more) {
    const int line = client % LINES, holder = atomicCAS(&tally.client[line], 0, client + 1);
    if (holder == 0 || holder == client + 1) atomicAdd(&tally.counted[line][kind], more);
    else atomicAdd(words_of<FIRST>(clients, client) + kind, (u64)more);
}

// One thread counts a row of each kind that is `counted` for the client that has its key.
template <int FIRST, int KINDS>
__device__ __forceinline__ void tally_row(Tally<FIRST, KINDS> &tally, const Clients &clients, i64 key,
                                          const bool (&counted)[KINDS]) {
    int low = 0, high = clients.n;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (clients.first[middle] <= key) low = middle;
        else high = middle;
    }
#pragma unroll
    for (int kind = 0; kind < KINDS; kind++)
        if (counted[kind]) tally_add(tally, clients, low, kind, 1);
}

// The range of a place. All lanes of a warp search for the same, in one round for up to 32 ranges, in two for up to
// 1,024.
__device__ __forceinline__ int range_find(const Clients &clients, i64 place) {
    int low = 0, n = clients.ranges;
    while (n > 1) {
        const int step = (n + 31) / 32, at = lane_index() * step;
        const u32 upto = __ballot_sync(FULL_WARP, at < n && clients.first[low + at] <= place);
        const int passed = (31 - __clz(upto | 1u)) * step;
        low += passed;
        n = n - passed < step ? n - passed : step;
    }
    return low;
}

// The count of a lane from a warp's votes: lane 0 those of the first kind, and so on.
__device__ __forceinline__ u32 of_lane(u32 first, u32 second, u32 third = 0, u32 fourth = 0) {
    const int lane = lane_index();
    return lane == 0 ? first : lane == 1 ? second : lane == 2 ? third : lane == 3 ? fourth : 0;
}

// A warp counts its `voters`, of which a lane counts `own` as `of_lane` says, each for the client in one of whose
// ranges its place is: a key, or a resident slot numbered on from the keys. Nearly always all are of one client.
template <int FIRST, int KINDS>
__device__ __forceinline__ void tally_votes(Tally<FIRST, KINDS> &tally, const Clients &clients, i64 place, u32 voters,
                                            u32 own) {
    u32 left = voters;
    while (left) {
        const int leader = __ffs(left) - 1;
        const int range = range_find(clients, __shfl_sync(FULL_WARP, place, leader));
        const i64 *edges = clients.first + range;
        const u32 same = left & __ballot_sync(FULL_WARP, edges[0] <= place && place < edges[1]) | 1u << leader;
        const int client = range < clients.n ? range : range - clients.n, more = __popc(own & same);
        if (more) tally_add(tally, clients, client, lane_index(), more);
        left &= ~same;
    }
}

// All threads of the block call it, after they have synchronised.
template <int FIRST, int KINDS>
__device__ __forceinline__ void tally_end(const Tally<FIRST, KINDS> &tally, const Clients &clients) {
    for (int at = threadIdx.x; at < LINES * KINDS; at += blockDim.x) {
        const int line = at / KINDS, kind = at % KINDS, more = tally.counted[line][kind];
        if (more) atomicAdd(words_of<FIRST>(clients, tally.client[line] - 1) + kind, (u64)more);
    }
}
#else
template <int FIRST, int KINDS>
struct Tally {};
template <int FIRST, int KINDS>
__device__ __forceinline__ void tally_begin(Tally<FIRST, KINDS> &) {}
template <int FIRST, int KINDS>
__device__ __forceinline__ void tally_row(Tally<FIRST, KINDS> &, const Clients &, i64, const bool (&)[KINDS]) {}
template <int FIRST, int KINDS>
__device__ __forceinline__ void tally_votes(Tally<FIRST, KINDS> &, const Clients &, i64, u32, u32) {}
__device__ __forceinline__ u32 of_lane(u32, u32, u32 = 0, u32 = 0) { return 0; }
template <int FIRST, int KINDS>
__device__ __forceinline__ void tally_end(const Tally<FIRST, KINDS> &, const Clients &) {}
#endif
