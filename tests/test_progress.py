"""The bar of calls on whole tables: on a terminal alone, and once the call has taken its time."""

from __future__ import annotations

import io
import sys

import pytest
import torch

import tieredemb
from tieredemb import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(monkeypatch, stderr, call):
    monkeypatch.setattr(sys, "stderr", stderr)
    call()
    return stderr.getvalue()


def work():
    with progress.progress("working", 100) as advance:
        for _ in range(10):
            advance(10)


def test_bar_shows_on_a_terminal_once_the_call_takes_long(monkeypatch):
    pytest.importorskip("tqdm")
    assert shown(monkeypatch, Terminal(), work) == ""
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.0)
    assert "tieredemb: working" in shown(monkeypatch, Terminal(), work)


def test_nothing_shows_where_there_is_no_terminal_or_no_tqdm(monkeypatch):
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.0)
    assert shown(monkeypatch, io.StringIO(), work) == ""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert shown(monkeypatch, Terminal(), work) == ""


def test_tqdm_is_asked_for_nothing_until_a_bar_is_to_be_seen(monkeypatch):
    tqdm = pytest.importorskip("tqdm").tqdm
    asked = []
    monkeypatch.setattr(tqdm, "get_lock", lambda: asked.append(1))
    shown(monkeypatch, io.StringIO(), work)
    shown(monkeypatch, Terminal(), work)
    assert asked == []


def test_every_call_on_whole_tables_shows_a_bar(monkeypatch, tmp_path):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.0)
    bag = tieredemb.TieredEmbeddingBag(500, 8, capacity=50, optimizer=tieredemb.Adagrad(lr=0.1), device="cpu")
    state = {"weight": torch.rand(500, 8, device="cpu")}
    optimizer = bag.fused_optimizer.state_dict()
    for call, title in (
        (lambda: bag.load_state_dict(state), "setting weights"),
        (bag.state_dict, "copying weights"),
        (bag.fused_optimizer.state_dict, "copying optimizer state"),
        (lambda: bag.fused_optimizer.load_state_dict(optimizer), "setting optimizer state"),
        (lambda: bag.save_checkpoint(tmp_path), "writing rows"),
        (lambda: bag.load_checkpoint(tmp_path), "verifying rows"),
        (lambda: bag.load_checkpoint(tmp_path), "loading rows"),
    ):
        assert f"tieredemb: {title}" in shown(monkeypatch, Terminal(), call), title
