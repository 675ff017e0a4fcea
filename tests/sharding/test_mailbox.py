"""Messages of ranks of one host through memory that they share: none is lost, and no rank waits for ever."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import numpy as np
import pytest

from tieredemb.sharding.mailbox import BEGIN, CHECK, NUMBER, Mailbox, open_box

RANKS, WORDS = 3, 5
LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.2)


class Connections:
    """Which ranks have ended."""

    def __init__(self, ended=()):
        self.of = list(ended)

    def ended(self):
        return self.of


def boxes(count=RANKS, timeout=LONG, ended=()):
    box = np.zeros((2, count, BEGIN + WORDS), np.int64)
    return box, [Mailbox(box, rank, Connections(ended), timeout) for rank in range(count)]


def words_of(rank, number):
    return np.arange(WORDS) + 1000 * rank + number


def test_each_rank_receives_what_all_have_sent():
    """However far one is ahead of the others."""
    _, ranks = boxes()
    found = [[] for _ in ranks]

    def run(rank):
        for number in range(300):
            ranks[rank].send(words_of(rank, number))
            found[rank].append(ranks[rank].receive())

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for received in found:
        assert len(received) == 300
        for number, words in enumerate(received):
            assert (words == [words_of(rank, number) for rank in range(RANKS)]).all()


@pytest.mark.parametrize("word", [NUMBER, CHECK, BEGIN, BEGIN + WORDS - 1])
def test_a_message_of_which_a_part_is_there_is_none(word):
    box, (one, other) = boxes(2, SHORT)
    other.send(words_of(1, 0))
    whole = box.copy()
    box[1, 1, word] += 1
    one.send(words_of(0, 0))
    with pytest.raises(RuntimeError, match=r"nothing within 0\.2 s"):
        one.receive()
    box[:] = whole
    assert (one.receive()[1] == words_of(1, 0)).all()


def test_what_a_rank_has_sent_before_it_ended_is_received():
    _, (one, other) = boxes(2, LONG, ended=[1])
    other.send(words_of(1, 0))
    one.send(words_of(0, 0))
    assert (one.receive()[1] == words_of(1, 0)).all()
    one.send(words_of(0, 1))
    with pytest.raises(RuntimeError, match="has ended"):
        one.receive()


def test_a_rank_that_has_left_receives_nothing_more():
    _, (one, _) = boxes(2)
    one.send(words_of(0, 0))
    one.close()
    with pytest.raises(RuntimeError, match="left the group"):
        one.receive()


def opened(places, *, before_opening=lambda path: None):
    """What ranks in these places open, each by itself; they exchange what each announces."""
    announced, barrier = {}, threading.Barrier(len(places))
    found = [None] * len(places)

    def every(rank, values):
        number = len(values)
        values.append(None)

        def tell(value):
            announced[number, rank] = value
            barrier.wait(60)
            if rank == 0 and number == 0:
                before_opening(value[1])
            barrier.wait(60)
            return [announced[number, other] for other in range(len(places))]

        return tell

    def run(rank):
        values = []
        found[rank] = open_box(len(places), WORDS, rank, places[rank], lambda value: every(rank, values)(value))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_ranks_of_one_place_share_memory_whose_file_is_gone():
    paths = []
    one, other = opened(["here", "here"], before_opening=paths.append)
    assert one.shape == other.shape == (2, 2, BEGIN + WORDS)
    one[1, 0, 3] = 7
    assert other[1, 0, 3] == 7
    assert not os.path.exists(paths[0])


@pytest.mark.parametrize("places", [["here", "there"], ["here", "here", "there"]])
def test_ranks_of_several_places_share_none(places):
    assert opened(places) == [None] * len(places)


def test_none_shares_memory_where_one_cannot_open_it():
    def replace(path):
        os.unlink(path)
        with open(path, "wb") as file:  # another one of that name, as on another host
            file.write(bytes(1 << 12))

    assert opened(["here", "here"], before_opening=replace) == [None, None]
