"""Who takes part in the GPU step benchmark. A provider's `step(ids)` is forward, backward and update of one batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn

import tieredemb
from benchmarks.cuda_timing import allocated_bytes, synchronize
from benchmarks.cuda_workload import SEED, Cache, CudaWorkload, every_row
from tieredemb.config import Policy
from tieredemb.storage.unified import UnifiedMemory

LR = 0.05
OURS, TORCH, FBGEMM = "tieredemb", "torch", "fbgemm"


class Upstream:
    """Offsets, int64 (T · B + 1,), and the gradient of the outputs, float32 (B, T · D), of every step."""

    def __init__(self, work: CudaWorkload, device: torch.device) -> None:
        random = torch.Generator(device).manual_seed(SEED)
        self.offsets = torch.arange(work.lookups + 1, device=device)
        shape = (work.batch, work.tables * work.width)
        self.gradient = torch.randn(shape, generator=random, device=device).mul_(1e-2)


class Tiered:
    """A `TieredEmbeddingBagCollection` over unified memory (host memory on the CPU).

    `build_seconds`, `load_seconds`: the constructor; setting all weights · `allocated`: bytes of torch on the card by
    the constructor.
    """

    def __init__(self, work: CudaWorkload, cache: Cache, policy: Policy, upstream: Upstream) -> None:
        self.work, self.upstream, self.device = work, upstream, upstream.offsets.device
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            check_room(work.cold_bytes)
        storage = UnifiedMemory() if on_gpu else tieredemb.HostMemory()
        tables = [
            tieredemb.TableConfig(name=f"t{t}", num_embeddings=rows, embedding_dim=work.width)
            for t, rows in enumerate(work.sizes)
        ]
        before, start = allocated_bytes(self.device), perf_counter()
        self.module = tieredemb.TieredEmbeddingBagCollection(
            tables, capacity=cache.capacity, optimizer=tieredemb.RowWiseAdagrad(lr=LR), policy=policy, storage=storage,
            device=self.device, dtype=work.dtype, rounding=work.rounding, output_dtype=torch.float32,
        )  # fmt: skip
        synchronize(self.device)
        self.build_seconds = perf_counter() - start
        self.allocated = allocated_bytes(self.device) - before
        self.load_seconds = 0.0

    def load(self) -> None:
        """Sets all weights, so that a missed row is one that cold storage holds and not one to be generated."""
        start = perf_counter()
        some = torch.randn(1 << 16, self.work.width, generator=torch.Generator().manual_seed(SEED))
        weight = some.repeat(-(-self.work.rows // len(some)), 1)  # all random would take seconds
        self.module.load_state_dict({f"tables.t{t}.weight": weight[:rows] for t, rows in enumerate(self.work.sizes)})
        synchronize(self.device)
        self.load_seconds = perf_counter() - start

    def fill(self) -> None:
        """Brings every row into the cache."""
        with torch.no_grad():
            for ids, offsets in every_row(self.work.sizes, self.work.lookups, self.device):
                self.module(ids, offsets)

    def step(self, ids: torch.Tensor) -> None:
        self.module(ids, self.upstream.offsets).backward(self.upstream.gradient)

    def close(self) -> None:
        self.module.close()


def torch_step(work: CudaWorkload, upstream: Upstream) -> Callable[[torch.Tensor], None]:
    """One `nn.EmbeddingBag(sparse=True)` a table and `torch.optim.Adagrad`, outputs and gradients a tensor each."""
    device = upstream.offsets.device
    bags = [nn.EmbeddingBag(rows, work.width, mode="sum", sparse=True, device=device) for rows in work.sizes]
    optimizer = torch.optim.Adagrad([bag.weight for bag in bags], lr=LR)
    offsets = torch.arange(work.batch, device=device)
    gradients = [part.contiguous() for part in upstream.gradient.chunk(work.tables, 1)]

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        per_table = ids.view(work.tables, -1)
        outputs = [bag(table_ids, offsets) for bag, table_ids in zip(bags, per_table, strict=True)]
        torch.autograd.backward(outputs, gradients)
        optimizer.step()

    return step


def fbgemm_installed() -> bool:
    return importlib.util.find_spec("fbgemm_gpu") is not None


def fbgemm_step(work: CudaWorkload, upstream: Upstream) -> Callable[[torch.Tensor], None]:
    """FBGEMM's table-batched bags: all in HBM, or over managed memory with an LFU cache of 1 % of the rows."""
    if not work.resident:
        check_room(work.cold_bytes)
    bags = fbgemm_bags(
        [(rows, work.width) for rows in work.sizes],
        upstream.offsets.device,
        share=None if work.resident else 0.01,
        halves=work.dtype is not torch.float32,  # it has no bf16
        stochastic=work.rounding == "stochastic",
    )

    def step(ids: torch.Tensor) -> None:
        bags(ids, upstream.offsets).backward(upstream.gradient)

    return step


def fbgemm_bags(
    tables: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    share: float | None,
    halves: bool = False,
    stochastic: bool = False,
) -> Any:
    """FBGEMM's module of `tables`, (rows, width) each, with row-wise Adagrad: over managed memory with an LFU cache of
    a `share` of the rows, or all in HBM. `halves`: rows are float16."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm, EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    where = EmbeddingLocation.DEVICE if share is None else EmbeddingLocation.MANAGED_CACHING
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, width, where, ComputeDevice.CUDA) for rows, width in tables],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LR,
        weights_precision=SparseType.FP16 if halves else SparseType.FP32,
        output_dtype=SparseType.FP32,
        stochastic_rounding=stochastic,
        pooling_mode=PoolingMode.SUM,
        cache_algorithm=CacheAlgorithm.LFU,
        cache_load_factor=share or 0.01,
        device=device,
    )


def check_room(size_bytes: int) -> None:
    """Refuses to ask for more managed memory than the card has free: on a shared machine it would push others out."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if size_bytes > free:
        raise SystemExit(
            f"the tables need {size_bytes / 2**30:.1f} GiB of managed memory, the card has {free / 2**30:.1f} GiB of "
            f"{total / 2**30:.1f} GiB free; free some, or choose smaller workloads with --workloads or --quick"
        )
