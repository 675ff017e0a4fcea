"""Writes the results into the README: `python -m benchmarks.tables [--check] [--readme README.md]`.

What stands between `<!-- benchmarks:NAME -->` and `<!-- /benchmarks -->` is generated from `results/NAME.json`; no
figure is written by hand. Benchmarks that need a GPU may still lack their results.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT
from benchmarks.record import RESULTS, Record, load

ON_GPU = {
    f"cuda-{name}": f"python -m benchmarks.cuda_{name}" for name in ("kernels", "step", "dlrm", "inference", "tiers")
}
BLOCK = re.compile(r"(<!-- benchmarks:([a-z0-9-]+) -->\n).*?(<!-- /benchmarks -->)", re.DOTALL)


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail unless the README is in step")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args(args)
    if not chosen.readme.exists():
        print(f"{chosen.readme.name} is missing; nothing to write the tables into", file=sys.stderr)
        return 1
    old = chosen.readme.read_text()
    names = [match[2] for match in BLOCK.finditer(old)]
    missing = [name for name in names if name not in ON_GPU and not (chosen.results / f"{name}.json").exists()]
    if missing:
        print(f"no results for {', '.join(missing)}; run python -m benchmarks", file=sys.stderr)
        return 1
    new = rewrite(old, chosen.results)
    if chosen.check and new != old:
        print(f"{chosen.readme.name} is out of step with the results; run python -m benchmarks.tables", file=sys.stderr)
        return 1
    if new != old:
        chosen.readme.write_text(new)
    print(f"{chosen.readme.name}: {', '.join(names) or 'no table is asked for'}")
    return 0


def rewrite(text: str, results: Path) -> str:
    """`text` with the content of every block replaced by its table."""
    return BLOCK.sub(lambda match: f"{match[1]}{_content(results, match[2])}{match[3]}", text)


def _content(results: Path, name: str) -> str:
    if name in ON_GPU and not (results / f"{name}.json").exists():
        return f"*Not measured yet: `{ON_GPU[name]}`, on a machine with a GPU.*\n"
    return table(load(results, name))


def table(run: dict[str, Any]) -> str:
    """One run as Markdown: what was run, the figures, and where."""
    records: list[Record] = run["records"]
    columns = [column for column in COLUMNS if any(COLUMNS[column](record) for record in records)]
    heads = ["figure" if column == "median" and "statistic" in run else column for column in columns]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(COLUMNS[column](record) for column in columns)} |" for record in records]
    return "\n".join([run["workload"], "", *lines, "", _provenance(run), ""])


def _provenance(run: dict[str, Any]) -> str:
    here, versions = run["machine"], run["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "tieredemb")
    gpu = f"{here['gpu']}, driver {here.get('driver', 'not noted')}; " if "gpu" in here else ""
    return (
        f"*{gpu}{here['cpu']}, {here['cores']} cores, {here['l3']} L3, {here['memory_gib']} GiB, huge pages "
        f"{here['huge_pages']}; {packages}; tieredemb {versions['tieredemb']} at {run['commit']}, {run['date'][:10]}. "
        f"Load before the run: {here['load_before']:.1f}. {run.get('statistic', 'Medians, 20–80 % in brackets')}.*"
    )


def _figure(value: float) -> str:
    """Three digits, no exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _time(record: Record) -> str:
    spread = f" ({_figure(record.p20)}–{_figure(record.p80)})" if record.rounds > 1 else ""
    return f"{_figure(record.median)} {record.unit}{spread}"


def _bar(record: Record) -> str:
    return "" if record.met is None else f"{record.bar}: {'met' if record.met else '**missed**'}"


COLUMNS: dict[str, Callable[[Record], str]] = {
    "work": lambda record: f"{record.op}, {record.config}" if record.config else record.op,
    "provider": lambda record: record.provider,
    "median": _time,
    "peer": lambda record: record.peer,
    "ratio": lambda record: "" if record.ratio is None else f"{record.ratio:.2f}{record.ratio_label}",
    "bar": _bar,
    "moved": lambda record: "" if record.moved_mb is None else f"{_figure(record.moved_mb)} MB",
    "of copy bandwidth": lambda record: "" if record.share is None else f"{record.share:.0%}",
    "note": lambda record: record.note,
}

if __name__ == "__main__":
    sys.exit(main())
