"""CPU kernel of the page reservation (`file_pages.PageMap`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tieredemb.kernels.cpu import jit


@jit
def pages_claim(lo: int, hi: int, keys: Any, row_bytes: int, page_shift: int, bits: Any, missing: Any) -> int:
    """Marks the pages of the rows `keys[lo:hi]` in `bits` (uint8, one bit a page, lowest first).

    Writes those that were not marked to `missing` (int64) and returns their number. A page has 2 ** `page_shift` bytes:
    divisions would take twice as long as all the rest. One thread: pages share bytes.
    """
    count = 0
    for i in range(lo, hi):
        first = keys[i] * row_bytes
        for page in range(first >> page_shift, ((first + row_bytes - 1) >> page_shift) + 1):
            bit = np.uint8(1 << (page & 7))
            if bits[page >> 3] & bit == 0:
                bits[page >> 3] |= bit
                missing[count] = page
                count += 1
    return count
