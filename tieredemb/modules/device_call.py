"""One forward of a module on a GPU, and its update: launches alone, nothing waits for the device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tieredemb.cache.plan import DROPPED
from tieredemb.errors import ConfigError, InvalidInputError, UnsupportedError
from tieredemb.kernels.streams import on_device
from tieredemb.lookup.device_bags import MAX_BAGS, DeviceBags, Edges, find_device_bags, tell_fault
from tieredemb.lookup.device_lookup import Segments, frequency_scale
from tieredemb.modules.call import Call, inside_backward
from tieredemb.modules.call_memory import CallMemory
from tieredemb.modules.group import DeviceGroup

if TYPE_CHECKING:
    from tieredemb.cache.device_cache import DeviceTicket
    from tieredemb.modules.base import TieredModule
    from tieredemb.modules.options import LookupOptions


class DeviceGroupCall:
    """One forward in one group: its bags, its ticket, and what its gradient needs. `segments`, `trained`: room for
    them, where they are found with the plan · `given`: comes once the bags are there, if that is to be waited for."""

    def __init__(
        self,
        group: DeviceGroup,
        bags: DeviceBags,
        ids: torch.Tensor,
        *,
        segments: Segments | None,
        trained: torch.Tensor | None,
        given: torch.cuda.Event | None,
    ) -> None:
        self.group = group
        self.bags = bags
        self._segments = segments
        beside = None
        if segments is not None:  # sorts while rows are on their way
            beside = functools.partial(group.lookup.find_segments, segments, bags.homes, bags.bag, bags.batch)
        scored = not inside_backward()
        self.ticket = group.cache.plan(bags.keys, bags.homes, score=scored, given=given, beside=beside)
        held = (*vars(bags).values(), *(() if segments is None else vars(segments).values()), trained)
        self.ticket.beside_bytes = sum(t.nbytes for t in held if isinstance(t, torch.Tensor)) - bags.homes.nbytes
        # homes of the occurrences that gradients reach: padding that lookups read is left out
        self.trained = homes = self.ticket.homes
        if trained is not None:
            padding = int(group.space.padding[0])
            self.trained = trained.copy_(homes).masked_fill_(ids == padding, DROPPED)
            if self.ticket.ready is not None:
                self.ticket.ready.record()
        self.weights: torch.Tensor | None = None
        self.argmax: torch.Tensor | None = None
        self.forward_rows: torch.Tensor | None = None

    def join(self) -> None:
        """What ran beside the lookup is done for what follows."""
        if self.ticket.aside is not None:
            self.ticket.aside.wait()
            self.ticket.aside = None

    def segments(self) -> Segments:
        """The trained occurrences by row."""
        return self._segments or self.group.lookup.segments(self.trained, self.bags.bag, self.bags.batch)

    def held(self) -> list[torch.Tensor]:
        """The tensors that the forward leaves for the update."""
        return [value for value in (self.weights, self.argmax) if value is not None]

    def again(self, batch: int) -> DeviceGroupCall:
        """The call of `batch`, which a replay has planned to where this one was."""
        call = copy.copy(self)
        call.ticket = self.group.cache.reopen(self.ticket, batch)
        call.weights = call.argmax = call.forward_rows = None
        return call

    def limit_norms(self, fault: torch.Tensor, options: LookupOptions) -> None:
        """Scales the rows of this forward down to `max_norm`, where they are longer."""
        assert options.max_norm is not None
        self.join()
        cache = self.group.cache
        with cache.using(self.ticket):
            # those that a plan has sorted are all of them
            segments = self._segments or self.group.lookup.segments(self.ticket.homes, self.bags.bag, self.bags.batch)
            away = cache.away([self.ticket])
            self.group.lookup.limit_norms(cache.hot, away, segments, fault, options.max_norm, options.norm_type)

    def pool(self, out: torch.Tensor, weights: torch.Tensor | None, *, keep_argmax: bool, keep_rows: bool) -> None:
        """Pools into `out` (B, ΣD); keeps what a backward will want to know of the forward."""
        group, bags = self.group, self.bags
        if keep_argmax and group.lookup.has_max:
            self.argmax = torch.full(out.shape, -1, dtype=torch.int32, device=out.device)
        with group.cache.using(self.ticket):
            if weights is not None:
                self.weights = weights if bags.position is None else weights[bags.position]
            hot, away = group.cache.hot, group.cache.away([self.ticket])
            group.lookup.pool(hot, away, self.ticket.homes, bags, self.weights, out, self.argmax)
            if keep_rows:
                self.forward_rows = group.lookup.gather(hot, away, self.ticket.homes)

    def weights_gradient(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """Adds the gradient of the per-sample weights to `out`, float32 (N,), at their positions."""
        assert self.forward_rows is not None
        homes, bags = self.ticket.homes, self.bags
        gradient = self.group.lookup.weights_gradient(self.forward_rows, homes, bags, grad)
        if bags.position is None:
            out += gradient
        else:  # what belongs to other groups has no position of its own, and a gradient of zero
            out.index_add_(0, bags.position, gradient)

    def scale(self, options: LookupOptions) -> torch.Tensor | None:
        """What each occurrence's share of the gradient is multiplied by, float32 (N,), or None for ones."""
        scale = self.weights
        if scale is None and self.group.lookup.has_mean:
            scale = self.group.lookup.mean_scale(self.ticket.homes, self.bags)
        if options.scale_grad_by_freq:
            share = frequency_scale(self.trained)
            scale = share if scale is None else scale * share
        return scale


