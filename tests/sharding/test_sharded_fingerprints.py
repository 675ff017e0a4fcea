"""Ranks of which one takes other steps than the others, unnoticed by itself: all raise at the next header."""

from __future__ import annotations

import itertools

import pytest
import torch
from devices import equal
from sharding.ranks import batch_of, seven, tables_of
from sharding.test_sharded_failures import QUICK, raised

import tieredemb as te
from tieredemb.sharding.collection import ShardedTieredEmbeddingBagCollection
from tieredemb.tables.fingerprint import OPTION_BITS, Fingerprint, are_alike, steps_fingerprint

TABLES = tables_of(widths=(4, 8))  # two caches
KINDS = ["fused", "followed"]


def model_of(kind, **keywords):
    """A collection, and the torch optimizer that has its options."""
    fused = te.Adagrad(lr=0.1)
    chosen = fused if kind == "fused" else torch.optim.Adagrad
    model = ShardedTieredEmbeddingBagCollection(TABLES, capacity=0.5, optimizer=chosen, timeout=QUICK, **keywords)
    if kind == "fused":
        return model, model.fused_optimizer
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    model.follow(optimizer)
    return model, optimizer


def step_with(model, optimizer, rank, number, wrong=False):
    ids, offsets, _, upstream = batch_of(TABLES, number, rank, samples=seven)
    optimizer.zero_grad()
    model(ids + 1000 * wrong, offsets).backward(upstream)


def drifts(rank, size, kind, how):
    """Steps, from the third of which on rank 1 takes other ones; of each step what is raised."""
    model, optimizer = model_of(kind)
    group, found = optimizer.param_groups[0], []
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for number in range(5):
        differs = rank == 1 and number >= 2
        if how == "schedule":
            group["lr"] = 0.1 / (1 + number)
            group["of the user's"] = rank
        elif how == "rate" and differs:
            group["lr"] = 0.3
        wrong = how == "schedule" and rank == 2 and number == 3  # nobody updates, and all go on
        found.append(raised(step_with, model, optimizer, rank, number, wrong))
        if not (how == "skip" and differs) and not found[-1]:
            optimizer.step()
        if how == "plateau":
            plateau.step(1.0 - 0.1 * number + differs)
    return found


@pytest.mark.parametrize(
    ("kind", "how", "first", "text"),
    [
        ("fused", "rate", 2, "lr of the Adagrad that updates the rows differs between the ranks: 0.1 on rank 0, "),
        ("fused", "plateau", 3, "lr of the Adagrad that updates the rows differs between the ranks: 0.1 on rank 0, "),
        (
            "followed",
            "rate",
            3,
            "lr of the Adagrad that the tables follow at its last step differs between the ranks: 0.1",
        ),
        (
            "followed",
            "plateau",
            4,
            "lr of the Adagrad that the tables follow at its last step differs between the ranks: 0.1",
        ),
        ("followed", "skip", 3, "steps of the Adagrad that the tables follow differs between the ranks: 3 on rank 0,"),
    ],
)
def test_a_rank_that_goes_another_way_is_noticed(worlds, kind, how, first, text):
    """`first`: the step in which it is. Options of a fused optimizer are compared before they change a row, those of a
    torch optimizer behind its step, by the next forward."""
    for found in worlds(3).run(drifts, kind, how):
        assert found[:first] == [None] * first
        name, said = found[first]
        assert name == "PeerError"
        assert text in said
        assert "on rank 1; each rank has to take the same steps" in said
        assert "start all ranks again from the last checkpoint" in said
        assert all("nothing is exchanged any more" in said for _, said in found[first + 1 :])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_whose_options_change_alike_go_on(worlds, kind):
    for found in worlds(3).run(drifts, kind, "schedule"):
        (name, text), others = found[3], found[:3] + found[4:]
        assert name == "IdOutOfRangeError"
        assert text.startswith("rank 2: ")
        assert others == [None] * 4


def fingerprint_of(**options):
    return Fingerprint().of(options)


def test_fingerprints_know_values_however_they_are_written():
    assert fingerprint_of(lr=1, betas=[0.9, 0.99]) == fingerprint_of(betas=(0.9, 0.99), lr=1.0)
    others = [
        fingerprint_of(lr=1.0),
        fingerprint_of(lr=True),
        fingerprint_of(lr=1.00001),
        fingerprint_of(eps=1.0),
        fingerprint_of(),
    ]
    assert len(set(others)) == len(others)
    assert 0 <= steps_fingerprint(2**40 - 1, 2**40 - 1, 2**OPTION_BITS - 1) < 2**63
    every = {steps_fingerprint(*each) for each in itertools.product(range(3), repeat=3)}
    assert len(every) == 27


