"""``ds demo``: start the ranks, show their news, then load what they saved without ds and let it write."""

import sys
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from tokenizers import Tokenizer

from ds.demo.display import Display
from ds.demo.model import generate, load_gpt
from ds.demo.options import MARK, STEPS, DemoOptions, Message, Result, Sample, Started, Step
from ds.launch import run_script

PROMPT = "The "
SAMPLE_TOKENS = 80


class Listener:
    """Takes the ranks' output line by line: messages go to the display, anything else to stderr."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self.result: Result | None = None

    def line(self, rank: int, stream: str, line: str) -> None:
        """One line of a rank."""
        if not line.startswith(MARK):
            sys.stderr.write(f"[rank {rank}] {line}\n")
            return
        match msgspec.json.decode(line[len(MARK) :], type=Message):
            case Started() as message:
                self._display.started(message)
            case Sample() as message:
                self._display.untrained(message)
            case Step() as message:
                self._display.step(message)
            case Result() as message:
                self.result = message


def run_demo(
    *,
    size: str,
    stage: int,
    num_ranks: int | None,
    text: Path | None,
    out: Path,
    steps: int | None,
    as_json: bool,
) -> int:
    """Train, show and save; the exit code of the launch.

    Raises:
        ValueError: the text is too short.
    """
    from ds.demo.text import read_text

    read_text(text)  # so that a text that does not do is refused before ranks start
    options = DemoOptions(
        size=size,
        stage=stage,
        steps=steps or STEPS[size],
        text=str(text.resolve()) if text else None,
        out=str(out),
    )
    console = Console()
    display = Display(console)
    listener = Listener(display)
    try:
        code = run_script(
            "ds.demo.train",
            [msgspec.json.encode(options).decode()],
            num_ranks=num_ranks,
            module=True,
            on_line=listener.line,
        )
    finally:
        display.close()
    if code or listener.result is None:
        return code or 1
    display.result(listener.result, write_from(out))
    if as_json:
        sys.stdout.write(msgspec.json.encode(listener.result).decode() + "\n")
    return 0


def write_from(folder: Path) -> str:
    """What the saved model writes, loaded by plain torch and safetensors."""
    model = load_gpt(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = torch.tensor([tokenizer.encode(PROMPT).ids])
    tokens = generate(model, prompt, num_tokens=SAMPLE_TOKENS, context=model.config.context)
    return tokenizer.decode(tokens[0].tolist())
