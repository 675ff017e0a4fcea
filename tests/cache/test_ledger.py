"""The ledger of a GPU's cache against a plain model that remembers every batch. Needs no GPU."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tieredemb.cache.device.effects import NOTHING_PLANNED, ONE_PLAN
from tieredemb.cache.device.ledger import Ledger
from tieredemb.cache.tickets import Flight, TicketLedger
from tieredemb.errors import StorageError


class PlainFlight(Flight):
    def size_bytes(self):
        return 0


class LedgerMachine(RuleBasedStateMachine):
    """Plans, releases, holds, captures and replays in any order. The model: `batches`, what each number has locked ·
    `flights`: those in flight · `holds`: each with the oldest batch that it keeps locked · `eager`: the last batch
    planned outside a capture · `steps`: captured ones, as `Effects` and what the model expects of them."""

    @initialize(start=st.sampled_from([0, 1000]))
    def begins(self, start):
        self.tickets = TicketLedger()
        self.ledger = Ledger(self.tickets)
        self.batches, self.flights, self.holds, self.steps = {}, {}, [], []
        self.restarts(start)

    def locked(self, oldest):
        """Ids, and whether uncached, of the batches from `oldest` on."""
        found = [what for number, what in self.batches.items() if number >= oldest]
        return sum(ids for ids, _ in found), any(uncached for _, uncached in found)

    def oldest(self, batch):
        kept = [*self.flights, *(oldest for _, oldest in self.holds)]
        return min([batch, *kept])

    def reach(self, ended):
        oldest = min(ended, default=self.last + 1)
        return self.last - oldest, self.locked(oldest)[0]

    def some(self, data):
        """All batches in flight, or some of them."""
        if not self.flights or data.draw(st.booleans()):
            return set(self.flights)
        return data.draw(st.sets(st.sampled_from(sorted(self.flights))))

    def plans(self, *, captured=False):
        """A batch begins."""
        begun = self.ledger.begin(captured=captured)
        assert begun.number == self.last + 1
        oldest = self.oldest(begun.number)
        assert begun.lag == begun.number - oldest
        assert (begun.locked, begun.uncached) == self.locked(oldest)
        return begun

    def counts(self, begun):
        assert self.ledger.count(ONE_PLAN, captured=begun.captured) == begun.number - 1
        self.last = begun.number
        if not begun.captured:
            self.eager = begun.number

    def opens(self, begun, ids, uncached):
        flight = PlainFlight(begun.number, self.tickets)
        self.tickets.open(flight, ids, uncached)
        self.flights[begun.number], self.batches[begun.number] = flight, (ids, uncached)

    @rule(ids=st.integers(1, 9), uncached=st.booleans(), fails=st.sampled_from(["", "", "", "early", "late"]))
    def plan(self, ids, uncached, fails):
        begun = self.plans()
        if fails != "early":
            self.counts(begun)
        if not fails:  # without a ticket it locks nothing
            self.opens(begun, ids, uncached)
        self.ledger.over()

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def release(self, data):
        self.flights.pop(data.draw(st.sampled_from(sorted(self.flights)))).release()

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def drop(self, data):
        del self.flights[data.draw(st.sampled_from(sorted(self.flights)))]

    @rule(amid=st.sampled_from(["", "begun", "counted"]))
    def hold(self, amid):
        """Of another thread, which may come in the middle of a plan: before its batch is in flight."""
        following = self.last + 1
        if amid:
            begun = self.plans()
        if amid == "counted":
            self.counts(begun)
        self.holds.append((self.ledger.hold(), min(self.flights, default=following)))
        if amid:
            if amid == "begun":
                self.counts(begun)
            self.opens(begun, 1, uncached=False)
            self.ledger.over()

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), dropped=st.booleans())
    def end_hold(self, data, dropped):
        hold, _ = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        if not dropped:
            hold.release()

    @precondition(lambda self: not self.flights)
    @rule(batch=st.integers(0, 50))
    def restarts(self, batch):
        self.ledger.restart(batch)
        self.holds.clear()
        self.tickets.forget_dropped()
        self.last = self.eager = batch
        self.batches.clear()

    @rule(data=st.data(), plans=st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=3), fails=st.booleans())
    def capture(self, data, plans, fails):
        """Ends some batches, as a captured step does those that the step before has left in flight."""
        ended = self.some(data)
        others = any(batch <= self.eager for batch in self.flights if batch not in ended)
        first, reach = self.last, self.reach(ended)
        self.ledger.begin_capture(ended)
        for ids, uncached in plans:
            begun = self.plans(captured=True)
            with pytest.raises(StorageError, match="from before is in flight") if others else contextlib.nullcontext():
                self.ledger.check_recurring()
            if not others:
                self.counts(begun)
                self.opens(begun, ids, uncached)
            self.ledger.over()
        for batch in () if fails else ended:
            self.flights.pop(batch).release()
        effects = self.ledger.end_capture()
        locked = tuple((number - first, *what) for number, what in self.batches.items() if number > first)
        assert (effects.plans, effects.locked) == (self.last - first, locked)
        assert (effects.distance, effects.before) == reach
        assert not locked or locked[0][0] == 1  # batches are counted from the last one before
        if not fails:
            self.steps.append((effects, locked, reach))

    @rule(ids=st.integers(1, 9))
    def capture_alone(self, ids):
        """A captured step that leaves nothing in flight."""
        begun = self.plans(captured=True)
        others = any(batch <= self.eager for batch in self.flights)
        with pytest.raises(StorageError, match="from before is in flight") if others else contextlib.nullcontext():
            self.ledger.check_recurring()
        if not others:
            self.counts(begun)
            self.opens(begun, ids, uncached=False)
            self.flights.pop(begun.number).release()
        self.ledger.over()

    @rule(data=st.data(), is_last=st.sampled_from([None, True, True, False]))
    def replay(self, data, is_last):
        ended = self.some(data)
        last = None if is_last is None else self.last - (not is_last)
        step = data.draw(st.sampled_from([None, *self.steps, *self.steps[-1:]]))
        effects, locked, (distance, before) = step or (NOTHING_PLANNED, (), (0, 0))
        expected = set(self.flights) <= ended and is_last is not False
        if step:
            expected &= all(now <= then for now, then in zip(self.reach(ended), (distance, before), strict=True))
        assert self.ledger.may_replay(ended, last, effects) == expected
        if not expected:
            return
        first = self.last
        assert self.ledger.count(effects) == first
        self.last = self.eager = first + effects.plans
        self.batches |= {first + number: what for number, *what in locked}
        for batch in ended:
            self.flights.pop(batch).release()
        for number, *_ in locked:
            self.flights[first + number] = PlainFlight(first + number, self.tickets)
            self.tickets.open(self.flights[first + number])

    @invariant()
    def agrees(self):
        if hasattr(self, "ledger"):
            assert self.ledger.last == self.last
            assert self.tickets.live == set(self.flights)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=300, stateful_step_count=30)


def test_a_hold_amid_a_plan_keeps_what_is_being_planned():
    """The thread that plans ahead may come before the batch is in flight."""
    tickets = TicketLedger()
    ledger = Ledger(tickets)
    ledger.begin()
    ledger.count(ONE_PLAN)
    hold = ledger.hold()
    ledger.over()
    assert ledger.begin().lag == 1
    hold.release()
    assert ledger.begin().lag == 0


def test_a_plan_finds_locked_what_was_released_since_its_hold():
    """It may come, on the device, before what was launched for that."""
    tickets = TicketLedger()
    ledger = Ledger(tickets)
    flights = []
    for _ in range(3):
        begun = ledger.begin()
        ledger.count(ONE_PLAN)
        flights.append(PlainFlight(begun.number, tickets))
        tickets.open(flights[-1], 1)
        ledger.over()
    flights[0].release()
    hold = ledger.hold()
    flights[1].release()
    assert [ledger.is_locked(flight.batch) for flight in flights] == [False, True, True]
    hold.release()
    assert [ledger.is_locked(flight.batch) for flight in flights] == [False, False, True]
    flights[2].release()
    ledger.restart(1)  # numbers begin anew: none of before is locked
    assert not any(ledger.is_locked(number) for number in (2, 3))


@pytest.mark.parametrize(("ids", "more"), [(5, 0), (4, 0), (6, 0), (5, 1)])
def test_a_step_is_replayed_over_no_more_than_was_locked_at_its_capture(ids, more):
    """Its plans look no further back, and have room for no more rows without a slot."""
    tickets = TicketLedger()
    ledger = Ledger(tickets)

    def plan(ids):
        begun = ledger.begin()
        ledger.count(ONE_PLAN)
        flight = PlainFlight(begun.number, tickets)
        tickets.open(flight, ids)
        ledger.over()
        return flight

    flight = plan(5)
    ledger.begin_capture([flight.batch])
    effects = ledger.end_capture()
    flight.release()
    flights = [plan(ids), *(plan(0) for _ in range(more))]
    assert ledger.may_replay([flight.batch for flight in flights], None, effects) == (ids <= 5 and not more)
