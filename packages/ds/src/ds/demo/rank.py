"""``python -m ds.demo.rank OPTIONS RESULT``: what the launcher starts, once per rank."""

import json
import sys
from pathlib import Path

import msgspec

from ds.demo.train import DemoOptions, run


def main(arguments: list[str]) -> None:
    """Run with JSON options; rank 0 writes the result file."""
    import ds_comm

    options = msgspec.json.decode(arguments[0], type=DemoOptions)
    result = run(options)
    if ds_comm.current().rank == 0:
        Path(arguments[1]).write_text(json.dumps(result))
    ds_comm.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
