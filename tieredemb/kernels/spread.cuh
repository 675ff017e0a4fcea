// Rows that are written to several ranks, each of which has memory for them that the others can write to.
//
// Every rank gets the same number, `each`, behind the `first` rows of its memory, which begins at begins[rank].
struct Spread {
    const i64 *begins;
    i64 each, first;
    int ranks;
};

// Which of the ranks · each rows is written as row `number`, and to where: one rank after another, so that a GPU
// writes to all of them at the same time, including its own memory.
template <typename T>
struct Target {
    i64 row;
    T *to;
};

template <typename T>
__device__ __forceinline__ Target<T> target_of(const Spread &spread, i64 number, int width) {
    const i64 place = number / spread.ranks;
    const int rank = (int)(number - place * spread.ranks);
    return {rank * spread.each + place,
            reinterpret_cast<T *>(spread.begins[rank]) + (spread.first + place) * width};
}

// Each thread calls it after its last row. A kernel may have ended while its writes are on their way to another GPU,
// and a later signal may overtake them. At 762b4e7, where a collective of NCCL was the barrier, 23 of 130 runs of
// captured steps read rows that had not arrived yet without this fence, and none of 130 did with it, side by side on
// two H100s. Today's barrier (`barrier.cu`) is a release of all earlier writes on its stream; it was not tried without
// the fence.
__device__ __forceinline__ void publish_rows() { __threadfence_system(); }
