"""The autograd node of forwards that are looked up as one: what it collects, and what keeps it. On the CPU, without
tables: those are in test_grouped_calls."""

from __future__ import annotations

import gc
import types

import pytest
import torch

from tieredemb.errors import BackwardError
from tieredemb.step.forwards import Forwards
from tieredemb.step.program import LOOKUP, Calls

FORWARDS, SAMPLES, WIDTH = 4, 2, 3


class Pass:
    """Collects gradients, as a backward pass does."""

    def __init__(self):
        self.collected = []

    def add(self, *gradients):
        self.collected += gradients


class Forward:
    """One of the forwards, that at `position`."""

    within, consumed, requested, block = None, False, None, 0

    def __init__(self, position, backward_pass, forwards=None):
        self.position, self.forwards = position, forwards
        updater = types.SimpleNamespace(optimizer=types.SimpleNamespace(is_there=True))
        self.context = types.SimpleNamespace(backward_pass=backward_pass, check_trainable=lambda: None, updater=updater)

    def __del__(self):
        if self.forwards is not None:
            self.forwards.release_part(self.position)


@pytest.fixture
def node():
    """The outputs of a node, zeros, and what it has collected: by position, the gradients."""
    backward_pass = Pass()
    came = Calls({position: Forward(position, backward_pass) for position in range(FORWARDS)})
    leaf, zeros = torch.zeros(0, requires_grad=True), torch.zeros(FORWARDS, SAMPLES, WIDTH)
    outputs = LOOKUP(leaf, None, came, lambda: [each.data for each in zeros.unbind()])

    def collected():
        return [(call.position, grad.tolist()) for call, grad in backward_pass.collected]

    return outputs, collected


def rows(value):
    return [[value] * WIDTH] * SAMPLES


def test_outputs_that_nobody_uses_have_no_gradient(node):
    outputs, collected = node
    (outputs[2].sum() * 3 + outputs[0].sum()).backward()
    assert collected() == [(0, rows(1.0)), (2, rows(3.0))]


def test_each_output_has_a_backward_of_its_own_and_no_second_one(node):
    outputs, collected = node
    for each in outputs[:2]:
        each.sum().backward()
    assert collected() == [(0, rows(1.0)), (1, rows(1.0))]
    with pytest.raises(BackwardError, match="backpropagated already"):
        (outputs[1].sum() + outputs[3].sum()).backward()
    assert len(collected()) == 2


def test_outputs_may_be_changed_in_place_and_do_not_change_each_other(node):
    outputs, collected = node
    outputs[0].add_(1).mul_(2)
    assert outputs[1].eq(0).all()
    outputs[0].square().sum().backward()
    assert collected() == [(0, rows(8.0))]


def test_gradients_of_16_bits_and_expanded_ones_are_those_of_float32(node):
    outputs, collected = node
    (outputs[0].bfloat16().sum() + outputs[1].mean()).backward()
    assert collected() == [(0, rows(1.0)), (1, [[pytest.approx(1 / 6)] * WIDTH] * SAMPLES)]


def test_gradients_of_something_else_are_not_collected(node):
    outputs, collected = node
    scale = torch.ones((), requires_grad=True)
    assert torch.autograd.grad((outputs[0] + 1).sum() * scale, [scale])[0] == SAMPLES * WIDTH
    assert collected() == []


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
def test_a_backward_that_builds_a_graph_collects_as_another(node):
    outputs, collected = node
    (outputs[0].sum() ** 2).backward(create_graph=True)
    assert len(collected()) == 1


# --- what keeps it ----------------------------------------------------------------------------------------------------


class Zeros:
    """A call of several forwards whose rows are zeros. `cache`: whose `rows_version` tells when they have changed."""

    number, gpu, released = 0, -1, 0

    def __init__(self):
        self.context = types.SimpleNamespace(is_dense=False)
        block = types.SimpleNamespace(positions=range(FORWARDS))
        where = [(0, position) for position in range(FORWARDS)]
        self.form = types.SimpleNamespace(size=SAMPLES, counts=[SAMPLES] * FORWARDS, where=where, blocks=[block])
        self.cache = types.SimpleNamespace(rows_version=0)
        self.parts = [types.SimpleNamespace(group=types.SimpleNamespace(cache=self.cache))]

    def pool_blocks(self):
        return [torch.zeros(FORWARDS * SAMPLES, WIDTH)]

    def release(self):
        self.released += 1


@pytest.fixture
def forwards():
    gc.collect()
    gc.disable()
    made = Forwards(Zeros(), [])
    yield made
    made.release_part(*range(FORWARDS))  # as a plan is given up: outputs of forwards that never came keep the call
    gc.enable()


HOOK = torch.zeros(0, requires_grad=True)


def output(forwards, position):
    return forwards.output_of(Forward(position, Pass(), forwards), HOOK)


@pytest.mark.parametrize("without", range(FORWARDS + 1))
def test_a_call_ends_with_its_last_output_whichever_had_gradients(forwards, without):
    for position in range(without):
        part = Forward(position, Pass(), forwards)
        assert not forwards.rows_of(position).requires_grad
        del part
    outputs = [output(forwards, position) for position in range(without, FORWARDS)]
    assert all(each.requires_grad for each in outputs)
    assert forwards.call.released == (without == FORWARDS)
    del outputs
    assert forwards.call.released == 1
    assert forwards._node is None


def test_outputs_of_forwards_that_never_come_end_with_those_that_are_given_up(forwards):
    outputs = [output(forwards, position) for position in range(2)]
    forwards.release_part(2, 3)
    assert forwards.call.released == 0
    del outputs
    assert forwards.call.released == 1


def test_a_forward_that_came_ends_amid_the_end_of_the_others(forwards):
    """With the last output that was left the node goes, and with that the forward, which releases its own part."""
    output(forwards, 0)
    forwards.release_part(1, 2, 3, 0)
    assert forwards.call.released > 0
    assert forwards._node is None


def test_all_come_of_one_node(forwards):
    outputs = [output(forwards, position) for position in (2, 0, 3)]
    assert len({each.grad_fn for each in outputs}) == 1
    assert forwards.rows_of(1).requires_grad is False


def test_a_forward_is_looked_up_by_itself_once_rows_have_changed(forwards):
    first = output(forwards, 0)
    forwards.call.cache.rows_version += 1
    assert output(forwards, 1) is None
    assert first.requires_grad


def test_no_output_is_handed_out_twice(forwards):
    first = output(forwards, 0)
    assert output(forwards, 0) is None
    del first
