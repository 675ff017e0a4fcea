"""The `cache-hit` command: options, the order of work, progress. Everything that can be refused is refused
first."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from tieredemb import plots
from tieredemb.cache_hit.division import DividedWorkload, best_division
from tieredemb.cache_hit.generate import ZipfTrace, generate
from tieredemb.cache_hit.options import POLICY_HELP, capacity_bytes, capacity_rows, parse_policy, words
from tieredemb.cache_hit.report import Divided, division_table, heading, hit_rate_table, target_table, write_csv
from tieredemb.cache_hit.run import Contender, HitRate, capacity_for, contenders, side_by_side, sweep
from tieredemb.cache_hit.traces import FORMATS, Trace, read_trace
from tieredemb.cache_hit.workload import Workload
from tieredemb.errors import ConfigError
from tieredemb.progress import Advance, progress

DESCRIPTION = """\
Measures which share of a trace's lookups a hot cache serves, by running the real plan and policy over it.

A trace is a file of keys in time order, or is generated (--zipf). Every capacity is run with every policy and
batch size; the first half of the batches warms the cache up, the second half is measured. Beside the policies
stand four references: LRU, LFU that forgets evicted rows, the best static set of the measured half, and
Belady's optimum with bypass, the last two of which know the future."""
REFERENCE_NOTE = """\
* reference; static: the rows used most in the measured part, in the cache before it begins; belady: the fewest
  fetches possible for a cache that fetches a row at its first use. So static, which never fetches its rows, can
  have the higher hit rate of the two"""
