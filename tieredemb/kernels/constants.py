"""Numbers shared by kernels of CPU and GPU, and by the code that launches them.

They are written only here. CUDA sources get all of them as the header `constants.cuh`, which `source.py` makes from
this module; layouts and parameters are read from the CUDA sources.
"""

from __future__ import annotations

from tieredemb.config import MODES

# homes and slots
DROPPED = -(2**31)  # home of an occurrence that takes no part: padding
NOT_FOUND = -1  # slot of a key that a map does not hold
CELL_BYTES = 16  # of a map: a key and its slot
EMPTY_CELL = 0  # a cell stores key + 1, so that a map of untouched zero pages is empty

# scores: see cache/policy.py
MIN_SCORE = 1  # of a row that was written but never used
MAX_SCORE = 2**32 - 3
# on a GPU a slot whose row has not arrived has a mark in place of the score, which arrives with the row: the second
# mark means that the next plan has used the row already
ARRIVING, ARRIVING_USED = 2**32 - 1, 2**32 - 2
AGED, COUNT, CLOCK = 0, 1, 2  # how a use changes a score: LRFU, exact LFU, LRU

# lookups
SUM, MEAN, MAX = range(len(MODES))  # how a table pools
BAD_ID, BAD_OFFSET, SPOILT = 1, 2, 3  # what a fault is about; the last is of a step: see lookup/spoilt.py
CHUNK = 64  # occurrences summed at the first level: a table of three rows in a batch of 65,536 has 340 chunks a row

# what optimizers that move every row keep of their steps: see lookup/history.py
# a step's terms, float64
TERM_WEIGHT, TERM_POINT, TERM_FIRST, TERM_ROOT_SECOND, TERM_DECAY, TERM_COUPLED, TERM_EPS = range(7)
TERMS = 7
FIRST_LOG, SECOND_LOG, DECAY_LOG, LOGS = 0, 1, 2, 3  # of a step's sums of logarithms, float64
ORDERS = 9  # moments of a sum; what it is expanded from, float32: its total, mean point and central moments, then
SUM_IS_SERIES, SUM_EPS = 8, 9  # whether they may be used, and the eps beside them
SUM_FIRST, SUM_SECOND, SUM_DECAY, SUMS = 10, 11, 12, 13  # as long as the sum grows: the products of its steps' factors
WINDOW = 2048  # steps whose sums may still grow
OVERFLOWING_SQUARES = 1e32  # of a mean of squares: divided by a correction for its bias it may have no float32
FIRST_PRODUCT, SECOND_PRODUCT, DECAY_PRODUCT, UNIT_AT, EPS_AT, MOMENTS_AT = range(6)  # of an entry there, float64
ENTRY = 15
SUM_ENDS_AT = 5e-8  # what the terms of a sum, of a geometric series nearly, have fallen to when it ends
SERIES_ERROR = 1e-7  # relative, of a move; above it steps are replayed
HISTORY_FIRST, HISTORY_TAKEN, HISTORY_REPLAYED, HISTORY_REFUSED, HISTORY_WORDS = (
    0,
    2,
    3,
    4,
    5,
)  # of a history on a GPU: int64

# inputs that are joined: of how many features by one launch, and the bits of `kind_of`
MOST_JOINED = 56
IDS_32, OFFSETS_32, LAST, KIND_BITS = 1, 2, 4, 3
MOST_ADDRESSES = 64  # addresses that one launch is given
MOST_COPIED = 16  # tensors that one launch copies

# ids that ranks send each other: see sharding/peer_exchange.py
REGION_HEAD = 2  # words before the blocks of a region
MOST_PARTS = 3  # of the tables of one width: row-wise, table-wise and replicated ones

# exact sums, int64: digits of 32 bits, then how many infinities and NaNs are in it; see lookup/exact_sum.py
EXACT_DIGITS = 66  # 32 bits each: all bits of a float64, and some for a carry
EXACT_INFINITIES, EXACT_NANS, EXACT_WORDS = 66, 67, 68

# what rounding draws random bits for, and the elements that a block of them is for: see lookup/rounding.py
DRAW_UPDATE, DRAW_LIMIT, DRAW_CATCH_UP = 0, 1, 2
DRAWS = 8

# parts of the end of a plan: missed keys get slots; later plans find them there, and homes are resolved
ASSIGN, PUBLISH = 1, 2

# initial values
NORMAL, UNIFORM = 0, 1  # distributions

# of a sort by home: bits of a digit, and how many digits are a home
SORT_BITS, SORT_PASSES = 11, 3

# of the int64 words of a miss report (`MissReport`) before the keys: the one that the GPU writes last, and how many
# they are; word 0 is the number of missed keys
REPORT_NUMBER, REPORT_WORDS = 3, 4

# threads of a block
FILL_THREADS = 256  # that find bags: each finds its own among edges that all have read
SORT_THREADS, SORT_ITEMS = 256, 8  # that sort by home, and how many each of them takes
MEETING_THREADS = (
    1024  # a block of kernels whose blocks wait for one another, as where victims are chosen: two bins a thread
)
