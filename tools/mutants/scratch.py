"""The copy of a commit in which mutants live, and pytest in it: a process group that ends with the call."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD = REPOSITORY / "build" / "mutants"
MEMORY_BYTES = 12 << 30  # of one process: a mutant may ask for any number of rows


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()


@dataclass(frozen=True)
class Result:
    """`code`: pytest's exit code, None where it ran out of time · `printed`: all of it."""

    code: int | None
    printed: str


class Scratch:
    """A checkout of HEAD in `build/mutants/NAME/tree`, with a cache of kernels, temporary files and coverage's data of
    its own."""

    def __init__(self, name: str) -> None:
        names = ("tree", "kernels", "temporary", "coverage")
        self.root, self.kernels, self.temporary, self.coverage = (BUILD / name / each for each in names)
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        self.kernels.mkdir(mode=0o700, exist_ok=True)
        self.coverage.mkdir(exist_ok=True)
        archive = subprocess.Popen(["git", "archive", "HEAD"], cwd=REPOSITORY, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", self.root], stdin=archive.stdout, check=True)
        archive.wait()

    def pytest(self, args: Sequence[str], *, seconds: float, **environment: str) -> Result:
        shutil.rmtree(self.temporary, ignore_errors=True)  # what the last mutant left
        self.temporary.mkdir(parents=True, exist_ok=True)  # a process of that may still write there
        own = {
            "PYTHONPATH": f"{self.root}:{REPOSITORY}",  # children find the copy; what is installed is the working tree
            "PYTHONDONTWRITEBYTECODE": "1",  # a changed file may have the age and size of the one before
            "NUMBA_CACHE_DIR": str(self.kernels),
            "TMPDIR": str(self.temporary),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", *args]
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=os.environ | own | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES)),
        )
        try:
            printed, _ = process.communicate(timeout=seconds)
            return Result(process.returncode, printed)
        except subprocess.TimeoutExpired:
            return Result(None, "")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # those that it started, too
            process.wait()

    @contextlib.contextmanager
    def changed(self, files: Mapping[str, str]) -> Iterator[None]:
        """Other texts for some files while the block runs. Kernels that it compiles are not kept."""
        before = {file: (self.root / file).read_text() for file in files}
        kernels = {path for path in self.kernels.rglob("*") if path.is_file()}
        try:
            for file, text in files.items():
                (self.root / file).write_text(text)
            yield
        finally:
            for file, text in before.items():
                (self.root / file).write_text(text)
            for path in self.kernels.rglob("*"):
                if path.is_file() and path not in kernels:
                    path.unlink()
