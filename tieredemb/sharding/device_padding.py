"""Exchanges of one size on a GPU, of row-wise tables: a few kernels do what `padding` and `request` do by operations on
tensors, each of which is a launch.

A captured step had to wait for some ninety launches one after the other. Kernels replace them where different rows come
back once; those for received messages also need a width without table-wise tables.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tieredemb.kernels.arguments import struct_type
from tieredemb.kernels.compiler import blocks_for, kernel
from tieredemb.kernels.streams import on_device

PADDING = "sharding/padding.cu"  # compiled as one
THREADS, IN_ONE_BLOCK, IN_ONE_WARP = 256, 1024, 32


def prepare(device: torch.device) -> None:
    """Begins to compile the kernels, which may first be launched in a capture."""
    kernel(PADDING, "blocks_begin").prepare(device.index)


class PaddedBags(NamedTuple):
    """Requests in blocks of one size. `order`: int64 (W · bound,), the occurrences · `values`: int64 (W · (F +
    bound),), as in a `padding.Message`."""

    order: torch.Tensor
    values: torch.Tensor


def pad_bags(
    counts: torch.Tensor,
    features: int,
    order: torch.Tensor,
    ids: torch.Tensor,
    homes: torch.Tensor,
    *,
    bound: int,
    rows: int,
) -> PaddedBags:
    """Pads occurrences `order` and `ids`, int64 (·,), that lie rank by rank, to `bound` for each; see `Padding.pad` and
    `message`. Makes `homes`, int32 (N,), which are numbers of rows, those of entries, where each rank sends `rows`; see
    `Padding.move`. `counts`: int64 (W, columns), how many ids of each of the `features` are requested of each rank, and
    behind those how many rows. Does not synchronise."""
    ranks, device = counts.shape[0], counts.device
    begins = counts.new_empty((2, ranks + 1))
    padded, values = counts.new_empty(ranks * bound), counts.new_empty(ranks * (features + bound))
    with on_device(device):
        kernel(PADDING, "blocks_begin")(1, IN_ONE_WARP, counts.data_ptr(), counts.stride(0), ranks, features, begins)
        kernel(PADDING, "bags_pad")(
            blocks_for(max(len(values), len(homes)), THREADS), THREADS, counts.data_ptr(), counts.stride(0), features,
            begins, ranks, bound, rows, order, len(order), ids, len(ids), homes, len(homes), padded, values,
        )  # fmt: skip
    return PaddedBags(padded, values)


class Joined(NamedTuple):
    """What all ranks have sent, in the order of one process: feature by feature, and in these rank by rank. `edges`:
    int64 (F + 1,), where features begin and end · `joined`: int64 (W · bound,), the entry of each id · `entry`: the
    same, and W · bound behind the last id · `ids`: int64 (W · bound,) · `row`: int32 (W · bound,), the row of the
    output, which is at the entry · `picked`: int64 (K,), which ids have the rows that go back."""

    edges: torch.Tensor
    joined: torch.Tensor
    entry: torch.Tensor
    ids: torch.Tensor
    row: torch.Tensor
    picked: torch.Tensor


def join_messages(values: torch.Tensor, *, ranks: int, features: int, bound: int, rows: int | None) -> Joined:
    """Sorts received messages, int64 (W · (F + bound),). `rows`: how many go back to each rank, if not one for each
    entry. Does not synchronise."""
    device, entries, pieces = values.device, ranks * bound, ranks * features
    messages = struct_type(PADDING, "Messages")(values=values.contiguous(), bound=bound, ranks=ranks, features=features)
    ends, shift, each = values.new_empty(pieces), values.new_empty(pieces), values.new_empty(ranks)
    edges, joined, entry, ids = (values.new_empty(n) for n in (features + 1, entries, entries, entries))
    row = torch.empty(entries, dtype=torch.int32, device=device)
    picked = values.new_empty(entries if rows is None else ranks * rows)
    firsts: torch.Tensor | int = 0
    blocks = blocks_for(max(entries, len(picked)), THREADS)
    with on_device(device):
        kernel(PADDING, "pieces_find")(1, IN_ONE_BLOCK, messages, ends, shift, edges, each)
        if rows is not None:
            is_first = torch.empty_like(row)
            kernel(PADDING, "firsts_mark")(blocks, THREADS, messages, each, is_first, picked, len(picked))
            firsts = torch.cumsum(is_first, 0, dtype=torch.int32)
        else:
            picked.zero_()
        kernel(PADDING, "ids_join")(
            blocks, THREADS, messages, ends, shift, firsts, rows or 0, joined, entry, ids, row, picked
        )
    return Joined(edges, joined, entry, ids, row, picked)
