// Planning a batch on the device: finds and locks resident rows, claims missed keys, and assigns slots to them.
//
// Nothing here waits for the host: counts are in `Counts`, number and time in `Clock`. With -DUNCACHED a batch may
// exceed the cache: rows without a slot are used in place, under a record that exists as long as a ticket uses it. No
// home changes while a ticket is in flight, so a row under a record gets a slot only in a plan after its last ticket.
//
// The rows of a plan may be moved while the next plan is made, and scores must be as if they had been moved before it.
// So a slot whose row has not arrived has ARRIVING in place of its score. A plan that uses the row changes that to
// ARRIVING_USED; the kernel that moves the row (transfer.cu) writes the row's score there. Both are atomic: the second
// one sees what the first has written, and raises the score. The victim's own score is kept in the memory of the plan.
// A row under a record that two such plans use one after the other is raised once.
//
// With -DCLIENTS each count is also made for the client that owns the row (clients.cuh).
#include "clients.cuh"
#include "common.cuh"
#include "policy.cuh"
#include "slot_map.cuh"

struct alignas(16) Claim {
    i64 key;  // + 1; 0 is free
    int missed;
    int pad;
};

// Behind the last record: how many are taken, and the state of their index.
struct RecordsEnd {
    int taken;
    int index;  // FILLED: with entries of this plan; STALE: of an earlier one
    int pad[2];
};
constexpr int FILLED = 1, STALE = 2;

// All records, and their index: a map of the records in use.
struct Records {
    Record *records;
    int n_records;
    Cell *map;
    i64 n_map;
};
__device__ __forceinline__ RecordsEnd *end_of(const Records &all) {
    return reinterpret_cast<RecordsEnd *>(all.records + all.n_records);
}

// The cached slots, and the map that finds them. The host makes one for the lifetime of a cache.
struct Slots {
    Cell *cells;
    i64 n_cells;
    i64 *keys;
    int *last_batch;
    u32 *score;
    int capacity;
};

// Gives a plan the next number, and its time: the next one if it `ages` scores, as the first plan does, else the
// present one.
__device__ __forceinline__ void clock_advance(Clock *clock, Counts *counts, int scored, int ages) {
    const bool is_later = ages || clock->time == 0;
    clock->batch += 1;
    clock->time += is_later;
    counts->totals.batches += scored && is_later;
}

// Counts the batch for the clients whose ids the plan has, `n_planned` at `planned`: several plans of one time are one
// batch. Called by one block, after it has advanced the clock.
__device__ __forceinline__ void batch_count(const Clock *clock, const Clients &clients, const int *planned,
                                            int n_planned) {
#ifdef CLIENTS
    __syncthreads();
    const i64 time = clock->time;
    for (int p = threadIdx.x; p < n_planned; p += blockDim.x) {
        Client *client = clients.of + planned[p];
        if (atomicExch(reinterpret_cast<u64 *>(&client->time), (u64)time) != (u64)time)
            atomicAdd(&client->totals.batches, 1ull);
    }
#endif
}

// Starts a plan: its number and time, zero counts, empty claims, `Moving` behind them, and `selection` (16-byte units
// each). Slots of the `lag` batches before it are locked. `planned`: the numbers of the `n_planned` clients that the
// plan is for.
extern "C" __global__ void plan_begin(Clock *clock, Counts *counts, double units_per_batch, int lag, int scored,
                                      int ages, int4 *claims, i64 n_claims, int4 *selection, i64 n_selection,
                                      Records records, const int *planned, int n_planned) {
    wait_for_prior_kernel();
    for (i64 at = thread_index(); at < n_claims; at += thread_count()) claims[at] = make_int4(0, 0, 0, 0);
    for (i64 at = thread_index(); at < n_selection; at += thread_count()) selection[at] = make_int4(0, 0, 0, 0);
    if (thread_index() == 0) clock_advance(clock, counts, scored, ages);
    if (blockIdx.x == 0 && scored) batch_count(clock, counts->clients, planned, n_planned);
    if (thread_index() != 0) return;
    double now = (double)MIN_SCORE + floor((double)clock->time * units_per_batch);
    clock->now = now < (double)MAX_SCORE ? (i64)now : (i64)MAX_SCORE;
    clock->stamp = (int)(u32)(u64)clock->batch;
    clock->oldest = clock->stamp - lag;
    counts->missed = counts->uncached = counts->needed = counts->into_unused = 0;
    counts->arrivals = 0;
    RecordsEnd *end = end_of(records);
    end->index = end->index ? STALE : 0;
}

