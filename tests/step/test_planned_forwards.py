"""How a forward finds its plan: by the very tensors that it is given, as they are."""

from __future__ import annotations

import pytest
import torch

from tieredemb.step.planned_forwards import CompletedFuture, Planned, PlannedForwards


class Plan:
    """What was planned."""

    def complete(self):
        return True


class Waits:
    """Forwards of these inputs, each in tables of its own, that were planned as one."""

    def __init__(self, *inputs):
        self.tables = [object() for _ in inputs]
        self.planned = Planned(list(zip(self.tables, inputs, strict=True)), CompletedFuture(Plan()))

    def come(self, number, given):
        """Whether one that comes is taken for that forward."""
        forwards = PlannedForwards()
        forwards.add(self.planned)
        return forwards.take(self.tables[number], given) is not None


def test_inputs_are_known_by_their_memory_form_and_content():
    ids, other, offsets = torch.arange(6), torch.arange(6), torch.arange(3)
    waits = Waits((ids, offsets), (other, offsets), (ids,))
    assert not waits.come(0, (other, offsets))
    assert not waits.come(0, (ids,))
    assert not waits.come(2, (ids, None))
    assert not waits.come(2, (ids.view(2, 3),))
    assert waits.planned.left == 3
    assert waits.come(0, (ids, offsets))
    assert waits.come(1, (other, offsets))
    assert waits.come(2, (ids.view(6),))
    assert waits.planned.left == 0


def test_a_forward_is_taken_once():
    ids = torch.arange(6)
    waits = Waits((ids,), (ids,))
    assert waits.come(1, (ids,))
    assert not waits.come(1, (ids,))
    assert waits.planned.left == 1


def test_inputs_that_were_changed_since_are_others():
    ids, offsets = torch.arange(6), torch.arange(3)
    waits = Waits((ids, offsets, None))
    ids.add_(1)
    assert not waits.come(0, (ids, offsets, None))


def test_what_was_planned_again_is_of_the_content_then():
    ids, offsets = torch.arange(6), torch.arange(3)
    waits = Waits((ids, offsets))
    ids.add_(1)
    again = waits.planned.rebind(Plan())
    assert not waits.come(0, (ids, offsets))
    waits.planned = again
    assert waits.come(0, (ids, offsets))
    ids.add_(1)
    waits.planned = again.rebind(Plan())
    ids.add_(1)
    assert not waits.come(0, (ids, offsets))


def test_inputs_made_in_inference_mode_are_known_by_their_memory():
    with torch.inference_mode():
        ids = torch.arange(6)
        assert not Waits((ids,)).come(0, (ids.clone(),))
    assert Waits((ids,)).come(0, (ids,))


@pytest.mark.parametrize("arrives", [True, False])
def test_a_part_of_a_joint_plan_is_taken_once_all_of_it_has_come(arrives):
    """Rows may have been left for later; where they fail to come, the forward plans anew."""
    ids, asked = torch.arange(6), []

    class Joint:
        contexts = ()

        def complete(self):
            asked.append("complete")
            return arrives

        def share(self, number, given):
            asked.append("share")
            return number, given

        def release_part(self, number):
            asked.append("release")

    tables, forwards = object(), PlannedForwards()
    forwards.add(Planned([(tables, (ids,))], CompletedFuture(Joint()), shared=Joint()))
    assert forwards.take(tables, (ids,)) == ((0, (ids,)) if arrives else None)
    assert asked == (["complete", "share"] if arrives else ["complete", "release"])
