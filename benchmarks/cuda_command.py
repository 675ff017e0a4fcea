"""What the command lines of the GPU benchmarks share: their options, and where results go."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cuda_step import STEPS, WARM_UP, check_device, say, show
from benchmarks.record import RESULTS, Record, save

CHANGES_NOTHING = ("results", "device", "directory")  # options under which a run is still the whole benchmark


def make_parser(module: str, description: str | None, *, rows: int | None = None) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.{module}`, with the options that every benchmark has. `rows`: of its tables,
    where they are all of one size."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    parser.add_argument(
        "--results", type=Path, help=f"directory of the results (default: {RESULTS.name}/ for a whole run)"
    )
    if rows is not None:
        parser.add_argument("--rows", type=int, default=rows, help="of each table (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes and few steps")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="cpu only with --quick")
    return parser


def add_steps(parser: argparse.ArgumentParser) -> None:
    """The options of benchmarks of steps."""
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps of each way (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before the first (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=1, help="batches fetched ahead (default: %(default)s)")


def parse(parser: argparse.ArgumentParser, args: Sequence[str] | None) -> argparse.Namespace:
    """The options; exits with an error for those that make no sense. What is not the whole benchmark is kept only where
    --results asks for it, as it would replace the whole one."""
    chosen = parser.parse_args(args)
    for name, value in vars(chosen).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if chosen.device.type == "cpu" and not chosen.quick:
        parser.error("the sizes are made for a GPU; try the harness out with --quick --device cpu")
    check_device(chosen.device)
    changed = (name for name, value in vars(chosen).items() if value != parser.get_default(name))
    if chosen.results is None and all(name in CHANGES_NOTHING for name in changed):
        chosen.results = RESULTS
    return chosen


def keep(results: Path | None, name: str, title: str, records: Sequence[Record], *, statistic: str) -> None:
    """Prints the records, and saves them where `results` is a directory."""
    for record in records:
        show(record)
    if results is None:
        say("not the whole benchmark: nothing is kept without --results")
    else:
        save(results, name, title, records, statistic=statistic)


def barred(bar: dict[str, Any], *, quick: bool) -> dict[str, Any]:
    """The fields of a bar; figures of tiny sizes mean nothing, so they have none."""
    return {} if quick else bar