def test_what_is_rounded_is_alike():
    assert are_alike((0.9, [1, 0.1]), [0.9, (1.0, float(torch.tensor(0.1)))])
    assert not are_alike(0.1, 0.10001)
    assert not are_alike((0.9,), (0.9, 0.99))
    assert not are_alike(1.0, True)
    assert not are_alike(1.0, None)
    assert are_alike("max", "max")


def test_a_fingerprint_is_found_anew_where_options_have_changed_in_place():
    fingerprint, betas = Fingerprint(), [0.9, 0.99]
    first = fingerprint.of({"betas": betas})
    betas[0] = 0.8
    assert fingerprint.of({"betas": betas}) not in (0, first)
    assert fingerprint.of({"betas": (0.9, 0.99)}) == first


def rounds(rank, size, kind):
    """Steps with a learning rate that rank 1 has in float32 alone."""
    model, optimizer = model_of(kind)
    for number in range(40):
        rate = 0.1 * 0.97**number
        optimizer.param_groups[0]["lr"] = float(torch.tensor(rate)) if rank == 1 else rate
        step_with(model, optimizer, rank, number)
        optimizer.step()
    return [fingerprint_of(lr=float(torch.tensor(0.1 * 0.97**number))) for number in range(40)]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_round_otherwise_go_on(worlds, kind):
    rounded = worlds(2).run(rounds, kind)[0]
    exact = [fingerprint_of(lr=0.1 * 0.97**number) for number in range(40)]
    assert rounded != exact  # some lie on both sides of an edge


def loses_gradients(rank, size, how):
    """Steps of two micro-batches, of which rank 1 once drops a gradient; in which step what is raised."""
    model, optimizer = model_of("followed")
    lost = (1, 0) if how == "between" else (1, 1)
    for number in range(4):
        optimizer.zero_grad()
        for part in range(2):
            ids, offsets, _, upstream = batch_of(TABLES, 2 * number + part, rank, samples=seven)
            try:
                model(ids, offsets).backward(upstream)
            except te.errors.PeerError as error:
                return number, part, str(error)
            if rank == 1 and (number, part) == lost:
                optimizer.zero_grad(set_to_none=how == "between")
        optimizer.step()
    return None


@pytest.mark.parametrize(("how", "left"), [("between", 3), ("zeros", 2)])
def test_a_rank_that_loses_a_gradient_is_noticed(worlds, how, left):
    for number, part, text in worlds(2).run(loses_gradients, how):
        assert (number, part) == (2, 0)
        assert f"have applied differs between the ranks: 4 on rank 0, {left} on rank 1" in text


def scales(rank, size, how):
    """A backward with a scaler that has another scale on rank 1, or is off there, or attached on rank 0 alone."""
    model, optimizer = model_of("fused")
    other = rank == 1
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=8.0 if other and how == "scale" else 4.0, enabled=how != "off" or not other
    )
    if how != "attached" or not other:
        optimizer.attach_grad_scaler(scaler)
    return raised(step_with, model, optimizer, rank, 0)


@pytest.mark.parametrize(("how", "found"), [("scale", "8.0"), ("off", "none"), ("attached", "none")])
def test_a_scaler_is_that_of_all_ranks(worlds, how, found):
    for name, text in worlds(2).run(scales, how):
        assert name == "PeerError"
        assert (
            f"the scale of the attached GradScaler differs between the ranks: 4.0 on rank 0, {found} on rank 1" in text
        )
    assert worlds(2).run(scales, "alike") == [None] * 2


def fails_to_apply(rank, size):
    """The update of a step fails on rank 1 alone, which announces nothing; what the next step raises."""
    model, optimizer = model_of("followed")
    found = []
    for number in range(3):
        step_with(model, optimizer, rank, number)
        pending = model._held[0].engine.optimizer.pending
        if (rank, number) == (1, 1):
            pending.apply = lambda others: 1 / 0
        found.append(raised(optimizer.step))
        pending.__dict__.pop("apply", None)
        if number == 1:
            return found, raised(step_with, model, optimizer, rank, 2)
    return None


def test_a_rank_whose_step_has_failed_is_noticed(worlds):
    for rank, (steps, then) in enumerate(worlds(2).run(fails_to_apply)):
        assert steps == [None, ("ZeroDivisionError", "division by zero") if rank == 1 else None]
        assert then[0] == "PeerError"
        assert "the number of steps of the Adagrad that the tables follow differs between the ranks: 2 on" in then[1]


def accumulates(rank, size, rate):
    """Ranks sum gradients up; before the update of these rank 1 has another learning rate."""
    model, optimizer = model_of("fused")

    def step():
        with model.accumulate():
            step_with(model, optimizer, rank, 0)
            optimizer.param_groups[0]["lr"] = rate if rank == 1 else 0.1

    found = raised(step)
    optimizer.param_groups[0]["lr"] = 0.1
    return found, raised(model.state_dict)


