"""Train a small GPT on English text under ZeRO-3 and let it write: ``ds run train.py [STEPS]``."""

import sys
from pathlib import Path

import torch

import ds
from ds.demo.model import GPT, GPTConfig, generate, next_token_loss
from ds.demo.text import RandomWindows, read_text, split_tokens, train_tokenizer

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
tokenizer = train_tokenizer(text := read_text(), vocabulary=2048)
tokens, _ = split_tokens(text, tokenizer)
torch.manual_seed(0)
config = GPTConfig(vocabulary=tokenizer.get_vocab_size(), width=192, depth=4, heads=6)
engine, _, batches, _ = ds.initialize(
    model=GPT(config),
    training_data=RandomWindows(tokens, context=config.context, count=10_000),
    config=Path(__file__).with_name("ds_config.json"),
)
for step, batch in zip(range(1, steps + 1), batches, strict=False):
    loss = next_token_loss(engine, batch.to(engine.device))
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0 and (step == 1 or step % 10 == 0):
        print(f"step {step}  loss {loss.item():.3f}  lr {engine.get_lr()[0]:.1e}")

prompt = torch.tensor([tokenizer.encode("The ").ids], device=engine.device)
written = generate(engine, prompt, num_tokens=40, context=config.context)
engine.save_16bit_model("runs/quickstart")
if engine.global_rank == 0:
    print(tokenizer.decode(written[0].tolist()))
