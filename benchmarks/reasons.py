"""Why figures miss their targets, or are slower than what they are compared with: a reason for each kind of miss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.headlines import Miss


class Reason(NamedTuple):
    """`kind`: what was missed, in plain words · `names`: benchmarks, a pattern · `what`: op and config, a pattern."""

    kind: str
    names: str
    what: str
    why: str


REASONS = (
    Reason(
        "short steps on a GPU without a CUDA graph",
        "cuda-step",
        r"^W-(small, eager|1\.2(-bf16)?, (1051MiB, )?prefetch|kaggle, (337,625 slots, )?(prefetch|eager))",
        "Python needs as long to launch such a step as the GPU needs to run it. `graph_step` takes the launches away.",
    ),
    Reason(
        "the part of a captured step that moves rows",
        "cuda-step",
        r"PCIe's share",
        "Few rows move in these steps, so the rest of the step, which moves none, weighs more.",
    ),
    Reason(
        "filling empty slots",
        "cuda-kernels",
        r"^fill of empty slots",
        "Rows come in and none goes out. One direction of PCIe carries fewer requests than both together.",
    ),
    Reason(
        "choosing victims",
        "cuda-kernels",
        r"^choose victims",
        "The cause is not known. The run before this one met the target.",
    ),
    Reason(
        "a lookup of few samples as a CUDA graph",
        "cuda-inference",
        r"^lookup, all hits, .*CUDA graph$",
        "Before each replay Python checks that the tables are as they were captured, and copies the batch. A graph "
        "that a user captures and replays without these checks meets the target.",
    ),
    Reason(
        "a DLRM with a cache of 1 %, as a CUDA graph",
        "cuda-dlrm",
        r"^DLRM step",
        "The missed rows travel while the dense layers compute, and not all of that time is hidden.",
    ),
    Reason(
        "the file tier on a GPU",
        "cuda-tiers",
        r"over File",
        "The GPU cannot read a file. Threads of the host gather the rows, and the step waits for them.",
    ),
    Reason(
        "a converted model with prefetch, launched kernel by kernel",
        "cuda-converted",
        r"prefetch / eager",
        "Such a step waits for Python, which has the next batch to look at, too.",
    ),
    Reason(
        "a converted model under Adam, launched kernel by kernel",
        "cuda-converted",
        r"^step, capacity 10 %, Adam$",
        "Python calls the forward of each of the 26 tables, which takes longer than what the GPU does.",
    ),
    Reason(
        "tables of six widths, beside tables of one",
        "cuda-converted",
        r"^step, capacity 10 %, CUDA graph(, prefetch)?$",
        "Rows are fetched one width after the other, so that the kernels that compute have room on the GPU. And "
        "the rows that the same bytes hold are asked for less often: the hit rates differ.",
    ),
    Reason(
        "losses that use whole tables on the CPU",
        "cpu-whole",
        r"^step",
        "Each row is searched in an index to be copied, and again to be updated; torch reads and updates the weight "
        "where it lies. Where the dense layers compute little, that is most of a step.",
    ),
    Reason(
        "losses that use whole tables on a GPU",
        "cuda-whole",
        r"^step",
        "Each table is read and updated in chunks of its own, which Python launches; torch launches all tables "
        "together, and reads weights where they lie. Where the dense layers compute little, that is most of a step.",
    ),
    Reason(
        "training of small or jagged tables on the CPU",
        "cpu-shapes",
        r"^step",
        "A table's plan has a cost of its own, which few ids do not repay, and each id is searched in an index.",
    ),
    Reason(
        "the division of caches that are far smaller than a batch",
        "cpu-widths",
        r"^hit rate",
        "A batch uses over five times what the caches hold. Which rows stay is chance there, which scores do not tell.",
    ),
    Reason(
        "lookups without gradient on the CPU",
        "cpu-shapes",
        r"^lookup",
        "Each id is searched in an index and its row is scored, by Python that takes longer than torch's; torch reads "
        "the row at once.",
    ),
    Reason(
        "shapes drawn by a seed with large batches and a cache of 1 %, on a GPU",
        "cuda-shapes",
        r"worst of|^step",
        "Large batches miss many rows, which come over PCIe, in FBGEMM's step as in ours.",
    ),
    Reason(
        "prefetch where the host binds",
        "cuda-loops",
        r"^prefetch / eager, shape",
        "The host binds, and no loop went ahead in the end. Loops without prefetch differ as much.",
    ),
    Reason(
        "prefetch of rows of 16 bits",
        "cuda-loops",
        r"-bf16, prefetch / eager",
        "The target lies within the measured interval. Rows have half the bytes, so there is less to hide.",
    ),
    Reason(
        "two GPUs whose steps take a fraction of a millisecond",
        "cuda-sharding",
        r"CUDA graph, prefetch",
        "The parts are measured one after the other, each alone. In the step each exchange waits for the rank that "
        "comes later, and several short kernels pack what is sent and unpack it.",
    ),
)


def reason_of(miss: Miss) -> Reason:
    """Why. Raises `ValueError` for a miss that has no reason yet, or several."""
    found = [
        reason for reason in REASONS if re.fullmatch(reason.names, miss.name) and re.search(reason.what, miss.what)
    ]
    if len(found) != 1:
        raise ValueError(f"{miss.name}, {miss.what!r}, has {len(found)} reasons in benchmarks/reasons.py, wants one")
    return found[0]


def by_reason(misses: Sequence[Miss]) -> list[tuple[Reason, list[Miss]]]:
    """Misses of each reason that has some, in the order of the reasons."""
    given = [(reason_of(miss), miss) for miss in misses]
    return [
        (reason, of_reason) for reason in REASONS if (of_reason := [miss for each, miss in given if each is reason])
    ]
