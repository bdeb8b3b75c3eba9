"""The event stream: runtimes emit, sinks listen, and nobody pays while nobody listens."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from ds_spec.event import Event

logger = logging.getLogger(__name__)

Sink = Callable[[Event], None]

# Replaced as a whole under the lock, so that emit reads one tuple without locking.
_sinks: tuple[Sink, ...] = ()
_lock = threading.Lock()
_reported: set[int] = set()


def listening() -> bool:
    """Whether an event would reach anyone; check before building a costly one."""
    return bool(_sinks)


def emit(event: Event) -> None:
    """Hand ``event`` to every sink, in the order they subscribed.

    Without one it costs a call and a look at an empty tuple. A sink that raises is logged once and disturbs
    neither the caller nor the other sinks.
    """
    for sink in _sinks:
        try:
            sink(event)
        except Exception:
            if _fails_first(sink):
                logger.exception("event sink %r failed; its further failures are not logged", sink)


def _fails_first(sink: Sink) -> bool:
    with _lock:
        first = id(sink) not in _reported
        _reported.add(id(sink))
    return first


class Subscription:
    """A sink's place in the stream; ends with :meth:`close` or the ``with`` block."""

    def __init__(self, sink: Sink) -> None:
        self._sink: Sink | None = sink

    def close(self) -> None:
        """Stop listening; harmless when closed already."""
        global _sinks  # noqa: PLW0603 -- the stream is one per process
        with _lock:
            if self._sink is not None:
                remaining = list(_sinks)
                remaining.remove(self._sink)
                _sinks = tuple(remaining)
                _reported.discard(id(self._sink))
                self._sink = None

    def __enter__(self) -> "Subscription":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def subscribe(sink: Sink) -> Subscription:
    """Send every event of this process to ``sink`` until the subscription is closed.

    ``sink`` is called in the thread that emits, so it must be quick and safe to call from several. An event
    that another thread is just emitting may still arrive after the subscription has been closed.
    """
    global _sinks  # noqa: PLW0603 -- the stream is one per process
    subscription = Subscription(sink)
    with _lock:
        _sinks = (*_sinks, sink)
    return subscription


@contextmanager
def collect() -> Iterator[list[Event]]:
    """The events of a ``with`` block, as a list that grows."""
    seen: list[Event] = []
    with subscribe(seen.append):
        yield seen