class DeviceCall(Call):
    """One forward of a module. `ids`: int32 or int64 (N,) · `edges`: of the bags of all tables, not yet checked ·
    `trains`: whether a backward is expected to update its rows · `ahead`: whether the forward has yet to come, and a
    fault is told when it does · `memory`: that of a call of as many ids and bags that is over, to be used again."""

    def __init__(
        self,
        module: TieredModule,
        ids: torch.Tensor,
        edges: Edges,
        batch: int,
        *,
        trains: bool,
        ahead: bool,
        memory: CallMemory | None = None,
    ) -> None:
        super().__init__(module, batch)
        self.parts: list[DeviceGroupCall] = []
        tables = module.tables
        if len(tables.config.tables) * batch > MAX_BAGS:
            raise InvalidInputError(
                f"{len(tables.config.tables)} tables × {batch} samples are more than {MAX_BAGS} bags; split the batch"
            )
        if ahead and tables.config.check_ids == "always":
            raise UnsupportedError("check_ids='always' waits for the GPU in every forward: nothing is planned ahead")
        ids = ids.to(torch.int64)
        self.ids = ids.shape[0]
        self._tells_later = ahead
        groups = [group for group in tables.groups if isinstance(group, DeviceGroup)]
        with on_device(ids.device):
            fits = memory is not None and memory.fits(groups, self.ids, batch)
            self.memory = memory if fits and memory else self._allocate(groups, trains=trains)
            given = None
            if torch.cuda.is_current_stream_capturing():  # events cost nothing there
                given = groups[0].cache.aside(functools.partial(self._find_bags, groups, ids, edges))
            else:
                self._find_bags(groups, ids, edges)
        if tables.config.check_ids == "always":
            _check_at_once(module, ids.device)
        try:
            parts = zip(groups, self.memory.bags, self.memory.segments, self.memory.trained, strict=True)
            for group, bags, segments, trained in parts:
                self.parts.append(DeviceGroupCall(group, bags, ids, segments=segments, trained=trained, given=given))
        except BaseException:
            self.release()
            if given is not None:
                given.wait()  # a capture ends with the error that has come, not with one about a stream
            raise
        finally:
            self.memory.planned(part.ticket.aside for part in self.parts)

    def _allocate(self, groups: list[DeviceGroup], *, trains: bool) -> CallMemory:
        dropped = self.module.options.padding_is_dropped
        reads_padding = [not dropped and int(group.space.padding[0]) >= 0 for group in groups]
        sorts = [trains and not reads for reads in reads_padding]  # the padding's occurrences are known afterwards
        with groups[0].cache.memory():
            return CallMemory(groups, self.ids, self.batch, sorts=sorts, masks=reads_padding)

    def _find_bags(self, groups: list[DeviceGroup], ids: torch.Tensor, edges: Edges) -> None:
        memory, faults = self.memory, self.module.tables.faults
        memory.words.zero_()
        report = memory.report.data_ptr() if self._tells_later else faults.address
        dropped = self.module.options.padding_is_dropped
        for group, bags in zip(groups, memory.bags, strict=True):
            space = group.device_space
            find_device_bags(bags, ids, edges, space, memory.fault, report, padding_is_dropped=dropped)

    @property
    def tickets(self) -> list[DeviceTicket]:
        """Those of all groups."""
        return [part.ticket for part in self.parts]

    def arrive(self) -> None:
        """The current stream waits for what was planned ahead."""
        for part in self.parts:
            if part.ticket.ready is not None:
                part.ticket.ready.wait()
        self.has_arrived()

    def has_arrived(self) -> None:
        """Nothing need wait for what was planned ahead any more."""
        for part in self.parts:
            part.ticket.ready = None
        self.memory.joined()

    def again(self, batches: Sequence[int]) -> DeviceCall:
        """The call that a replay has planned to where this one was, as `batches` of its groups' caches."""
        call = copy.copy(self)
        call.number, call.consumed, call.within, call.keeps_rows = -1, False, None, False
        call.parts = [part.again(batch) for part, batch in zip(self.parts, batches, strict=True)]
        call._tells_later = True
        return call

    def start(self) -> None:
        self.follow()
        super().start()
        if self._tells_later:
            with self.parts[0].group.cache.using(*self.tickets):
                tell_fault(self.memory.report, self.module.tables.faults.address)
            self._tells_later = False
            self.memory.joined()

    def limit_norms(self) -> None:
        if self.module.options.max_norm is not None:
            for part in self.parts:
                part.limit_norms(self.memory.fault, self.module.options)

    def pool(self, weights: torch.Tensor | None, *, differentiable: bool) -> torch.Tensor:
        tables = self.module.tables
        out = torch.empty((self.batch, tables.output_width), dtype=tables.config.dtype, device=tables.config.device)
        if weights is not None:  # backward reads them again, and loaders reuse their buffers
            weights = weights.detach().to(torch.float32, copy=differentiable).contiguous()
        for part in self.parts:
            part.pool(out, weights, keep_argmax=differentiable, keep_rows=self.keeps_rows)
        for part in self.parts:
            part.join()
        self.memory.joined()
        self.follow()
        return out

    def weights_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(self.ids, dtype=torch.float32, device=grad.device)
        for part in self.parts:
            part.weights_gradient(grad, out)
        return out

    def follow(self, *more: torch.Tensor) -> None:
        """Tells torch's allocator where another stream uses the memory of the one that computed before, and `more`."""
        if torch._C._cuda_getCurrentRawStream(self.memory.fault.get_device()) == self.memory.stream.cuda_stream:
            return
        held = [*more, *self.memory.tensors(), *(value for part in self.parts for value in part.held())]
        for tensor in held:
            tensor.record_stream(torch.cuda.current_stream())

    @staticmethod
    def apply(module: TieredModule, collected: list[tuple[Call, torch.Tensor]]) -> None:
        optimizer = module.check_trainable()
        calls = [(call, grad) for call, grad in collected if isinstance(call, DeviceCall)]
        device, samples = module.tables.config.device, sum(call.batch for call, _ in calls)
        if len(module.tables.config.tables) * samples > MAX_BAGS:
            raise InvalidInputError(
                f"one backward pass reached {len(calls)} forwards of {samples} samples in all; with "
                f"{len(module.tables.config.tables)} tables these are more than {MAX_BAGS} bags: call backward for each"
            )
        with module.tables.updating(), on_device(device):
            for call, grad in calls:
                call.follow(grad)
            faults = (
                calls[0][0].memory.fault if len(calls) == 1 else torch.cat([call.memory.fault for call, _ in calls])
            )
            grads = [grad for _, grad in calls]
            found_inf, grad_scale = optimizer.scaling(grads)
            for g, group in enumerate(module.tables.groups):
                assert isinstance(group, DeviceGroup)
                parts = [call.parts[g] for call, _ in calls]
                batch = _Combined(parts, grads, module.options)
                options = optimizer.options_on(group)
                tickets = [part.ticket for part in parts]
                with group.cache.using(*tickets):
                    rate, numbers = group.lookup.begin(
                        options, group.device_steps, faults, found_inf, grad_scale, batch.segments.work
                    )
                    away = group.cache.away(tickets)
                    group.lookup.update(
                        group.cache.hot, away, batch.segments, batch.grad, batch.scale, batch.argmax, rate, numbers
                    )


