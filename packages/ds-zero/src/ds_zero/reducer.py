"""When gradients are reduced: as soon as they are ready, in one order that every rank shares."""

from collections import deque
from collections.abc import Sequence

from ds_comm import Communicator
from ds_zero.gradients import FlatGradients

# Reductions in flight. Two overlap one another and the backward; more only hold more memory.
MAX_IN_FLIGHT = 2


class Reducer:
    """Reduces every flat once per backward.

    Ranks may finish their gradients in different orders, and a rank may not touch a flat at all. So a flat
    waits for those before it in the order, and what is left is flushed at the end of backward, zeros for
    what no local gradient reached. The order starts as the reverse of registration and becomes, after the
    first backward, the one rank 0 saw.

    Attributes:
        enabled: off inside ``no_sync``: gradients stay with this rank.
    """

    def __init__(self, gradients: Sequence[FlatGradients], comm: Communicator) -> None:
        self.enabled = True
        self._comm = comm
        self._order = list(reversed(gradients))
        self._labels = {gradient.flat.label: gradient for gradient in gradients}
        self._arrivals: list[FlatGradients] | None = []
        self._next = 0
        self._ready: set[str] = set()
        self._in_flight: deque[FlatGradients] = deque()

    def add(self, gradient: FlatGradients) -> None:
        """Reduce this flat too, last until the next backward shows when it is ready."""
        self._order.append(gradient)
        self._labels[gradient.flat.label] = gradient
        self._arrivals = []

    def begin_backward(self) -> None:
        """Start over at the head of the order."""
        self._next = 0
        self._ready.clear()
        for gradient in self._order:
            gradient.begin_backward()

    def mark_ready(self, gradient: FlatGradients) -> None:
        """All gradients of this flat have arrived; reduce what the order allows."""
        self._ready.add(gradient.flat.label)
        if self._arrivals is not None:
            self._arrivals.append(gradient)
        while self.enabled and self._next < len(self._order):
            following = self._order[self._next]
            if following.flat.label not in self._ready:
                return
            self._start(following)

    def end_backward(self) -> None:
        """Reduce the rest and wait for everything; under ``no_sync`` nothing moves."""
        if not self.enabled:
            return
        while self._next < len(self._order):
            self._start(self._order[self._next])
        while self._in_flight:
            self._in_flight.popleft().finish_reduce()
        if self._arrivals is not None:
            self._learn_order(self._arrivals)
            self._arrivals = None

    def _start(self, gradient: FlatGradients) -> None:
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            self._in_flight.popleft().finish_reduce()
        gradient.start_reduce()
        self._in_flight.append(gradient)
        self._next += 1

    def _learn_order(self, arrivals: Sequence[FlatGradients]) -> None:
        labels = list(dict.fromkeys(gradient.flat.label for gradient in arrivals))
        rest = [gradient.flat.label for gradient in self._order if gradient.flat.label not in labels]
        agreed = self._comm.all_gather_object(labels + rest, tag="reduction order")[0]
        self._order = [self._labels[label] for label in agreed]

    def zero(self) -> None:
        """Forget every gradient."""
        for gradient in self._order:
            gradient.zero()
