"""How far a run is from plain torch: the same model with `nn.EmbeddingBag` tables and torch's optimizer, trained on the
first part of the same log, from the same weights, in the same batches. The losses of that part are compared."""

from __future__ import annotations

from dataclasses import replace

from examples.dlrm.config import TrainConfig
from examples.dlrm.criteo import Log
from examples.dlrm.model import TABLES
from examples.dlrm.processes import Processes
from examples.dlrm.progress import Point
from examples.dlrm.trainer import Trainer
from tieredemb import HostMemory
from tieredemb.errors import UnsupportedError

MOST_BYTES = 1 << 30  # of plain tables, which are built whole, and once more for their first weights
STORED = "on the first 10,000 rows of Criteo's log the test AUC is 0.7377, of plain torch 0.7378 (examples/dlrm)"


def against_torch(config: TrainConfig, log: Log, points: list[Point], samples: int, processes: Processes) -> str:
    """One line. `points`: those of the run, by `processes`. `samples`: plain torch trains on at most so many, to the
    end of an interval, or on one interval."""
    ours = [point for point in points if point.samples <= samples] or points[:1]
    try:
        if processes.size > 1:
            raise UnsupportedError("plain torch trains in one process")
        theirs = _plain(config, log, ours[-1].samples)
    except UnsupportedError as error:
        return f"not measured here ({str(error).partition(';')[0]}); {STORED}"
    sizes = [point.samples - before for point, before in zip(ours, [0, *(p.samples for p in ours)], strict=False)]
    losses = [
        sum(point.loss * size for point, size in zip(run, sizes, strict=True)) / sum(sizes) for run in (ours, theirs)
    ]
    largest = max(abs(one.loss - other.loss) for one, other in zip(ours, theirs, strict=True))
    return (
        f"train loss of the first {ours[-1].samples:,} samples {losses[0]:.4f}, of plain torch {losses[1]:.4f}; "
        f"of one interval they differ by {largest:.4f} at most"
    )


def _plain(config: TrainConfig, log: Log, samples: int) -> list[Point]:
    model = config.model
    if len(TABLES) * model.rows_per_table * model.embedding_dim * 4 > MOST_BYTES:
        raise UnsupportedError("its tables would take more than 1 GiB")
    cache = replace(config.cache, storage=HostMemory(), prefetch=0)
    with Trainer(replace(config, reference=True, graph=False, cache=cache), log) as trainer:
        trainer.run(stop_samples=samples)
        return trainer.progress.points
