"""The timeline as a picture: a bar an activity, a row a stream, a colour a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.timeline_trace import GROUPS, Activity, Step
from tieredemb import plots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito's palette, as in `tieredemb.plots`; what is not the library's is grey
COLORS = {
    "plan": "#0072B2",
    "swap": "#E69F00",
    "sort": "#56B4E9",
    "lookup": "#009E73",
    "update": "#D55E00",
    "dense": "#B4B4B4",
    "copy": "#CC79A7",
    "other": "#5A5A5A",
}
NAMES = {
    "swap": "swap of rows",
    "update": "backward + update",
    "dense": "dense layers",
    "copy": "copies",
    "other": "fills, other",
}
DARK = ("plan", "lookup", "update", "other")  # that white letters can be read on
MOST_ROWS = 6  # a graph may run each branch on a stream of its own: beyond this those that take turns share a row
OVERLAP_US = 1.0  # by which clocks of a trace let one kernel begin before the last is over
PAUSE_US = 20.0  # at most, between kernels that one name is written over
WIDTH_INCHES, ROW_INCHES, MARGIN_INCHES = 10.0, 0.62, 2.0
LETTER_INCHES = 0.07  # of a name over bars


def timeline(step: Step, workload: str) -> Figure:
    """A step's activities over time."""
    rows = stream_rows(step.activities)
    figure = plots._figure(1)
    figure.set_size_inches(WIDTH_INCHES, MARGIN_INCHES + ROW_INCHES * len(rows))
    axis = figure.subplots()
    for row, (_, activities) in enumerate(rows):
        _bars(axis, row, activities, inches_per_us=0.87 * WIDTH_INCHES / step.us)
    axis.set_yticks(range(len(rows)), [label for label, _ in rows])
    axis.set_ylim(len(rows) - 0.45, -0.55)
    axis.tick_params(axis="y", length=0)
    axis.set_xlim(0, step.us / 1e3)
    axis.set_xlabel("ms")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    _legend(figure, step)
    axis.set_title(workload, fontsize="small")
    figure.suptitle(f"A training step on the GPU: {step.us / 1e3:.2f} ms", fontsize="large")
    return figure


def stream_rows(activities: Sequence[Activity]) -> list[tuple[str, list[Activity]]]:
    """Rows of activities that follow one another, with their streams' numbers; the busiest with dense layers first."""
    lanes: list[tuple[list[int], list[Activity]]] = []
    for stream in dict.fromkeys(activity.stream for activity in activities):
        own: list[list[Activity]] = []
        for activity in sorted((each for each in activities if each.stream == stream), key=lambda each: each.start_us):
            free = next((lane for lane in own if not _overlap(lane, [activity])), None)
            if free is None:
                own.append(free := [])
            free.append(activity)
        lanes += [([stream], lane) for lane in own]
    if len(lanes) > MOST_ROWS:
        lanes = _packed(lanes)
    lanes.sort(key=lambda lane: -sum(each.us for each in lane[1] if each.group in ("dense", "lookup")))
    labels = [_label(streams) for streams, _ in lanes]
    return [
        (f"{label}, beside" if label in labels[:row] else label, lane)
        for row, (label, (_, lane)) in enumerate(zip(labels, lanes, strict=True))
    ]


def _packed(lanes: Sequence[tuple[list[int], list[Activity]]]) -> list[tuple[list[int], list[Activity]]]:
    """In fewer lanes: each joins the first with which it never overlaps."""
    packed: list[tuple[list[int], list[Activity]]] = []
    for streams, lane in sorted(lanes, key=lambda lane: -len(lane[1])):
        for others, taken in packed:
            if not _overlap(taken, lane):
                others += streams
                taken += lane
                break
        else:
            packed.append((list(streams), list(lane)))
    return packed


def _overlap(some: Sequence[Activity], others: Sequence[Activity]) -> bool:
    return any(
        min(a.start_us + a.us, b.start_us + b.us) - max(a.start_us, b.start_us) > OVERLAP_US
        for a in some
        for b in others
    )


def _label(streams: Sequence[int]) -> str:
    distinct = sorted(set(streams))
    if len(distinct) == 1:
        return f"stream {distinct[0]}"
    return f"streams {', '.join(map(str, distinct[:2]))}{' …' if len(distinct) > 2 else ''}"


def _bars(axis: Axes, row: int, activities: Sequence[Activity], *, inches_per_us: float) -> None:
    for group in GROUPS:
        spans = [(each.start_us / 1e3, each.us / 1e3) for each in activities if each.group == group]
        edge = (1.0, 1.0, 1.0, 0.5)
        axis.broken_barh(spans, (row - 0.36, 0.72), facecolors=COLORS[group], edgecolor=edge, linewidth=0.3)
    for group, start_us, end_us in runs(activities):
        if (end_us - start_us) * inches_per_us > LETTER_INCHES * (len(group) + 1):
            middle, color = (start_us + end_us) / 2e3, "white" if group in DARK else "black"
            axis.text(middle, row, group, ha="center", va="center", fontsize="small", color=color, clip_on=True)


def runs(activities: Sequence[Activity]) -> list[tuple[str, float, float]]:
    """Group, start and end of what follows one another without long pauses; a fill in between is none."""
    found: list[tuple[str, float, float]] = []
    for each in sorted(activities, key=lambda each: each.start_us):
        if each.group == "other" and each.us < PAUSE_US:
            continue
        group, start_us, end_us = found[-1] if found else ("", 0.0, 0.0)
        if each.group == group and each.start_us - end_us < PAUSE_US:
            found[-1] = (group, start_us, each.start_us + each.us)
        else:
            found.append((each.group, each.start_us, each.start_us + each.us))
    return found


def _legend(figure: Figure, step: Step) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(color=COLORS[group], label=f"{NAMES.get(group, group)}, {us / 1e3:.2f} ms")
        for group, us in step.group_us.items()
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