// Empties the index of the records if an earlier plan has filled it. Most batches that might exceed the cache do not,
// and find no record at all: then this and the next kernel end at once.
extern "C" __global__ void records_clear(Records all) {
    wait_for_prior_kernel();
    if ((end_of(all)->index & STALE) == 0) return;
    for (i64 at = thread_index(); at < all.n_map; at += thread_count())
        *reinterpret_cast<int4 *>(all.map + at) = make_int4(0, 0, 0, 0);
}

// Indexes the records that a ticket still uses and frees the others.
extern "C" __global__ void records_index(Records all, const Clock *clock) {
    wait_for_prior_kernel();
    Record *records = all.records;
    RecordsEnd *end = end_of(all);
    if (thread_index() == 0) atomicAnd(&end->index, ~STALE);
    if (*(volatile int *)&end->taken == 0) return;  // if the last one was freed, there is none to look at
    bool filled = false;
    for (i64 r = thread_index(); r < all.n_records; r += thread_count()) {
        i64 key = records[r].key - 1;
        if (key < 0) continue;
        if (records[r].last_batch - clock->oldest < 0) {
            records[r].key = 0;
            atomicSub(&end->taken, 1);
        } else {
            insert_slot(all.map, all.n_map, key, (int)r);
            filled = true;
        }
    }
    if (filled) atomicOr(&end->index, FILLED);
}

// Finds each key; the first thread that finds a resident row in this batch locks it and, if `scored`, raises its score.
// A missed key is claimed once; homes[i] then names its claim, as −2 − cell, until the plan is resolved, or its record,
// as −2 − n_claims − record; rows under records are stored away from the slots, by key or by record. Without a key a
// home stays unchanged: the slot of a resident table, or DROPPED. Rows of the plan before may not have arrived yet:
// such a row with a slot is raised when it arrives; with `may_arrive` a row under a record that this plan and the one
// before use is raised once.
extern "C" __global__ void keys_find(Slots slots, const i64 *keys, i64 n, const Clock *clock, int kind, float unit,
                                     int scored, Claim *claims, i64 n_claims, int *homes, i64 *missed_keys,
                                     Records all, word_t *away_state, i64 away_stride, int away_by_key,
                                     int may_arrive, Counts *counts) {
    wait_for_prior_kernel();
    int *last_batch = slots.last_batch;
    u32 *score = slots.score;
    __shared__ int block_lookups, block_hits, block_unique, block_overflow;
    __shared__ Tally<OF_LOOKUPS, 4> tally;
    if (threadIdx.x == 0) block_lookups = block_hits = block_unique = block_overflow = 0;
    tally_begin(tally);
    __syncthreads();
    const Clients &clients = counts->clients;
    const int stamp = clock->stamp;
    const i64 now = clock->now;
#ifdef UNCACHED
    const bool map_is_filled = end_of(all)->index & FILLED;
    Record *records = all.records;
#endif
    for (i64 start = (i64)blockIdx.x * blockDim.x; start < n; start += thread_count()) {
        i64 i = start + threadIdx.x;
        i64 key = i < n ? keys[i] : -1;
        bool hit = false, first = false, won = false, over = false;
        i64 at = 0, place = key;
        if (key >= 0) {
            int slot = find_slot(slots.cells, slots.n_cells, key);
            hit = slot >= 0;
            if (hit) {
                homes[i] = slot;
                if (__ldcg(last_batch + slot) != stamp) first = atomicExch(last_batch + slot, stamp) != stamp;
                if (first && scored) {
                    u32 old = __ldcg(score + slot);
                    if (old == ARRIVING) old = atomicCAS(score + slot, ARRIVING, ARRIVING_USED);
                    if (old != ARRIVING) score[slot] = raised(old, now, kind, unit);
                }
            } else {
                int record = NOT_FOUND;
#ifdef UNCACHED
                if (map_is_filled) record = find_slot(all.map, all.n_map, key);
                if (record >= 0) {
                    homes[i] = (int)(-2 - n_claims - record);
                    int *last = &records[record].last_batch;
                    int before = __ldcg(last);
                    if (before != stamp) over = first = (before = atomicExch(last, stamp)) != stamp;
                    u32 *its_score = away_state + ((away_by_key ? key : record) + 1) * away_stride - 1;
                    if (first && scored && !(may_arrive && before == stamp - 1))
                        *its_score = raised(*its_score, now, kind, unit);
                }
#endif
                if (record < 0) {
                    at = (i64)(((u64)key * 0x9E3779B97F4A7C15ull) >> 32) & (n_claims - 1);
                    while (true) {
                        i64 seen = __ldcg(&claims[at].key);
                        if (seen == EMPTY_CELL) {
                            seen = (i64)atomicCAS(reinterpret_cast<u64 *>(&claims[at].key), (u64)EMPTY_CELL, (u64)(key + 1));
                            won = seen == EMPTY_CELL;
                            if (won) break;
                        }
                        if (seen == key + 1) break;
                        at = (at + 1) & (n_claims - 1);
                    }
                    homes[i] = (int)(-2 - at);
                }
            }
        } else if (i < n) {
            const int slot = homes[i];
            hit = slot >= 0;
            place = slot + clients.beyond;
        }
        const int m = __syncthreads_or(won) ? append(&counts->missed, won) : 0;  // most blocks miss nothing
        if (won) {
            missed_keys[m] = key;
            claims[at].missed = m;
        }
        u32 lookups = __ballot_sync(FULL_WARP, key >= 0 || hit), hits = __ballot_sync(FULL_WARP, hit);
        u32 unique = __ballot_sync(FULL_WARP, first || won), overflow = __ballot_sync(FULL_WARP, over);
        if (lane_index() == 0 && lookups) {
            atomicAdd(&block_lookups, __popc(lookups));
            atomicAdd(&block_hits, __popc(hits));
            atomicAdd(&block_unique, __popc(unique));
            if (overflow) atomicAdd(&block_overflow, __popc(overflow));
        }
        if (scored) tally_votes(tally, clients, place, lookups, of_lane(lookups, hits, unique, overflow));
    }
    __syncthreads();
    tally_end(tally, clients);
    if (threadIdx.x == 0 && block_lookups && scored) {
        atomicAdd(&counts->totals.lookups, (u64)block_lookups);
        atomicAdd(&counts->totals.hits, (u64)block_hits);
        atomicAdd(&counts->totals.unique, (u64)block_unique);
        if (block_overflow) atomicAdd(&counts->totals.overflow, (u64)block_overflow);
    }
}

