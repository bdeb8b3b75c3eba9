"""What ds-zero raises beyond ValueError and TypeError."""


class ZeroError(RuntimeError):
    """Any failure of the sharding engine."""


class NonFiniteGradientError(ZeroError):
    """The global gradient norm is infinite or NaN; no rank has changed its weights."""


class InternalError(ZeroError):
    """A broken invariant of the engine itself, never the caller's mistake."""


class LossScaleError(ZeroError):
    """A gradient overflows although the loss scale is as small as it may be."""


class SwapError(ZeroError):
    """A swap file could not be made, written or read; the message has its path and what to do."""
