"""One backward pass over forwards of a sharded collection: ranks send the gradients that it has reached to the owners,
which update their rows."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from tieredemb.errors import PeerError
from tieredemb.sharding.context import ShardedContext
from tieredemb.sharding.eager_buffers import EagerBuffers
from tieredemb.sharding.exchange import LeavingOnError, Sending
from tieredemb.sharding.header import Header, Phase
from tieredemb.sharding.symmetric import SymmetricRows
from tieredemb.step.program import Call, in_forward_order

# flags in the header of a backward
INFINITE = 1  # a gradient is not finite: no rank may update
REACHED_SHIFT = 1  # bits: the higher ones say which forwards the backward has reached
MOST_COUNTED = 0xFFFF  # forwards: the flag counts no more


class ReadyGradients(NamedTuple):
    """What the backward of one forward is about to exchange. `sending`: of each part, until it is sent; the buffer for
    the gradients of all ranks where ranks write into the owner's memory · `kept`: of each part, a tensor to copy
    received gradients to, if a later step applies them · `is_infinite`: whether a gradient of this rank is not finite ·
    `is_final`: whether an update takes what is received as it is, so that no rank can fail before the update; the same
    on all ranks."""

    sending: list[list[Sending | SymmetricRows]]
    kept: list[torch.Tensor | None]
    is_infinite: bool
    is_final: bool


class ReachedCall(Protocol):
    """A forward that a backward pass has reached: see `ShardedCall`."""

    exchange_number: int

    def ready(self, grad: torch.Tensor) -> ReadyGradients: ...

    def exchange_gradients(self, ready: ReadyGradients) -> list[list[torch.Tensor]]: ...

    def gradients(
        self, received: Sequence[Sequence[torch.Tensor]], *, is_infinite: bool
    ) -> list[tuple[Call, torch.Tensor]]: ...

    def release(self) -> None: ...

    def over(self) -> None: ...


Reached = Sequence[tuple[ReachedCall, torch.Tensor]]  # and the gradient of its outputs


def apply(context: ShardedContext, buffers: EagerBuffers, reached: Reached) -> None:
    """Applies the gradients that one backward pass has `reached`, in forward order, as one update. A collective: no
    rank updates where one of them could not. A rank that is interrupted during the exchange itself leaves the group;
    the others notice it at their next header. `buffers`: other ranks' memory, which eager forwards write to."""
    exchange = context.exchange
    try:
        ready, header = _ready(context, reached)
        is_infinite = bool(header.set_by_any & INFINITE)
        # no rank can fail any more before the update, so they need not agree again
        is_final = not is_infinite and all(each.is_final for each in ready)
        with LeavingOnError(exchange):
            if not buffers.is_off:
                buffers.reached([call.exchange_number for call, _ in reached])
            received = [call.exchange_gradients(gradients) for (call, _), gradients in zip(reached, ready, strict=True)]
        pairs: list[tuple[Call, torch.Tensor]] = []
        with LeavingOnError(exchange) if is_final else context.announcing_errors(Phase.BACKWARD):
            for (call, _), gradients in zip(reached, received, strict=True):
                pairs += call.gradients(gradients, is_infinite=is_infinite)
        if not is_final:
            context.announce(Phase.BACKWARD)
    except BaseException:
        for call, _ in reached:
            call.release()
        raise
    try:
        context.shards[0].context.apply(in_forward_order(pairs))
    finally:
        for call, _ in reached:
            call.over()


def _ready(context: ShardedContext, reached: Reached) -> tuple[list[ReadyGradients], Header]:
    """What each forward is about to exchange, and the ranks' header. Raises on all ranks the error of one, or that they
    have reached different forwards."""
    failed: Exception | None = None
    ready: list[ReadyGradients] = []
    try:
        ready += [call.ready(grad) for call, grad in reached]
    except Exception as error:
        failed = error
    reached_flag = _reached_flag([call.exchange_number for call, _ in reached])
    flag = INFINITE * any(each.is_infinite for each in ready)
    updates = failed is None and context.optimizer is not None  # a torch optimizer updates later, in its step
    header = context.announce(Phase.BACKWARD, flag=reached_flag << REACHED_SHIFT | flag, error=failed, updates=updates)
    _check_reached([each >> REACHED_SHIFT for each in header.flags])
    return ready, header


def _reached_flag(exchange_numbers: Sequence[int]) -> int:
    """The bits of a flag that say which forwards a backward pass has reached, by the numbers of their exchanges: how
    many they are, and a checksum."""
    count = min(len(exchange_numbers), MOST_COUNTED)
    return zlib.crc32(np.array(sorted(exchange_numbers), np.int64).tobytes()) << 16 | count


def _check_reached(reached_flags: Sequence[int]) -> None:
    """Raises `PeerError`, on all ranks, where their backward passes have reached different forwards."""
    if reached_flags.count(reached_flags[0]) < len(reached_flags):
        reached = ", ".join(f"{each & MOST_COUNTED} on rank {rank}" for rank, each in enumerate(reached_flags))
        raise PeerError(
            f"the backward passes of the ranks have reached different lookups ({reached}); each rank has to run "
            f"backward through the same ones"
        )
