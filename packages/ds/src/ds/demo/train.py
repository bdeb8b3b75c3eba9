"""One rank of the demo, ``python -m ds.demo.train OPTIONS``: train, measure, save, tell."""

import sys
import time
from pathlib import Path

import msgspec
import torch
from tokenizers import Tokenizer
from torch import nn

import ds
import ds_comm
import ds_zero
from ds.demo.model import GPT, GPTConfig, generate, next_token_loss
from ds.demo.options import (
    MARK,
    MICRO_BATCH,
    SIZES,
    DemoOptions,
    Message,
    Result,
    Sample,
    Started,
    Step,
    deepspeed_config,
)
from ds.demo.text import RandomWindows, read_text, split_tokens, train_tokenizer
from ds.demo.weights import save_weights

PROMPT = "The "
SAMPLE_TOKENS = 40
HELD_OUT_WINDOWS = 32
# Ranks compare the memory they hold every so many steps.
COMPARE_EVERY = 5


def tell(message: Message) -> None:
    """Send a message to whoever started the ranks."""
    sys.stdout.write(f"{MARK}{msgspec.json.encode(message).decode()}\n")
    sys.stdout.flush()


class Run:
    """The demo on this rank: text, model and engine, ready to train.

    Collective: every rank makes one and calls the same methods.
    """

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self.world = ds_comm.init()
        self.all_ranks = ds_comm.Mesh.world().axis("dp")
        text = read_text(Path(options.text) if options.text else None)
        sizes = SIZES[options.size]
        self.tokenizer: Tokenizer = train_tokenizer(text, sizes["vocabulary"])
        self.config = GPTConfig(**{**sizes, "vocabulary": self.tokenizer.get_vocab_size()})
        self.train_tokens, self.held_out = split_tokens(text, self.tokenizer)
        torch.manual_seed(0)
        with ds_zero.sharded_init():
            model = GPT(self.config)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        # A CPU without a bf16 unit multiplies bf16 several times slower than fp32.
        self.bf16 = self.world.device.type != "cpu"
        self.planned_bytes = self._plan(model)
        count = options.steps * MICRO_BATCH * self.world.world_size
        windows = RandomWindows(self.train_tokens, context=self.config.context, count=count)
        self.engine, _, self.batches, _ = ds.initialize(
            model=model, training_data=windows, config=deepspeed_config(options, bf16=self.bf16)
        )
        self.tokens_per_s = 0.0

    @property
    def dtype(self) -> str:
        """Of the parameters in forward and backward."""
        return "bf16" if self.bf16 else "fp32"

    def _plan(self, model: nn.Module) -> int:
        planned = ds_zero.plan_bytes(
            model,
            torch.optim.AdamW(model.parameters()),
            stage=self.options.stage,
            world_size=self.world.world_size,
            precision=self.dtype,
        )
        return sum(planned.values())

    def peaks(self) -> tuple[int, ...]:
        """Most bytes that each rank's engine held at once so far, in rank order."""
        mine = torch.tensor([ds_zero.peak_bytes(self.engine.module)], dtype=torch.float64)
        return tuple(int(peak) for peak in self.all_ranks.exchange(mine, tag="demo peak bytes")[:, 0])

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss over windows of the held-out text, dealt out to the ranks."""
        world_size = self.world.world_size
        count = -(-HELD_OUT_WINDOWS // world_size) * world_size
        windows = RandomWindows(self.held_out, context=self.config.context, count=count, seed=1)
        mine = torch.stack([windows[index] for index in range(self.world.rank, count, world_size)])
        self.engine.eval()
        loss = next_token_loss(self.engine, mine.to(self.world.device)).double().reshape(1).cpu()
        self.engine.train()
        return float(self.all_ranks.exchange(loss, tag="demo held-out loss").mean())

    def sample(self) -> str:
        """What the model writes now; all ranks run it together, units being gathered as they are needed."""
        prompt = torch.tensor([self.tokenizer.encode(PROMPT).ids], device=self.world.device)
        tokens = generate(self.engine, prompt, num_tokens=SAMPLE_TOKENS, context=self.config.context)
        return self.tokenizer.decode(tokens[0].tolist())

    def train(self) -> None:
        """All steps; rank 0 tells each."""
        if self.batches is None:
            raise RuntimeError("ds.initialize gave no loader for training_data")
        tokens_per_step = MICRO_BATCH * self.config.context * self.world.world_size
        peaks = self.peaks()
        begin_s = time.perf_counter()
        for step, batch in enumerate(self.batches, start=1):
            loss = next_token_loss(self.engine, batch.to(self.world.device))
            self.engine.backward(loss)
            self.engine.step()
            self.tokens_per_s = step * tokens_per_step / (time.perf_counter() - begin_s)
            if step <= 2 or step % COMPARE_EVERY == 0:
                peaks = self.peaks()
            if self.world.rank == 0:
                tell(Step(step=step, loss=loss.item(), tokens_per_s=self.tokens_per_s, peak_bytes=peaks))


def run_rank(options: DemoOptions) -> Result:
    """The whole demo on this rank among the others.

    Collective: every rank.
    """
    run = Run(options)
    started = Started(
        ranks=run.world.world_size,
        device=run.world.device.type,
        stage=options.stage,
        dtype=run.dtype,
        num_parameters=run.num_parameters,
        num_tokens=len(run.train_tokens),
        steps=options.steps,
        planned_bytes=run.planned_bytes,
    )
    first, text = run.held_out_loss(), run.sample()
    if run.world.rank == 0:
        tell(started)
        tell(Sample(text=text, loss=first))
    run.train()
    last = run.held_out_loss()
    save_weights(run.engine.module, run.config, run.tokenizer, Path(options.out))
    result = Result(
        stage=options.stage,
        ranks=run.world.world_size,
        device=run.world.device.type,
        dtype=run.dtype,
        steps=options.steps,
        num_parameters=run.num_parameters,
        loss_first=first,
        loss_last=last,
        tokens_per_s=run.tokens_per_s,
        peak_bytes=max(run.peaks()),
        planned_bytes=run.planned_bytes,
        out=options.out,
    )
    if run.world.rank == 0:
        tell(result)
    return result


if __name__ == "__main__":
    run_rank(msgspec.json.decode(sys.argv[1], type=DemoOptions))
    ds_comm.shutdown()