EPILOG = """\
trace formats, by name, each plain or .xz, .zst, .gz:
  be64   big-endian 64-bit keys                            *.be64, scarab*.trace
  be32   big-endian 32-bit keys                            *.be32, orm-*.trace
  arc    text lines 'start count 0 request', each an       *.lis, *.arc
         access to start … start+count-1
  npy    NumPy array of integers, one dimension            *.npy
other names need --format

examples:
  python -m tieredemb cache-hit requests.be64.xz --capacity 1% 5% 20% --policy lrfu:300 lfu --plot curves.png
  python -m tieredemb cache-hit --zipf 1.05 --accesses 5000000 --batch-size 4096 --target 0.8
  python -m tieredemb cache-hit users.npy --beside items.npy --row-bytes 117 309 --batch-size 4096 81920 \\
      --capacity 8MiB 1%"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "cache-hit",
        help="hit rates of cache sizes and policies over a trace",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_trace_options(parser)
    _add_run_options(parser)
    parser.set_defaults(run=run)


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    trace = parser.add_argument_group("trace")
    trace.add_argument("trace", nargs="?", type=Path, help="trace file; before the options that take several values")
    trace.add_argument(
        "--beside",
        nargs="+",
        type=Path,
        default=[],
        metavar="TRACE",
        help="traces of tables of other widths in the same steps: finds the best division of one capacity in bytes",
    )
    trace.add_argument(
        "--format", default="auto", choices=("auto", *FORMATS), help="format of the file (auto: by its name)"
    )
    trace.add_argument(
        "--limit", type=int, metavar="N", help="take only the first N accesses of the file; the rest is not read"
    )
    trace.add_argument(
        "--zipf", type=float, metavar="ALPHA", help="generate: rank r is drawn in proportion to r^-ALPHA"
    )
    trace.add_argument("--rows", type=int, metavar="R", help="generate: rows of the table (default 1000000)")
    trace.add_argument("--accesses", type=int, metavar="N", help="generate: length of the trace (default 2000000)")
    trace.add_argument(
        "--drift",
        type=float,
        metavar="SHARE",
        help="generate: this share of the ranks, chosen anew each time, swaps its ids among itself every "
        "--drift-every accesses (default 0)",
    )
    trace.add_argument("--drift-every", type=int, metavar="N", help="generate: accesses per drift (default 100000)")
    trace.add_argument("--seed", type=int, help="generate: seed (default 0)")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    measured = parser.add_argument_group("what is measured; several values are separated by blanks or commas")
    measured.add_argument(
        "--capacity",
        nargs="+",
        default=["0.5%", "1%", "2%", "5%", "10%", "20%"],
        metavar="C",
        help="rows (2583) or shares of the rows (0.01, 1%%) (default 0.5%% 1%% 2%% 5%% 10%% 20%%); with --beside "
        "bytes (8MiB) or shares",
    )
    measured.add_argument(
        "--row-bytes",
        nargs="+",
        default=[],
        metavar="BYTES",
        help="with --beside: of a row in the cache, for each trace: 4 times the width, as much for each number of "
        "optimizer state, and 53 (49 on a GPU)",
    )
    measured.add_argument(
        "--policy", nargs="+", default=["lrfu:300"], metavar="P", help=f"{POLICY_HELP} (default lrfu:300)"
    )
    measured.add_argument(
        "--batch-size",
        nargs="+",
        default=["512"],
        metavar="B",
        help="accesses planned at once (default 512); with --beside those of each trace",
    )
    measured.add_argument(
        "--lock-window",
        type=int,
        default=0,
        metavar="W",
        help="rows of the W previous batches are never evicted, as with prefetching W batches (default 0)",
    )
    measured.add_argument(
        "--warm-up",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="share of the batches not measured (default 0.5)",
    )
    measured.add_argument(
        "--target",
        type=float,
        metavar="RATE",
        help="find the capacity at which each policy reaches this hit rate, by real runs, to 1 %%",
    )
    measured.add_argument("--no-references", action="store_true", help="run only the policies asked for")
    output = parser.add_argument_group("output")
    output.add_argument("--csv", type=Path, metavar="FILE", help="write one line a (batch size, capacity, policy)")
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw the hit-rate curves (.png, .svg, .pdf)")
    output.add_argument("--quiet", action="store_true", help="print the tables only: no progress, no file names")


# --- the run ------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; returns the exit code. Raises `TieredEmbError` for what cannot be done."""
    _check_outputs(arguments)
    if arguments.beside:
        return _run_divided(arguments)
    if arguments.row_bytes:
        raise ConfigError("--row-bytes is for traces that share a capacity; pass --beside too")
    policies = {word: parse_policy(word) for word in words(arguments.policy)}
    batch_sizes = _batch_sizes(arguments.batch_size)
    if arguments.target is not None and not 0 < arguments.target <= 1:
        raise ConfigError(f"target is a hit rate and must lie in (0, 1], got {arguments.target!r}")
    trace = _trace(arguments)
    capacities = sorted({capacity_rows(word, trace.rows) for word in words(arguments.capacity)})
    workloads = [
        Workload(trace=trace, batch_size=size, warm_up=arguments.warm_up, lock_window=arguments.lock_window)
        for size in batch_sizes
    ]
    chosen = contenders(policies, references=not arguments.no_references)
    points: list[HitRate] = []
    for workload in workloads:
        runs = len(capacities) * sum(contender.policy is not None for contender in chosen)
        with _progress(f"batches of {workload.batch_size}", runs * trace.ids.size, arguments.quiet) as advance:
            measured = list(sweep(workload, capacities, chosen, advance))
        print(f"\n{heading(workload)}\n\n{hit_rate_table(measured)}")
        if not arguments.no_references:
            print(REFERENCE_NOTE)
        if arguments.target is not None:
            _find_target(arguments.target, workload, chosen, measured, arguments.quiet)
        points += measured
    if arguments.csv is not None:
        write_csv(arguments.csv, points)
    if arguments.plot is not None:
        plots.save(plots.hit_rate_curves(points), arguments.plot)
    written = [str(path) for path in (arguments.csv, arguments.plot) if path is not None]
    if written and not arguments.quiet:
        print(f"\nwrote {', '.join(written)}")
    return 0


