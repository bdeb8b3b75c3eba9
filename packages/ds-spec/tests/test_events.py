"""Events reach every listener, and neither a broken listener nor a second thread disturbs who emits."""

import logging
import threading

import pytest

from ds_spec import MemoryEvent, events

EVENT = MemoryEvent(component="parameters", bytes_held=3, time_s=0.5, rank=0)


def test_events_reach_every_listener_until_it_closes():
    with events.collect() as outer:
        assert events.listening()
        with events.collect() as inner:
            events.emit(EVENT)
        events.emit(EVENT)
    events.emit(EVENT)
    assert (inner, outer) == ([EVENT], [EVENT, EVENT])
    assert not events.listening()


def test_a_listener_that_raises_is_reported_once_and_harms_nobody(caplog):
    def broken(event):
        raise OSError("disk full")

    with caplog.at_level(logging.ERROR), events.subscribe(broken), events.collect() as seen:
        events.emit(EVENT)
        events.emit(EVENT)
    assert seen == [EVENT, EVENT]
    assert caplog.text.count("OSError: disk full") == 1


def test_closing_twice_is_harmless_and_ends_only_that_subscription():
    seen = []
    first, second = events.subscribe(seen.append), events.subscribe(seen.append)
    first.close()
    first.close()
    events.emit(EVENT)
    second.close()
    events.emit(EVENT)
    assert seen == [EVENT]


def test_an_interrupt_in_a_listener_is_not_swallowed():
    def interrupted(event):
        raise KeyboardInterrupt

    with events.subscribe(interrupted), pytest.raises(KeyboardInterrupt):
        events.emit(EVENT)


def test_listeners_may_come_and_go_while_others_emit():
    stop = threading.Event()

    def come_and_go():
        while not stop.is_set():
            with events.collect():
                pass

    guests = [threading.Thread(target=come_and_go) for _ in range(3)]
    with events.collect() as seen:
        for guest in guests:
            guest.start()
        for _ in range(2000):
            events.emit(EVENT)
        stop.set()
        for guest in guests:
            guest.join()
    assert len(seen) == 2000
    assert not events.listening()


def test_events_from_many_threads_all_arrive():
    def work():
        for _ in range(200):
            events.emit(EVENT)

    with events.collect() as seen:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(seen) == 1600
