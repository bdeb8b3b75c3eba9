"""English text that every Python carries, a tokenizer trained on the spot, and windows of its tokens."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import Dataset

# The last part of the text is held out for the loss that is reported.
HELD_OUT = 0.05
MIN_CHARACTERS = 20_000
# A paragraph with this share of letters and blanks is prose, and is written as one line.
PROSE = 0.85


def read_text(path: Path | None = None) -> str:
    """The file's text, or the manual of the Python language (465 kB of English under the PSF licence).

    Raises:
        ValueError: the file is too short to train on.
    """
    if path is None:
        from pydoc_data.topics import topics

        paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
        return "\n\n".join(unwrapped(paragraph) for paragraph in paragraphs if paragraph.strip())
    text = path.read_text(errors="replace")
    if len(text) < MIN_CHARACTERS:
        raise ValueError(
            f"{path} has {len(text)} characters, too few to learn from; "
            f"give a text of {MIN_CHARACTERS} or more"
        )
    return text


def unwrapped(paragraph: str) -> str:
    """Prose as one line, so that the model learns words and not margins; code and tables as they are."""
    share = sum(character.isalpha() or character.isspace() for character in paragraph) / len(paragraph)
    return " ".join(paragraph.split()) if share >= PROSE else paragraph


def train_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocabulary`` tokens, >= 256; the same text gives the same tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def split_tokens(text: str, tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the text, int64: the part to train on, and the part held out."""
    tokens = torch.tensor(tokenizer.encode(text).ids)
    cut = int(len(tokens) * (1.0 - HELD_OUT))
    return tokens[:cut], tokens[cut:]


class RandomWindows(Dataset[torch.Tensor]):
    """``count`` windows of ``context + 1`` tokens that start anywhere; the same ones on every rank.

    Raises:
        ValueError: there are fewer tokens than one window has.
    """

    def __init__(self, tokens: torch.Tensor, *, context: int, count: int, seed: int = 0) -> None:
        if len(tokens) <= context + 1:
            raise ValueError(f"a window of {context + 1} tokens does not fit into a text of {len(tokens)}")
        generator = torch.Generator().manual_seed(seed)
        self._tokens = tokens
        self._length = context + 1
        self._starts = torch.randint(len(tokens) - self._length, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = self._starts[index]
        return self._tokens[start : start + self._length]
