"""The exchanges of ranks by `torch.distributed`: rows, in the order of the ranks, and headers of what ranks are about
to do.

Every exchange of a step is announced by a header of fixed size. So ranks that do different things, or of which one has
failed, learn it from each other and all raise. If a rank calls nothing at all, the others wait for it until the group's
timeout.

Headers travel without GPUs, also where rows lie on GPUs: ranks of one host share memory for them, others use gloo. So
no header waits for a GPU, and the end of a rank is noticed before NCCL would wait for it. Rows go from GPU to GPU by
NCCL, or, in a group without it, through the hosts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import tempfile
import traceback
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from tieredemb import errors
from tieredemb.config import Array
from tieredemb.errors import ConfigError, PeerError, TieredEmbError, shown
from tieredemb.kernels.collectives import PATIENCE, end_waits, is_over
from tieredemb.sharding.construction import Connections, Construction, Stage, named
from tieredemb.sharding.exchange_clock import ExchangeClock
from tieredemb.sharding.header import NO_FINGERPRINT, WORDS, Announcement, Counts, Header, Phase, UpdateFingerprint
from tieredemb.sharding.mailbox import Mailbox, open_box
from tieredemb.sharding.peer_exchange import PeerExchange
from tieredemb.sharding.stats import ShardedStats
from tieredemb.tables.fingerprint import are_alike

SEVERAL_A_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"  # the variable by which NCCL takes several ranks on one GPU


class RankLocation(NamedTuple):
    """Where a rank is: its host, and the UUID of its GPU. `shares`: equal for two processes of a host that can share
    memory."""

    host: str
    gpu: str
    shares: str


class Sending(NamedTuple):
    """Rows that are about to be exchanged. `given`: what is sent, `sent_sizes` rows to each rank · `received_sizes`:
    rows from each · `received`: where the group puts these · `out`: where they go from there; the same tensor, unless
    hosts send for GPUs."""

    given: torch.Tensor
    sent_sizes: list[int]
    received_sizes: list[int]
    received: torch.Tensor
    out: torch.Tensor


class Exchange:
    """The collectives of one collection, over a process group of its own. `timeout`: how long a rank waits for another
    · `has_nccl`: whether GPUs exchange their tensors by NCCL, as in the given group · `sent`: bytes sent to other
    ranks, by kind · `clock`: of exchanges by NCCL, if there is one."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError(
                "torch.distributed is not initialized; start the script by torchrun and call "
                "torch.distributed.init_process_group() before, or build a TieredEmbeddingBagCollection for one process"
            )
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        if dist.get_rank() not in ranks:
            raise ConfigError(f"rank {dist.get_rank()} is none of the group's, which are {ranks}")
        self.has_nccl = "cuda:nccl" in dist.get_backend_config(group)
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self.ranks, self._ones = ranks, [1] * len(ranks)
        problem = _timeout_problem(timeout)
        self.timeout = dist.default_pg_timeout if timeout is None or problem else timeout
        self._construction: Construction | None = Construction(group, ranks, self.rank, self.timeout)
        self._held: list[Any] = [self._construction.connect(problem)]
        if not self.has_nccl:  # those of NCCL end together on all ranks, by close()
            weakref.finalize(self, _destroy_group, self._held)
        self._broken = ""
        self.failures = 0  # errors that all ranks know of
        self._has_announced = False
        self._mailbox: Mailbox | None = None  # of ranks of one host
        self.locations: Sequence[RankLocation] = ()  # of each rank, where GPUs exchange by NCCL
        self._device: torch.device | None = None  # the GPU of this rank, in the same case
        self.sent = self._tally = Counter[str]()
        self._wait_seconds = self._exchange_seconds = 0.0  # of the host
        self.clock: ExchangeClock | None = None

    def stats(self) -> ShardedStats:
        """What was sent, and waited for, so far. Synchronises where a GPU has exchanged something by NCCL."""
        exchanged = self._exchange_seconds + (0.0 if self.clock is None else self.clock.seconds)
        return ShardedStats(**self.sent, wait_seconds=self._wait_seconds, exchange_seconds=exchanged)

    @property
    def group(self) -> Any:
        """The process group. Raises `PeerError` where it was destroyed."""
        if not self._held:
            raise PeerError(f"nothing is exchanged any more since an earlier call: {self._broken}")
        return self._held[0]

    def header(
        self,
        phase: Phase,
        number: int,
        counts: Counts,
        *,
        flag: int = 0,
        error: BaseException | None = None,
        meanwhile: Callable[[], object] | None = None,
        fingerprint: UpdateFingerprint = NO_FINGERPRINT,
    ) -> Header:
        """Announces to all ranks what this one is about to do, as its call `number`, and the `counts` of its batch;
        returns what all have announced. Raises on all ranks alike where one has met an `error`, does something else, or
        has another `fingerprint`. `meanwhile`: called before this rank waits for the others, who assume that it
        succeeds: a rank that fails in it leaves the group. Does not wait for a GPU."""
        self._check(error)
        words = [phase, number, error is not None, fingerprint.before, fingerprint.next, flag]
        with LeavingOnError(self):
            theirs = self._exchange_headers(phase, words, counts, meanwhile)
            while Phase.BUSY in [words_of_rank[0] for words_of_rank in theirs]:
                theirs = self._exchange_headers(phase, words, counts)
        announced = [words_of_rank[: WORDS - 1] for words_of_rank in theirs]
        if error is not None or announced.count(announced[0]) < len(announced):
            self._check_announced([Announcement(*each) for each in announced], error, fingerprint)
        return Header(
            [words_of_rank[WORDS:] for words_of_rank in theirs], [words_of_rank[WORDS - 1] for words_of_rank in theirs]
        )

    def wait_for(self, done: torch.cuda.Event, counts: Counts) -> None:
        """Waits for a GPU, before a header with as many `counts`. The GPU may be waiting for a rank that has ended. So
        while it is busy for long, ranks send each other headers, those that have something to announce by that. Raises
        `PeerError` where a rank has ended, or where this takes longer than the timeout; then this rank leaves the
        group."""
        timeout = self.timeout.total_seconds()
        deadline = monotonic() + timeout
        while not is_over(done, min(PATIENCE, timeout / 4)):
            self._check()
            if monotonic() > deadline:
                error = self._broken_by(
                    f"the GPU of rank {self.rank} was still busy after {timeout:g} s (timeout=), "
                    f"with work that has to end before the ranks' next exchange: it may wait for an exchange of "
                    f"your own, or of DistributedDataParallel, in which another rank takes no part. Start all of them "
                    f"again from the last checkpoint"
                )
                _destroy_group(self._held)
                raise error
            with LeavingOnError(self):
                self._exchange_headers(Phase.BUSY, [Phase.BUSY, 0, 0, 0, 0, 0], counts)

    def _exchange_headers(
        self, phase: Phase, words: Sequence[int], counts: Counts, meanwhile: Callable[[], object] | None = None
    ) -> list[list[int]]:
        """Sends a header to all ranks, and waits for theirs; returns of each the words of `Announcement`, its flag, and
        those of its counts."""
        mine = self._send_header(words, counts, phase)
        if meanwhile is not None:
            meanwhile()
        begin = monotonic()
        with _Answered(self, phase):
            theirs: list[list[int]] = self._receive_headers(mine).tolist()
        self._wait_seconds += monotonic() - begin
        return theirs

    def _check_announced(
        self, announced: Sequence[Announcement], error: BaseException | None, fingerprint: UpdateFingerprint
    ) -> None:
        """Raises the error of one rank, or that ranks do different things. Called on all ranks."""
        if any(each.failed for each in announced):
            self._raise(error)
        if len({(each.phase, each.number) for each in announced}) > 1:
            described = ", ".join(
                f"rank {rank} {Phase(each.phase).description} (its call {each.number})"
                for rank, each in enumerate(announced)
            )
            planning = ""
            if any(each.phase == Phase.PLAN for each in announced):
                planning = (
                    ". A loader that ends before those of others does this, and so does a prefetch() whose first batch "
                    "has no samples, as it learns from that where the ids are; name them with ids_of"
                )
            raise self._broken_by(
                f"the ranks do different things: {described}; each rank has to look up, and to run backward through, "
                f"as many batches in the same order, to plan them ahead alike, and between the same ones to read and "
                f"write whole tables, or a norm of their gradients{planning}"
            )
        if len({each.before for each in announced}) > 1 or len({each.next for each in announced if each.next}) > 1:
            own_values: dict[str, object] = {}
            with contextlib.suppress(Exception):  # of a GPU, say: the others must not wait for this rank
                own_values = fingerprint.describe()
            found = self.all_gather_object(own_values)
            difference = _difference(found) if all(found) else "what updates the rows differs between the ranks"
            if not difference:  # they differ by rounding alone
                return
            raise self._broken_by(
                f"{difference}; each rank has to take the same steps, by the same options: a scheduler that goes by a "
                f"loss or a metric has to be given that of all ranks, and none may leave a step out. Rows of a table "
                f"are not of one model any more, or would not be: start all ranks again from the last checkpoint"
            )

    def _send_header(self, words: Sequence[int], counts: Counts, phase: Phase) -> Array:
        """Sends the header to the ranks of this host; others are sent it where theirs is received. Returns it, int64
        (words,)."""
        mine = np.array([*words, *counts.words], np.int64)
        if not self._has_announced:
            self._has_announced = True
            begin = monotonic()
            with _Answered(self, phase):
                self._mailbox = self._open_mailbox(len(mine), phase)
            self._wait_seconds += monotonic() - begin
        if self._mailbox is not None:
            self._mailbox.send(mine)
        return mine

    def _receive_headers(self, mine: Array) -> Array:
        """The headers of all ranks, int64 (W, words)."""
        if self._mailbox is not None:
            return self._mailbox.receive()
        theirs = torch.empty((self.size, len(mine)), dtype=torch.int64, device="cpu")
        dist.all_to_all_single(theirs, torch.from_numpy(mine).repeat(self.size, 1), group=self.group)
        return theirs.numpy()

    def _open_mailbox(self, words: int, phase: Phase) -> Mailbox | None:
        """On all ranks alike: None where they are on several hosts, or cannot share memory."""
        place = f"{socket.gethostname()} {_shared_by_processes()}" if shares_memory() else uuid.uuid4().hex
        box = open_box(self.size, words, self.rank, place, lambda value: self.all_gather_object(value, phase))
        if box is None:
            return None
        mailbox = Mailbox(box, self.rank, Connections(self.group, range(self.size)), self.timeout)
        self._held.append(mailbox)
        return mailbox

    def unanswered(self, phase: Phase, error: RuntimeError) -> PeerError:
        """The error of a wait that another rank did not end, as `error` says, by gloo or NCCL, or by a communicator
        that was aborted. Nothing is exchanged any more."""
        if not self.has_nccl:  # a rank that all have answered would wait for this one; groups of NCCL end together
            traceback.clear_frames(error.__traceback__)  # which refer to the group, too
            _destroy_group(self._held)
        ended = [] if self._construction is None else self._construction.ended()
        other = named(ended) if ended else "another rank"
        return self._broken_by(
            f"rank {self.rank} {phase.description}, and {other} did not: it has ended, was interrupted where "
            f"ranks send each other something, or did nothing within {self.timeout.total_seconds():g} s (timeout=). "
            f"Each rank has to take part; start all of them again from the last checkpoint"
        )

    def _broken_by(self, reason: str) -> PeerError:
        """The error for `reason`. Nothing is exchanged any more, as earlier messages may still be on their way, and no
        GPU waits for another."""
        self._broken = self._broken or reason
        self.failures += 1
        if self._device is not None:
            end_waits(self._device)
        return PeerError(reason)

    def _check(self, error: BaseException | None = None) -> None:
        """Raises `PeerError` where nothing is exchanged any more; a `PeerError` of the caller itself, if it has one."""
        if self._broken:
            if isinstance(error, PeerError):
                raise error
            raise PeerError(f"nothing is exchanged any more since an earlier call: {self._broken}")
        if not self._has_group():
            self._broken = (
                "torch.distributed.destroy_process_group() came before this call, and nothing can be exchanged since; "
                "call it after the last use of the module, and close() the module before it"
            )
            self.failures += 1
            raise PeerError(self._broken)

    def _has_group(self) -> bool:
        """Whether the group exists, as `destroy_process_group()` may have ended it with all others."""
        return bool(self._held) and _is_known(self._held[0])

    def close(self) -> None:
        """Destroys the group."""
        if not self._broken:
            self._broken = "the module was closed"
            _destroy_group(self._held)

    def agree_to_construct(self, error: Exception | None, what: dict[str, str]) -> None:
        """Waits until all ranks have checked their arguments, or have met an `error`; then see `agree`. Raises
        `PeerError` where one has ended meanwhile."""
        self._construct(Stage.CHECKED, error, what)

    def end_construction(self, error: Exception | None, what: dict[str, str]) -> None:
        """The same once all ranks have built what they hold."""
        self._construct(Stage.BUILT, error, what)
        self._construction = None

    def _construct(self, stage: Stage, error: Exception | None, what: dict[str, str]) -> None:
        assert self._construction is not None
        try:
            self._construction.wait(stage, connections=Connections(self.group, range(self.size)))
        except PeerError as of_others:
            raise of_others from error
        self.agree(error, what, Phase.CONSTRUCT)

    def of_all(self, value: Any) -> list[Any]:
        """The `value` of every rank during a construction, on every rank."""
        return self.all_gather_object(value, Phase.CONSTRUCT)

    def leave(self, error: BaseException) -> None:
        """Leaves the group, as the construction has met an `error`; ranks that wait for this one raise `PeerError`."""
        if self._construction is not None:
            self._construction.leave(error)
        self._construction = None
        self._broken = self._broken or "its construction has failed"
        # to destroy a communicator that NCCL has connected would wait for the rank that has ended
        is_connected = self.has_nccl and bool(self._held) and self.group.bound_device_id is not None
        if not (is_connected and isinstance(error, PeerError)):
            _destroy_group(self._held)

    def _raise(self, error: BaseException | None, phase: Phase = Phase.WHOLE) -> None:
        """Raises, on all ranks, the error of the first that has met one."""
        self.failures += 1
        if self.size == 1 and error is not None:
            raise error
        mine = None if error is None else (type(error).__name__, str(error))
        found = self.all_gather_object(mine, phase)
        met = [(rank, *each) for rank, each in enumerate(found) if each is not None]
        # a rank's own error says more than a PeerError about others
        rank, kind, text = next((each for each in met if each[1] != PeerError.__name__), met[0])
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, TieredEmbError):
            raise known(f"rank {rank}: {text}") from error
        raise PeerError(f"rank {rank}: {kind}: {text}") from error

    def sending_blocks(self, values: torch.Tensor, out: torch.Tensor | None = None) -> Sending:
        """As `sending`: of `values` (W, …) one block goes to each rank, and one is received from each."""
        return self.sending(values, self._ones, self._ones, out)

    def sending(
        self,
        values: torch.Tensor,
        sent_sizes: Sequence[int],
        received_sizes: Sequence[int],
        out: torch.Tensor | None = None,
    ) -> Sending:
        """Prepares to send `values` (N, …), the first `sent_sizes[0]` rows to rank 0, the next to rank 1, …; allocates
        memory for `received_sizes` rows from each, or takes `out`. If this is done before the ranks agree to send, no
        rank runs out of memory while others wait. From a GPU without NCCL it waits for the values. Where `sent_sizes`
        is empty, as it is on all ranks then, the values stay here."""
        if not sent_sizes:
            return Sending(values, [], [], values, values)
        if out is None:
            out = torch.empty((sum(received_sizes), *values.shape[1:]), dtype=values.dtype, device=values.device)
        given = self._sendable(values)
        received = out if given.device == out.device else _pinned(out.shape, out.dtype)
        return Sending(given, list(sent_sizes), list(received_sizes), received, out)

    def send(self, sending: Sending, kind: str = "", peers: PeerExchange | None = None) -> torch.Tensor:
        """Sends; returns the received rows, in the order of the ranks, on the device of the sent ones. On a GPU the
        current stream waits for them, and the host does not: by NCCL, or through `peers`, to whom all ranks send blocks
        of one size. `kind`: what they are counted as, if at all."""
        given, sent_sizes, received_sizes, received, out = sending
        if not sent_sizes:
            return out
        begin = monotonic()
        with _Answered(self, Phase.ROWS):
            if peers is not None:
                peers.send(received, given)
            else:
                with contextlib.nullcontext() if self.clock is None or not kind else self.clock.running():
                    dist.all_to_all_single(received, given, received_sizes, sent_sizes, group=self.group)
        if kind:
            self._exchange_seconds += 0.0 if given.is_cuda else monotonic() - begin
            self.count(kind, given, sum(sent_sizes) - sent_sizes[self.rank])
        return out if received is out else out.copy_(received, non_blocking=True)

    def count(self, kind: str, values: torch.Tensor, sent: int) -> None:
        """Counts that `sent` rows of such `values`, (·, …), were sent to other ranks."""
        self._tally[kind] += sent * values.element_size() * math.prod(values.shape[1:])

    @contextlib.contextmanager
    def counting_replays(self) -> Iterator[Callable[[], object]]:
        """What is sent inside is captured. It is counted whenever the function that this yields is called."""
        self._tally = Counter()
        try:
            yield functools.partial(self.sent.update, self._tally)
        finally:
            self._tally = self.sent

    @property
    def is_broken(self) -> bool:
        """Whether nothing is exchanged any more."""
        return bool(self._broken)

    def leave_during_exchange(self, error: BaseException) -> None:
        """Leaves the group, as this rank has met an `error` where the others exchange something."""
        try:
            self._broken_by(
                f"rank {self.rank} has failed where the others were about to exchange something, and has left them "
                f"({type(error).__name__}: {error}); start all of them again from the last checkpoint"
            )
        finally:
            _destroy_group(self._held)

    def _sendable(self, values: torch.Tensor) -> torch.Tensor:
        """The `values` where the group can send them: from a GPU without NCCL in host memory, for which it waits."""
        if not values.is_cuda or self.has_nccl:
            return values.contiguous()
        return _pinned(values.shape, values.dtype).copy_(values)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """The `values` (…) of every rank, (W, …), on every rank."""
        given = self._sendable(values)
        found = [torch.empty_like(given) for _ in range(self.size)]
        with _Answered(self, Phase.WHOLE):
            dist.all_gather(found, given, group=self.group)
        return torch.stack(found).to(values.device)

    def all_gather_object(self, value: Any, phase: Phase = Phase.WHOLE) -> list[Any]:
        """The `value` of every rank, on every rank."""
        found: list[Any] = [None] * self.size
        with _Answered(self, phase):
            dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast_object(self, value: Any) -> Any:
        """The `value` of rank 0, on every rank."""
        found = [value]
        with _Answered(self, Phase.WHOLE):
            dist.broadcast_object_list(found, src=self.ranks[0], group=self.group)
        return found[0]

    def agree(self, error: Exception | None, what: dict[str, str], phase: Phase = Phase.WHOLE) -> None:
        """Raises on all ranks the error of one, or `ConfigError` where they were given different things, `what`."""
        found = self.all_gather_object((error is not None, what), phase)
        if any(failed for failed, _ in found):
            self._raise(error, phase)
        difference = _difference([each for _, each in found])
        if difference:
            raise ConfigError(f"{difference}; give the same on all of them")

    def check_device(self, device: torch.device) -> None:
        """Notes where the ranks' GPUs are. Raises `ConfigError` on all ranks where two share a GPU, which NCCL refuses,
        from 2.30 on unless `NCCL_MULTI_RANK_GPU_ENABLE` is 1."""
        if device.type != "cuda" or not self.has_nccl:
            return
        self._device = device
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        location = RankLocation(socket.gethostname(), gpu, _shared_by_processes())
        self.locations = self.all_gather_object(location, Phase.CONSTRUCT)
        ranks: dict[tuple[str, str], int] = {}
        for rank, location_of_rank in enumerate(self.locations):
            other = ranks.setdefault((location_of_rank.host, location_of_rank.gpu), rank)
            if other != rank:
                if all(self.all_gather_object(os.environ.get(SEVERAL_A_GPU) == "1", Phase.CONSTRUCT)):
                    return
                raise ConfigError(
                    f"ranks {other} and {rank} are on the same GPU, which NCCL does not take; call "
                    f"torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before, or make the process group by "
                    f"init_process_group('gloo') to have several ranks on one; to try several out by NCCL 2.30 and "
                    f"later, set {SEVERAL_A_GPU}=1 for all ranks"
                )

    def gather(self, value: Any, to: int = 0) -> list[Any] | None:
        """The `value` of every rank, on rank `to` alone."""
        found: list[Any] | None = [None] * self.size if self.rank == to else None
        with _Answered(self, Phase.WHOLE):
            dist.gather_object(value, found, dst=self.ranks[to], group=self.group)
        return found


