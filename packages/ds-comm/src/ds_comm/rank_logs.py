"""Output of launched ranks: one file per rank and stream, followed line by line while they run."""

import threading
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from ds_comm.rank_start import log_name

LOOK_EVERY_S = 0.05
STREAMS = ("stdout", "stderr")
OnLine = Callable[[int, str, str], None]


class RankLogs(LogsSpecs):
    """Files ``rank-0.stdout.log``, ``rank-0.stderr.log``, ... in one folder, as the agent asks for them."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self.files = {
            (rank, stream): folder / log_name(rank, stream) for rank in range(num_ranks) for stream in STREAMS
        }

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Where the agent finds what each rank tells; ranks redirect their streams themselves."""
        error_files = {rank: str(self._folder / f"rank-{rank}.error.json") for rank in envs}
        for rank, environment in envs.items():
            environment["TORCHELASTIC_ERROR_FILE"] = error_files[rank]
        return LogsDest(
            stdouts=dict.fromkeys(envs, ""),
            stderrs=dict.fromkeys(envs, ""),
            error_files=error_files,
        )

    def last_lines(self, rank: int, count: int) -> tuple[str, ...]:
        """End of a rank's error output, without empty lines at its end."""
        path = self.files[rank, "stderr"]
        text = path.read_text(errors="replace") if path.exists() else ""
        return tuple(text.rstrip().splitlines()[-count:])


class LogFollower:
    """Calls ``on_line(rank, stream, line)`` for every whole line as it appears, from one thread.

    Lines end at a newline, or at a carriage return as progress bars write it.
    """

    def __init__(self, logs: RankLogs, on_line: OnLine) -> None:
        self._files = logs.files
        self._on_line = on_line
        self._offsets = dict.fromkeys(self._files, 0)
        self._rest = dict.fromkeys(self._files, b"")
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="ds-comm-logs", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._finished.wait(LOOK_EVERY_S):
            self._read_all()
        self._read_all()
        for (rank, stream), rest in self._rest.items():
            if rest:
                self._on_line(rank, stream, rest.decode(errors="replace"))

    def _read_all(self) -> None:
        for key, path in self._files.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._offsets[key])
                new = file.read()
            self._offsets[key] += len(new)
            *lines, self._rest[key] = (
                (self._rest[key] + new).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            )
            for line in lines:
                self._on_line(*key, line.decode(errors="replace"))

    def close(self) -> None:
        """Give what is left and stop."""
        self._finished.set()
        self._thread.join()
