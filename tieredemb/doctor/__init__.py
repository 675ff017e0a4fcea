"""The `doctor` command: what this machine offers to the library, and what to install for what it lacks.

Each check returns `Finding`s and may fail without harm: an odd machine yields a finding of status "unknown",
never a traceback. The checks of `checks` allocate nothing; with a GPU `bandwidth` measures it for some seconds.
`--size` tries a table of that size (`try_size`), after it was checked that it fits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tieredemb.config import parse_bytes
from tieredemb.doctor import checks
from tieredemb.doctor.bandwidth import MAX_WIDTH, check_bandwidth
from tieredemb.doctor.finding import Check, Finding, unknown
from tieredemb.doctor.try_size import Trial, try_size
from tieredemb.errors import ConfigError

CHECKS: tuple[Check, ...] = (
    checks.check_packages,
    checks.check_numba_cache,
    checks.check_cpu,
    checks.check_memory,
    checks.check_huge_pages,
    checks.check_disk,
    checks.check_memkind,
    checks.check_driver,
    checks.check_gpus,
    checks.check_cupy,
)


def examine(chosen: Sequence[Check] = CHECKS) -> list[Finding]:
    """All findings, in order. A check that fails becomes a finding of status "unknown"."""
    found: list[Finding] = []
    for check in chosen:
        try:
            found += check()
        except Exception as error:  # a diagnosis must survive whatever is broken here
            found.append(unknown(check.__name__.removeprefix("check_").replace("_", " "), error))
    return found


def render(findings: Sequence[Finding]) -> str:
    """A line a finding, its install command below it."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<8} {finding.name:<{width}}  {finding.detail}".rstrip())
        if finding.install:
            lines.append(f"{'':<8} {'':<{width}}  → {finding.install}")
    return "\n".join(lines)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the `doctor` command and its options."""
    parser = commands.add_parser("doctor", help="what this machine offers, and what to install")
    parser.add_argument("--json", action="store_true", help="print a JSON list of findings")
    gpu = parser.add_argument_group("with a GPU, the cold rows that it reads and writes are measured")
    gpu.add_argument("--width", type=int, default=128, metavar="D", help="row of D float32 (default: %(default)s)")
    gpu.add_argument(
        "--table",
        default="4GiB",
        metavar="SIZE",
        help="size of the table measured in, at most a quarter of what is free; 0B measures nothing "
        "(default: %(default)s)",
    )
    trial = parser.add_argument_group("a table of your size, tried: allocated, random rows written and read back")
    trial.add_argument(
        "--size",
        metavar="SIZE",
        help="in managed memory on a GPU, else in the host's (200GB, 64GiB); what does not fit is refused. Measures "
        "this table instead of --table",
    )
    trial.add_argument("--path", type=Path, metavar="FILE", help="in a new file instead, which is removed again")
    trial.add_argument(
        "--beyond-gpu", action="store_true", help="allow more managed memory than the GPU has free: unproven"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings. Always 0: a missing part is a fact, not a failure. Raises `ConfigError` for options."""
    width, table_bytes = arguments.width, parse_bytes(arguments.table)
    if not 1 <= width <= MAX_WIDTH:
        raise ConfigError(f"--width must lie in 1 … {MAX_WIDTH}, got {width}")

    trial = _trial(arguments)

    def check_gpu_bandwidth() -> list[Finding]:
        return check_bandwidth(width, table_bytes)

    findings = examine((*CHECKS, check_gpu_bandwidth) if trial is None else CHECKS)
    if trial is not None:
        findings += try_size(trial)
    print(json.dumps([asdict(finding) for finding in findings], indent=2) if arguments.json else render(findings))
    return 0


def _trial(arguments: argparse.Namespace) -> Trial | None:
    """The table that `--size` describes. Raises `ConfigError` where it does not fit."""
    if arguments.size is None:
        if arguments.path is not None or arguments.beyond_gpu:
            raise ConfigError("--path and --beyond-gpu say where a table of --size SIZE is tried; give --size too")
        return None
    size = parse_bytes(arguments.size)
    return Trial(size_bytes=size, width=arguments.width, path=arguments.path, beyond_gpu=arguments.beyond_gpu)
