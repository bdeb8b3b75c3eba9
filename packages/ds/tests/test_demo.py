"""The demo's parts in one process: text, tokens, model, files; and the whole of it, small, on two ranks."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from typer.testing import CliRunner

from ds import cli
from ds.demo.model import GPT, GPTConfig, generate, load_gpt, next_token_loss
from ds.demo.options import LEARNING_RATE, SIZES, STEPS, DemoOptions, deepspeed_config
from ds.demo.text import RandomWindows, read_text, split_tokens, train_tokenizer, unwrapped
from ds.demo.weights import group_of, plan_files

TINY = GPTConfig(vocabulary=64, context=16, width=16, depth=2, heads=2)
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind.\n" * 40


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_python_carries_enough_english() -> None:
    text = read_text()
    assert len(text) > 300_000
    assert text.count(" the ") > 1000


def test_prose_becomes_one_line_and_code_stays() -> None:
    assert unwrapped("Words that\n   go on.") == "Words that go on."
    code = ">>> f(x[1:2])\n   {1: 2}"
    assert unwrapped(code) == code


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("too short")
    with pytest.raises(ValueError, match="has 9 characters, too few"):
        read_text(path)
    result = CliRunner().invoke(cli.app, ["demo", "--text", str(path)])
    assert result.exit_code == cli.EXIT_USAGE
    assert "too few" in result.output


def test_text_that_is_not_utf8_is_read(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"t\xeate " * 5000)
    assert "te t" in read_text(path)


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=60))
def test_tokens_give_any_text_back(text: str) -> None:
    tokenizer = train_tokenizer(TEXT, 300)
    assert tokenizer.get_vocab_size() <= 300
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_the_same_text_gives_the_same_tokenizer() -> None:
    assert train_tokenizer(TEXT, 300).to_str() == train_tokenizer(TEXT, 300).to_str()


def test_held_out_text_is_not_trained_on() -> None:
    tokenizer = train_tokenizer(TEXT, 300)
    train, held_out = split_tokens(TEXT, tokenizer)
    assert torch.cat([train, held_out]).tolist() == tokenizer.encode(TEXT).ids
    assert 0 < len(held_out) < len(train)


def test_windows_are_the_same_everywhere_and_inside_the_text() -> None:
    tokens = torch.arange(100)
    windows = RandomWindows(tokens, context=8, count=50)
    again = RandomWindows(tokens, context=8, count=50)
    for index in range(len(windows)):
        window = windows[index]
        assert window.tolist() == list(range(int(window[0]), int(window[0]) + 9))
        assert torch.equal(window, again[index])
    with pytest.raises(ValueError, match="does not fit"):
        RandomWindows(torch.arange(9), context=8, count=1)


def test_no_token_sees_what_follows_it() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    tokens = torch.randint(TINY.vocabulary, (2, 12))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % TINY.vocabulary
    torch.testing.assert_close(model(tokens)[:, :7], model(changed)[:, :7])
    assert not torch.allclose(model(tokens)[:, 7:], model(changed)[:, 7:])


def test_an_untrained_model_knows_nothing_and_a_trained_one_something() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    batch = torch.arange(17).repeat(4, 1)
    first = next_token_loss(model, batch).item()
    assert first == pytest.approx(math.log(64), rel=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        loss = next_token_loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert next_token_loss(model, batch).item() < 0.5 * first


def test_generation_continues_the_prompt_and_repeats_with_the_seed() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    prompt = torch.tensor([[1, 2, 3]])
    once = generate(model, prompt, num_tokens=30, context=TINY.context)
    assert once.shape == (1, 33)
    assert once[0, :3].tolist() == [1, 2, 3]
    assert torch.equal(once, generate(model, prompt, num_tokens=30, context=TINY.context))
    assert not torch.equal(once, generate(model, prompt, num_tokens=30, context=TINY.context, seed=1))


@given(st.integers(1, 6), st.integers(1, 9))
def test_every_tensor_goes_to_one_file_and_blocks_stay_whole(world_size: int, depth: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=64, context=16, width=16, depth=depth, heads=2))
    numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    owner = plan_files(numels, world_size)
    assert owner.keys() == numels.keys()
    assert set(owner.values()) <= set(range(world_size))
    assert len({(group_of(name), rank) for name, rank in owner.items()}) == len(set(map(group_of, owner)))
    load = [sum(numels[name] for name, to in owner.items() if to == rank) for rank in range(world_size)]
    groups = [
        sum(n for name, n in numels.items() if group_of(name) == group) for group in map(group_of, numels)
    ]
    assert max(load) - min(load) <= max(groups)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", range(4))
def test_the_configuration_is_accepted(size: str, stage: int) -> None:
    from ds.config_reader import read_config

    options = DemoOptions(size=size, stage=stage, steps=STEPS[size], text=None, out="x")
    for bf16 in (False, True):
        parsed = read_config(deepspeed_config(options, bf16=bf16), data_parallel_size=2)
        assert parsed.zero_optimization.stage == stage
        assert parsed.bf16.enabled is bf16
    assert LEARNING_RATE.keys() == STEPS.keys() == SIZES.keys()


LOAD_WITHOUT_DS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from model import load_gpt, generate
model = load_gpt(sys.argv[1])
tokens = generate(model, torch.tensor([[1, 2]]), num_tokens=3, context=model.config.context)
assert tokens.shape == (1, 5)
assert not [name for name in sys.modules if name.split(".")[0].startswith("ds")]
"""


def check_saved(folder: Path, ranks: int) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = [f"model-{n + 1:05d}-of-{ranks:05d}.safetensors" for n in range(ranks)]
    assert sorted(path.name for path in folder.glob("*.safetensors")) == names
    held: dict[str, str] = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            held |= dict.fromkeys(file.keys(), name)
    assert held == index["weight_map"]
    total = sum(p.numel() * p.element_size() for p in load_gpt(folder).parameters())
    assert index["metadata"]["total_size"] == total
    command = [sys.executable, "-c", LOAD_WITHOUT_DS, str(folder)]
    subprocess.run(command, check=True, timeout=120)


def run_demo(*arguments: str) -> tuple[str, dict]:
    command = [sys.executable, "-m", "ds", "demo", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


def test_the_whole_demo_tiny(tmp_path: Path) -> None:
    said, result = run_demo("--tiny", "--ranks", "2", "--out", str(tmp_path / "out"))
    assert (result["stage"], result["ranks"]) == (3, 2)
    assert result["loss_last"] < result["loss_first"] - 0.3
    assert result["tokens_per_s"] > 0
    assert 0 < result["peak_bytes"] <= result["planned_bytes"]
    assert "Before training" in said
    assert "After training" in said
    assert "step 12/12" in said
    check_saved(tmp_path / "out", 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_as_a_newcomer_runs_it(tmp_path: Path) -> None:
    _, result = run_demo("--quick", "--ranks", "2", "--out", str(tmp_path / "out"))
    assert result["loss_last"] < result["loss_first"] - 1.5
    check_saved(tmp_path / "out", 2)
