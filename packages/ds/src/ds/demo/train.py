"""One rank of the demo: train, measure, save, generate."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer
from torch import nn

import ds
import ds_comm
import ds_zero
from ds.demo.display import Display
from ds.demo.model import GPT, GPTConfig, generate, next_token_loss
from ds.demo.text import Corpus, read_text, train_tokenizer

PROMPT = "The "
TOKENS_SHOWN = 60
HELD_OUT_BATCH = 8


class DemoOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks are told."""

    stage: int
    steps: int
    batch_size: int
    text: str | None
    out: str
    model: dict[str, int]


def deepspeed_config(options: DemoOptions, *, bf16: bool) -> dict[str, Any]:
    """The demo's DeepSpeed JSON."""
    return {
        "train_micro_batch_size_per_gpu": options.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": options.steps, "warmup_num_steps": max(2, options.steps // 10)},
        },
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": options.stage},
    }


def run(options: DemoOptions) -> dict[str, Any]:
    """Train on this rank among the others; the result is the same on all.

    Collective: every rank.
    """
    world = ds_comm.init()
    display = Display(options.steps, shown=world.rank == 0)
    text = read_text(Path(options.text) if options.text else None)
    config = GPTConfig(**options.model)
    tokenizer = train_tokenizer(text, config.vocabulary)
    corpus = Corpus(text, tokenizer, config.context)
    torch.manual_seed(0)
    with ds_zero.sharded_init():
        model = GPT(config)
    bf16 = world.device.type != "cpu"  # CPUs without a bf16 unit multiply it several times slower
    planned = _plan(model, options, world.world_size, bf16=bf16)
    engine, _, _, _ = ds.initialize(model=model, config=deepspeed_config(options, bf16=bf16))
    display.start(config, world, options.stage, sum(planned.values()))
    display.text("before", _continue(engine, tokenizer, config, world.device))
    first = _held_out_loss(engine, corpus, world.device)
    begin_s = time.perf_counter()
    for step in range(options.steps):
        batch = corpus.batch(step, rank=world.rank, world_size=world.world_size, size=options.batch_size)
        loss = next_token_loss(engine, batch.to(world.device))
        engine.backward(loss)
        engine.step()
        tokens = (step + 1) * options.batch_size * config.context * world.world_size
        rate = tokens / (time.perf_counter() - begin_s)
        display.advance(step + 1, float(loss.detach()), rate, ds_zero.peak_bytes(engine.module))
    last = _held_out_loss(engine, corpus, world.device)
    display.stop()
    display.text("after", _continue(engine, tokenizer, config, world.device))
    save(engine.module, tokenizer, config, Path(options.out))
    return {
        "stage": options.stage,
        "ranks": world.world_size,
        "steps": options.steps,
        "loss_first": round(first, 4),
        "loss_last": round(last, 4),
        "tokens_per_s": round(rate, 1),
        "peak_bytes": ds_zero.peak_bytes(engine.module),
        "planned_bytes": sum(planned.values()),
        "device": str(world.device),
        "out": options.out,
    }


def _plan(model: nn.Module, options: DemoOptions, world_size: int, *, bf16: bool) -> dict[str, int]:
    optimizer = torch.optim.AdamW(model.parameters())
    precision = "bf16" if bf16 else "fp32"
    return ds_zero.plan_bytes(
        model, optimizer, stage=options.stage, world_size=world_size, precision=precision
    )


@torch.no_grad()
def _held_out_loss(engine: nn.Module, corpus: Corpus, device: torch.device) -> float:
    return float(next_token_loss(engine, corpus.held_out(HELD_OUT_BATCH).to(device)))


def _continue(engine: nn.Module, tokenizer: Tokenizer, config: GPTConfig, device: torch.device) -> str:
    prompt = torch.tensor([tokenizer.encode(PROMPT).ids], device=device)
    tokens = generate(engine, prompt, num_tokens=TOKENS_SHOWN, context=config.context)
    return tokenizer.decode(tokens[0].tolist())


def save(model: nn.Module, tokenizer: Tokenizer, config: GPTConfig, folder: Path) -> None:
    """Write the weights as one safetensors file per rank, with an index, the tokenizer and the sizes.

    Tensors are gathered one module at a time and dealt out to the ranks, so no rank holds the whole model.

    Collective: every rank.
    """
    from safetensors.torch import save_file

    world = ds_comm.current()
    files = [
        f"model-{rank + 1:05d}-of-{world.world_size:05d}.safetensors" for rank in range(world.world_size)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    names = dict(model.named_parameters())
    homes: dict[str, str] = {}
    mine: dict[str, torch.Tensor] = {}
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(".".join(name.split(".")[:2]), []).append(name)
    for index, members in enumerate(groups.values()):
        owner = index % world.world_size
        homes |= dict.fromkeys(members, files[owner])
        with ds_zero.gathered([names[name] for name in members]):
            if owner == world.rank:
                mine |= {name: names[name].detach().to("cpu", copy=True) for name in members}
    save_file(mine, str(folder / files[world.rank]), metadata={"format": "pt"})
    if world.rank == 0:
        total = (
            sum(parameter.numel() for parameter in GPT(config).parameters())
            * mine[next(iter(mine))].element_size()
        )
        index_text = json.dumps({"metadata": {"total_size": total}, "weight_map": homes}, indent=2)
        (folder / "model.safetensors.index.json").write_text(index_text)
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2))
        tokenizer.save(str(folder / "tokenizer.json"))
    ds_comm.Mesh.world().axis("dp").barrier(tag="demo saved")
