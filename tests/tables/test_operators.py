"""Every operator of torch does with a table what it does with a tensor, or is refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from tables import operators

CONSTRAINTS = operators.PAGE.parents[1] / "constraints.txt"


@pytest.fixture(scope="module")
def outcomes():
    pytest.importorskip("expecttest", reason="torch.testing's samples need expecttest: pip install 'tieredemb[dev]'")
    return operators.tried()


def test_every_operator_does_what_it_does_with_a_tensor_or_is_refused(outcomes):
    assert len(outcomes) > 500
    assert {name: outcome for name, outcome in outcomes.items() if operators.badness(outcome) == 2} == {}


def test_the_page_of_limits_names_those_that_are_refused(outcomes):
    pinned = re.search(r"^torch==(.*)$", CONSTRAINTS.read_text(), re.MULTILINE)[1]
    if torch.__version__.partition("+")[0] != pinned:
        pytest.skip(f"the page is of torch {pinned}, and this is {torch.__version__}")
    page = operators.PAGE.read_text()
    assert operators.written(page, outcomes) == page, "run: python -m tests.tables.operators"
    assert operators.text(outcomes) in page
