"""`python -m tieredemb`: the cache-hit benchmark and the doctor, each in its own module."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tieredemb import doctor
from tieredemb.cache_hit import cli as cache_hit
from tieredemb.errors import TieredEmbError

REFUSED = 2  # what argparse returns for bad arguments, and we for bad inputs
INTERRUPTED = 130  # 128 + SIGINT, the shells' convention
CLOSED_PIPE = 141  # 128 + SIGPIPE, as a shell reports a C program before `head`; Python's own 1 would mean a failure


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. `arguments`: without the program's name, `sys.argv[1:]` if None."""
    try:
        try:
            return _run(arguments)
        except KeyboardInterrupt:
            print("tieredemb: interrupted", file=sys.stderr)
            return INTERRUPTED
        finally:
            print(end="", flush=True)  # also before argparse exits: a closed pipe is to show here, not as Python ends
    except BrokenPipeError:
        _drop_unwritten()
        return CLOSED_PIPE


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="tieredemb", description="Tiered embedding caches: tools.")
    commands = parser.add_subparsers(title="commands", metavar="command", required=True)
    cache_hit.add_parser(commands)
    doctor.add_parser(commands)
    parsed = parser.parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
        return code
    except TieredEmbError as error:
        print(f"tieredemb: error: {error}", file=sys.stderr)
    except MemoryError as error:
        print(f"tieredemb: error: not enough memory for this input ({error}); give it a smaller one", file=sys.stderr)
    return REFUSED


def _drop_unwritten() -> None:
    """Python flushes stdout once more as it ends, and would complain: what a closed pipe did not take goes to the null
    device. See the note on SIGPIPE in the documentation of `signal`. stderr keeps nothing back."""
    if sys.stdout is not None:  # None: closed before the start; then stderr is the pipe
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


if __name__ == "__main__":
    sys.exit(main())
