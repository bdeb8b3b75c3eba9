"""What ds-comm raises when ranks do not meet; every rank of the group raises the same one."""


class CommError(RuntimeError):
    """Any failure of communication."""


class CollectiveMismatchError(CommError):
    """Ranks disagree on what the n-th call of a group is."""


class StalledError(CommError):
    """A rank did not enter a call the others wait in: it left, or it is still doing something else."""


class PeerLostError(CommError):
    """A rank's process ended while others needed it."""


BY_NAME = {kind.__name__: kind for kind in (CommError, CollectiveMismatchError, StalledError, PeerLostError)}