# Classes, as a step enters some twenty of these, and generators take almost three times as long.


class _Answered(contextlib.AbstractContextManager[None]):
    """Turns the error of a rank that did not answer in time, or has ended, into a `PeerError`."""

    __slots__ = ("_exchange", "_phase")

    def __init__(self, exchange: Exchange, phase: Phase) -> None:
        self._exchange, self._phase = exchange, phase

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise self._exchange.unanswered(self._phase, error) from error


class LeavingOnError(contextlib.AbstractContextManager[None]):
    """A context between an agreement to exchange something and the exchange, or around a header. A rank that fails
    inside, or is interrupted, leaves the group. So the others, which do exchange, learn that it will not, and need not
    wait for their timeout."""

    __slots__ = ("_exchange",)

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, PeerError):
            self._exchange.leave_during_exchange(error)


def _difference(values_of_ranks: Sequence[Mapping[str, object]]) -> str:
    """The first value that a rank has otherwise than rank 0, in words; each rank has values by name."""
    for rank, values in enumerate(values_of_ranks):
        for name, value in values_of_ranks[0].items():
            if not are_alike(values.get(name), value):
                return f"{name} differs between the ranks: {value} on rank 0, {values.get(name)} on rank {rank}"
    return ""


def _timeout_problem(timeout: Any) -> str:
    """What is wrong with a timeout, or ""."""
    if timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta(0)):
        return ""
    return f"timeout must be a datetime.timedelta of more than 0 s, or None, got {shown(timeout)}"


