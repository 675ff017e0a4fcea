"""CPU twin of philox.cuh."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

import numpy as np

from tieredemb.kernels.cpu import inline


@inline
def philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox4x32 on uint32 counters and keys; four uint32."""
    mask = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    for _ in range(10):
        p0 = np.uint64(c0) * np.uint64(0xD2511F53)
        p1 = np.uint64(c2) * np.uint64(0xCD9E8D57)
        c0 = np.uint32(p1 >> half) ^ c1 ^ k0
        c1 = np.uint32(p1 & mask)
        c2 = np.uint32(p0 >> half) ^ c3 ^ k1
        c3 = np.uint32(p0 & mask)
        k0 = np.uint32(np.uint64(k0) + np.uint64(0x9E3779B9))
        k1 = np.uint32(np.uint64(k1) + np.uint64(0xBB67AE85))
    return c0, c1, c2, c3
