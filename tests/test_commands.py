"""How the commands of `python -m tieredemb` end: on a pipe that nobody reads, and on Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import forks
import pytest

COMMAND = [sys.executable, "-m", "tieredemb"]
ZIPF = ["cache-hit", "--zipf", "1.0", "--rows", "200", "--accesses", "2000", "--no-references"]


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """The writing end of a pipe without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize(
    ("options", "unbuffered"),
    [
        (["--help"], ""),
        (["doctor", "--table", "0B"], ""),
        (ZIPF, ""),  # Python's own buffering: what was printed is written as the command ends
        (ZIPF, "1"),  # at the first line, in the midst of the run
    ],
)
def test_command_ends_quietly_on_a_closed_pipe(closed_pipe: int, options: list[str], unbuffered: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open(os.devnull) as nothing, tempfile.TemporaryFile() as errors:
        fds = [nothing.fileno(), closed_pipe, errors.fileno()]
        fork = forks.Fork(forks.run_module("tieredemb"), *options, fds=fds, env=environment)
        assert fork.wait(120) == 141
        errors.seek(0)
        assert errors.read() == b""


@pytest.mark.parametrize("stdout", ["pipe", "none"])
def test_command_whose_error_nobody_reads_ends_quietly(closed_pipe: int, stdout: str) -> None:
    """`2>&1 | head`, and `>&-`, where Python has no stdout at all."""
    command = [*COMMAND, "cache-hit", "none.be64"]
    if stdout == "none":
        command = ["sh", "-c", '"$@" >&-', "sh", *command]
    done = subprocess.run(command, stdout=closed_pipe, stderr=closed_pipe, check=False)
    assert done.returncode == 141  # 1 would be a traceback that nobody reads, 120 Python's own failure to flush


def test_command_interrupted_ends_without_a_traceback() -> None:
    options = ["--rows", "2000", "--accesses", "4000000", "--batch-size", "4000000", "1", "--quiet"]
    # a shell's background jobs, such as CI's, inherit it ignored
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + forks.run_module("tieredemb")
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with forks.Script(code, *ZIPF, *options, env=environment) as process:
        process.readline()  # the first batch size is done, the second takes minutes
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == "tieredemb: interrupted\n"
        assert process.returncode == 130
