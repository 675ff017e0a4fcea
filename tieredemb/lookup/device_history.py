"""The history of a dense optimizer on a GPU: kept by kernels, and so inside graphs, too. See `history.py`."""

from __future__ import annotations

import torch

from tieredemb.errors import BackwardError
from tieredemb.kernels.constants import MARK_REFUSED, MARK_REPLAYED, MARKS
from tieredemb.lookup.history import History

FIRST_ROOM = 1 << 16  # steps


def new_pasts(count: int, device: torch.device) -> torch.Tensor:
    """Room for `count` `Past`s, int64 (count, ·)."""
    return torch.zeros((count, 10), dtype=torch.int64, device=device)


class DeviceHistory:
    """The arrays of a `History` on a device, and `past`, int64 (·): a `Past` that says where they are, at one address
    for good, as graphs have it. `steps`: int64 (T,), those that the tables have taken.

    There is room for more steps than were taken. Only the host can make more: `note_step` counts those that may have
    been launched, and looks at the device's number where they come near. A step without room is refused, and `check`
    tells.
    """

    def __init__(self, history: History, steps: torch.Tensor, past: torch.Tensor | None = None) -> None:
        """`past`: where that is to be, if it is one of several."""
        self._steps = steps
        self._device = steps.device
        self.past = new_pasts(1, self._device)[0] if past is None else past
        self._replayed = 0  # steps, as counted before a history was replaced
        self._marks = torch.zeros(MARKS, dtype=torch.int64, device=self._device)
        self.adopt(history)

    def adopt(self, history: History) -> None:
        """Takes over what a host knows. Synchronises."""
        self._replayed += int(self._marks[MARK_REPLAYED])
        self.base = history.base
        self._most = history.steps  # at least as many as were taken
        taken = history.steps - history.base + 1
        self._room = FIRST_ROOM
        while self._room < 2 * taken:
            self._room *= 2
        self._arrays: dict[str, torch.Tensor] = {}
        for name, array in history.arrays().items():
            values = torch.from_numpy(array[:taken])
            room = torch.zeros((self._room, *values.shape[1:]), dtype=values.dtype, device=self._device)
            room[:taken] = values.to(self._device)
            self._arrays[name] = room
        self._windows = torch.from_numpy(history.windows).to(self._device)
        marks = torch.zeros(MARKS, dtype=torch.int64, device="cpu")
        marks[:2] = torch.tensor(history.first, device="cpu")
        self._marks = marks.to(self._device)
        self._tell()

    def _tell(self) -> None:
        names = ("rates", "numbers", "sums", "ends", "logs", "coupled")
        arrays = [self._arrays[name] for name in names] + [self._windows, self._marks]
        words = [self.base, self._room, *(array.data_ptr() for array in arrays)]
        self.past.copy_(torch.tensor(words, dtype=torch.int64, device="cpu"))

    def note_step(self) -> None:
        """A step is about to be launched. Synchronises, and makes room, where there may be too little: seldom, and
        never in a capture."""
        self._most += 1
        if self._most - self.base + 2 < self._room or torch.cuda.is_current_stream_capturing():
            return
        self._most = int(self._steps[0])
        if 2 * (self._most - self.base + 2) < self._room:
            return
        torch.cuda.synchronize(self._device)  # no kernel reads the arrays that go
        for name, array in self._arrays.items():
            self._arrays[name] = torch.cat([array, torch.zeros_like(array)])
        self._room *= 2
        self._tell()

    def download(self, history: History) -> None:
        """Tells the host's `history` what the device knows, unless it is at the same step. Synchronises."""
        steps = int(self._steps[0])
        if (history.base, history.steps) == (self.base, steps):
            return
        taken = steps - self.base + 1
        arrays = {name: array[:taken].cpu().numpy() for name, array in self._arrays.items()}
        first = self._marks[:2].tolist()
        history.load(arrays, self._windows.cpu().numpy(), base=self.base, steps=steps, first=first)

    def replayed(self) -> int:
        """Steps that rows were made to take one by one, since this was made. Synchronises."""
        return self._replayed + int(self._marks[MARK_REPLAYED])

    def check(self) -> None:
        """Raises `BackwardError`, once, where steps found no room and so were not taken. Synchronises."""
        refused = int(self._marks[MARK_REFUSED])
        if refused:
            self._marks[MARK_REFUSED].zero_()
            raise BackwardError(
                f"{refused} step(s) of a CUDA graph were refused, as there was no room to keep more than {self._room} "
                f"of them: before each replay of a graph that you captured yourself, call the optimizer's upload(), "
                f"which makes room; tieredemb.graph_step does so"
            )

    def size_bytes(self) -> int:
        return self._windows.nbytes + sum(array.nbytes for array in self._arrays.values())
