"""`python -m tieredemb`: the cache-hit benchmark and the doctor. A thin shell: each command lives in its
module."""

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
    """Runs one command (`arguments`: without the program's name; default `sys.argv[1:]`); returns the exit
    code."""
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
    except KeyboardInterrupt:
        print("tieredemb: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
