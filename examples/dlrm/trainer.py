"""The training run: rows in time order, one update a batch, position and metrics kept so that it can be resumed.

Everything that decides a number is in the log's order, the seed and the checkpoint: a run that was killed and resumed
ends with the same bits as one that was not, given the same device and number of threads (torch sums the dense layers
in an order that depends on them; the tables do not).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from examples.dlrm import checkpoint
from examples.dlrm.config import CheckpointConfig, TrainConfig
from examples.dlrm.criteo import Log, LogError
from examples.dlrm.embeddings import EmbeddingBags, reference_optimizer, tiered_tables
from examples.dlrm.model import DLRM, TABLES, Batch, to_batch
from examples.dlrm.processes import Processes
from examples.dlrm.progress import Point, Progress
from tieredemb import graph_step, prefetch
from tieredemb.cache.stats import CacheStats
from tieredemb.errors import CheckpointError, UnsupportedError

# cuBLAS is deterministic only with a fixed workspace; torch looks at this once, at a process's first matrix product
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

POINTS = 200  # an epoch, of the curves of loss and hit rate: enough for a plot, few enough reads of the counters


class Trainer:
    """A DLRM, its optimizers, its place in the log. Used as a context manager, it closes the tables.

    Of several `processes` each trains its part of every batch: together they make the update of one that has all of it,
    within rounding of the dense layers. Every call is then one that all of them make.

    Raises `CheckpointError` when `saving` asks to resume what is not there, or would overwrite what is.

    >>> with Trainer(TrainConfig(), log) as trainer:
    ...     trainer.run()
    ...     labels, probabilities = trainer.predict()
    """

    def __init__(
        self,
        config: TrainConfig,
        log: Log,
        saving: CheckpointConfig | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.config = config
        self.processes = processes or Processes()
        if config.reference and self.processes.size > 1:
            raise UnsupportedError("the reference trains in one process; start it without torchrun")
        self.log = log
        self.saving = saving
        self.train_rows = len(log) - round(len(log) * config.test_share)
        if not 0 < self.train_rows < len(log):
            raise LogError(
                f"a log of {len(log)} rows with test_share={config.test_share} leaves {self.train_rows} rows to "
                f"train and {len(log) - self.train_rows} to test; both need at least one"
            )
        self.progress = Progress(loss_sum=torch.zeros((), dtype=torch.float64, device=config.device))
        self._stats_base = CacheStats()
        self._rates: list[float] = []
        self.collection = tiered_tables(config, self.processes)
        try:
            self.model = self._model().to(config.device)
            self._together = self.processes.train_together(self.model, captured=config.captures)
            self.dense_layers = self.model.dense_layers()
            self.optimizers: list[torch.optim.Optimizer] = [
                torch.optim.Adagrad(self.dense_layers.parameters(), lr=config.dense_lr)
            ]
            if config.reference:
                self.optimizers.append(reference_optimizer(config, self.model.embeddings))
            self._train_whole = graph_step(self._train) if config.graph else self._train
            self._prepare()
        except BaseException:
            self.collection.close()
            raise

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.collection.close()

    @property
    def total_samples(self) -> int:
        return self.train_rows * self.config.epochs

    @property
    def samples_per_second(self) -> float:
        """The median of this run's intervals, so that the few in which kernels are compiled do not count."""
        return statistics.median(self._rates) if self._rates else float("nan")

    def run(
        self,
        on_point: Callable[[Point], None] = lambda point: None,
        on_step: Callable[[], None] = lambda: None,
        stop_samples: int | None = None,
    ) -> None:
        """Trains to the end, saving as asked for. `on_point` hears of each finished interval, `on_step` of each
        step. `stop_samples`: ends with the interval that reaches so many samples."""
        batches_an_epoch = -(-self.train_rows // self.config.batch_size)
        steps_a_point = -(-batches_an_epoch // POINTS)
        began, before = time.perf_counter(), self.progress.seconds
        since = began, self.progress.samples  # when the interval began, and where
        with _deterministic():
            for batch in self._remaining():
                self._step(batch)
                on_step()
                progress = self.progress
                if progress.step % steps_a_point == 0 or progress.samples == self.total_samples:
                    point = self._finish_point()
                    self._rates.append((progress.samples - since[1]) / (time.perf_counter() - since[0]))
                    on_point(point)
                    since = time.perf_counter(), progress.samples
                progress.seconds = before + time.perf_counter() - began
                self._save_if_due()
                if stop_samples is not None and not progress.pending and progress.samples >= stop_samples:
                    return

    def predict(self) -> tuple[Tensor, Tensor]:
        """Labels and click probabilities of the held-out rows, float64 (rows,) on the CPU. Trains nothing."""
        labels, logits = [], []  # fetched once: a GPU is waited for at the end alone
        self.model.eval()
        with _deterministic(), torch.no_grad():
            size = max(self.config.batch_size, 1024)
            for batch in self._batches(self.train_rows, len(self.log), size):
                logits.append(self.model(batch).double())
                labels.append(batch.labels.double())
        self.model.train()
        found = self.processes.gather(torch.stack([torch.cat(labels).cpu(), torch.cat(logits).cpu()], 1))
        return found[:, 0], torch.sigmoid(found[:, 1])

    def table_weights(self) -> dict[str, Tensor]:
        """Weights by table name, float32 (rows, D), of whichever embeddings are trained."""
        if isinstance(self.model.embeddings, EmbeddingBags):
            return dict(zip(TABLES, self.model.embeddings.weights(), strict=True))
        weights = self.collection.state_dict()
        return {name: weights[f"tables.{name}.weight"] for name in TABLES}

    def _model(self) -> DLRM:
        embeddings: torch.nn.Module = self.collection
        if self.config.reference:
            weights = self.collection.state_dict()
            embeddings = EmbeddingBags([weights[f"tables.{name}.weight"] for name in TABLES])
        return DLRM(embeddings, self.config.model, seed=self.config.seed)

    def _remaining(self) -> Iterator[Batch]:
        """The batches from the current position to the end of the last epoch."""
        progress = self.progress
        while progress.epoch < self.config.epochs:
            yield from self._batches(progress.row, self.train_rows, self.config.batch_size)
            progress.epoch, progress.row = progress.epoch + 1, 0

    def _batches(self, start: int, stop: int, size: int) -> Iterable[Batch]:
        """Rows of the log as the model eats them; their embeddings fetched ahead where that is asked for."""
        config = self.config
        part = self.processes.part
        loader = (
            to_batch(part(rows), config.model.rows_per_table, config.device)
            for rows in self.log.batches(start, stop, size)
        )
        if config.reference or not config.cache.prefetch:
            return loader
        return prefetch(loader, self.model, config.cache.prefetch, ids_of=lambda batch: (batch.ids, batch.offsets))

    def _step(self, batch: Batch) -> None:
        samples = min(self.config.batch_size, self.train_rows - self.progress.row)  # of all processes
        # a graph replays one size: the rest at the end of an epoch trains without
        train = self._train_whole if samples == self.config.batch_size else self._train
        self._share = self.processes.size / samples
        loss = train(batch)
        progress = self.progress
        progress.step += 1
        progress.row += samples
        progress.samples += samples
        progress.pending += samples
        progress.loss_sum += loss.double() * samples

    def _train(self, batch: Batch) -> Tensor:
        """One update; returns the loss before it. A graph may hold it: what is decided here in Python is decided once.

        torch's Adagrad is not marked `capturable`, and is nevertheless: of the host it reads the learning rate, and the
        number of the step only for a `lr_decay` that is not 0 (torch/optim/adagrad.py)."""
        loss = self._loss(self._together(batch), batch.labels)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # updates the tables too
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss; of several processes what has that of all samples as its mean over them."""
        if self.processes.size == 1:
            return binary_cross_entropy_with_logits(logits, labels)
        return binary_cross_entropy_with_logits(logits, labels, reduction="sum") * self._share

    def _finish_point(self) -> Point:
        progress = self.progress
        self._count()
        hit_rate = (progress.stats - progress.stats_at_point).hit_rate
        point = Point(progress.samples, self._loss_sum().item() / progress.pending, hit_rate)
        progress.points.append(point)
        progress.stats_at_point = progress.stats
        progress.loss_sum.zero_()
        progress.pending = 0
        return point

    def _loss_sum(self) -> Tensor:
        """Of the samples since the last point, of all processes."""
        return self.processes.sum(self.progress.loss_sum) / self.processes.size

    def _count(self) -> None:
        self.progress.stats = self._stats_base + self.processes.total(self.collection.stats())

    def _prepare(self) -> None:
        if self.saving is None:
            return
        if self.config.reference:
            raise UnsupportedError("the reference model keeps no checkpoints; drop --checkpoint or --reference")
        if self.saving.resume:
            self._load(self.saving.directory)
        elif checkpoint.exists(self.saving.directory):
            raise CheckpointError(
                f"{self.saving.directory} holds a checkpoint already; pass --resume to go on from it, or choose "
                "another directory"
            )

    def _identity(self) -> dict[str, Any]:
        """What decides the numbers. Epochs may be added on resuming; capacity, policy and tier change no number."""
        config, model = self.config, asdict(self.config.model, dict_factory=_jsonable)
        if config.model.dtype == "fp32":  # as runs were saved when there was no choice
            del model["dtype"], model["rounding"]
        return {
            "log": self.log.identity(),
            **model,
            "optimizer": repr(config.optimizer),
            **{name: getattr(config, name) for name in ("dense_lr", "batch_size", "test_share", "seed", "device")},
            "threads": torch.get_num_threads(),
        }

    def _save_if_due(self) -> None:
        saving, progress = self.saving, self.progress
        if saving is None or (progress.step % saving.every and progress.samples != self.total_samples):
            return
        self._count()
        state = {
            "step": progress.step,
            "progress": {**progress.state(), "loss_sum": self._loss_sum()},
            "dense_layers": self.dense_layers.state_dict(),
            "optimizer": self._dense_optimizer_state(),
            "random_state": torch.get_rng_state(),
        }
        checkpoint.save(saving.directory, self.collection, state, self._identity(), is_first=self.processes.is_first)

    def _dense_optimizer_state(self) -> dict[str, Any]:
        """With the number of the step, which is on the host, where no replay counts it."""
        dense = self.optimizers[0]
        for state in dense.state.values():
            state["step"].fill_(self.progress.step)
        return dense.state_dict()

    def _load(self, directory: Path) -> None:
        state = checkpoint.load(directory, self.collection, self._identity())
        self.dense_layers.load_state_dict(state["dense_layers"])
        self.optimizers[0].load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random_state"])
        self.progress = Progress.of(state["progress"], self.config.device)
        self._stats_base = self.progress.stats - self.processes.total(self.collection.stats())


def _jsonable(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in items}


@contextmanager
def _deterministic() -> Iterator[None]:
    """Refuses torch operations that are not deterministic, for as long as the context lasts."""
    memory: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # for debugging: one kernel more for every new tensor
    try:
        # torch warns about sparse gradients (the reference's) unless told whether to check them
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = filled