def shares_memory() -> bool:
    """Whether the environment lets ranks of one host write into each other's memory."""
    return os.environ.get("TIEREDEMB_PEER_MEMORY", "1") not in ("", "0")


def _shared_by_processes() -> str:
    """The PID namespace and the temporary directory: torch shares memory through sockets there, which PIDs name.
    Containers of one host may differ in either."""
    try:
        where = os.stat(tempfile.gettempdir())
        return f"{os.readlink('/proc/self/ns/pid')} {where.st_dev}:{where.st_ino}"
    except OSError:
        return uuid.uuid4().hex  # shared with none


def _is_known(group: Any) -> bool:
    """Whether a group was not destroyed yet."""
    try:
        return dist.is_initialized() and len(dist.get_process_group_ranks(group)) > 0
    except (KeyError, ValueError):  # of an earlier world
        return False


def _destroy_group(held: list[Any]) -> None:
    """Destroys the group that `held` begins with, after what uses it, and lets its threads end with the last reference.
    A thread of gloo may be about to drop tensors of the last exchange: if the interpreter ends meanwhile, it aborts the
    process."""
    if held:
        group, *under_way = held
        held.clear()
        for each in under_way:
            each.close()
        if _is_known(group):
            dist.destroy_process_group(group)


def _pinned(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
