"""`python -m tieredemb`: the cache-hit benchmark and the doctor, each in its own module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from tieredemb import doctor
from tieredemb.cache_hit import cli as cache_hit
from tieredemb.errors import TieredEmbError

REFUSED = 2  # what argparse returns for bad arguments, and we for bad inputs
INTERRUPTED = 130  # 128 + SIGINT, the shells' convention


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code. `arguments`: without the program's name, `sys.argv[1:]` if None."""
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
        return REFUSED
    except MemoryError as error:
        print(f"tieredemb: error: not enough memory for this input ({error}); give it a smaller one", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("tieredemb: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
