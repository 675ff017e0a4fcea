"""The history of a dense optimizer on a GPU: kept by kernels, and so inside graphs, too. See `history.py`."""

from __future__ import annotations

import torch

from tieredemb.errors import BackwardError
from tieredemb.kernels.constants import HISTORY_REFUSED, HISTORY_REPLAYED, HISTORY_WORDS
from tieredemb.lookup.history import History

FIRST_CAPACITY = 1 << 16  # steps


def new_pasts(count: int, device: torch.device) -> torch.Tensor:
    """Zeros for `count` `Past`s, int64 (count, ·)."""
    return torch.zeros((count, 10), dtype=torch.int64, device=device)


class DeviceHistory:
    """The arrays of a `History` on a device, and `past`, int64 (·): a `Past` with their addresses, whose own address
    never changes, as graphs contain it. `steps`: int64 (T,), taken by the tables.

    The arrays hold more steps than were taken. Only the host can enlarge them: `note_step` counts the steps that may
    have been launched, and reads the device's number where they come near the capacity. A step beyond the capacity is
    refused, and `check` raises.
    """

    def __init__(self, history: History, steps: torch.Tensor, past: torch.Tensor | None = None) -> None:
        """`past`: where that is to be, if it is one of several."""
        self._steps = steps
        self._device = steps.device
        self.past = new_pasts(1, self._device)[0] if past is None else past
        self._replayed = 0  # steps, as counted before a history was replaced
        self._words = torch.zeros(HISTORY_WORDS, dtype=torch.int64, device=self._device)
        self.adopt(history)

    def adopt(self, history: History) -> None:
        """Takes over the history of the host. Synchronises."""
        self._replayed += int(self._words[HISTORY_REPLAYED])
        self.base = history.base
        self._most = history.steps  # at least as many as were taken
        taken = history.steps - history.base + 1
        self._capacity = FIRST_CAPACITY
        while self._capacity < 2 * taken:
            self._capacity *= 2
        self._arrays: dict[str, torch.Tensor] = {}
        for name, array in history.arrays().items():
            values = torch.from_numpy(array[:taken])
            grown = torch.zeros((self._capacity, *values.shape[1:]), dtype=values.dtype, device=self._device)
            grown[:taken] = values.to(self._device)
            self._arrays[name] = grown
        self._windows = torch.from_numpy(history.windows).to(self._device)
        first = torch.zeros(HISTORY_WORDS, dtype=torch.int64, device="cpu")
        first[:2] = torch.tensor(history.first, device="cpu")
        self._words = first.to(self._device)
        self._upload()

    def _upload(self) -> None:
        names = ("rates", "numbers", "sums", "ends", "logs", "coupled")
        arrays = [self._arrays[name] for name in names] + [self._windows, self._words]
        words = [self.base, self._capacity, *(array.data_ptr() for array in arrays)]
        self.past.copy_(torch.tensor(words, dtype=torch.int64, device="cpu"))

    def note_step(self) -> None:
        """A step is about to be launched. Synchronises, and enlarges the arrays, where these may be too small: seldom,
        and never in a capture."""
        self._most += 1
        if self._most - self.base + 2 < self._capacity or torch.cuda.is_current_stream_capturing():
            return
        self._most = int(self._steps[0])
        if 2 * (self._most - self.base + 2) < self._capacity:
            return
        torch.cuda.synchronize(self._device)  # no kernel reads the arrays that go
        for name, array in self._arrays.items():
            self._arrays[name] = torch.cat([array, torch.zeros_like(array)])
        self._capacity *= 2
        self._upload()

    def download(self, history: History) -> None:
        """Copies what the device has to the host's `history`, unless it is at the same step. Synchronises."""
        steps = int(self._steps[0])
        if (history.base, history.steps) == (self.base, steps):
            return
        taken = steps - self.base + 1
        arrays = {name: array[:taken].cpu().numpy() for name, array in self._arrays.items()}
        first = self._words[:2].tolist()
        history.load(arrays, self._windows.cpu().numpy(), base=self.base, steps=steps, first=first)

    def replayed(self) -> int:
        """Steps that rows were made to take one by one, since this was made. Synchronises."""
        return self._replayed + int(self._words[HISTORY_REPLAYED])

    def check(self) -> None:
        """Raises `BackwardError`, once, where steps were beyond the capacity, and so not taken. Synchronises."""
        refused = int(self._words[HISTORY_REFUSED])
        if refused:
            self._words[HISTORY_REFUSED].zero_()
            raise BackwardError(
                f"{refused} step(s) of a CUDA graph were refused, as there was no room to keep more than "
                f"{self._capacity} of them: before each replay of a graph that you captured yourself, call the "
                f"optimizer's upload(), which makes room; tieredemb.graph_step does so"
            )

    def size_bytes(self) -> int:
        return self._windows.nbytes + sum(array.nbytes for array in self._arrays.values())