// The missed keys of a plan, and their occurrences.
struct Missed {
    const i64 *keys;
    int *slots;    // of the missed keys: a slot, or −1 until there is a record, then its home
    i64 *victims;  // the key that was there, or −1
    u32 *scores;   // its score
};
struct Occurrences {
    int *homes;
    i64 n;
    const Claim *claims;
    i64 n_claims;
};

// The counts at the end of a plan, which every thread reads before the first of them changes.
struct Ending {
    Wanted wanted;
    int victims;     // of those wanted
    int tombstones;  // in the map, once the victims are removed
    int stamp;
};
__device__ __forceinline__ Ending ending_of(const Wanted &wanted, int chosen, int tombstones, int stamp) {
    const int victims = chosen < wanted.needed ? chosen : wanted.needed;
    return {wanted, victims, tombstones + victims, stamp};
}

// Assigns slots to missed keys: slots never used, and those of victims. With `commit` the map changes, too: the victims
// are removed and the missed keys own the slots, although their rows have not arrived.
__device__ __forceinline__ void missed_assign(const Ending &end, const int *victims, const Slots &slots,
                                              const Missed &missed, bool commit) {
    for (i64 m = thread_index(); m < end.wanted.missed; m += thread_count()) {
        int slot = -1;
        i64 victim = -1;
        if (m < end.wanted.into_unused) {
            slot = end.wanted.used + (int)m;
        } else if (m - end.wanted.into_unused < end.victims) {
            slot = victims[m - end.wanted.into_unused];
            victim = slots.keys[slot];
        }
        missed.slots[m] = slot;
        missed.victims[m] = victim;
        if (slot < 0 || !commit) continue;
        if (victim >= 0) erase_slot(slots.cells, slots.n_cells, victim);
        missed.scores[m] = slots.score[slot];
        slots.score[slot] = ARRIVING;
        slots.keys[slot] = missed.keys[m];
        slots.last_batch[slot] = end.stamp;
    }
}

// Copies the counts of a plan for the kernels that move its rows.
__device__ __forceinline__ void missed_leave(Moving *moving, const Wanted &wanted, i64 now) {
    moving->missed = wanted.missed;
    moving->needed = wanted.needed;
    moving->now = now;
}

