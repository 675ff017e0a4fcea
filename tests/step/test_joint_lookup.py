"""The autograd node of forwards that are looked up as one: what it collects, and what keeps it. On the CPU, without
tables: those are in test_joint_calls."""

from __future__ import annotations

import gc
import types

import pytest
import torch

from tieredemb.errors import BackwardError
from tieredemb.step.call import LOOKUP, Calls
from tieredemb.step.host_joint_call import HostJointCall

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

    def __init__(self, position, backward_pass, joint=None):
        self.position, self.joint = position, joint
        updater = types.SimpleNamespace(optimizer=types.SimpleNamespace(is_there=True))
        self.context = types.SimpleNamespace(backward_pass=backward_pass, check_trainable=lambda: None, updater=updater)

    def __del__(self):
        if self.joint is not None:
            self.joint.release_part(self.position)


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


class Joint(HostJointCall):
    """A joint call whose rows are zeros. `changed`: whether rows have, since the first forward."""

    def __init__(self):
        self.count, self.batch, self.released, self.changed = FORWARDS, SAMPLES, 0, False
        self.number, self.is_dense = 0, False
        self.form = types.SimpleNamespace(where=[(0, position) for position in range(FORWARDS)])
        self._forget_parts()
        self._rows = torch.zeros(FORWARDS, SAMPLES, WIDTH).unbind()

    def _is_as_looked_up(self, block):
        return not self.changed

    def release(self):
        self.released += 1


@pytest.fixture
def joint():
    gc.collect()
    gc.disable()
    made = Joint()
    yield made
    made.release_part(*range(FORWARDS))  # as a plan is given up: outputs of forwards that never came keep the call
    gc.enable()


HOOK = torch.zeros(0, requires_grad=True)


def output(joint, position):
    return joint.output_of(Forward(position, Pass(), joint), HOOK)


@pytest.mark.parametrize("without", range(FORWARDS + 1))
def test_a_call_ends_with_its_last_output_whichever_had_gradients(joint, without):
    for position in range(without):
        part = Forward(position, Pass(), joint)
        assert not joint.rows_of(position).requires_grad
        del part
    outputs = [output(joint, position) for position in range(without, FORWARDS)]
    assert all(each.requires_grad for each in outputs)
    assert joint.released == (without == FORWARDS)
    del outputs
    assert joint.released == 1
    assert joint._node is None


def test_outputs_of_forwards_that_never_come_end_with_those_that_are_given_up(joint):
    outputs = [output(joint, position) for position in range(2)]
    joint.release_part(2, 3)
    assert joint.released == 0
    del outputs
    assert joint.released == 1


def test_a_forward_that_came_ends_amid_the_end_of_the_others(joint):
    """With the last output that was left the node goes, and with that the forward, which releases its own part."""
    output(joint, 0)
    joint.release_part(1, 2, 3, 0)
    assert joint.released > 0
    assert joint._node is None


def test_all_come_of_one_node(joint):
    outputs = [output(joint, position) for position in (2, 0, 3)]
    assert len({each.grad_fn for each in outputs}) == 1
    assert joint.rows_of(1).requires_grad is False


def test_a_forward_is_looked_up_by_itself_once_rows_have_changed(joint):
    first = output(joint, 0)
    joint.changed = True
    assert output(joint, 1) is None
    assert first.requires_grad


def test_no_output_is_handed_out_twice(joint):
    first = output(joint, 0)
    assert output(joint, 0) is None
    del first
