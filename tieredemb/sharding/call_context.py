"""What the calls of one sharded module share, and how those that a backward pass has reached become one update."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from tieredemb.errors import PeerError
from tieredemb.sharding.captures import Captures
from tieredemb.sharding.context import ShardedContext
from tieredemb.sharding.eager_rooms import EagerRooms
from tieredemb.sharding.exchange import Sending
from tieredemb.sharding.finder import recorded_requests
from tieredemb.sharding.header import Header, Phase
from tieredemb.step.batch import Batch
from tieredemb.step.program import Call, in_forward_order

INFINITE = 1  # flag of the header of a backward: a gradient is not finite, which is to keep all ranks from the update
SETTLED = 2  # what is exchanged is the gradient as an update takes it
PASSED_BITS = 2  # behind which stands which forwards the backward has reached
MOST_TOLD = 0xFFFF  # forwards that one tells of by how many they are


class ReadyGradients(NamedTuple):
    """What a backward of one forward is about to exchange. `sending`: of each part, until it is sent; where it is
    written to the owner's memory, what comes of all ranks · `is_infinite`: whether a gradient here is not finite ·
    `is_settled`: whether what comes is the gradient as an update takes it, so that this rank cannot fail any more
    before that."""

    sending: list[list[Sending | torch.Tensor]]
    is_infinite: bool
    is_settled: bool


class ReachedCall(Protocol):
    """A forward that a backward pass has reached: see `ShardedCall`."""

    announced: int

    def ready(self, grad: torch.Tensor) -> ReadyGradients: ...

    def gradients(self, ready: ReadyGradients, *, is_infinite: bool) -> list[tuple[Call, torch.Tensor]]: ...

    def release(self) -> None: ...

    def over(self) -> None: ...


@dataclass(eq=False, kw_only=True)
class ShardedCallContext(ShardedContext):
    """What the calls of one module share. `make_batch`: makes a checked batch of what a forward is given · `captures`:
    what lets a step be captured · `recorded`: what eager forwards record on a GPU, and `eager_rooms`: where they write
    what they would send."""

    make_batch: Callable[..., Batch]

    def __post_init__(self) -> None:
        self.captures = Captures(self, self.find, self.make_batch)
        self.recorded = recorded_requests(self, self.find)
        self.eager_rooms = EagerRooms(self)

    def apply(self, reached: Sequence[tuple[ReachedCall, torch.Tensor]]) -> None:
        """Applies what one backward pass has reached, in forward order, as one update. Every rank takes part, and none
        updates where one of them could not. Who is interrupted amid the exchange itself leaves the group, and others
        learn of it by their next header."""
        try:
            ready, header = self._ready(reached)
            is_infinite = bool(header.set_by_any & INFINITE)
            # nothing of a rank's own can fail any more, so they need not agree again
            is_settled = not is_infinite and bool(header.set_by_all & SETTLED)
            pairs: list[tuple[Call, torch.Tensor]] = []
            with self.exchange.agreed() if is_settled else self.telling(Phase.BACKWARD):
                for (call, _), its in zip(reached, ready, strict=True):
                    pairs += call.gradients(its, is_infinite=is_infinite)
            self.eager_rooms.reached([call.announced for call, _ in reached])
            if not is_settled:
                self.announce(Phase.BACKWARD)
        except BaseException:
            for call, _ in reached:
                call.release()
            raise
        try:
            self.shards[0].context.apply(in_forward_order(pairs))
        finally:
            for call, _ in reached:
                call.over()

    def _ready(self, reached: Sequence[tuple[ReachedCall, torch.Tensor]]) -> tuple[list[ReadyGradients], Header]:
        """What each forward is about to exchange, and the ranks' header. Raises on all ranks what one has met, or that
        they have reached different forwards."""
        failed: Exception | None = None
        ready: list[ReadyGradients] = []
        try:
            ready += [call.ready(grad) for call, grad in reached]
        except Exception as error:
            failed = error
        passed = self._passed([call.announced for call, _ in reached])
        flag = INFINITE * any(each.is_infinite for each in ready) | SETTLED * all(each.is_settled for each in ready)
        updates = failed is None and self.optimizer is not None  # a torch optimizer's step comes later
        header = self.announce(Phase.BACKWARD, flag=passed << PASSED_BITS | flag, error=failed, updates=updates)
        _check_passed([each >> PASSED_BITS for each in header.flags])
        return ready, header

    @staticmethod
    def _passed(announced: Sequence[int]) -> int:
        """What a flag says of the forwards that a backward pass has reached, by the numbers of their exchanges."""
        return zlib.crc32(np.array(sorted(announced), np.int64).tobytes()) << 16 | min(len(announced), MOST_TOLD)


def _check_passed(passed: Sequence[int]) -> None:
    """Raises `PeerError`, on all ranks, where their backward passes have reached different forwards."""
    if passed.count(passed[0]) < len(passed):
        reached = ", ".join(f"{each & MOST_TOLD} on rank {rank}" for rank, each in enumerate(passed))
        raise PeerError(
            f"the backward passes of the ranks have reached different lookups ({reached}); each rank has to run "
            f"backward through the same ones"
        )
