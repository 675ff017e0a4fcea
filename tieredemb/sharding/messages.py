"""Messages of one size that the hosts of few ranks send each other, one by one. What comes next is received while the
ranks compute: so it is there, or on its way, when a rank asks for it, and no sender has to learn first that it may."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


class Messages:
    """Those of `group`, whose ranks have the numbers `ranks` in the world, of which this one is number `rank`. Messages
    are int64 (`words`,). Beside them the group may do other things."""

    def __init__(self, group: Any, ranks: Sequence[int], rank: int, words: int) -> None:
        self._group, self._rank = group, rank
        self._others = [(number, its) for number, its in enumerate(ranks) if number != rank]
        self._room = torch.empty((len(ranks), words), dtype=torch.int64, device="cpu")
        self._under_way: list[Any] = []

    def _expect(self) -> None:
        """The next message of each may come from now on."""
        self._under_way = [dist.irecv(self._room[number], src=its, group=self._group) for number, its in self._others]

    def send(self, mine: torch.Tensor) -> None:
        """Sends each rank its row of `mine`, (W, words), which is to stay until `receive`. Raises what torch does."""
        if not self._under_way:
            self._expect()
        for number, its in self._others:
            self._under_way.append(dist.isend(mine[number], dst=its, group=self._group))

    def receive(self, mine: torch.Tensor) -> torch.Tensor:
        """Returns what all have sent, this rank `mine`. Waits for that, for the group's timeout at most; raises what
        torch does."""
        for each in self._under_way:
            each.wait()
        theirs = self._room.clone()
        theirs[self._rank] = mine[self._rank]
        self._under_way = []
        with contextlib.suppress(RuntimeError):  # who has said all may have ended; who asks for more learns of it then
            self._expect()
        return theirs

    def close(self) -> None:
        """Expects no more, and leaves the group: while anything of it is there it does not come to its end, of which
        others learn."""
        self._under_way.clear()
        self._group = None
