"""Pictures: functions that take results and return a matplotlib `Figure`. No global state, no window, Agg
only.

matplotlib is the extra `plots`; it loads with the first picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieredemb.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tieredemb.cache_hit.run import HitRate

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
PANEL_INCHES = (7.0, 4.8)
# Okabe & Ito's palette, which colour-blind readers can distinguish
POLICY_COLORS = ("#D55E00", "#0072B2", "#009E73", "#E69F00")
MARKERS = "osD^vP"
REFERENCE_STYLES: dict[str, dict[str, Any]] = {
    "lru": {"color": "#56B4E9", "label": "LRU"},
    "lfu-forget": {"color": "#CC79A7", "label": "LFU, forgets evicted rows"},
    "static": {"color": "#888888", "linestyle": ":", "label": "best static set, known in advance"},
    "belady": {"color": "#000000", "label": "Belady with bypass: the best on demand"},
}


def _figure(panels: int) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "pictures need matplotlib, which is not installed; run: pip install 'tieredemb[plots]'"
        ) from None
    figure = Figure(figsize=(PANEL_INCHES[0] * panels, PANEL_INCHES[1]), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_picture(path: Path) -> None:
    """Raises `MissingDependencyError` without matplotlib, `ConfigError` for a suffix that is no picture's:
    both before the work that the picture is to show."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise ConfigError(f"picture {str(path)!r} needs a name that ends in {', '.join(PICTURE_SUFFIXES)}")
    _figure(1)


def save(figure: Figure, path: Path) -> None:
    """Writes `figure` in the format of the suffix. Raises `ConfigError` if `path` cannot be written."""
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"the picture {str(path)!r} cannot be written: {error}") from error


def hit_rate_curves(points: Sequence[HitRate]) -> Figure:
    """Hit rate against capacity: a panel a batch size, a line a policy, references dashed."""
    if not points:
        raise ConfigError("there is no hit rate to draw; pass at least one measured point")
    panels: dict[int, list[HitRate]] = {}
    for point in points:
        panels.setdefault(point.workload.batch_size, []).append(point)
    figure = _figure(len(panels))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels.values(), strict=True):
        _hit_rate_panel(axis, panel)
    axes[0].set_ylabel("hit rate")
    trace = points[0].workload.trace
    figure.suptitle(f"{trace.name}: {trace.ids.size:,} accesses to {trace.rows:,} rows", fontsize="large")
    return figure


def _hit_rate_panel(axis: Axes, points: Sequence[HitRate]) -> None:
    workload = points[0].workload
    curves: dict[str, list[HitRate]] = {}
    for point in points:
        curves.setdefault(point.policy, []).append(point)
    policies = [name for name, curve in curves.items() if not curve[0].reference]
    for name, curve in curves.items():
        curve.sort(key=lambda point: point.capacity)
        axis.plot(
            [point.capacity for point in curve],
            [point.hit_rate for point in curve],
            **_line_style(name, policies.index(name) if name in policies else None),
        )
    _capacity_axes(axis, [point.capacity for point in points], workload.trace.rows)
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)
    axis.set_title(
        f"batches of {workload.batch_size:,}, lock window {workload.lock_window}, "
        f"last {workload.lookups:,} accesses measured",
        fontsize="small",
    )
    axis.legend(fontsize="small", loc="best")


def _capacity_axes(axis: Axes, capacities: Sequence[int], rows: int) -> None:
    """Log axes in rows (below) and in shares of `rows` (above)."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    # over two decades, ticks at 1, 2, 5 would run into each other
    steps = (1.0,) if max(capacities) > 100 * min(capacities) else (1.0, 2.0, 5.0)
    axis.set_xscale("log")
    share = axis.secondary_xaxis("top", functions=(_scale(100 / rows), _scale(rows / 100)))
    for ticks, text in ((axis.xaxis, "{:,.0f}"), (share.xaxis, "{:g} %")):
        ticks.set_major_locator(LogLocator(subs=steps))
        ticks.set_major_formatter(FuncFormatter(lambda value, _, text=text: text.format(value)))
        ticks.set_minor_formatter(NullFormatter())
    axis.set_xlabel("capacity in rows; above: share of all rows")


def _scale(factor: float) -> Callable[[Any], Any]:
    return lambda values: values * factor


def _line_style(name: str, position: int | None) -> dict[str, Any]:
    """`position` among the policies, None for a reference. Curves often coincide: later ones are drawn wider
    and below, so that they show on both sides of the earlier ones."""
    if position is None:
        return {"linestyle": "--", "linewidth": 1.3, "marker": ".", "zorder": 2} | REFERENCE_STYLES[name]
    return {
        "color": POLICY_COLORS[position % len(POLICY_COLORS)],
        "marker": MARKERS[position % len(MARKERS)],
        "markersize": 4 + position,
        "linewidth": 1.6 + 0.5 * position,
        "zorder": 4 - 0.1 * position,
        "label": name,
    }
