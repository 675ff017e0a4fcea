"""What the tables of a model are, in words."""

from __future__ import annotations

from torch import nn

from tieredemb.cache.base import Cache
from tieredemb.conversion.found import find
from tieredemb.errors import ConfigError
from tieredemb.modules.lookup_module import LookupModule
from tieredemb.modules.names import table_name
from tieredemb.step.engine import Engine
from tieredemb.step.table_parameter import TableParameter
from tieredemb.tables.followed_optimizer import FollowedOptimizer
from tieredemb.tables.group import Group
from tieredemb.tables.table_set import TableSet

_HEADER = ("table", "rows", "width", "weights", "cache", "trained by")


def describe(model: nn.Module) -> None:
    """Prints the tiered tables of a model: name, rows, width, bytes of all weights, the cache and tier behind it, and
    what trains it; how many numbers they hold, and whether `parameters()` counts them; and the embeddings that are no
    tables, with the reason where they could not be. Tables that share a cache show the number that it has in the list;
    of those that several ranks hold, the cache is this rank's, of the rows that it owns. Raises `ConfigError` for what
    is no module. Does not synchronise.

    >>> model = nn.Sequential(nn.EmbeddingBag(1000, 4), nn.Linear(4, 1)).eval()
    >>> tieredemb.describe(tieredemb.replace_embedding_bags(model))
    table     rows  width   weights  cache                                 trained by
    0.weight  1000      4  15.6 KiB  10 rows of 1000 (1 %), CPU over host  nothing: no optimizer
    <BLANKLINE>
    1 table, 1,000 rows, 4,000 numbers (15.6 KiB), beside the 5 that parameters() counts
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    lines: list[tuple[str, ...]] = []
    tiered = {name: module for name, module in model.named_modules() if isinstance(module, LookupModule)}
    all_tables = [engine.tables for module in tiered.values() for engine in module.engines]
    caches = list(dict.fromkeys(group.cache for tables in all_tables for group in tables.whole.groups))
    rows = numbers = size = 0
    engines = [(name, module, engine) for name, module in tiered.items() for engine in module.engines]
    for name, module, engine in engines:
        config = engine.tables.config
        for t, table in enumerate(config.tables):
            own_rows = config.part(t).rows
            group, _, _ = engine.tables.locate(t)
            row_bytes = group.cache.cold.layout.format.columns * group.cache.cold.layout.carrier.itemsize
            rows, numbers = rows + own_rows, numbers + own_rows * table.embedding_dim
            size += own_rows * row_bytes
            lines.append((
                table_name(name, module, table.name), f"{own_rows}",
                f"{table.embedding_dim}", _bytes(own_rows * row_bytes),
                _cache(engine.tables, group, caches), _trainer(module, engine),
            ))  # fmt: skip
    for line in _aligned([_HEADER, *lines]) if lines else ["no tiered tables"]:
        print(line)
    if lines:
        among = sum(param.numel() for param in model.parameters() if isinstance(param, TableParameter))
        counted = sum(param.numel() for param in model.parameters())
        where = "beside" if not among else "among" if among == numbers else f"{among:,} of them among"
        many = "table" if len(lines) == 1 else "tables"
        print(
            f"\n{len(lines)} {many}, {rows:,} rows, {numbers:,} numbers ({_bytes(size)}), {where} the {counted:,} that "
            f"parameters() counts"
        )
    left = find(model)
    if left:
        print("\nno tables:")
        for each in left:
            print(f"  {each.shown} {each.reason or 'was left out, or came later'}")


def _cache(tables: TableSet, group: Group, caches: list[Cache]) -> str:
    rows = sum(each.space.rows for each in tables.whole.groups if each.cache is group.cache)
    device = group.config.device
    where = "CPU" if device.type == "cpu" else str(device)
    number = f"{caches.index(group.cache) + 1}: " if len(caches) > 1 else ""
    return (
        f"{number}{group.slots} rows of {rows} ({_percent(group.slots / rows)}), {where} over {group.cache.cold.kind}"
    )


def _percent(share: float) -> str:
    """Two digits, of a large share three: "0.25 %", "5 %", "99.8 %", "100 %"; never an exponent."""
    percent = 100 * share
    if percent < 0.0001:
        return "under 0.0001 %"
    return f"{percent:.3g} %" if percent >= 9.95 else f"{float(f'{percent:.2g}'):.6f}".rstrip("0").rstrip(".") + " %"


def _trainer(module: LookupModule, engine: Engine) -> str:
    optimizer = engine.optimizer
    if optimizer is None:
        return "nothing: no optimizer"
    if not module.is_trainable:
        return "nothing: frozen"
    if not isinstance(optimizer, FollowedOptimizer):
        return f"{type(engine.tables.config.optimizer).__name__}, in backward"
    if optimizer.optimizer is None:
        return "nothing yet: tieredemb.follow(model, optimizer) is to come"
    return f"torch.optim.{type(optimizer.optimizer).__name__}, param group {optimizer.group}"


def _bytes(size: int) -> str:
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = (False, True, True, True, False, False)
    cells = [
        [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        for line in lines
    ]
    return ["  ".join(line).rstrip() for line in cells]
