// Faults of a batch or its step, as kernels mark them and report them to the host.
#pragma once

struct Fault {
    u64 id, offset;  // marks, 0 without a fault: a larger one is of an earlier position
    u32 finished;    // blocks of `bags_fill`
    u32 pad;
};
struct Report {  // of the first fault; the host reads these by their names
    i64 state, kind, feature, position, value, before, ids, edges;
};
