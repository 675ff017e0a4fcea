// The map from key to slot alone: the functions that a plan uses, as kernels.
#include "common.cuh"
#include "slot_map.cuh"

// slots[i] = slot of keys[i], or NOT_FOUND (always for a negative key). Moves 12 bytes a key in order and one sector
// of 32 at random.
extern "C" __global__ void slot_map_find(const Cell *cells, i64 n_cells, const i64 *keys, i64 n, int *slots) {
    wait_for_prior_kernel();
    for (i64 i = thread_index(); i < n; i += thread_count()) {
        i64 key = keys[i];
        slots[i] = key < 0 ? NOT_FOUND : find_slot(cells, n_cells, key);
    }
}

// Adds absent keys; of equal ones any. `count` is read on the device.
extern "C" __global__ void slot_map_insert(Cell *cells, i64 n_cells, const i64 *keys, const int *slots,
                                           const int *count) {
    wait_for_prior_kernel();
    for (i64 i = thread_index(); i < *count; i += thread_count()) insert_slot(cells, n_cells, keys[i], slots[i]);
}

// Removes present, distinct keys; counts the tombstones it leaves.
extern "C" __global__ void slot_map_erase(Cell *cells, i64 n_cells, const i64 *keys, const int *count,
                                          int *tombstones) {
    wait_for_prior_kernel();
    for (i64 i = thread_index(); i < *count; i += thread_count()) erase_slot(cells, n_cells, keys[i]);
    if (thread_index() == 0) *tombstones += *count;
}

// Fills an emptied map from the slots' keys (negative: no row), which it indexes.
extern "C" __global__ void slot_map_rebuild(Cell *cells, i64 n_cells, const i64 *slot_keys, i64 n_slots) {
    wait_for_prior_kernel();
    for (i64 slot = thread_index(); slot < n_slots; slot += thread_count())
        if (slot_keys[slot] >= 0) insert_slot(cells, n_cells, slot_keys[slot], (int)slot);
}