class _Combined:
    """The calls of one backward pass in one group, as one batch: samples and winning occurrences count on."""

    def __init__(self, parts: list[DeviceGroupCall], grads: list[torch.Tensor], options: LookupOptions) -> None:
        lookup = parts[0].group.lookup
        scales = [part.scale(options) for part in parts]
        if len(parts) == 1:
            part = parts[0]
            self.grad, self.scale, self.argmax = grads[0], scales[0], part.argmax
            self.segments = part.segments()
            return
        samples = sum(len(grad) for grad in grads)
        bags, argmax, first_sample, first = [], [], 0, 0
        for part in parts:
            own = max(1, part.bags.batch)
            table = torch.div(part.bags.bag, own, rounding_mode="floor")
            bags.append(part.bags.bag + table * (samples - part.bags.batch) + first_sample)
            if part.argmax is not None:
                argmax.append(torch.where(part.argmax < 0, part.argmax, part.argmax + first))
            first_sample += part.bags.batch
            first += part.trained.shape[0]
        self.grad = torch.cat(grads)
        self.argmax = torch.cat(argmax) if argmax else None
        ones = [torch.ones(p.trained.shape[0], device=p.trained.device, dtype=torch.float32) for p in parts]
        filled = [one if scale is None else scale for one, scale in zip(ones, scales, strict=True)]
        self.scale = torch.cat(filled) if any(scale is not None for scale in scales) else None
        homes = torch.cat([part.trained for part in parts])
        self.segments = lookup.segments(homes, torch.cat(bags), samples)


def _check_at_once(module: TieredModule, device: torch.device) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "check_ids='always' waits for the GPU in every forward, which a CUDA graph cannot capture; build the "
            "module with check_ids='deferred'"
        )
    torch.cuda.synchronize(device)
    module.tables.faults.check()
