// The map from key to slot: open addressing, linear probing, one thread a key.
//
// Cells of 16 bytes {key + 1, slot}; an all-zero cell is empty, a removed one a tombstone. A find reads a cell in one
// load. Inserting follows a finished find pass, and cells only fill while it runs: two threads with one key walk the
// same cells and meet in the same one.
#pragma once

struct alignas(16) Cell {
    i64 key;  // + 1
    int slot;
    int spare;
};
static_assert(sizeof(Cell) == CELL_BYTES, "the host makes room for cells");
[[maybe_unused]] constexpr i64 TOMBSTONE = -1;

// Slot of a key, or NOT_FOUND.
__device__ __forceinline__ int find_slot(const Cell *cells, i64 n_cells, i64 key) {
    i64 at = first_cell(key, n_cells);
    while (true) {
        int4 raw = *reinterpret_cast<const int4 *>(cells + at);
        i64 found = (i64)((u64)(u32)raw.x | ((u64)(u32)raw.y << 32));
        if (found == key + 1) return raw.z;
        if (found == EMPTY_CELL) return NOT_FOUND;
        at = at + 1 == n_cells ? 0 : at + 1;
    }
}

// Takes the first free cell in probe order for an absent key; of threads with one key, one does.
__device__ __forceinline__ void insert_slot(Cell *cells, i64 n_cells, i64 key, int slot) {
    const i64 wanted = key + 1;
    i64 at = first_cell(key, n_cells);
    while (true) {
        i64 seen = __ldcg(&cells[at].key);
        if (seen == EMPTY_CELL || seen == TOMBSTONE) {
            i64 before = (i64)atomicCAS(reinterpret_cast<u64 *>(&cells[at].key), (u64)seen, (u64)wanted);
            if (before == seen) {
                cells[at].slot = slot;
                return;
            }
            seen = before;
        }
        if (seen == wanted) return;
        at = at + 1 == n_cells ? 0 : at + 1;
    }
}

// Writes a tombstone to the cell of a present key.
__device__ __forceinline__ void erase_slot(Cell *cells, i64 n_cells, i64 key) {
    i64 at = first_cell(key, n_cells);
    while (cells[at].key != key + 1) at = at + 1 == n_cells ? 0 : at + 1;
    cells[at].key = TOMBSTONE;
}
