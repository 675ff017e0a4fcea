"""`python -m benchmarks`: runs all benchmarks, keeps their results and rewrites the README's tables.

Further arguments go to pytest: `--quick` (tiny sizes, nothing kept), `-k slot_map`, `--results DIR`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.machine import ROOT


def main(args: list[str]) -> int:
    code = pytest.main([str(Path(__file__).parent), "-q", *args])
    if code == 0 and not {"--quick", "--results"} & {arg.partition("=")[0] for arg in args}:
        return tables.main(["--readme", str(ROOT / "README.md")])
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
