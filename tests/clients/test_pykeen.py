"""Models of pykeen, which constrain the weights of entities by `.data` after each step."""

from __future__ import annotations

import beside
import numpy as np
import pytest
import torch

beside.require("pykeen")

from pykeen.models import DistMult, RotatE, TransE  # noqa: E402 - skipped where it is not there
from pykeen.triples import TriplesFactory  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

ENTITIES, RELATIONS, WIDTH, TRIPLES, BATCH, EPOCHS = 300, 12, 16, 512, 64, 3


@pytest.fixture(scope="module")
def facts():
    rng = np.random.default_rng(0)
    columns = (beside.skewed(rng, count, TRIPLES) for count in (ENTITIES, RELATIONS, ENTITIES))
    triples = torch.from_numpy(np.stack(list(columns), axis=1))
    return TriplesFactory(
        triples,
        entity_to_id={str(n): n for n in range(ENTITIES)},
        relation_to_id={str(n): n for n in range(RELATIONS)},
    )


def train(model, optimizer, triples):
    """The loop of pykeen's training, with heads of other facts as those of none; returns the loss of every step."""
    losses = []
    for _ in range(EPOCHS):
        for positive in triples.split(BATCH):
            negative = torch.cat([positive.roll(1, 0)[:, :1], positive[:, 1:]], dim=1)
            optimizer.zero_grad()
            loss = torch.relu(1.0 + model.score_hrt(negative) - model.score_hrt(positive)).mean()
            loss.backward()
            optimizer.step()
            model.post_parameter_update()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [TransE, DistMult, RotatE])
def test_pykeen_model_trains_as_before(kind, facts):
    triples = facts.mapped_triples

    def run(converted, move):
        model = kind(triples_factory=facts, embedding_dim=WIDTH, random_seed=0)
        move(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if converted:
            beside.convert(model, optimizer)
        losses = train(model, optimizer, triples)
        with torch.no_grad():
            return beside.Trained(model, np.array(losses), model.score_hrt(triples).double().numpy())

    beside.assert_trains_alike(run)