def _run_divided(arguments: argparse.Namespace) -> int:
    """Traces that share a capacity: the same share of the rows of each, and the best division."""
    refused = [name for name in ("zipf", "target", "plot", "limit") if getattr(arguments, name) is not None]
    if refused or arguments.trace is None:
        raise ConfigError(
            f"--beside is for trace files alone{f', without --{refused[0]}' if refused else '; name the first before'}"
        )
    paths, sizes = [arguments.trace, *arguments.beside], _batch_sizes(arguments.batch_size)
    if len(sizes) == 1:
        sizes *= len(paths)
    if len(sizes) != len(paths):
        raise ConfigError(f"{len(paths)} traces need one --batch-size or {len(paths)}, got {len(sizes)}")
    contenders_of = [Contender(name=word, policy=parse_policy(word)) for word in words(arguments.policy)]
    row_bytes = [_count(word, "--row-bytes") for value in arguments.row_bytes for word in value.split(",") if word]
    divided = DividedWorkload(
        workloads=[
            Workload(
                trace=read_trace(path, format=arguments.format),
                batch_size=size,
                warm_up=arguments.warm_up,
                lock_window=arguments.lock_window,
            )
            for path, size in zip(paths, sizes, strict=True)
        ],
        row_bytes=row_bytes,
    )
    budgets = [capacity_bytes(word, divided.all_bytes) for word in words(arguments.capacity)]
    points: list[HitRate] = []
    found = []
    for budget in budgets:
        for contender in contenders_of:
            with _progress(f"division of {budget:,} bytes, {contender.name}", None, arguments.quiet) as advance:
                best = best_division(divided, budget, contender, advance)
                same = divided.measure(contender, divided.equal_shares(budget), advance)
            found.append(Divided(budget, contender.name, same, best))
            points += best
    print(f"\n{division_table(found)}")
    if arguments.csv is not None:
        write_csv(arguments.csv, points)
        if not arguments.quiet:
            print(f"\nwrote {arguments.csv}")
    return 0


def _count(word: str, option: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise ConfigError(f"{option} {word!r} is not possible; pass a whole number of at least 1")
    return int(word)


def _batch_sizes(values: list[str]) -> list[int]:
    sizes = []
    for word in words(values):
        if not word.isdecimal() or int(word) < 1:
            raise ConfigError(f"batch size {word!r} is not possible; pass a number of accesses of at least 1")
        sizes.append(int(word))
    return sizes


def _check_outputs(arguments: argparse.Namespace) -> None:
    """A run may take minutes: what would fail at its end is refused before it."""
    for option, path in (("--csv", arguments.csv), ("--plot", arguments.plot)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"{option} {str(path)!r} is not a file in an existing directory; create it first")
    if arguments.plot is not None:
        plots.check_picture(arguments.plot)


def _trace(arguments: argparse.Namespace) -> Trace:
    generated = {name: getattr(arguments, name) for name in ("rows", "accesses", "drift", "drift_every", "seed")}
    given = {name: value for name, value in generated.items() if value is not None}
    if (arguments.trace is None) == (arguments.zipf is None):
        raise ConfigError("pass either a trace file, before the options, or --zipf ALPHA to generate a trace")
    if arguments.zipf is None:
        if given:
            raise ConfigError(f"--{next(iter(given)).replace('_', '-')} is for generated traces; pass --zipf too")
        return read_trace(arguments.trace, format=arguments.format, limit=arguments.limit)
    if arguments.limit is not None or arguments.format != "auto":
        raise ConfigError("--limit and --format are for trace files; a generated trace takes --accesses")
    return generate(ZipfTrace(**{"alpha": arguments.zipf, "rows": 1_000_000, "accesses": 2_000_000} | given))


def _find_target(
    target: float, workload: Workload, chosen: list[Contender], measured: list[HitRate], quiet: bool
) -> None:
    def search(contender: Contender, counted: Advance) -> HitRate | None:
        known = [point for point in measured if point.policy == contender.name]
        return capacity_for(target, contender, workload, known, counted)

    with _progress(f"capacity for {target:g}", None, quiet) as advance:
        reached = list(side_by_side(search, chosen, advance))
    found = dict(zip((contender.name for contender in chosen), reached, strict=True))
    print(f"\n{target_table(target, found, workload)}")


def _progress(title: str, accesses: int | None, quiet: bool) -> contextlib.AbstractContextManager[Advance]:
    return contextlib.nullcontext(lambda done: None) if quiet else progress(title, accesses, " accesses")
