// Rows that go to several ranks, each of which has memory for them that the others write to.
//
// Every rank gets as many, `each`, behind the `first` rows of its memory, which begins at begins[rank].
struct Spread {
    const i64 *begins;
    i64 each, first;
    int ranks;
};

// Which of the ranks · each rows is taken `turn`-th, and where it goes: to one rank after the other, so that a GPU writes
// to all of them at the same time, its own memory among them.
template <typename T>
struct Going {
    i64 row;
    T *to;
};

template <typename T>
__device__ __forceinline__ Going<T> going(const Spread &spread, i64 turn, int width) {
    const i64 place = turn / spread.ranks;
    const int rank = (int)(turn - place * spread.ranks);
    return {rank * spread.each + place,
            reinterpret_cast<T *>(spread.begins[rank]) + (spread.first + place) * width};
}

// Each thread calls it behind its last row. A kernel may be over while what it has written is on its way to another GPU,
// and a later signal may overtake it. At 762b4e7, where a collective of NCCL was the barrier, 23 of 130 runs of captured
// steps read rows that had yet to arrive without this fence, and none of 130 did with it, side by side on two H100s. The
// barrier of today (`barrier.cu`) is a release of all earlier writes on its stream; it was not tried without the fence.
__device__ __forceinline__ void publish_rows() { __threadfence_system(); }
