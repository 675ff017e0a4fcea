"""`python -m benchmarks`: runs all benchmarks, keeps their results and rewrites the pages' tables.

Wants an idle machine: under load torch's threads suffer most, and comparisons with it flatter tieredemb. Further
arguments go to pytest: `--quick` (tiny sizes, nothing kept), `-k slot_map`, `--results DIR`; on a host of many cores
`-k state --state-gib 25`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks import tables

BUSY = 0.5  # load average of the last minute


def main(args: list[str]) -> int:
    load = os.getloadavg()[0]
    if load > BUSY:
        print(
            f"this machine is busy (load {load:.1f}): stop what runs on it, or do not trust the figures",
            file=sys.stderr,
        )
    code = pytest.main([str(Path(__file__).parent), "-q", *args])
    if code == 0 and not {"--quick", "--results"} & {arg.partition("=")[0] for arg in args}:
        return tables.main([])
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
