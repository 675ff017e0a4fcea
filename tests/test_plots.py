"""The hit-rate picture: what it draws, how policies and references are told apart, what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import forks
import numpy as np
import pytest

from tieredemb.cache_hit.run import HitRate
from tieredemb.cache_hit.traces import Trace
from tieredemb.cache_hit.workload import Workload
from tieredemb.errors import ConfigError, MissingDependencyError
from tieredemb.plots import check_picture, hit_rate_curves, save

TRACE = Trace(name="shop", ids=np.arange(1000) % 200, rows=200)
REFERENCES = ("lru", "lfu-forget", "static", "belady")


def _points(*names: str, batch_size: int = 10, capacities: tuple[int, ...] = (20, 5, 10)) -> list[HitRate]:
    workload = Workload(trace=TRACE, batch_size=batch_size, lock_window=1)
    return [
        HitRate(
            workload=workload,
            capacity=capacity,
            policy=name,
            reference=name in REFERENCES,
            lookups=workload.lookups,
            hits=capacity * (position + 1),
            seconds=0.0,
        )
        for capacity in capacities
        for position, name in enumerate(names)
    ]


def test_hit_rate_curves_draws_each_policy_in_order_of_capacity() -> None:
    figure = hit_rate_curves(_points("lrfu:300", "belady"))
    (axis,) = figure.axes
    lines = {line.get_label(): line for line in axis.get_lines()}
    assert list(lines) == ["lrfu:300", "Belady with bypass: the best on demand"]
    assert list(lines["lrfu:300"].get_xdata()) == [5, 10, 20]
    assert list(lines["lrfu:300"].get_ydata()) == [0.01, 0.02, 0.04]
    assert axis.get_xscale() == "log"
    assert axis.get_ylim() == (0, 1)
    assert "capacity" in axis.get_xlabel()
    assert axis.get_ylabel() == "hit rate"


def test_hit_rate_curves_names_trace_batch_size_and_what_was_measured() -> None:
    figure = hit_rate_curves(_points("lfu"))
    assert figure.get_suptitle() == "shop: 1,000 accesses to 200 rows"
    assert figure.axes[0].get_title() == "batches of 10, lock window 1, last 500 accesses measured"


def test_hit_rate_curves_tells_policies_and_references_apart() -> None:
    (axis,) = hit_rate_curves(_points("lrfu:300", "lfu", "lrfu:50", *REFERENCES)).axes
    lines = axis.get_lines()
    solid = [line for line in lines if line.get_linestyle() == "-"]
    assert [line.get_label() for line in solid] == ["lrfu:300", "lfu", "lrfu:50"]
    assert len({line.get_color() for line in lines}) == len(lines) == 7


def test_hit_rate_curves_gives_each_batch_size_a_panel() -> None:
    figure = hit_rate_curves(_points("lfu") + _points("lfu", batch_size=50))
    assert [axis.get_title().split(",")[0] for axis in figure.axes] == ["batches of 10", "batches of 50"]


@pytest.mark.parametrize("capacities", [(7,), (1, 2), (1, 10, 100)])
def test_hit_rate_curves_labels_rows_below_and_shares_above(capacities: tuple[int, ...]) -> None:
    figure = hit_rate_curves(_points("lfu", capacities=capacities))
    figure.canvas.draw()
    (axis,) = figure.axes
    below = axis.xaxis.get_major_formatter()
    above = axis.child_axes[0].xaxis.get_major_formatter()
    assert below(1000, 0) == "1,000"
    assert above(0.5, 0) == "0.5 %"
    low, high = axis.get_xlim()
    share_low, share_high = axis.child_axes[0].get_xlim()
    assert share_low == pytest.approx(low / 2)  # of 200 rows, a row is half a percent
    assert share_high == pytest.approx(high / 2)


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_save_writes_the_format_of_the_suffix(tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / f"rates{suffix}"
    check_picture(path)
    save(hit_rate_curves(_points("lfu")), path)
    assert path.read_bytes().startswith(start)


def test_pictures_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no hit rate to draw"):
        hit_rate_curves([])
    with pytest.raises(ConfigError, match=r"'rates.txt' needs a name that ends in .png"):
        check_picture(Path("rates.txt"))
    with pytest.raises(ConfigError, match="cannot be written"):
        save(hit_rate_curves(_points("lfu")), tmp_path / "nowhere" / "rates.png")


def test_pictures_without_matplotlib_name_the_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'tieredemb\[plots\]'"):
        check_picture(Path("rates.png"))


def test_plots_loads_no_matplotlib_and_draws_without_pyplot() -> None:
    code = (
        "import sys, tieredemb.plots as plots; assert 'matplotlib' not in sys.modules; "
        "plots._figure(1); assert 'matplotlib.figure' in sys.modules; assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = forks.run(code, base=forks.TORCH)
    assert done.returncode == 0, done.stderr
