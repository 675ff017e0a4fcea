"""How a forward finds its plan: by the very tensors that it is given, as they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tieredemb.step.joint_call import PlannedTogether
from tieredemb.step.planned_forwards import Made, Seen, marks


def is_same(seen, number, given):
    return seen.is_same(number, given, marks(given))


def test_inputs_are_known_by_their_memory_form_and_content():
    ids, other, offsets = torch.arange(6), torch.arange(6), torch.arange(3)
    seen = Seen([(ids, offsets), (other, offsets), (ids,)])
    assert is_same(seen, 0, (ids, offsets))
    assert is_same(seen, 1, (other, offsets))
    assert is_same(seen, 2, (ids,))
    assert not is_same(seen, 0, (other, offsets))
    assert not is_same(seen, 0, (ids,))
    assert not is_same(seen, 2, (ids, None))
    assert not is_same(seen, 2, (ids.view(2, 3),))
    assert is_same(seen, 2, (ids.view(6),))


def test_inputs_that_were_changed_since_are_others():
    ids, offsets = torch.arange(6), torch.arange(3)
    seen = Seen([(ids, offsets, None)])
    assert is_same(seen, 0, (ids, offsets, None))
    ids.add_(1)
    assert not is_same(seen, 0, (ids, offsets, None))


def test_what_was_planned_again_is_of_the_content_then():
    ids, offsets = torch.arange(6), torch.arange(3)
    seen = Seen([(ids, offsets)])
    ids.add_(1)
    again = seen.again()
    assert is_same(again, 0, (ids, offsets))
    assert not is_same(seen, 0, (ids, offsets))
    ids.add_(1)
    assert not is_same(again, 0, (ids, offsets))


def test_inputs_made_in_inference_mode_are_known_by_their_memory():
    with torch.inference_mode():
        ids = torch.arange(6)
    seen = Seen([(ids,)]).again()
    assert is_same(seen, 0, (ids,))
    with torch.inference_mode():
        assert not is_same(seen, 0, (ids.clone(),))


@pytest.mark.parametrize("arrives", [True, False])
def test_a_part_of_a_joint_plan_is_taken_once_all_of_it_has_come(arrives):
    """Rows may have been left for later; where they fail to come, the forward plans anew."""
    ids, asked = torch.arange(6), []

    class Joint:
        def complete(self):
            asked.append("complete")
            return arrives

        def share(self, number, context, given):
            asked.append("share")
            return number, context, given

        def release_part(self, number):
            asked.append("release")

    context = SimpleNamespace(tables=object())
    planned = PlannedTogether(Made(Joint()), [(context, (ids,))])
    number = planned.find(context.tables, (ids,), marks((ids,)))
    assert planned.call_of(number) == ((0, context, (ids,)) if arrives else None)
    assert asked == (["complete", "share"] if arrives else ["complete", "release"])