// Publishes the missed keys' new slots; a key without one gets a record.
__device__ __forceinline__ void missed_publish(const Ending &end, const Slots &slots, const Missed &missed,
                                               Counts *counts, const Records &all) {
    for (i64 m = thread_index(); m < end.wanted.missed; m += thread_count()) {
        i64 key = missed.keys[m];
        int slot = missed.slots[m];
        if (slot >= 0) insert_slot(slots.cells, slots.n_cells, key, slot);
#ifdef UNCACHED
        while (slot < 0) {  // records are at most half taken
            int r = (int)(atomicAdd(&counts->record, 1u) % (u32)all.n_records);
            if (atomicCAS(reinterpret_cast<u64 *>(&all.records[r].key), 0ull, (u64)(key + 1)) != 0ull) continue;
            all.records[r].last_batch = end.stamp;
            atomicAdd(&end_of(all)->taken, 1);
            missed.slots[m] = -2 - r;
            break;
        }
#endif
    }
}

// Sets the homes of the missed keys' occurrences, which name their claims, and of those under records.
__device__ __forceinline__ void homes_resolve(const Occurrences &all, const int *missed_slots) {
    for (i64 i = thread_index(); i < all.n; i += thread_count()) {
        int home = all.homes[i];
        if (home >= -1 || home == DROPPED) continue;
        i64 at = -2 - (i64)home;
        all.homes[i] = at < all.n_claims ? missed_slots[all.claims[at].missed] : (int)(-2 - (at - all.n_claims));
    }
}

#ifdef CLIENTS
// Counts the missed keys, each for its client: those without a slot, those with one, and of the latter those that evict
// a row.
__device__ __forceinline__ void missed_count(const Ending &end, const i64 *keys, const Counts *counts) {
    __shared__ Tally<OF_MISSES, 3> tally;
    tally_begin(tally);
    __syncthreads();
    const Clients &clients = counts->clients;
    const int into_unused = end.wanted.into_unused, with_slots = into_unused + end.victims;
    for (i64 start = (i64)blockIdx.x * blockDim.x; start < end.wanted.missed; start += thread_count()) {
        const i64 m = start + threadIdx.x;
        const u32 missed = __ballot_sync(FULL_WARP, m < end.wanted.missed);
        const u32 filled = __ballot_sync(FULL_WARP, m < with_slots);
        const u32 evicted = __ballot_sync(FULL_WARP, m >= into_unused);
        tally_votes(tally, clients, m < end.wanted.missed ? keys[m] : -1,
                    missed, of_lane(missed & ~filled, filled, filled & evicted));
    }
    __syncthreads();
    tally_end(tally, clients);
}
#endif

// Runs after the map has changed: later plans find the missed keys there, homes are resolved, and the map is rebuilt
// from the slots' keys once a quarter of its cells may be tombstones. If nothing was missed, only homes that name
// records change.
__device__ __forceinline__ void missed_commit(const Ending &end, const Slots &slots, const Missed &missed,
                                              const Occurrences &all, Counts *counts, const Records &records,
                                              Moving *moving) {
    if (end.wanted.missed == 0) {
#ifdef UNCACHED
        if (end_of(records)->index & FILLED) {
            homes_resolve(all, missed.slots);
            grid_meet(&counts->arrivals);  // else a block that starts later would see that all is done
        }
#endif
        if (thread_index() == 0) moving->published = 1;
        return;
    }
    missed_publish(end, slots, missed, counts, records);
    grid_meet(&counts->arrivals);
    if (thread_index() == 0) moving->published = 1;
    homes_resolve(all, missed.slots);
#ifdef CLIENTS
    missed_count(end, missed.keys, counts);
#endif
    const bool rebuild = end.tombstones > slots.n_cells / 4;
    const int used = end.wanted.used + end.wanted.into_unused;
    if (thread_index() == 0) {
        const int with_slots = end.wanted.into_unused + end.victims, uncached = end.wanted.missed - with_slots;
        counts->used = used;
        counts->tombstones = rebuild ? 0 : end.tombstones;
        counts->uncached = uncached;
        counts->totals.filled += (u64)with_slots;
        counts->totals.moved.evicted += (u64)end.victims;
        counts->totals.overflow += (u64)uncached;
    }
    if (!rebuild) return;
    for (i64 at = thread_index(); at < slots.n_cells; at += thread_count())
        *reinterpret_cast<int4 *>(slots.cells + at) = make_int4(0, 0, 0, 0);
    grid_meet(&counts->arrivals);
    for (i64 slot = thread_index(); slot < used; slot += thread_count())
        if (slots.keys[slot] >= 0) insert_slot(slots.cells, slots.n_cells, slots.keys[slot], (int)slot);
}

