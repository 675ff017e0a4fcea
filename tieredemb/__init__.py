"""Embedding tables larger than memory, behind a hot cache: bit for bit the results of a table held whole.

What only several processes need is imported when it is first used: most programs are one process, and some builds of
torch have no `torch.distributed`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tieredemb.cache.stats import CacheStats
from tieredemb.config import LFU, LRU, Normal, TableConfig, Uniform
from tieredemb.conversion.description import describe
from tieredemb.conversion.replace import replace_embedding_bags
from tieredemb.conversion.restore import restore_embedding_bags
from tieredemb.errors import TieredEmbError
from tieredemb.lookup.optimizers.adagrad import Adagrad
from tieredemb.lookup.optimizers.adam import Adam, AdamW
from tieredemb.lookup.optimizers.adamax import Adamax
from tieredemb.lookup.optimizers.nadam import NAdam
from tieredemb.lookup.optimizers.rmsprop import RMSprop
from tieredemb.lookup.optimizers.row_mean_adagrad import RowMeanAdagrad
from tieredemb.lookup.optimizers.row_wise_adagrad import RowWiseAdagrad
from tieredemb.lookup.optimizers.sgd import SGD
from tieredemb.lookup.optimizers.sparse_adam import SparseAdam
from tieredemb.lookup.optimizers.sparse_lion import SparseLion
from tieredemb.model.checkpoint import load_checkpoint, save_checkpoint
from tieredemb.model.follow import follow
from tieredemb.model.reports import close, flush, memory_report, stats
from tieredemb.modules.clipping import clip_grad_norm_
from tieredemb.modules.collection import TieredEmbeddingBagCollection
from tieredemb.modules.embedding import TieredEmbedding
from tieredemb.modules.embedding_bag import TieredEmbeddingBag
from tieredemb.modules.embedding_collection import TieredEmbeddingCollection
from tieredemb.modules.scores import scores
from tieredemb.pipeline.graphs import graph_forward, graph_step
from tieredemb.pipeline.prefetch import prefetch
from tieredemb.storage.file.tier import File
from tieredemb.storage.host import HostMemory
from tieredemb.storage.pmem import Pmem
from tieredemb.storage.unified import UnifiedMemory

if TYPE_CHECKING:
    from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
    from tieredemb.sharding.layout import Replicated, RowWise, TableWise
    from tieredemb.sharding.stats import ShardedStats

__version__ = "0.2.0"

__all__ = [
    "LFU",
    "LRU",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "CacheStats",
    "File",
    "HostMemory",
    "NAdam",
    "Normal",
    "Pmem",
    "RMSprop",
    "Replicated",
    "RowMeanAdagrad",
    "RowWise",
    "RowWiseAdagrad",
    "ShardedStats",
    "ShardedTieredEmbeddingBagCollection",
    "SparseAdam",
    "SparseLion",
    "TableConfig",
    "TableWise",
    "TieredEmbError",
    "TieredEmbedding",
    "TieredEmbeddingBag",
    "TieredEmbeddingBagCollection",
    "TieredEmbeddingCollection",
    "UnifiedMemory",
    "Uniform",
    "clip_grad_norm_",
    "close",
    "describe",
    "flush",
    "follow",
    "graph_forward",
    "graph_step",
    "load_checkpoint",
    "memory_report",
    "prefetch",
    "replace_embedding_bags",
    "restore_embedding_bags",
    "save_checkpoint",
    "scores",
    "stats",
]

_LATE = {
    "Replicated": "tieredemb.sharding.layout",
    "RowWise": "tieredemb.sharding.layout",
    "ShardedStats": "tieredemb.sharding.stats",
    "ShardedTieredEmbeddingBagCollection": "tieredemb.sharding.collection",
    "TableWise": "tieredemb.sharding.layout",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LATE[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
