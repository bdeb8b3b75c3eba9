"""English text that every Python carries, and a tokenizer trained on it."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# Held out for the loss that is reported: the last part of the text.
HELD_OUT = 0.05


def read_text(path: Path | None) -> str:
    """The file's text, or Python's own documentation of its syntax (465 kB of English, PSF licence).

    Raises:
        ValueError: the file is too short to train on.
    """
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    text = path.read_text(errors="replace")
    if len(text) < 20_000:
        raise ValueError(f"{path} has {len(text)} characters; the demo needs at least 20,000 to learn from")
    return text


def train_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """A byte-level BPE of ``vocabulary`` tokens trained on ``text``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text[i : i + 10_000] for i in range(0, len(text), 10_000)], trainer)
    return tokenizer


class Corpus:
    """Tokens of a text, split into training and held-out parts."""

    def __init__(self, text: str, tokenizer: Tokenizer, context: int) -> None:
        tokens = torch.tensor(tokenizer.encode(text).ids)
        cut = int(len(tokens) * (1.0 - HELD_OUT))
        self._train, self._held_out = tokens[:cut], tokens[cut:]
        self._length = context + 1

    def batch(self, step: int, *, rank: int, world_size: int, size: int) -> torch.Tensor:
        """Random windows (size, context + 1) of the training part, different on every step and rank."""
        generator = torch.Generator().manual_seed(step * world_size + rank)
        starts = torch.randint(len(self._train) - self._length, (size,), generator=generator)
        return torch.stack([self._train[start : start + self._length] for start in starts])

    def held_out(self, size: int) -> torch.Tensor:
        """The same ``size`` windows of the held-out part every time."""
        starts = torch.linspace(0, len(self._held_out) - self._length, size).long()
        return torch.stack([self._held_out[start : start + self._length] for start in starts])
