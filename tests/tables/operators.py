"""Every operator of torch that takes a tensor, tried on a table: what each does, by torch's own samples of arguments.

`python -m tests.tables.operators` writes what it finds into docs/limits.md.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

import tieredemb as te
from tieredemb.errors import UnsupportedError

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"
BEGIN, END = "<!-- operators of torch: python -m tests.tables.operators -->\n", "\n<!-- /operators of torch -->"
ROWS, WIDTH = 400, 8
SAMPLES = 3  # of arguments, of those that torch has for an operator
ANY = {"empty_like", "new_empty", "new_empty_strided"}  # their numbers are any
WIDER = {"as_strided"}  # a view of a view may leave that, within the table; not within a tensor that ends there


def tried() -> dict[str, str]:
    """For each operator, and with "_" behind its name for that in place: "same", "refused", or what went wrong."""
    from torch.testing._internal.common_methods_invocations import op_db

    table, found = te.TieredEmbedding(ROWS, WIDTH, capacity=5, device="cpu"), defaultdict(list)
    for operator in op_db:
        if torch.float32 not in operator.dtypes or operator.name in ANY | WIDER:
            continue
        for ending, function in (("", operator.op), ("_", operator.get_inplace())):
            if function is not None:
                name = operator.name.removesuffix("_") + ending
                found[name] += [outcome(table, function, sample) for sample in samples_of(operator)]
    return {name: max(outcomes, key=badness) for name, outcomes in found.items() if outcomes}


def badness(outcome: str) -> int:
    return {"same": 0, "refused": 1}.get(outcome, 2)


def samples_of(operator) -> Iterator:
    """Some of torch's samples of its arguments, of those whose first is a tensor of floats."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        # not operator.sample_inputs, which looks at the whole stack for the name of a test
        samples = operator.sample_inputs_func(operator, "cpu", torch.float32, False)
        for sample, _ in zip(samples, range(SAMPLES), strict=False):
            first = sample.input
            is_tensor = isinstance(first, torch.Tensor) and first.layout is torch.strided
            if is_tensor and first.dtype is torch.float32 and first.numel() <= ROWS * WIDTH:
                yield sample


def outcome(table, function, sample) -> str:
    """What becomes of a table, whose first elements are the sample's, and of a tensor with them."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = sample.input.detach().clone(memory_format=torch.contiguous_format)
        flat = table.weight.view(-1)[: plain.numel()]
        flat.copy_(plain.reshape(-1))
        tiered = flat.view(plain.shape)
        other = copy.deepcopy(sample)  # its other arguments may be written to
        expected, error = returned(function, plain, sample)
        result, raised = returned(function, tiered, other)
        if error is not None and raised is not None:
            return "same"
        if isinstance(raised, UnsupportedError):
            return "refused"
        if raised is not None or error is not None:
            return f"{type(error).__name__} for a tensor, {type(raised).__name__} for a table: {raised}"
        if not equal(result, expected):
            return f"another result: {result}, not {expected}"
        return "same" if equal(tiered, plain) else f"other elements: {tiered + 0}, not {plain}"


def returned(function, first, sample):
    torch.default_generator.manual_seed(
        0
    )  # torch.manual_seed() notes the stack for each kind of device that is not there
    try:
        return function(first, *sample.args, **sample.kwargs), None
    except Exception as error:
        return None, error


def equal(ours, theirs) -> bool:
    if isinstance(theirs, tuple | list):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    if not isinstance(theirs, torch.Tensor):
        return ours == theirs or ours is theirs
    ours, theirs = ours.clone(), theirs.clone()
    if theirs.layout is not torch.strided:
        ours, theirs = ours.to_dense(), theirs.to_dense()
    same_kind = type(ours) is torch.Tensor and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    return same_kind and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def text(outcomes: dict[str, str]) -> str:
    """Markdown: what is refused, and of how many."""
    refused = sorted(name for name, outcome in outcomes.items() if outcome == "refused")
    names = ", ".join(f"`{name}`" for name in refused)
    return (
        f"{len(outcomes)} operators of `torch.testing` that take a tensor of floats, in place or not, were tried on a "
        f"CPU without gradients, with up to {SAMPLES} samples of arguments each: "
        f"{len(outcomes) - len(refused)} of them do with a table what they do with a tensor that has its rows "
        f"(torch {torch.__version__.partition('+')[0]}). These raise `UnsupportedError`, as they change the shape of a "
        f"tensor in place: {names}."
    )


def written(page: str, outcomes: dict[str, str]) -> str:
    """The page with that in its place."""
    return re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: BEGIN + text(outcomes) + END, page, flags=re.DOTALL
    )


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), tried()))
