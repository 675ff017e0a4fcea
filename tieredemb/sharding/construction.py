"""Where ranks wait for each other while they construct a collection: keys in the store of `init_process_group`.

To make a process group is to wait for all of its ranks until its timeout, even for one that has ended. So before ranks
make a group, and again before they compare what they have built, each writes to the store that it is there, and reads
whether all are. Meanwhile it polls the connections to the others of an earlier gloo group: gloo finds at once that a
process has ended, and then refuses to receive from it. No thread waits for that.

They compare late what they have built because a rank that fills rows is late, and not gone.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tieredemb.errors import ConfigError, PeerError

FIRST_POLL, POLL = 1e-3, 0.05  # seconds between two reads of the store, at first and at most
LOOK = 0.25  # seconds: how often a rank checks whether another has ended
CONNECT = timedelta(seconds=60)  # timeout for ranks that are all there: many take seconds to connect
PROBE = 0x7E1E3B  # a tag of messages that no rank sends
LONGEST = 500  # letters of an error that other ranks read
AGAIN = "start all ranks again"


class Stage(enum.Enum):
    """What a rank has done when it waits for the others: begun the construction, checked its arguments, or built what
    it holds."""

    BEGUN = "begun"
    CHECKED = "checked"
    BUILT = "built"

    @property
    def ended(self) -> str:
        """Describes a stage that ranks had not reached when they ended."""
        return f"{_ENDED[self]} the sharded collection"

    @property
    def missing(self) -> str:
        """Describes a stage that ranks did not reach in time."""
        return f"{_MISSING[self]} the sharded collection"


_ENDED = {
    Stage.BEGUN: "before constructing",
    Stage.CHECKED: "while checking the arguments of",
    Stage.BUILT: "while building its rows of",
}
_MISSING = {
    Stage.BEGUN: "begin to construct",
    Stage.CHECKED: "check the arguments of",
    Stage.BUILT: "build its rows of",
}


class Connections(NamedTuple):
    """The connections of `group` to the ranks of a collection, which have the `numbers` in it."""

    group: Any
    numbers: Sequence[int]

    def ended(self) -> list[int]:
        """The ranks whose processes have ended, or have left the group."""
        found = []
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        for rank, number in enumerate(self.numbers):
            if number != self.group.rank():
                try:
                    self.group.recv([nothing], number, PROBE)  # not waited for: it fails, or is dropped
                except RuntimeError:
                    found.append(rank)
        return found


class Construction:
    """One construction of a collection by `ranks` of the world, of which this one is number `rank`. They wait for each
    other for at most `timeout`. `group`: the user's group of these ranks, or None, which is all of them."""

    def __init__(self, group: dist.ProcessGroup | None, ranks: list[int], rank: int, timeout: timedelta) -> None:
        self._group, self._ranks, self._rank, self._timeout = group, ranks, rank, timeout
        self._connections = _connections(group, ranks)
        world = c10d._get_default_store()
        name = f"tieredemb/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
        with self._answered(Stage.BEGUN):
            number = world.add(f"{name}/constructions/{rank}", 1)
        self._store: Any = c10d.PrefixStore(f"{name}/{number}", world)

    def connect(self, problem: str = "") -> Any:
        """A group of these ranks, made once all are there. Raises on all of them `ConfigError` where one has a
        `problem`, or they cannot make a group, and `PeerError` where one has ended, or is not there in time."""
        try:
            self._check_alike(self.wait(Stage.BEGUN, {"problem": problem, "groups": _count_of_groups(self._ranks)}))
            with self._answered(Stage.BEGUN):
                self._check_left()
            return self._connected()
        except BaseException as error:
            self.leave(error)
            raise

    def wait(self, stage: Stage, value: Any = None, connections: Connections | None = None) -> list[Any]:
        """Waits until all ranks have reached a `stage`, and returns the `value` of each. `connections`: to find ranks
        that have ended; by default those of the user's group. Raises `PeerError` where one has ended, has left, or is
        not there within the timeout."""
        connections = connections or self._connections
        keys = [f"{stage.value}/{rank}" for rank in range(len(self._ranks))]
        started, poll = monotonic(), FIRST_POLL
        look = started + LOOK
        with self._answered(stage, connections):
            self._store.set(keys[self._rank], json.dumps(value))
            if self._store.add(stage.value, 1) == len(keys):
                self._store.set(_all(stage), "")
            while not self._store.check([_all(stage)]):
                if monotonic() > look:
                    self._check(stage, connections)
                    look = monotonic() + LOOK
                if monotonic() > started + self._timeout.total_seconds():
                    raise self._late(stage, keys)
                sleep(poll)
                poll = min(2 * poll, POLL)
            has_many = self._store.has_extended_api()
            found = self._store.multi_get(keys) if has_many else [self._store.get(key) for key in keys]
            return [json.loads(each) for each in found]

    def leave(self, error: BaseException) -> None:
        """Ranks that wait for this one raise `PeerError` at once, with the text of `error`."""
        text = str(error) if isinstance(error, PeerError) else f"{type(error).__name__}: {error}".rstrip(": ")
        with contextlib.suppress(RuntimeError):  # of a store that has ended
            if not self._store.check(["left"]):
                self._store.set("left", json.dumps([self._rank, text[:LONGEST]]))

    def ended(self, connections: Connections | None = None, *, within: float = LOOK) -> list[int]:
        """The ranks that have ended, as far as the user's group, or other `connections`, can find out `within` seconds:
        gloo's thread for a group may be late."""
        connections = connections or self._connections
        if connections is None:
            return []
        deadline = monotonic() + within
        found = connections.ended()
        while not found and monotonic() < deadline:
            sleep(POLL)
            found = connections.ended()
        return found

    def _check_left(self) -> None:
        """Raises `PeerError` where a rank has left."""
        if self._store.check(["left"]):
            rank, text = json.loads(self._store.get("left"))
            raise PeerError(f"rank {rank} stopped constructing the sharded collection: {text}")

    def _check(self, stage: Stage, connections: Connections | None) -> None:
        """Raises `PeerError` where a rank has left, or has ended without an announcement."""
        ended = self.ended(connections, within=0)
        self._check_left()
        if ended and not self._store.check([_all(stage)]):
            raise PeerError(f"{named(ended)} ended {stage.ended}, for which rank {self._rank} waits; {AGAIN}")

    def _late(self, stage: Stage, keys: Sequence[str]) -> PeerError:
        """The error of ranks that are not there in time."""
        late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        return PeerError(
            f"{named(late)} did not {stage.missing} within {self._timeout.total_seconds():g} s (timeout=), for which "
            f"rank {self._rank} waited; each rank of the group has to construct it, and the same ones in the same order"
        )

    @contextlib.contextmanager
    def _answered(self, stage: Stage, connections: Connections | None = None) -> Iterator[None]:
        """Raises `PeerError` where the store does not answer."""
        try:
            yield
        except PeerError:
            raise
        except RuntimeError as error:
            ended = self.ended(connections)
            who = f"{named(ended)} ended {stage.ended}" if ended else "the process that serves it has ended"
            raise PeerError(
                f"{who}: the store of torch.distributed did not answer rank {self._rank} while it constructed a "
                f"sharded collection; {AGAIN} ({error})"
            ) from error

    def _check_alike(self, found: Sequence[dict[str, Any]]) -> None:
        """Raises `ConfigError` for the problem of a rank, or where ranks would give a new group different names. Torch
        names a group by how many a process has made: ranks that have made others would wait for each other."""
        for rank, values in enumerate(found):
            if values["problem"]:
                raise ConfigError(f"rank {rank}: {values['problem']}")
        counts = [values["groups"] for values in found]
        if len(set(counts)) > 1:
            raise ConfigError(
                f"the ranks {self._ranks} are in different numbers of process groups ({counts}), by which torch tells "
                f"a new group of theirs from others; make groups on all ranks alike, as a DeviceMesh does"
            )

    def _connected(self) -> Any:
        """The new group. A rank that ends just now keeps the others waiting for `CONNECT`."""
        backend = _backend(self._group)
        is_debugged = c10d.get_debug_level() == c10d.DebugLevel.DETAIL  # its checks keep the first timeout of a group
        within = self._timeout if backend is None or is_debugged else min(self._timeout, CONNECT)
        groups = c10d._world.pg_map
        before = set(groups)
        how: dict[str, Any] = {"timeout": within, "backend": backend}
        try:
            if len(self._ranks) < dist.get_world_size():
                how["use_local_synchronization"] = True
            made = dist.new_group(self._ranks, **how)
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)  # which have the group
            for each in set(groups) - before:
                dist.destroy_process_group(each)
            ended = self.ended()
            raise PeerError(
                f"{named(ended) if ended else 'another rank'} ended while the ranks connected to each other for the "
                f"sharded collection, or did not answer rank {self._rank} within {within.total_seconds():g} s; {AGAIN} "
                f"({error})"
            ) from error
        if within != self._timeout:
            _set_timeout(made, self._timeout)
        return made


