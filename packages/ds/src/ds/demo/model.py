"""A small GPT in plain torch, to be read in one sitting; knows nothing of ds, saved beside its weights."""

import dataclasses
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

# Shapes: B batch, T tokens, D width, H heads, V vocabulary


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of the model."""

    vocabulary: int = 2048
    context: int = 128
    width: int = 256
    depth: int = 6
    heads: int = 4


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) to (B, T, D)."""
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Turn pairs of elements of (B, H, T, D / H) by angles that grow with the position.

    Source: RoFormer, arXiv:2104.09864.
    """
    half = x.shape[-1] // 2
    speed = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_norm = nn.RMSNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) to (B, T, D)."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.feed_norm(x))))


class GPT(nn.Module):
    """Token embedding, blocks, and an output tied to the token embedding."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.zeros_(parameter)  # a block changes nothing at first
            elif parameter.dim() == 2:
                nn.init.normal_(
                    parameter, std=0.02 if parameter is self.tokens.weight else config.width**-0.5
                )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens (B, T) to logits (B, T, V)."""
        # As the output, the embedding wants small numbers; as the input of the blocks, numbers around 1.
        x = F.rms_norm(self.tokens(tokens), (self.config.width,))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of every next token of ``batch`` (B, T + 1), in nats."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def generate(
    model: nn.Module, tokens: torch.Tensor, *, num_tokens: int, context: int, seed: int = 0
) -> torch.Tensor:
    """Continue ``tokens`` (1, T) by ``num_tokens`` samples at temperature 0.8; the same for the same seed."""
    generator = torch.Generator(device=tokens.device).manual_seed(seed)
    for _ in range(num_tokens):
        logits = model(tokens[:, -context:])[:, -1].float() / 0.8
        following = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens


def load_gpt(folder: str | Path) -> GPT:
    """The model that was saved in ``folder``, read by plain torch and safetensors."""
    from safetensors.torch import load_file

    folder = Path(folder)
    model = GPT(GPTConfig(**json.loads((folder / "config.json").read_text())))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    state: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        state |= load_file(str(folder / name))
    state["head.weight"] = state["tokens.weight"]  # tied: stored once
    model.load_state_dict(state)
    return model
