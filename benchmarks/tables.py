"""Writes the results into the README and the documentation: `python -m benchmarks.tables [--check] [PAGE …]`.

What stands between `<!-- benchmarks:NAME -->` and `<!-- /benchmarks -->` is generated from `results/NAME.json`, and
"headlines", "missed" and "reasons" from all of them (`headlines.py`, `reasons.py`), "expected" from those of several
GPUs (`expected.py`); `charts.py` draws the pictures. No figure is written by hand. Benchmarks that need a GPU may still
lack their results.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import charts, expected
from benchmarks.headlines import ON_GPU, Miss, headlines, misses
from benchmarks.machine import ROOT
from benchmarks.notes import brief
from benchmarks.reasons import by_reason
from benchmarks.record import RESULTS, Record, figure_text, load_each

APPENDIX = ROOT / "docs" / "benchmarks"
GUIDES = tuple(ROOT / "docs" / "guides" / page for page in ("optimizers.md", "sharding.md"))
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", *sorted(APPENDIX.glob("*.md")), *GUIDES)
OF_ALL = ("headlines", "missed", "reasons", "expected")
BLOCK = re.compile(r"(<!-- benchmarks:([a-z0-9-]+) -->\n).*?(<!-- /benchmarks -->)", re.DOTALL)


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail unless all is in step")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "pages", nargs="*", type=Path, metavar="PAGE", help="default: README.md, docs/benchmarks*, and the pictures"
    )
    chosen = parser.parse_args(args)
    code = 0 if chosen.pages else _draw(chosen.results, check=chosen.check)
    return max(code, *(_write(page, chosen.results, check=chosen.check) for page in chosen.pages or PAGES))


def _draw(results: Path, *, check: bool) -> int:
    """Brings the pictures in step; returns what the process is to return."""
    if not check:
        charts.write(results)
        return 0
    stale = [path.name for path, _, in_step in charts.pictures(results) if not in_step]
    if stale:
        print(f"{', '.join(stale)}: out of step with the results; run python -m benchmarks.tables", file=sys.stderr)
    return int(bool(stale))


def _write(page: Path, results: Path, *, check: bool) -> int:
    """Brings one page in step; returns what the process is to return."""
    if not page.exists():
        print(f"{page.name} is missing; nothing to write the tables into", file=sys.stderr)
        return 1
    old = page.read_text()
    names = [match[2] for match in BLOCK.finditer(old)]
    optional = (*OF_ALL, *ON_GPU)
    missing = [name for name in names if name not in optional and not (results / f"{name}.json").exists()]
    if missing:
        print(f"no results for {', '.join(missing)}; run python -m benchmarks", file=sys.stderr)
        return 1
    new = rewrite(old, results)
    if check and new != old:
        print(f"{page.name} is out of step with the results; run python -m benchmarks.tables", file=sys.stderr)
        return 1
    if new != old:
        page.write_text(new)
    print(f"{page.name}: {', '.join(names) or 'no table is asked for'}")
    return 0


def rewrite(text: str, results: Path) -> str:
    """`text` with the content of every block replaced by its table."""
    return BLOCK.sub(lambda match: f"{match[1]}{_content(results, match[2])}{match[3]}", text)


def _content(results: Path, name: str) -> str:
    if name == "headlines":
        return sentences(results)
    if name == "missed":
        return missed_table(list(misses(results)))
    if name == "reasons":
        return reasons_table(list(misses(results)))
    if name == "expected":
        return _grid(expected.HEADS, expected.rows(results)) + "\n"
    if name in ON_GPU and not (results / f"{name}.json").exists():
        return f"*Not measured yet: `python -m benchmarks.{name.replace('-', '_')}`, on a machine with a GPU.*\n"
    return "\n".join(map(table, load_each(results, name)))


def sentences(results: Path) -> str:
    """The headlines as a list, and the machines that they are of."""
    found = list(headlines(results))
    machines = dict.fromkeys(_short_provenance(run) for _, runs in found for run in runs)
    return "".join(f"- {sentence}\n" for sentence, _ in found) + f"\n*{'. '.join(machines)}.*\n"


def missed_table(missed: Sequence[Miss]) -> str:
    """Every miss by itself."""
    rows = [
        [
            miss.what,
            f"{figure_text(miss.record.median)} {miss.record.unit}".strip(),
            _ratio(miss.record),
            _target(miss.record),
        ]
        for miss in missed
    ]
    return _grid(["work", "figure", "ratio", "target"], rows) + "\n"


def reasons_table(missed: Sequence[Miss]) -> str:
    """Misses by their reasons: how many there are of each, and how far the worst is from its target."""
    rows = [
        [reason.kind, str(len(some)), f"{1 + max(miss.beyond for miss in some):.2f}×", reason.why]
        for reason, some in by_reason(missed)
    ]
    return _grid(["what", "figures", "at worst, by its target", "why"], rows) + "\n"


def table(run: dict[str, Any]) -> str:
    """One run as Markdown: what was run, the figures, what their notes mean, and where."""
    records, legend = brief(run["records"])
    columns = [column for column in COLUMNS if any(COLUMNS[column](record) for record in records)]
    heads = ["figure" if column == "median" and "statistic" in run else column for column in columns]
    rows = [[COLUMNS[column](record) for column in columns] for record in records]
    notes = f"Notes: {'; '.join(legend)}." if legend else ""
    parts = [run["workload"], _grid(heads, rows), notes, _provenance(run)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(
        [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]
    )


def _provenance(run: dict[str, Any]) -> str:
    here, versions = run["machine"], run["versions"]
    packages = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "tieredemb")
    gpu = f"{here['gpu']}, driver {here.get('driver', 'not noted')}; " if "gpu" in here else ""
    return (
        f"*{gpu}{here['cpu']}, {here['cores']} cores, {here['l3']} L3, {here['memory_gib']} GiB, huge pages "
        f"{here['huge_pages']}; {packages}; tieredemb {versions['tieredemb']} at {run['commit']}, {run['date'][:10]}. "
        f"Load before the run: {here['load_before']:.1f}. {run.get('statistic', 'Medians, 20–80 % in brackets')}.*"
    )


def _short_provenance(run: dict[str, Any]) -> str:
    here, versions = run["machine"], run["versions"]
    cores = f"{here['cores']} core{'s' if here['cores'] > 1 else ''}"
    where = "GPU: " + here["gpu"] if "gpu" in here else f"CPU: {here['cpu']}, {cores}"
    return f"{where}; torch {versions['torch']}; tieredemb at {run['commit']}, {run['date'][:10]}"


def _time(record: Record) -> str:
    spread = f" ({figure_text(record.p20)}–{figure_text(record.p80)})" if record.rounds > 1 else ""
    return f"{figure_text(record.median)} {record.unit}{spread}"


def _ratio(record: Record) -> str:
    return "" if record.ratio is None else f"{record.ratio:.2f}{record.ratio_label}"


def _target(record: Record) -> str:
    return "" if record.met is None else f"{record.bar}: {'met' if record.met else '**missed**'}"


COLUMNS: dict[str, Callable[[Record], str]] = {
    "work": lambda record: f"{record.op}, {record.config}" if record.config else record.op,
    "provider": lambda record: record.provider,
    "median": _time,
    "peer": lambda record: record.peer,
    "ratio": _ratio,
    "target": _target,
    "moved": lambda record: "" if record.moved_mb is None else f"{figure_text(record.moved_mb)} MB",
    "of copy bandwidth": lambda record: "" if record.share is None else f"{record.share:.0%}",
    "note": lambda record: record.note,
}

if __name__ == "__main__":
    sys.exit(main())
