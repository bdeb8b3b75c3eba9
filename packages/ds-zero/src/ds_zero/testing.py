"""A small model with every awkward parameter there is, for tests of ds-zero and of what is built on it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 50


class OddBlock(nn.Module):
    """A residual block with odd sizes and a parameter that no forward uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.unused = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: ``x`` and the result are (..., width)."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class OddModel(nn.Module):
    """Tied, frozen, reused, unused, zero-element and odd-sized parameters in a few thousand elements.

    Args:
        width: of the residual stream; odd on purpose.
        depth: blocks; the first one runs twice.
        recompute: run every block under torch's non-reentrant activation checkpointing.
        skip: index of a block to leave out.
    """

    def __init__(
        self, width: int = 33, depth: int = 3, *, recompute: bool = False, skip: int | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(OddBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.full((width,), 0.5), requires_grad=False)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.tensor(1.25))
        self.recompute = recompute
        self.skip = skip

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Shapes: ``tokens`` (batch, length) -> loss of predicting them from themselves, ()."""
        x = self.embed(tokens) * (self.frozen * self.scale).to(self.embed.weight.dtype)
        for index, block in enumerate([self.blocks[0], *self.blocks]):
            if index - 1 != self.skip:
                x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def odd_optimizer(model: nn.Module, learning_rate: float = 1e-2) -> torch.optim.AdamW:
    """AdamW with two groups: weight decay on matrices, none on vectors. Leaves no trainable parameter out."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trainable if parameter.dim() > 1]
    vectors = [parameter for parameter in trainable if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate)


def odd_batches(
    num_batches: int, *, batch_size: int = 4, length: int = 9, seed: int = 5
) -> list[torch.Tensor]:
    """Token batches of shape (batch_size, length), the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, VOCABULARY, (batch_size, length), generator=generator) for _ in range(num_batches)
    ]
