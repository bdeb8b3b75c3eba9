"""Log lines that every rank would say alike, said by rank 0."""

import logging
import sys
from typing import Any


def log_once(logger: logging.Logger, level: int, message: str, *values: Any) -> None:
    """Log on rank 0, or in every process as long as processes have not met."""
    comm = sys.modules.get("ds_comm")  # not imported for this: reading a configuration needs no torch
    if comm is None or not comm.is_initialized() or comm.current().rank == 0:
        logger.log(level, message, *values)