// Ends a plan whose victims were chosen: does one `part` (ASSIGN, PUBLISH) or both; 0 only assigns slots to missed
// keys. Publishing again changes nothing. All blocks are resident at once, each on a multiprocessor of its own:
// registers for two would spill.
extern "C" __global__ void __launch_bounds__(MEETING_THREADS, 1)
    missed_resolve(Counts *counts, const int *victims, const int *chosen, const i64 *missed_keys, Slots slots,
                  const Clock *clock, int *missed_slots, i64 *victim_keys, u32 *victim_scores, int *homes, i64 n,
                  const Claim *claims, i64 n_claims, Records records, Moving *moving, int part) {
    wait_for_prior_kernel();
    if (part == PUBLISH && moving->published) return;
    const Missed missed{missed_keys, missed_slots, victim_keys, victim_scores};
    const Wanted wanted{counts->missed, counts->used, counts->into_unused, counts->needed};
    const Ending end = ending_of(wanted, *chosen, counts->tombstones, clock->stamp);
    if (part != PUBLISH) {
        if (part & ASSIGN && thread_index() == 0) missed_leave(moving, wanted, clock->now);
        missed_assign(end, victims, slots, missed, part & ASSIGN);
    }
    if ((part & PUBLISH) == 0) return;
    if (part & ASSIGN && wanted.missed) grid_meet(&counts->arrivals);
    missed_commit(end, slots, missed, {homes, n, claims, n_claims}, counts, records, moving);
}

// Gives missed keys slots in one launch, for plans whose slots may be reassigned before a row has moved: chooses
// victims as `victims_select` does, and assigns as `missed_resolve` does, which has to publish afterwards. Slots of the
// `lag` batches before it are locked: if another plan was made since it began, fewer than then. 1,024 threads a block,
// all blocks resident at once. `selection` is zero at the start. Called again once rows have moved, it does nothing.
extern "C" __global__ void __launch_bounds__(MEETING_THREADS, 1)
    missed_place(Selection *selection, Counts *counts, const Clock *clock_at, int lag, Slots slots, float unit,
                 int by_age, int in_parts, int *victims, const i64 *missed_keys, int *missed_slots, i64 *victim_keys,
                 u32 *victim_scores, Moving *moving) {
    wait_for_prior_kernel();
    if (moving->over) return;
    Clock clock = *clock_at;
    clock.oldest = clock.stamp - lag;
    const Missed missed{missed_keys, missed_slots, victim_keys, victim_scores};
    const Wanted wanted = slots_wanted(counts, slots.capacity);
    if (thread_index() == 0) {  // for later kernels: in this one every thread has them
        counts->needed = wanted.needed;
        counts->into_unused = wanted.into_unused;
        missed_leave(moving, wanted, clock.now);
    }
    int chosen = 0;
    if (wanted.needed) {
        victims_choose(selection, clock, slots.score, slots.last_batch, wanted, unit, by_age, in_parts, victims);
        grid_meet(&selection->arrivals);  // else a slot that was reassigned would be ranked again
        chosen = __ldcg(&selection->chosen);
    }
    const Ending end = ending_of(wanted, chosen, counts->tombstones, clock.stamp);
    missed_assign(end, victims, slots, missed, true);
}

// If every row is resident, a plan only counts: homes are given, and all lookups hit.
extern "C" __global__ void homes_count(const int *homes, i64 n, Clock *clock, Counts *counts, int scored, int ages,
                                       const int *planned, int n_planned) {
    wait_for_prior_kernel();
    __shared__ int block_lookups;
    __shared__ Tally<OF_LOOKUPS, 2> tally;
    if (threadIdx.x == 0) block_lookups = 0;
    tally_begin(tally);
    __syncthreads();
    const Clients &clients = counts->clients;
    int lookups = 0;
#ifdef CLIENTS
    for (i64 start = (i64)blockIdx.x * blockDim.x; start < n; start += thread_count()) {
        const i64 i = start + threadIdx.x;
        const int slot = i < n ? homes[i] : DROPPED;
        const u32 homed = __ballot_sync(FULL_WARP, slot != DROPPED);
        lookups += slot != DROPPED;
        if (scored) tally_votes(tally, clients, slot + clients.beyond, homed, of_lane(homed, homed));
    }
#else
    for (i64 i = thread_index(); i < n; i += thread_count()) lookups += homes[i] != DROPPED;
#endif
    atomicAdd(&block_lookups, lookups);
    __syncthreads();
    tally_end(tally, clients);
    if (threadIdx.x == 0 && scored && block_lookups) {
        atomicAdd(&counts->totals.lookups, (u64)block_lookups);
        atomicAdd(&counts->totals.hits, (u64)block_lookups);
    }
    if (thread_index() == 0) clock_advance(clock, counts, scored, ages);
    if (blockIdx.x == 0 && scored) batch_count(clock, clients, planned, n_planned);
}
