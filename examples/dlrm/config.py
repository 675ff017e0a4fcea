"""Settings of a run, frozen and checked where they are made. The defaults suit small logs: see README.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from tieredemb import LFU, Adagrad, File, Pmem
from tieredemb.config import Capacity, OptimizerConfig, Policy
from tieredemb.errors import ConfigError, UnsupportedError
from tieredemb.lookup.rounding import Rounding
from tieredemb.storage.base import Storage

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the DLRM. `rows_per_table`: rows that each of the 26 columns is hashed to, the missing value's
    included; `dtype`, `rounding`: of the tables' rows, one of `DTYPES`; `bottom`, `top`: widths of the hidden
    layers."""

    rows_per_table: int = 100_000
    embedding_dim: int = 16
    dtype: str = "fp32"
    rounding: Rounding = "nearest"
    bottom: tuple[int, ...] = (64,)
    top: tuple[int, ...] = (64,)

    def __post_init__(self) -> None:
        if self.rows_per_table < 2:
            raise ConfigError(
                f"rows_per_table must be at least 2 (one is the missing value's), got {self.rows_per_table}"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.embedding_dim < 1 or min((*self.bottom, *self.top), default=1) < 1:
            raise ConfigError(f"widths of layers and embeddings must be at least 1, got {self}")


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """What changes the speed of the tables, never the numbers. `capacity`: rows, share or bytes; `storage`: None for
    the library's default on the device; `prefetch`: batches whose rows are fetched ahead."""

    capacity: Capacity = 0.01
    policy: Policy = field(default_factory=LFU)
    storage: Storage | None = None
    prefetch: int = 0

    def __post_init__(self) -> None:
        if self.prefetch < 0:
            raise ConfigError(f"prefetch must be a number of batches, 0 or more, got {self.prefetch}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. `optimizer`: of the tables; `dense_lr`: of the dense layers' Adagrad; `test_share`: the part
    of the rows, at the end of the log, that is held out; `device`: "cpu" or "cuda"; `graph`: run each step as one CUDA
    graph, which changes no number, and on the CPU nothing at all; `reference`: train the plain torch model with
    `nn.EmbeddingBag` from the same initial weights instead."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = field(default_factory=CacheConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: Adagrad(lr=0.02))
    dense_lr: float = 0.01
    batch_size: int = 128
    epochs: int = 1
    test_share: float = 0.2
    device: str = "cpu"
    seed: int = 0
    graph: bool = False
    reference: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.epochs < 1:
            raise ConfigError(f"batch_size and epochs must be at least 1, got {self.batch_size} and {self.epochs}")
        if not 0 < self.test_share < 1:
            raise ConfigError(f"test_share must lie between 0 and 1, got {self.test_share}")
        if not self.dense_lr >= 0:
            raise ConfigError(f"dense_lr must be a number of at least 0, got {self.dense_lr}")
        if self.reference and self.model.dtype != "fp32":
            raise UnsupportedError(f"the reference has tables of fp32, not {self.model.dtype}; drop --dtype")
        if self.captures:
            self._check_capturable()

    @property
    def captures(self) -> bool:
        """Whether there are CUDA graphs to capture."""
        return self.graph and self.device != "cpu"

    def _check_capturable(self) -> None:
        if self.reference:
            raise UnsupportedError(
                "a step of the reference waits for the GPU, which a CUDA graph cannot hold; drop --graph or --reference"
            )
        capacity, storage = self.cache.capacity, self.cache.storage
        all_resident = isinstance(capacity, float) and capacity >= 1
        if isinstance(storage, (File, Pmem)) and not all_resident:
            raise UnsupportedError(
                f"rows of the {type(storage).__name__.lower()} tier pass through the host, which a CUDA graph cannot "
                "hold; drop --graph, take --tier unified or host, or keep all rows on the GPU with --capacity 100%"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go and how often: after every `every` batches and at the end of the training; `resume`: go on
    from the one that is there."""

    directory: Path
    every: int = 1000
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"a checkpoint is written every 1 or more batches, got {self.every}")
