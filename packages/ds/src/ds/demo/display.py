"""What the demo shows: a live bar when a person watches, plain lines otherwise."""

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from ds.demo.options import Result, Sample, Started, Step

PLAIN_LINES = 12


class Display:
    """Shows the messages of rank 0 on one console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started: Started | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def started(self, message: Started) -> None:
        """Say what will be trained on what."""
        self._started = message
        self._console.print(
            f"GPT with {message.num_parameters / 1e6:.1f} M parameters, {message.num_tokens:,} tokens of text"
            f", {message.steps} steps\n"
            f"ZeRO stage {message.stage} on {message.ranks} {message.device} rank(s), {message.dtype}; "
            f"plan: {mb(message.planned_bytes)} per rank",
            highlight=False,
        )

    def sample(self, when: str, text: str, loss: float) -> None:
        """Show what the model writes."""
        self._console.print(f"\n{when} training, held-out loss {loss:.3f}, it writes:", style="bold")
        self._console.print(Padding(Text(text.strip(), style="italic"), (0, 2)), "")

    def untrained(self, message: Sample) -> None:
        """Show what the untrained model writes."""
        self.sample("Before", message.text, message.loss)

    def step(self, message: Step) -> None:
        """Show one step."""
        if self._started is None:
            return
        memory = f"{mb(max(message.peak_bytes))} of {mb(self._started.planned_bytes)}"
        if self._console.is_terminal:
            self._bar().update(
                self._task,
                completed=message.step,
                loss=f"{message.loss:.2f}",
                speed=f"{message.tokens_per_s:,.0f}",
                memory=memory,
            )
            return
        every = max(1, self._started.steps // PLAIN_LINES)
        if message.step == 1 or message.step % every == 0 or message.step == self._started.steps:
            per_rank = " ".join(mb(peak) for peak in message.peak_bytes)
            self._console.print(
                f"step {message.step}/{self._started.steps}  loss {message.loss:.3f}  "
                f"{message.tokens_per_s:,.0f} tokens/s  held per rank: {per_rank} "
                f"of {mb(self._started.planned_bytes)} planned",
                highlight=False,
                soft_wrap=True,
            )

    def _bar(self) -> Progress:
        if self._progress is None and self._started is not None:
            self._progress = Progress(
                TextColumn("{task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("loss {task.fields[loss]}"),
                TextColumn("{task.fields[speed]} tok/s"),
                TextColumn("{task.fields[memory]}"),
                TimeRemainingColumn(compact=True),
                console=self._console,
                expand=True,
            )
            self._task = self._progress.add_task("", total=self._started.steps, loss="", speed="", memory="")
            self._progress.start()
        if self._progress is None:
            raise RuntimeError("a step came before the start")
        return self._progress

    def result(self, message: Result, after: str) -> None:
        """Show what the trained model writes, and what it took."""
        self.sample("After", after, message.loss_last)
        self._console.print(
            f"Held-out loss {message.loss_first:.3f} -> {message.loss_last:.3f}, "
            f"{message.tokens_per_s:,.0f} tokens/s, at most {mb(message.peak_bytes)} of "
            f"{mb(message.planned_bytes)} planned per rank.\n"
            f"The model is in {message.out}: {message.ranks} safetensors file(s) with their index, "
            "tokenizer.json, and model.py to load them without ds.",
            highlight=False,
        )

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def mb(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / 1e6:.1f} MB"
