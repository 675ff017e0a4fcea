"""Draws the charts: bars by group, lines over a size, dots around 1."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.charts import Bar, Bars, Chart, Dots, Lines
from benchmarks.record import figure_text
from tieredemb import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's palette, as in `tieredemb.plots`: grey is the other library, each mode of ours has its colour
COLORS = {
    "FBGEMM": "#8C8C8C",
    "torch": "#8C8C8C",
    "tieredemb, eager": "#56B4E9",
    "tieredemb, CUDA graph": "#E69F00",
    "tieredemb, CUDA graph, prefetch": "#0072B2",
    "converted, 10 % cached": "#0072B2",
    "of PCIe": "#0072B2",
    "of a copy on the GPU": "#009E73",
    "of a copy by the CPU": "#D55E00",
}
DOTS = ("#0072B2", "#E69F00", "#D55E00")
WIDTH_INCHES, ROW_INCHES, GROUP_ROWS, MARGIN_INCHES = 10.0, 0.27, 1.2, 1.1
FACTOR = 1.35  # of space to the right of the longest bar, for its figure


def draw(chart: Chart) -> Figure:
    figure = plots._figure(1)
    if isinstance(chart, Bars):
        _bars(figure, chart)
    elif isinstance(chart, Lines):
        _lines(figure, chart)
    else:
        _dots(figure, chart)
    figure.suptitle(chart.title, fontsize="large")
    return figure


def save(chart: Chart, path: Path, digest: str) -> None:
    """Writes the picture, with letters as outlines so that all readers see what was looked at here."""
    import matplotlib as mpl

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.hashsalt": digest, "svg.fonttype": "path"}):
        draw(chart).savefig(path, metadata={"Date": None, "Description": digest})


def _bars(figure: Figure, chart: Bars) -> None:
    places, names, place = [], [], 0.0
    for name, bars in chart.groups:
        names.append((name, place - 0.55))
        places += [(place + row, bar) for row, bar in enumerate(bars)]
        place += len(bars) + GROUP_ROWS
    figure.set_size_inches(WIDTH_INCHES, MARGIN_INCHES + ROW_INCHES * place)
    axes = figure.subplots(1, len(chart.panels), sharey=True, squeeze=False)[0]
    for panel, (axis, unit) in enumerate(zip(axes, chart.panels, strict=True)):
        _panel(axis, [(at, bar, bar.values[panel]) for at, bar in places], unit)
        if chart.line is not None:
            axis.axvline(chart.line[0], color="black", linewidth=0.8, linestyle=":")
            axis.text(chart.line[0], -1.5, chart.line[1], ha="center", va="bottom", fontsize="small")
    axes[0].set_yticks([at for at, _ in places], [bar.label for _, bar in places], fontsize="small")
    axes[0].set_ylim(place - GROUP_ROWS - 0.3, -1.5)
    for name, above in names:
        axes[0].text(0, above, f" {name}", va="bottom", ha="left", fontsize="small", fontweight="bold")


def _panel(axis: Axes, bars: list[tuple[float, Bar, float | None]], unit: str) -> None:
    most = max(value for _, _, value in bars if value is not None)
    for at, bar, value in bars:
        if value is not None:
            axis.barh(at, value, height=0.8, color=COLORS[bar.series])
            axis.text(value + most / 60, at, figure_text(value), va="center", ha="left", fontsize="small")
    axis.set_xlim(0, most * FACTOR)
    _bare(axis, unit)
    axis.tick_params(axis="y", length=0)


def _lines(figure: Figure, chart: Lines) -> None:
    figure.set_size_inches(0.7 * WIDTH_INCHES, 4.0)
    axis = figure.subplots()
    for name, points in chart.lines:
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, marker="o", color=COLORS[name], label=name)
        for x, y in points:
            is_lowest = y == min(other for _, others in chart.lines for at, other in others if at == x)
            place = (0, -15 if is_lowest else 7)  # under the lowest line: the figures of two that are close part
            axis.annotate(
                figure_text(y), (x, y), xytext=place, textcoords="offset points", ha="center", fontsize="small"
            )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.margins(y=0.15)
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_xticks([x for x, _ in chart.lines[0][1]])
    for of in (axis.xaxis, axis.yaxis):
        of.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        of.set_minor_formatter(NullFormatter())
    axis.set_ylabel(chart.y)
    axis.legend(frameon=False, fontsize="small")
    _bare(axis, chart.x)


def _dots(figure: Figure, chart: Dots) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    counts = [len(rows) for _, _, rows in chart.panels]
    figure.set_size_inches(WIDTH_INCHES, MARGIN_INCHES + sum(ROW_INCHES * count + 1.1 for count in counts))
    axes = figure.subplots(len(counts), 1, squeeze=False, gridspec_kw={"height_ratios": counts})[:, 0]
    for axis, (title, series, rows) in zip(axes, chart.panels, strict=True):
        for color, position, name in zip(DOTS, range(len(series)), series, strict=False):
            axis.scatter([ratios[position] for _, ratios in rows], range(len(rows)), color=color, label=name, zorder=3)
        axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
        axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize="small")
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set_title(title, fontsize="medium", pad=24)
        axis.legend(
            frameon=False, fontsize="small", loc="lower right", bbox_to_anchor=(1.02, 0.99), ncols=len(series),
            columnspacing=1.0, handletextpad=0.2,
        )  # fmt: skip
        _bare(axis, "left of 1×: faster than the other library")
        axis.grid(axis="y", alpha=0.3)


def _bare(axis: Axes, unit: str) -> None:
    axis.set_xlabel(unit)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
