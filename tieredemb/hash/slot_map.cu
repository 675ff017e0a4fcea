// Map from key to slot: open addressing, linear probing, one thread a key.
//
// Cells of 16 bytes {key + 1, slot}; an all-zero cell is empty, a removed one a tombstone. A find reads a cell in one
// load. Inserting follows a finished find pass, and cells only fill while it runs: two threads with one key walk the
// same cells and meet in the same one.
#include "common.cuh"

struct alignas(16) Cell {
    i64 key;  // + 1
    int slot;
    int spare;
};
constexpr i64 EMPTY = 0;
constexpr i64 TOMBSTONE = -1;
constexpr int NOT_FOUND = -1;

__device__ __forceinline__ Cell load_cell(const Cell *cell) {
    int4 raw = *reinterpret_cast<const int4 *>(cell);
    return Cell{(i64)((u64)(u32)raw.x | ((u64)(u32)raw.y << 32)), raw.z, raw.w};
}

__device__ __forceinline__ int find_slot(const Cell *cells, i64 n_cells, i64 key) {
    i64 at = first_cell(key, n_cells);
    while (true) {
        Cell cell = load_cell(cells + at);
        if (cell.key == key + 1) return cell.slot;
        if (cell.key == EMPTY) return NOT_FOUND;
        at = at + 1 == n_cells ? 0 : at + 1;
    }
}

// slots[i] = slot of keys[i], or NOT_FOUND (always for a negative key). Moves 12 bytes a key in order and one sector
// of 32 at random.
extern "C" __global__ void slot_map_find(const Cell *cells, i64 n_cells, const i64 *keys, i64 n, int *slots) {
    for (i64 i = thread_index(); i < n; i += thread_count()) {
        i64 key = keys[i];
        slots[i] = key < 0 ? NOT_FOUND : find_slot(cells, n_cells, key);
    }
}

// Adds absent keys; of equal ones any. `count` is read on the device. `filled` counts cells taken that were empty.
extern "C" __global__ void slot_map_insert(Cell *cells, i64 n_cells, const i64 *keys, const int *slots,
                                           const int *count) {
    for (i64 i = thread_index(); i < *count; i += thread_count()) {
        i64 wanted = keys[i] + 1;
        i64 at = first_cell(keys[i], n_cells);
        while (true) {
            i64 seen = __ldcg(&cells[at].key);
            if (seen == EMPTY || seen == TOMBSTONE) {
                i64 before = (i64)atomicCAS(reinterpret_cast<u64 *>(&cells[at].key), (u64)seen, (u64)wanted);
                if (before == seen) {
                    cells[at].slot = slots[i];
                    break;
                }
                seen = before;
            }
            if (seen == wanted) break;
            at = at + 1 == n_cells ? 0 : at + 1;
        }
    }
}

// Removes present, distinct keys; counts the tombstones it leaves.
extern "C" __global__ void slot_map_erase(Cell *cells, i64 n_cells, const i64 *keys, const int *count,
                                          int *tombstones) {
    for (i64 i = thread_index(); i < *count; i += thread_count()) {
        i64 at = first_cell(keys[i], n_cells);
        while (cells[at].key != keys[i] + 1) at = at + 1 == n_cells ? 0 : at + 1;
        cells[at].key = TOMBSTONE;
    }
    if (thread_index() == 0) *tombstones += *count;
}

// Fills an emptied map from the slots' keys (negative: no row), the truth that it indexes.
extern "C" __global__ void slot_map_rebuild(Cell *cells, i64 n_cells, const i64 *slot_keys, i64 n_slots) {
    for (i64 slot = thread_index(); slot < n_slots; slot += thread_count()) {
        i64 key = slot_keys[slot];
        if (key < 0) continue;
        i64 at = first_cell(key, n_cells);
        while (atomicCAS(reinterpret_cast<u64 *>(&cells[at].key), (u64)EMPTY, (u64)(key + 1)) != (u64)EMPTY)
            at = at + 1 == n_cells ? 0 : at + 1;
        cells[at].slot = (int)slot;
    }
}
