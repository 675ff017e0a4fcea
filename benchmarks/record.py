"""Results: one JSON file a benchmark, in it one run a machine, in it one record an (op, provider, config).

Only medians and percentiles are kept, no raw samples. A new run on a machine replaces that machine's last one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, machine, machine_key, versions
from benchmarks.timing import Quantiles

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measured figure.

    `config`: what was varied · `median`, `p20`, `p80`, `rounds`: in `unit` · `ratio`: to the figure that `ratio_label`
    names, as in "× the time of nn.EmbeddingBag" · `bar`, `met`: the figure required, and whether it was reached ·
    `moved_mb`: 10^6 bytes that the work must move · `share`: of the measured copy bandwidth · `peer`: what another
    library reaches, in words.
    """

    op: str
    provider: str
    median: float
    p20: float
    p80: float
    rounds: int
    config: str = ""
    unit: str = ""
    ratio: float | None = None
    ratio_label: str = ""
    peer: str = ""
    bar: str = ""
    met: bool | None = None
    note: str = ""
    moved_mb: float | None = None
    share: float | None = None


def measured(
    op: str, provider: str, config: str, unit: str, samples: Quantiles, *, scale: float = 1.0, **more: Any
) -> Record:
    """A record of `samples`, multiplied by `scale` into `unit`."""
    fields: dict[str, Any] = {key: _short(value) if isinstance(value, float) else value for key, value in more.items()}
    return Record(
        op=op,
        provider=provider,
        config=config,
        unit=unit,
        median=_short(samples.median * scale),
        p20=_short(samples.p20 * scale),
        p80=_short(samples.p80 * scale),
        rounds=samples.rounds,
        **fields,
    )


def at_most(value: float, limit: float, unit: str = "×") -> dict[str, Any]:
    """Fields of a record whose `value` may not exceed `limit`."""
    return {"bar": f"≤ {limit:g}{unit}", "met": bool(value <= limit)}


def at_least(value: float, limit: float, unit: str = "×") -> dict[str, Any]:
    """Fields of a record whose `value` may not fall short of `limit`."""
    return {"bar": f"≥ {limit:g}{unit}", "met": bool(value >= limit)}


def save(directory: Path, name: str, workload: str, records: Sequence[Record], *, statistic: str = "") -> None:
    """Writes the run of this machine to `directory/name.json`, beside the runs of other machines. `statistic`: what
    the figures are where they are not medians with 20–80 %."""
    keys = [(record.op, record.provider, record.config) for record in records]
    if len(set(keys)) != len(keys):
        raise ValueError(f"records of {name} must differ in op, provider or config, got {keys}")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    runs = {} if not path.exists() else json.loads(path.read_text())["runs"]
    runs[machine_key()] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine() | {"load_before": round(_LOAD_BEFORE, 2)},
        "versions": versions(),
        "workload": workload,
        **({"statistic": statistic} if statistic else {}),
        "records": [_compact(asdict(record)) for record in records],
    }
    path.write_text(json.dumps({"name": name, "runs": runs}, indent=1, ensure_ascii=False) + "\n")


def load(directory: Path, name: str) -> dict[str, Any]:
    """The latest run of the benchmark `name`, its records as `Record`s. Raises `FileNotFoundError`."""
    return max(load_each(directory, name), key=lambda run: str(run["date"]))


def load_each(directory: Path, name: str) -> list[dict[str, Any]]:
    """The same of each machine that it was run on, those of fewer cores first."""
    runs: dict[str, Any] = json.loads((directory / f"{name}.json").read_text())["runs"]
    each = sorted(runs.values(), key=lambda run: int(run["machine"]["cores"]))
    return [run | {"records": [Record(**record) for record in run["records"]]} for run in each]


NUMBER = re.compile(r"\d(?:[\d,.]*\d)?")


def number(text: str) -> float:
    """The first number in what a record says."""
    found = NUMBER.search(text)
    if found is None:
        raise ValueError(f"no number in {text!r}")
    return float(found[0].replace(",", ""))


def figure_text(value: float) -> str:
    """Three digits, no exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


_LOAD_BEFORE = os.getloadavg()[0]  # what others ran when this run began: above 0.5 it was no quiet machine


def _short(value: float) -> float:
    """Five digits: more would be noise, and the files stay readable."""
    return float(f"{value:.5g}")


def _compact(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None and value != ""}
