"""What the demo shows: a live bar when a person watches, plain lines otherwise."""

from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import ds_comm
from ds.demo.model import GPTConfig

PLAIN_LINES = 10


class Display:
    """Progress of the training on one console; silent on all ranks but one.

    Args:
        steps: steps to come.
        shown: whether this rank shows anything.
    """

    def __init__(self, steps: int, *, shown: bool) -> None:
        self._steps = steps
        self._console = Console(quiet=not shown, stderr=False)
        self._planned = 0
        self._bar: Progress | None = None
        self._task: Any = None

    def start(self, config: GPTConfig, world: ds_comm.World, stage: int, planned_bytes: int) -> None:
        """Say what will be trained, and open the bar."""
        self._planned = planned_bytes
        self._console.print(
            f"GPT of {config.depth} blocks, width {config.width}, {config.vocabulary} tokens; ZeRO stage {stage} "
            f"on {world.world_size} rank(s), {world.device}; plan {_mb(planned_bytes)} per rank"
        )

    def _open_bar(self) -> None:
        if self._console.is_terminal and self._bar is None:
            columns = [
                "step {task.completed}/{task.total}",
                "loss {task.fields[loss]:.3f}",
                "{task.fields[rest]}",
            ]
            parts = [
                TextColumn(columns[0]),
                BarColumn(bar_width=16),
                *(TextColumn(text) for text in columns[1:]),
            ]
            self._bar = Progress(*parts, TimeRemainingColumn(), console=self._console)
            self._task = self._bar.add_task("train", total=self._steps, loss=0.0, rest="")
            self._bar.start()

    def advance(self, step: int, loss: float, tokens_per_s: float, peak_bytes: int) -> None:
        """Show one step."""
        rest = f"{tokens_per_s:,.0f} tok/s, {_mb(peak_bytes)} of {_mb(self._planned)}"
        self._open_bar()
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=loss, rest=rest)
        elif step == 1 or step % max(1, self._steps // PLAIN_LINES) == 0:
            self._console.print(f"step {step}/{self._steps}  loss {loss:.3f}  {rest}")

    def stop(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()

    def text(self, title: str, text: str) -> None:
        """Show generated text."""
        self._console.print(
            Panel(text.strip(), title=f"generated {title} training", title_align="left"), markup=False
        )


def _mb(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