def _all(stage: Stage) -> str:
    """The key that exists once all ranks have reached a stage."""
    return f"{stage.value}/all"


def named(ranks: Sequence[int]) -> str:
    """These ranks as messages name them."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _connections(group: dist.ProcessGroup | None, ranks: list[int]) -> Connections | None:
    """The gloo connections of the user's group, or of the world; None if there are none."""
    if "cpu:gloo" in dist.get_backend_config(group):
        return Connections(group or dist.group.WORLD, range(len(ranks)))
    return Connections(dist.group.WORLD, ranks) if "cpu:gloo" in dist.get_backend_config() else None


def _count_of_groups(ranks: Sequence[int]) -> int:
    """The number by which torch names the next group of these ranks."""
    world = c10d._world
    return world.group_count if len(ranks) == dist.get_world_size() else len(world.pg_names)


def _backend(group: dist.ProcessGroup | None) -> str | None:
    """The backend of a group of our own, beside the given one: gloo between hosts, whatever that has."""
    given = dist.get_backend_config(group)
    if "cuda:nccl" in given:
        return "cpu:gloo,cuda:nccl"
    return "gloo" if "cpu:gloo" in given else None


def _set_timeout(group: Any, timeout: timedelta) -> None:
    """Sets the timeout of later exchanges, except for single messages, which keep the one from the time of
    connecting."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timeout)
