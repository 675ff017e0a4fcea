"""A rank that runs short of memory in the middle of a step: all ranks raise that, and go on."""

from __future__ import annotations

import time

import pytest
import torch
from sharding.ranks import sharding_of
from sharding.test_sharded_agreement import TABLES, assert_same, batch, model_of, trained
from sharding.test_sharded_failures import raised
from sharding.worlds import WAIT_S

from tieredemb.errors import StorageFullError
from tieredemb.sharding.exchange import Exchange
from tieredemb.sharding.request import Request, RequestLayout


def none_left(*given, **named):
    raise StorageFullError("no memory is left")


def unpooled(bags):
    """The same, that find no memory when they are pooled."""
    bags.pool = none_left
    return bags


def short(sending):
    """It, without memory for rows."""

    def make(*given):
        if any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in given):
            raise StorageFullError("no memory is left")
        return sending(*given)

    return make


def runs_short(rank, size, where):
    """Rank 1 has no memory in the second step: for received rows, to pool them, for received gradients, or for
    these joined with those of bags."""
    model, errors = model_of(sharding=sharding_of("every other" if where == "together" else "rows", TABLES)), []
    context, gradient = model._ranks._context, Request.gradient
    exchange, find = context.exchange, context.find
    sending = exchange.sending
    for step in range(4):
        ids, offsets, _, upstream = batch(step, rank)
        fails = (rank, step) == (1, 1)
        if fails and where == "rows":
            exchange.sending = short(exchange.sending)

        if fails and where == "pooled":

            def find_unpooled(*given):
                found, most = find(*given)
                return [unpooled(bags) for bags in found], most

            context.find = find_unpooled

        def run(ids=ids, offsets=offsets, upstream=upstream, fails=fails):
            out = model(ids, offsets)
            if fails and where == "gradients":
                exchange.sending = short(exchange.sending)
            if fails and where == "together":
                Request.gradient = none_left
            out.backward(upstream)

        errors.append(raised(run))
        exchange.sending, Request.gradient = sending, gradient
        context.find = find
    weights = dict(model.state_dict())
    model.close()
    return errors, weights


@pytest.mark.parametrize("where", ["rows", "pooled", "gradients", "together"])
def test_a_rank_short_of_memory_is_raised_on_all(worlds, where):
    answers = worlds(2).run(runs_short, where)
    for errors, _ in answers:
        assert [each is None for each in errors] == [True, False, True, True]
        assert errors[1] == ("StorageFullError", "rank 1: no memory is left")
    assert_same(answers[0][1], trained([0, 2, 3]))


def runs_short_of_room_for_ids(rank, size):
    """Rank 1 has none where the others exchange ids already."""
    model, errors, took = model_of(), [], []
    of = RequestLayout.of
    for step in range(3):
        ids, offsets, _, upstream = batch(step, rank)
        if (rank, step) == (1, 1):
            RequestLayout.of = none_left
        start = time.monotonic()
        errors.append(
            raised(lambda ids=ids, offsets=offsets, upstream=upstream: model(ids, offsets).backward(upstream))
        )
        took.append(time.monotonic() - start)
        RequestLayout.of = of
    model.close()
    return errors, max(took)


def test_a_rank_without_memory_for_ids_leaves_the_others_which_do_not_wait_for_it(worlds):
    for rank, (errors, seconds) in enumerate(worlds(2).run(runs_short_of_room_for_ids)):
        assert errors[0] is None
        if rank == 1:
            assert errors[1] == ("StorageFullError", "no memory is left")
        else:
            assert errors[1][0] == "PeerError"
            assert "another rank did not: it has ended" in errors[1][1]
        assert errors[2][0] == "PeerError"
        assert "nothing is exchanged any more since an earlier call" in errors[2][1]
        assert seconds < WAIT_S["cpu"] / 2


class Gpu:
    """What torch reports of one."""

    def __init__(self, uuid):
        self.uuid = uuid


def shares_a_gpu(rank, size, allowing=()):
    """As if there were GPUs, of which ranks 0 and 2 have the same one; NCCL takes several on one on the ranks
    `allowing` it."""
    exchange = Exchange(None, None)
    exchange.has_nccl = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: Gpu(rank % 2))
        patch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", str(int(rank in allowing)))
        devices = torch.device("cuda", 0), torch.device("cpu")
        found = tuple(raised(exchange.check_device, device) for device in devices)
    exchange.close()
    return found


def test_ranks_on_one_gpu_are_refused_where_they_would_meet_by_nccl(worlds):
    for found, on_cpu in worlds(3).run(shares_a_gpu):
        assert found[0] == "ConfigError"
        assert found[1].startswith("ranks 0 and 2 are on the same GPU")
        assert on_cpu is None
    assert all(found is None for found, _ in worlds(2).run(shares_a_gpu))


def test_ranks_on_one_gpu_meet_by_nccl_where_it_takes_them(worlds):
    assert all(found is None for found, _ in worlds(3).run(shares_a_gpu, (0, 1, 2)))
    for found, _ in worlds(3).run(shares_a_gpu, (0, 1)):  # not on all of them
        assert found[0] == "ConfigError"
        assert "set NCCL_MULTI_RANK_GPU_ENABLE=1 for all ranks" in found[1]
