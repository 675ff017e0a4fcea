"""Tables that are collected are closed, wherever the collector comes to it, and before the process ends."""

from __future__ import annotations

import gc
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as futures

import forks
import pytest

from tieredemb.tables import collected
from tieredemb.tables.collected import wait, when_collected


class Owner:
    """Who can only be found by the collector."""

    def __init__(self):
        self.me = self


def lock_of(module, name):
    lock = getattr(module, name, None)
    if lock is None:
        pytest.skip(f"Python {sys.version_info.major}.{sys.version_info.minor} has no {name}")
    return lock


def with_threads(closed):
    """Closes as tables do, with threads that help."""
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    with ThreadPoolExecutor(1) as pool:
        closed.append(pool.submit(int, 7).result())


def test_what_is_collected_is_closed_at_once():
    closed = []
    owner = Owner()
    when_collected(owner, lambda: with_threads(closed))
    del owner
    gc.collect()
    assert closed == [7]


@pytest.mark.parametrize(
    ("module", "name"),
    [(threading, "_shutdown_locks_lock"), (futures, "_global_shutdown_lock")],
    ids=["start", "submit"],
)
def test_what_is_collected_amid_the_bookkeeping_of_threads_is_closed_behind_it(module, name):
    closed, owner = [], Owner()
    when_collected(owner, lambda: with_threads(closed))
    with lock_of(module, name):
        del owner
        gc.collect()  # here, if at all, with_threads would wait for itself
    wait()
    assert closed == [7]


def test_a_process_does_not_end_before(tmp_path):
    lock_of(threading, "_shutdown_locks_lock")
    script = f"""
import gc, threading, torch
import tieredemb as te

bag = te.TieredEmbeddingBag(
    50, 4, mode="sum", capacity=20, optimizer=te.SGD(lr=1.0), storage=te.File({str(tmp_path / "rows")!r})
)
bag(torch.arange(10).view(-1, 1)).sum().backward()
print(bag.state_dict()["weight"][:10].sum().item())
bag.me = bag
with threading._shutdown_locks_lock:
    del bag
    gc.collect()
"""
    done = forks.run(script)
    assert done.returncode == 0, done.stderr
    script = f"""
import tieredemb as te

bag = te.TieredEmbeddingBag(
    50, 4, mode="sum", capacity=20, optimizer=te.SGD(lr=1.0), storage=te.File({str(tmp_path / "rows")!r})
)
print(bag.state_dict()["weight"][:10].sum().item())
"""
    again = forks.run(script)
    assert again.stdout == done.stdout, again.stderr


def test_where_no_thread_can_be_started_the_end_of_the_process_closes(monkeypatch):
    registered, closed, owner = [], [], Owner()
    when_collected(owner, lambda: closed.append(1))
    monkeypatch.setattr(collected._thread, "start_new_thread", lambda *_: (_ for _ in ()).throw(RuntimeError("no")))
    monkeypatch.setattr(collected.atexit, "register", registered.append)
    with lock_of(threading, "_shutdown_locks_lock"):
        del owner
        gc.collect()
    wait()
    assert closed == []
    registered[0]()
    assert closed == [1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_waits_for_no_close_of_its_parents():
    script = """
import gc, os, sys, threading
from tieredemb.tables.collected import when_collected

class Owner: pass
gone = threading.Event()
owner = Owner(); owner.me = owner
when_collected(owner, gone.wait)
with threading._shutdown_locks_lock:
    del owner
    gc.collect()
if os.fork() == 0:
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
gone.set()
"""
    lock_of(threading, "_shutdown_locks_lock")
    done = forks.run(script, timeout=60)
    assert done.returncode == 0, done.stderr


FAILS = """
import sys
import tieredemb

storage = tieredemb.File(sys.argv[1])
table = tieredemb.TieredEmbeddingBag(9, 4, capacity=5, storage=storage, optimizer=tieredemb.SGD(lr=0.1))
table(__import__("torch").tensor([[1]])).sum().backward()

def full(*_):
    raise tieredemb.errors.StorageFullError("no space left")

table.tables.groups[0].cache.cold.write = full
"""


def test_rows_that_the_end_of_a_process_cannot_write_are_told_of_as_lost(tmp_path):
    ended = forks.run(FAILS, tmp_path / "rows")
    assert "StorageFullError: no space left" in ended.stderr
    assert "rows that were not written are lost" in ended.stderr
    assert "tieredemb.close(model)" in ended.stderr
