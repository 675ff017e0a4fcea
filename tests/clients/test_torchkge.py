"""Models of torchkge, trained as its examples do: their `normalize_parameters()` writes whole tables between steps."""

from __future__ import annotations

import beside
import numpy as np
import pytest
import torch

beside.require("torchkge")

from torchkge import models  # noqa: E402 - skipped where it is not there
from torchkge.utils import MarginLoss  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

ENTITIES, RELATIONS, WIDTH = 500, 20, 16
TRIPLES, BATCH, EPOCHS = 512, 64, 3
MODELS = {
    "TransE": lambda: models.TransEModel(WIDTH, ENTITIES, RELATIONS, dissimilarity_type="L2"),
    "TransH": lambda: models.TransHModel(WIDTH, ENTITIES, RELATIONS),
    "TransD": lambda: models.TransDModel(WIDTH, WIDTH, ENTITIES, RELATIONS),
    "TorusE": lambda: models.TorusEModel(WIDTH, ENTITIES, RELATIONS, dissimilarity_type="torus_L2"),
    "RESCAL": lambda: models.RESCALModel(WIDTH, ENTITIES, RELATIONS),
    "DistMult": lambda: models.DistMultModel(WIDTH, ENTITIES, RELATIONS),
    "ComplEx": lambda: models.ComplExModel(WIDTH, ENTITIES, RELATIONS),
    "Analogy": lambda: models.AnalogyModel(WIDTH, ENTITIES, RELATIONS),
}


@pytest.fixture(scope="module")
def triples():
    """Heads, tails and relations of facts, and heads and tails of what is none."""
    rng = np.random.default_rng(0)
    rows = (ENTITIES, ENTITIES, RELATIONS, ENTITIES, ENTITIES)
    return [torch.from_numpy(beside.skewed(rng, count, TRIPLES)) for count in rows]


def train(model, optimizer, triples):
    """The loop of the documentation's examples; returns the loss of every step."""
    criterion, losses = MarginLoss(0.5), []
    for _ in range(EPOCHS):
        for h, t, r, n_h, n_t in zip(*(each.split(BATCH) for each in triples), strict=True):
            optimizer.zero_grad()
            positive, negative = model(h, t, r, n_h, n_t)
            loss = criterion(positive, negative)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.normalize_parameters()
    return losses


def predict(model, triples):
    with torch.no_grad():
        return model.scoring_function(*triples[:3]).double().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_torchkge_model_trains_as_before(name, triples):
    def run(converted, move):
        torch.manual_seed(0)
        model = MODELS[name]()
        move(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-5)
        if converted:
            beside.convert(model, optimizer)
        losses = train(model, optimizer, triples)
        return beside.Trained(model, np.array(losses), predict(model, triples))

    plain, ours = beside.assert_trains_alike(run)
    ours.normalize_parameters()
    plain.load_state_dict(ours.state_dict())
    np.testing.assert_array_equal(predict(plain, triples), predict(ours, triples))