def test_what_is_accumulated_is_applied_by_equal_options(worlds):
    for found, then in worlds(2).run(accumulates, 0.3):
        assert found[0] == "PeerError"
        assert "lr of the Adagrad that updates the rows differs between the ranks: 0.1 on rank 0, " in found[1]
        assert then[0] == "PeerError"
    for found, then in worlds(2).run(accumulates, -1.0):
        assert found[0] == "ConfigError"
        assert found[1].startswith("rank 1: the learning rate is -1.0")
        assert then is None
    assert worlds(2).run(accumulates, 0.1) == [(None, None)] * 2


# --- whole tables -----------------------------------------------------------------------------------------------------


WHOLE = {
    "state_dict": "reads whole tables",
    "load_state_dict": "sets whole tables",
    "optimizer.state_dict": "reads the optimizer's state",
    "optimizer.load_state_dict": "sets the optimizer's state",
    "save": "saves a checkpoint",
    "load": "loads a checkpoint",
    "clip": "reads the norm of a gradient",
    "follow": "follows an optimizer",
    "accumulate": "ends an accumulate()",
}


def calls(rank, size, kind, whats, directory):
    """Rank 0 calls one of `WHOLE`, the others another one."""
    model, optimizer = model_of(kind)
    step_with(model, optimizer, rank, 0)
    if kind == "followed":
        optimizer.step()
        optimizer.zero_grad()
    tables, state = model.state_dict(), optimizer.state_dict()
    model.save_checkpoint(directory / "saved")
    if "clip" in whats:
        step_with(model, optimizer, rank, 1)

    def accumulate():
        with model.accumulate():
            pass

    todo = {
        "state_dict": model.state_dict,
        "load_state_dict": lambda: model.load_state_dict(tables),
        "optimizer.state_dict": optimizer.state_dict,
        "optimizer.load_state_dict": lambda: optimizer.load_state_dict(state),
        "save": lambda: model.save_checkpoint(directory / "again"),
        "load": lambda: model.load_checkpoint(directory / "saved"),
        "clip": lambda: te.clip_grad_norm_(model, 1.0),
        "follow": lambda: model.follow(optimizer),
        "accumulate": accumulate,
    }
    return raised(todo[whats[min(rank, 1)]])


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        *[("fused", "state_dict", second) for second in WHOLE if second not in ("state_dict", "clip", "follow")],
        *[("followed", first, "state_dict") for first in ("clip", "follow", "optimizer.state_dict")],
        ("fused", "load", "save"), ("fused", "load_state_dict", "load"),
        ("fused", "optimizer.state_dict", "optimizer.load_state_dict"),
        ("followed", "optimizer.load_state_dict", "optimizer.state_dict"),
        ("followed", "optimizer.load_state_dict", "load_state_dict"),
    ],
)  # fmt: skip
def test_ranks_that_do_different_things_with_whole_tables_raise(worlds, tmp_path, kind, first, second):
    for found in worlds(3).run(calls, kind, (first, second), tmp_path):
        assert found[0] == "PeerError"
        assert f"rank 0 {WHOLE[first]}" in found[1]
        assert f"rank 2 {WHOLE[second]}" in found[1]


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluates_apart(rank, size, planned, who):
    """Two steps, then another, in which one rank evaluates, or none makes it; and two more. What is raised."""
    model, _ = model_of("fused")
    batches = [batch_of(TABLES, number, rank, samples=seven) for number in range(5)]
    loader, found = [(ids, offsets) for ids, offsets, *_ in batches], []
    for number, batch in enumerate(te.prefetch(loader, model) if planned else loader):
        with torch.set_grad_enabled((rank, number) != (who, 2)):
            if number != 2 or who is not None:
                found.append(raised(lambda: step_on(model, *batch)))  # noqa: B023
    return found, dict(model.state_dict())


def step_on(model, ids, offsets):
    out = model(ids, offsets)
    if out.requires_grad:
        out.backward(torch.ones_like(out))


@pytest.mark.parametrize("planned", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_evaluates_while_others_train_is_noticed(worlds, who, planned):
    """Nothing has changed by then, and all go on."""
    expected = worlds(3).run(evaluates_apart, planned, None)
    assert all(found == [None] * 4 for found, _ in expected)
    answers = worlds(3).run(evaluates_apart, planned, who)
    for found, _ in answers:
        name, text = found.pop(2)
        assert name == "PeerError"
        assert f"ranks {[rank for rank in range(3) if rank != who]} look up a batch that they train on" in text
        assert found == [None] * 4
    for name, weight in expected[0][1].items():
        assert equal(answers[0][1][name], weight)
