"""Which tests run which lines: recorded once for each file of tests, in a process of its own, with coverage.

A file is recorded again when it has changed, all of them when the package has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from coverage import CoverageData
from coverage.exceptions import CoverageException

from tools.mutants.scratch import BUILD, Scratch, git

ROOMS = (  # of tests; the rest is about documents, benchmarks and the project
    "cache", "lookup", "storage", "tables", "step", "modules", "sharding", "conversion", "pipeline", "hash", "model",
    "formats", "disturbances",
)  # fmt: skip
LIMIT_S = 1800.0  # of one file of tests
RUN = """
    select file.path, context.context, line_bits.numbits from line_bits
    join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id where file.path in ({})
"""  # of coverage's files; bit n of `numbits` is line n
CONFIG = """[run]
source = {root}/tieredemb
data_file = {data}/coverage
parallel = true
patch = subprocess, _exit
concurrency = thread, multiprocessing
core = ctrace
disable_warnings = no-data-collected, module-not-measured
"""


class TestsMap:
    """`digest`: of the files of tests that are in it: another map may find other tests for a mutant."""

    __test__ = False

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = BUILD / "map" / git("rev-parse", "HEAD:tieredemb")[:12]
        self._folder.mkdir(parents=True, exist_ok=True)
        self.read()

    def missing(self) -> list[str]:
        """Files of tests that have yet to be recorded."""
        return [module for module in self._modules() if not self._path(module, "json").exists()]

    def record(self, module: str, scratch: Scratch) -> str:
        """Runs a file of tests; returns a line about it. `read` then finds what it has recorded."""
        data = scratch.coverage
        for path in data.glob("coverage*"):
            path.unlink()
        config, seconds = data / "config", data / "seconds.json"
        config.write_text(CONFIG.format(root=scratch.root, data=data))
        seconds.write_text("{}")
        start = time.monotonic()
        args = ["-p", "tools.mutants.contexts", "-o", "timeout=900", module]
        environment = {"COVERAGE_PROCESS_START": str(config), "MUTANTS_SECONDS": str(seconds)}
        scratch.pytest(args, seconds=LIMIT_S, **environment)
        _combine(data, self._path(module, "coverage"), scratch.root)
        passed = json.loads(seconds.read_text())
        self._path(module, "json").write_text(json.dumps(passed))
        return f"{module}: {len(passed)} tests in {time.monotonic() - start:.0f} s"

    def tests_of(self, places: dict[str, set[int]]) -> dict[str, tuple[int, float]]:
        """The tests that run one of these lines: how many of them, and the test's seconds. A file of tests whose
        processes run them counts with all its tests, for one line each."""
        masks = {file: sum(1 << line for line in lines) for file, lines in places.items()}
        run = RUN.format(", ".join("?" * len(places)))
        found: dict[str, tuple[int, float]] = {}
        for module, seconds in self._seconds.items():
            counts: dict[str, int] = defaultdict(int)
            with contextlib.closing(sqlite3.connect(self._path(module, "coverage"))) as data:
                for file, context, lines in data.execute(run, tuple(places)):
                    counts[context] += (int.from_bytes(lines, "little") & masks[file]).bit_count()
            if counts.pop("", 0):
                counts |= {test: counts[test] + 1 for test in seconds}
            found |= {test: (count, seconds[test]) for test, count in counts.items() if count and test in seconds}
        return found

    def _modules(self) -> Iterator[str]:
        for room in ROOMS:
            for path in sorted((self._root / "tests" / room).glob("test_*.py")):
                yield str(path.relative_to(self._root))

    def _path(self, module: str, kind: str) -> Path:
        content = hashlib.sha256((self._root / module).read_bytes()).hexdigest()[:12]
        return self._folder / f"{Path(module).parent.name}-{Path(module).stem}-{content}.{kind}"

    def read(self) -> None:
        paths = {module: self._path(module, "json") for module in self._modules()}
        self._seconds = {module: json.loads(path.read_text()) for module, path in paths.items() if path.exists()}
        names = " ".join(path.name for module, path in paths.items() if module in self._seconds)
        self.digest = hashlib.sha256(names.encode()).hexdigest()[:12]


def _combine(data: Path, target: Path, root: Path) -> None:
    """One file of what all processes have recorded, with paths from the root of the checkout."""
    target.unlink(missing_ok=True)
    combined = CoverageData(str(target))
    for path in sorted(data.glob("coverage.*")):
        part = CoverageData(str(path))
        try:
            part.read()
        except CoverageException:  # of a process that was killed as it wrote it
            continue
        combined.update(part, map_path=lambda name: str(Path(name).relative_to(root)))
        part.close()
    combined.write()
    combined.close()
