"""`ShardedTieredEmbeddingBagCollection`: the tables of a collection over several processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import torch

from tieredemb.cache.base import AHEAD, PlanKind
from tieredemb.config import (
    Capacity,
    CheckIds,
    Policy,
    TableConfig,
    check_flag,
    features_of,
    is_whole,
    plain,
    without_functions,
)
from tieredemb.errors import ConfigError, StorageFormatError, UncleanFileError, UnsupportedError, shown
from tieredemb.kernels.inference import no_inference
from tieredemb.kernels.tracing import untraced
from tieredemb.lookup.bags import Places
from tieredemb.lookup.options import LookupOptions
from tieredemb.lookup.rounding import Rounding
from tieredemb.modules.base import moved
from tieredemb.modules.collection import PooledInputs, check_collection, given_tables
from tieredemb.modules.forwards import LISTENERS, notify_listeners
from tieredemb.modules.given_weights import given_weights
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.sharding.agreed import agreed
from tieredemb.sharding.call import ShardedCallContext
from tieredemb.sharding.distributed_ranks import DistributedRanks
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.finder import bag_finder
from tieredemb.sharding.layout import REPLICATED, ROW_WISE, Layout, Sharding
from tieredemb.sharding.optimizer import ShardedOptimizer
from tieredemb.sharding.padding import MOST_ENTRIES
from tieredemb.sharding.ranks import Ranks
from tieredemb.sharding.shard import Held, Shard, own_tables
from tieredemb.sharding.states import RowStates
from tieredemb.sharding.stats import ShardedStats
from tieredemb.step.batch import Batch
from tieredemb.step.engine import Engine
from tieredemb.step.planned_forwards import PlanExecutor, Planned, PlannedForwards
from tieredemb.step.program import BackwardPass, inside_backward
from tieredemb.storage.base import Storage
from tieredemb.storage.file.tier import File
from tieredemb.tables.config import TableSetConfig, table_set_config
from tieredemb.tables.fused_optimizer import FusedOptimizer
from tieredemb.tables.group import row_layout, slot_bytes
from tieredemb.tables.shares import Sharer, shares
from tieredemb.tables.table_set import TableSet
from tieredemb.tables.torch_kinds import Optimizer, is_torch_optimizer

if TYPE_CHECKING:
    import torch.distributed as dist

    from tieredemb.step.agreement import Agreement


class ShardedTieredEmbeddingBagCollection(PooledInputs, LookupModule):
    """A `TieredEmbeddingBagCollection` whose rows are held by the ranks of a process group, each behind a cache of its
    own. Each rank looks up its own batches, in collective calls: all ranks run as many forwards and backwards.

    Rows are bit for bit those of one process that trains the batches of all ranks as one, rank by rank, given equal
    gradients of the outputs. `group`: the ranks, by default all; made by `torch.distributed.init_process_group` or a
    `DeviceMesh` · `sharding`: by the names of tables `RowWise()`, the default, `TableWise()` or `Replicated()`, or one
    for all. Of row-wise tables a row is sent for each different id of a rank's batch, and back a gradient for each
    occurrence; of table-wise ones pooled bags and their gradients; of replicated ones gradients of bags alone, to all
    ranks · `capacity`: of each rank · `average`: whether gradients of the tables are divided by the number of ranks, as
    `DistributedDataParallel` does with those of the dense layers · `max_ids`: how many ids a rank requests from another
    at most, in tables of one width and one kind of sharding. Exchanges are padded to it; for a batch of more the ranks
    agree on a larger size, to the same bits, and a warning says how many ids there are. None: the ranks agree on a size
    for each batch, on GPUs for each number of samples, and for captured steps (`graph_step`) on that of their largest
    batch so far · `device`: of this rank; "cuda" is the current one (`torch.cuda.set_device`), and all ranks are on
    CPUs, or all on GPUs · `timeout`: how long a rank waits for another, already while it constructs the collection, and
    before that for its own GPU; by default as long as torch does. The other keywords are those of
    `TieredEmbeddingBagCollection`. `capacity`, `storage`, `device`, `check_ids` and `timeout` may differ between the
    ranks, and so may the machines; the others are equal on all of them. To construct it is a collective, which raises
    `ConfigError` where they are not, and `PeerError` where a rank has ended.

    GPUs send each other rows by NCCL where the `group` has it, as "nccl" and "cpu:gloo,cuda:nccl" do. What ranks
    announce to each other goes through memory of the host that they share, or by gloo where they share none. In a group
    of gloo alone rows pass through host memory. An eager forward waits for the GPU once, to learn how many ids it
    requests from a rank at most, and whether one is wrong.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)    # under torchrun: "gloo" alone
    >>> tables = [tieredemb.TableConfig(name=n, num_embeddings=100, embedding_dim=4) for n in ("user", "item")]
    >>> collection = tieredemb.ShardedTieredEmbeddingBagCollection(
    ...     tables, sharding=tieredemb.RowWise(), capacity=0.5, optimizer=tieredemb.Adagrad(lr=0.02)
    ... )
    >>> ids = torch.tensor([7, 8, 9, 50])    # this rank's batch
    >>> collection(ids, torch.tensor([0, 1, 3, 4, 4])).sum().backward()
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        group: dist.ProcessGroup | None = None,
        sharding: Mapping[str, Sharding] | Sharding | None = None,
        capacity: Capacity = 0.01,
        policy: Policy | None = None,
        storage: Storage | None = None,
        optimizer: Optimizer = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        check_ids: CheckIds = "deferred",
        rounding: Rounding = "nearest",
        output_dtype: torch.dtype | None = None,
        is_weighted: bool = False,
        average: bool = True,
        max_ids: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__()
        exchange = Exchange(group, timeout)
        held: list[Held] = []
        given: dict[str, str] = {}
        copied: dict[str, str] = {}
        settings: dict[str, Any] = {
            "policy": policy, "storage": storage, "optimizer": optimizer, "seed": seed, "dtype": dtype,
            "device": device, "check_ids": check_ids, "rounding": rounding,
        }  # fmt: skip

        def check() -> tuple[TableSetConfig, LookupOptions, int | None]:
            self.table_configs = given_tables(tables)
            check_collection(self.table_configs, scale_grad_by_freq=scale_grad_by_freq, is_weighted=is_weighted)
            check_flag("average", average)
            self.is_weighted = is_weighted
            most = checked_max_ids(max_ids, exchange.size)
            config = table_set_config(self.table_configs, capacity=capacity, output_dtype=output_dtype, **settings)
            self.layout = Layout(self.table_configs, exchange.size, sharding)
            options = LookupOptions(max_norm=max_norm, norm_type=norm_type, scale_grad_by_freq=scale_grad_by_freq)
            alike = {name: getattr(config, name) for name in ("policy", "optimizer", "seed", "dtype", "rounding")}
            alike |= {"tables": without_functions(self.table_configs), "output_dtype": config.output_dtype}
            alike |= {"options": options, "sharding": self.layout.sharding, "average": average, "max_ids": most}
            given.update({name: repr(value) for name, value in alike.items()}, is_weighted=repr(is_weighted))
            given.update({"the kind of device": config.device.type, "what updates the rows": _updater(optimizer)})
            return config, options, most

        def build() -> None:
            plain_config = replace(config, tables=without_functions(self.table_configs))
            if is_alone(exchange):
                held.append(Held(range(len(config.tables)), config, options, _class_of(optimizer), self._over_ranks))
            else:
                self._make_shards(held, exchange, plain_config, settings, options)
                copied.update(self._copied_rows(held))
            fused = [each.engine.optimizer for each in held if isinstance(each.engine.optimizer, FusedOptimizer)]
            self._optimizer: FusedOptimizer | ShardedOptimizer | None = None
            if fused:
                self._optimizer = fused[0] if is_alone(exchange) else ShardedOptimizer(fused, self._states)
            self._ranks = self._make_ranks(exchange, held, plain_config, exchange.size if average else 1, most)

        try:
            # before a file is opened: ranks that would build different tables must not change any
            config, options, most = agreed(lambda failed: exchange.agree_to_construct(failed, given), check)
            agreed(lambda failed: exchange.end_construction(failed, copied), build)
            for each in held:
                each.engine.tables.filled()
            exchange.check_device(config.device)
            if isinstance(optimizer, torch.optim.Optimizer):
                self._ranks.follow(optimizer, group=None, in_state_dict=True)
        except BaseException as error:
            _close_after_error(exchange, held, error)
            raise
        self._know_features()
        self._frozen = False
        self.engine = self._ranks.engine
        self._hook = self._make_hook()
        self._ranks.disable_autograd_threads()

    def _make_ranks(
        self, exchange: Exchange, held: Sequence[Held], config: TableSetConfig, divisor: int, max_ids: int | None
    ) -> Ranks:
        """The ranks, of which this one holds `held`; gradients are divided by `divisor`."""
        if is_alone(exchange):
            return Ranks(held, exchange)
        widths = [self.table_configs[feature.table].embedding_dim for feature in features_of(self.table_configs)]
        shards = [each for each in held if isinstance(each, Shard)]
        find = bag_finder(self.layout, [part for shard in shards for part in shard.parts], config)
        context = ShardedCallContext(
            layout=self.layout, exchange=exchange, shards=shards, find=find,
            columns=sum(widths), output_dtype=config.output_dtype, device=config.device,
            divisor=float(divisor), backward_pass=BackwardPass(), optimizer=self._optimizer, max_ids=max_ids,
            make_batch=self._batch,
        )  # fmt: skip
        return DistributedRanks(context, config)

    def _make_shards(
        self,
        made: list[Held],
        exchange: Exchange,
        config: TableSetConfig,
        settings: Mapping[str, Any],
        options: LookupOptions,
    ) -> None:
        """Builds what this rank holds, of each width, into `made`. A collective: row files of all ranks are one set."""
        rank = exchange.rank
        settings = {**settings, "device": config.device, "check_ids": "deferred"}  # ids are checked with the bags
        widths_of = [self.table_configs[feature.table].embedding_dim for feature in features_of(self.table_configs)]
        columns = np.concatenate([[0], np.cumsum(widths_of)]).astype(np.int64)
        widths = sorted({table.embedding_dim for table in self.table_configs})
        members = [[t for t, table in enumerate(self.table_configs) if table.embedding_dim == w] for w in widths]
        own = [own_tables(self.layout, each, rank) for each in members]
        sharers = [
            Sharer(sum(t.num_embeddings for t in held), slot_bytes(row_layout(config, 1, width), config.device))
            for held, width in zip(own, widths, strict=True)
        ]
        labels = [f"width{width}-rank{rank}of{self.layout.size}" for width in widths]
        fills = any(callable(table.init) for each in own for table in each)
        storage = config.storage
        if isinstance(storage, File) and self._replicated:
            storage = replace(storage, recover=False)
        with self._known_sharding(), storage.opening(labels, fills=fills, gather=exchange.of_all) as rows:
            for each, label, held, share in zip(members, labels, own, shares(config.capacity, sharers), strict=True):
                its_config = table_set_config(
                    held, capacity=share, pooled=False, parts=tuple(self.layout.part(t, rank) for t in each),
                    label=label, **settings,
                )  # fmt: skip
                shard = Shard(
                    self.layout, rank, each, list(columns), its_config, options, _class_of(settings["optimizer"]),
                    self._over_ranks, rows=rows,
                )  # fmt: skip
                made.append(shard)

    @contextlib.contextmanager
    def _known_sharding(self) -> Iterator[None]:
        """Adds to the errors of row files: those of other tables may be of another sharding, where none was given;
        those that were not closed are refused with `Replicated()`."""
        try:
            yield
        except UncleanFileError as error:
            if not self._replicated:
                raise
            raise UncleanFileError(
                f"{error}. Every rank has a copy of {', '.join(map(repr, self._replicated.values()))}, of which each "
                f"may lack other updates: so recover=True is refused with Replicated(), and fresh=True is left"
            ) from error
        except StorageFormatError as error:
            if self.layout.size == 1 or not any(self.layout.is_default):
                raise
            raise StorageFormatError(
                f"{error}. All tables are row-wise, the default; if the files were written with other "
                f"sharding=, pass that (earlier versions held tables of less than 1 MiB whole: TableWise())"
            ) from error

    @property
    def _replicated(self) -> dict[int, str]:
        """The tables that every rank holds: their names by their numbers."""
        return {t: table.name for t, table in enumerate(self.table_configs) if self.layout.owner[t] == REPLICATED}

    def _copied_rows(self, held: Sequence[Held]) -> dict[str, str]:
        """What the copies of replicated tables here begin with, to be equal on all ranks."""
        found = {}
        for t, name in self._replicated.items():
            tables, number = next((each.engine.tables, each.tables.index(t)) for each in held if t in each.tables)
            begins = "new rows" if tables.is_new(number) else "the rows of a file"
            if tables.is_new(number) and callable(self.table_configs[t].init):
                filled = tables.weight(number).view(torch.uint8).numpy()
                begins = f"rows of CRC-32 {crc32(filled.data):#x}, by an init that is to draw from its generator alone"
            found[f"what the copy of table {name!r} begins with"] = begins
        return found

    def _make_hook(self) -> torch.Tensor:
        with no_inference():
            return torch.zeros(0, device=self.tables.config.device, requires_grad=not self._frozen)

    # --- forward and backward ---------------------------------------------------------------------------------------

    @property
    def tables(self) -> TableSet:
        """The tables of the smallest width, as far as this rank holds them."""
        return self._held[0].engine.tables

    @property
    def engines(self) -> Sequence[Engine]:
        """The engines of each width."""
        return [held.engine for held in self._held]

    @property
    def _held(self) -> Sequence[Held]:
        """What this rank holds."""
        return self._ranks.held

    @property
    def distributed_ranks(self) -> DistributedRanks | None:
        """The ranks that save and load the rows together; None where there is one rank."""
        return self._ranks if isinstance(self._ranks, DistributedRanks) else None

    @property
    def agreement(self) -> Agreement | None:
        return self._ranks.agreement

    @property
    def planned(self) -> PlannedForwards:
        """The forwards that were planned and have not run yet."""
        return self._ranks.planned

    def plan_ahead(
        self,
        executor: PlanExecutor,
        *inputs: torch.Tensor | Places,
        kind: PlanKind = AHEAD,
        memory: Any = None,
    ) -> Planned:
        """See `LookupModule`. A collective, in which the thread of the loop takes part."""
        if self._frozen:
            kind = kind._replace(trains=False)
        return self._ranks.plan_ahead(executor, inputs, self._batch, kind, memory)

    @property
    def is_trainable(self) -> bool:
        """Whether a backward updates the rows."""
        return self._held[0].engine.optimizer is not None and not self._frozen

    def requires_grad_(self, requires_grad: bool = True) -> ShardedTieredEmbeddingBagCollection:
        """Freezes the tables (False): outputs need no gradient and rows stay; or thaws them. On all ranks alike."""
        super().requires_grad_(requires_grad)
        self._frozen = not requires_grad
        self._hook = self._make_hook()
        return self

    @untraced
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """See `TieredEmbeddingBagCollection.forward`. A collective: all ranks raise the error of one."""
        with self._ranks.forward():
            return super().forward(*inputs, **named)

    def _lookup(self, batch: Batch) -> torch.Tensor:
        """Pools a batch: (B, ΣD). A collective."""
        recomputed = inside_backward()
        if LISTENERS and not recomputed:
            notify_listeners(self, batch, trains=self._hook.requires_grad and torch.is_grad_enabled())
        return self._ranks.look_up(batch, self._hook, recomputed=recomputed)

    def follow(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        group: int | dict[str, Any] | None = None,
        in_state_dict: bool = True,
    ) -> None:
        """From now on `optimizer.step()` updates the rows, on each rank its own optimizer; see
        `TieredEmbeddingBag.follow`. A collective: all ranks raise the error of one, and then none follows.

        The tables' parameters are added to the params of `group`, in the order of the tables; `parameters()` does not
        list them, as `DistributedDataParallel` would take them for its own. Their gradients are the norms over all
        ranks: code that reads one, as `GradScaler` and `clip_grad_norm_` do with the params that they are given, must
        run on all ranks.

        `in_state_dict`: whether `optimizer.state_dict()` and loading it are collectives and hold the tables' state:
        whole on rank 0, while the others have the dense part alone; taken from all ranks, or from rank 0 alone. False
        for tables larger than memory, whose state `save_checkpoint` saves."""
        self._ranks.follow(optimizer, group=group, in_state_dict=in_state_dict)

    def _states(self) -> RowStates:
        """The optimizer state of the rows of several ranks."""
        assert isinstance(self._ranks, DistributedRanks)
        return self._ranks.states

    def _over_ranks(self, totals: torch.Tensor, norm_type: float) -> torch.Tensor:
        """See `Ranks.total`."""
        return self._ranks.total(totals, norm_type)

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Sums the gradients of all backward passes inside the context and applies one optimizer step at its end; see
        `TieredEmbeddingBagCollection.accumulate`. On all ranks alike."""
        with contextlib.ExitStack() as all_of_them:
            for held in self._held:
                all_of_them.enter_context(held.engine.accumulate())
            try:
                yield
            except Exception as error:
                self._ranks.end_accumulate(error)
                raise
            self._ranks.end_accumulate()

    @property
    def fused_optimizer(self) -> FusedOptimizer | ShardedOptimizer:
        """The optimizer that backward applies. Change its options on all ranks alike. Raises `ConfigError` where the
        module was built without one."""
        if self._optimizer is None:
            raise ConfigError(
                "this module has no fused optimizer; pass optimizer=tieredemb.Adagrad(lr=…), or another one, to its "
                "constructor"
            )
        return self._optimizer

    # --- reports and saving -----------------------------------------------------------------------------------------

    def stats(self) -> ShardedStats:
        """Counters of the rows that this rank owns, and of what it has sent to other ranks (`ShardedStats`); subtract
        two snapshots to measure a stretch of work."""
        counted = self._ranks.stats()
        for held in self._held:
            counted += held.engine.tables.stats()
        return counted

    def memory_report(self) -> dict[str, Any]:
        """Bytes of every allocation of this rank, by width and purpose; `peers`: what other ranks write to."""
        found = {name: part for held in self._held for name, part in held.engine.tables.memory_report().items()}
        return found | self._ranks.memory_report()

    def row_files(self) -> dict[str, Any] | None:
        """See `TieredEmbeddingBag.row_files`: identity and generation are of all ranks, `files` of this one."""
        found = self._held[0].engine.tables.row_set
        return None if found is None else found._asdict()

    def flush(self) -> None:
        """Writes all hot rows of this rank back."""
        for held in self._held:
            held.engine.tables.flush()

    def close(self) -> None:
        """Flushes and closes the cold storage of this rank; the module is unusable afterwards."""
        for held in self._held:
            held.engine.drop_gradient()
            held.engine.tables.close()
        self._ranks.close()

    def describe(self) -> list[str]:
        """Which ranks hold each table, and whether that is the default: a line for each table."""
        lines = []
        for t, table in enumerate(self.table_configs):
            owner, size = int(self.layout.owner[t]), self.layout.size
            held = f"whole on rank {max(owner, 0)}"
            if owner == REPLICATED and size > 1:
                held = f"replicated on {size} ranks"
            elif owner == ROW_WISE and size > 1:
                held = f"row-wise over {size} ranks"
                if self.layout.is_default[t]:
                    held += ", the default: it sends least where bags have one id"
            lines.append(f"{table.name}: {table.num_embeddings} × {table.embedding_dim}, {held}")
        return lines

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for t, table in enumerate(self.table_configs):
            weight = self._ranks.weight(t)
            if weight is not None:
                destination[f"{prefix}tables.{table.name}.weight"] = weight

    def save_checkpoint(self, directory: str | os.PathLike[str], *, extra: dict[str, Any] | None = None) -> None:
        """Saves the rows of all ranks, optimizer state, scores and counters to `directory`, which all of them see, and
        replaces its last checkpoint atomically. A collective. It loads at any number of ranks and any sharding, and in
        one process, by `TieredEmbeddingBagCollection.load_checkpoint`. `extra`: that of rank 0 is saved. See
        `TieredEmbeddingBag.save_checkpoint`; all ranks raise the error of one."""
        self._ranks.save(directory, {} if extra is None else extra)

    def load_checkpoint(self, directory: str | os.PathLike[str], *, recover: bool = False) -> dict[str, Any]:
        """Replaces all rows by those of a checkpoint, which any collection of the same tables may have saved; returns
        its `extra`. A collective. See `TieredEmbeddingBag.load_checkpoint`; all ranks raise the error of one."""
        return self._ranks.load(directory, recover=recover)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        keys = [f"{prefix}tables.{table.name}.weight" for table in self.table_configs]
        weights, problems = given_weights(state_dict, keys, self.table_configs, unexpected_keys)
        known, of_others = self._ranks.set_weights(weights, problems)
        error_msgs += [*problems, *of_others]
        missing_keys += [key for t, key in enumerate(keys) if t not in known and state_dict.get(key) is None]

    # --- what nn.Module would do to parameters ------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        device = self.tables.config.device
        probe = moved(fn, torch.zeros(1, device=device))
        is_shared = probe.device.type == "cpu" and probe.is_shared()
        if probe.dtype != torch.float32 or probe.device != device or is_shared:
            raise UnsupportedError(
                "rows of a sharded collection stay where they are and as they are; build it with device= and dtype=, "
                "and convert or move the dense layers alone"
            )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a sharded collection cannot be copied or pickled: its rows lie on several ranks; use "
            "save_checkpoint(directory) and load_checkpoint(directory)"
        )

    def extra_repr(self) -> str:
        return "\n".join(self.describe())


def checked_max_ids(max_ids: Any, ranks: int) -> int | None:
    """What was given, if it is allowed. Raises `ConfigError`."""
    number: int | None = plain(max_ids)
    most = MOST_ENTRIES // ranks
    if number is not None and not (is_whole(number) and 1 <= number <= most):
        raise ConfigError(
            f"max_ids must be the number of ids that a rank requests from another at most, 1 … {most} with {ranks} "
            f"ranks, or None, got {shown(number)}"
        )
    return number


def _close_after_error(exchange: Exchange, held: Sequence[Held], error: BaseException) -> None:
    """Leaves the other ranks, and closes what a construction has opened before its `error`."""
    with contextlib.ExitStack() as all_of_them:  # from the last to the first, even if one fails
        for each in held:
            all_of_them.callback(each.engine.tables.close)
        all_of_them.callback(exchange.leave, error)


def is_alone(exchange: Exchange) -> bool:
    """Whether a rank has no other to exchange anything with."""
    return exchange.size == 1


def _updater(optimizer: Optimizer) -> str:
    """What updates rows, in words."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return "a torch optimizer, which tables follow at once"
    return "a torch optimizer that is to come" if is_torch_optimizer(optimizer) else "tieredemb's, or none"


def _class_of(optimizer: Optimizer) -> Optimizer:
    """The class of a torch optimizer, for which rows are laid out before tables follow it."""
    return type(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
