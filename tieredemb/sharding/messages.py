"""Messages of one size that the hosts of few ranks send each other, one by one. What comes next is received while the
ranks compute: so it is there, or on its way, when a rank asks for it, and no sender has to learn first that it may."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch


class Messages:
    """Those of `group`, in which this rank is number `rank`: of each rank the row of `mine`, int64 (W, words), is what
    it is sent. `timeout`: how long a rank waits for another. Beside them the group may do other things. It is asked
    itself: `torch.distributed`'s own `isend` and `irecv` look up, every time, what is known here."""

    def __init__(self, group: Any, rank: int, mine: torch.Tensor, timeout: timedelta) -> None:
        self._group, self._rank, self._mine, self._timeout = group, rank, mine, timeout
        self._room = torch.empty_like(mine)
        others = [number for number in range(len(mine)) if number != rank]
        self._given = [(number, [mine[number]]) for number in others]
        self._taken = [(number, [self._room[number]]) for number in others]
        self._under_way: list[Any] = []

    def _expect(self) -> None:
        """The next message of each may come from now on."""
        self._under_way = [self._group.recv(row, number, 0) for number, row in self._taken]

    def send(self) -> None:
        """Sends each rank its row, which is to stay until `receive`. Raises what torch does."""
        if not self._under_way:
            self._expect()
        self._under_way += [self._group.send(row, number, 0) for number, row in self._given]

    def receive(self) -> torch.Tensor:
        """Returns what all have sent, this rank `mine`. Waits for that; raises what torch does."""
        for each in self._under_way:
            each.wait(self._timeout)
        theirs = self._room.clone()
        theirs[self._rank] = self._mine[self._rank]
        self._under_way = []
        with contextlib.suppress(RuntimeError):  # who has said all may have ended; who asks for more learns of it then
            self._expect()
        return theirs

    def close(self) -> None:
        """Expects no more, and leaves the group: while anything of it is there it does not come to its end, of which
        others learn."""
        self._under_way.clear()
        self._group = None
