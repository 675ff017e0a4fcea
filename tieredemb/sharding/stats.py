"""Counters of a rank beside those of its cache: what it has sent to other ranks, and how long it has waited for
them."""

from __future__ import annotations

from dataclasses import dataclass

from tieredemb.cache.stats import CacheStats

IDS, ROWS, GRADIENTS = "id_bytes_sent", "row_bytes_sent", "gradient_bytes_sent"  # the kinds of messages


@dataclass(frozen=True, kw_only=True)
class ShardedStats(CacheStats):
    """Totals of one rank since its collection was built: those of `CacheStats`, for the rows that the rank owns; the
    bytes that it has sent to other ranks; how long it has sent and received; and how long its host and its GPU have
    waited for other ranks.

    `id_bytes_sent`: ids that this rank looks up and others own, and how many there are; for table-wise tables the
    lengths of their bags, too, and per-sample weights · `row_bytes_sent`: rows and pooled bags that others look up and
    this rank owns · `gradient_bytes_sent`: gradients of what this rank has looked up, and their factors ·
    `wait_seconds`: of the host, for the headers by which all ranks agree on each exchange · `exchange_seconds`: in
    exchanges of ids, rows and gradients, of the host by gloo, of the GPU by NCCL, waits for late ranks included ·
    `gpu_wait_seconds`: of the GPU, for the ids, rows and gradients that other GPUs write into its memory, before the
    first rows of a captured step, and where memory for them is allocated. A replicated table is owned by every rank:
    what is sent to each of the others counts, and so do lookups for them.

    Lookups and their backward passes count: eager steps, and each replay of a captured step, also where GPUs write into
    each other's memory. Ranks send blocks of one size, and the padding that fills a block is sent and counted. What a
    rank sends to itself is not counted, and neither are headers, state dicts and checkpoints.

    A rank that waits less than the others is the one that they wait for. Hosts wait before each exchange of an eager
    step, and once before a captured step. The time that a header takes is included. Where GPUs write into each other's
    memory only the waits are measured, as the same kernels also compute.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)    # under torchrun: "gloo" alone
    >>> tables = [tieredemb.TableConfig(name="user", num_embeddings=100, embedding_dim=4)]
    >>> collection = tieredemb.ShardedTieredEmbeddingBagCollection(tables, capacity=0.5)
    >>> before = collection.stats()
    >>> pooled = collection(torch.tensor([7, 8, 9]), torch.tensor([0, 1, 3]))
    >>> counted = collection.stats() - before
    >>> counted.lookups, counted.bytes_sent, counted.wait_seconds    # a rank alone sends nothing
    (3, 0, 0.0)
    >>> dist.destroy_process_group()
    """

    id_bytes_sent: int = 0
    row_bytes_sent: int = 0
    gradient_bytes_sent: int = 0
    wait_seconds: float = 0.0
    exchange_seconds: float = 0.0
    gpu_wait_seconds: float = 0.0

    @property
    def bytes_sent(self) -> int:
        """All bytes that it has sent to other ranks."""
        return self.id_bytes_sent + self.row_bytes_sent + self.gradient_bytes_sent
