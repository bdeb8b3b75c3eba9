"""The engine on several ranks: the same numbers as one plain process, the same bits at every stage."""

import logging

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ds
import ds_comm
from ds.schedules import WarmupLR
from ds_comm.testing import RankFailedError, run_ranks

CONFIG = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
}
STEPS = 3


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))


def micro_batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, generator=generator) for _ in range(2 * STEPS)]


def loss_of(module, batch):
    return (module(batch) - batch.sum(dim=1, keepdim=True)).square().mean()


def train(changes):
    engine, *_ = ds.initialize(model=model(), config=CONFIG | changes)
    for batch in micro_batches():
        mine = batch.chunk(engine.world_size)[engine.global_rank]
        engine.backward(loss_of(engine, mine))
        engine.step()
    counts = (engine.global_steps, engine.micro_steps, engine.get_lr(), engine.get_global_grad_norm())
    return engine.module_state_dict(), counts


def plain():
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.0)
    scheduler = WarmupLR(optimizer, warmup_num_steps=3)
    for index, batch in enumerate(micro_batches()):
        (loss_of(module, batch) / 2).backward()
        if index % 2:
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return module.state_dict()


def test_two_ranks_train_like_one_plain_process():
    expected = plain()
    runs = [run_ranks(train, 2, {"zero_optimization": {"stage": stage}}) for stage in (0, 1, 2, 3)]
    first, counts = runs[0][0]
    for run in runs:
        for state, seen in run:
            assert seen == counts
            assert all(torch.equal(state[name], value) for name, value in first.items())
    assert counts[:2] == (STEPS, 2 * STEPS)
    for name, value in expected.items():
        # The mean over two halves of a batch adds in another order than the mean over the whole.
        torch.testing.assert_close(first[name], value, rtol=1e-4, atol=1e-6, msg=name)


def save(folder):
    engine, *_ = ds.initialize(model=model(), config=CONFIG | {"zero_optimization": {"stage": 3}})
    engine.save_16bit_model(folder)
    engine.destroy()
    return engine.module.state_dict()


def test_one_file_holds_the_whole_model(tmp_path):
    from safetensors.torch import load_file

    for state in run_ranks(save, 2, str(tmp_path)):
        saved = load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(saved[name], value) for name, value in state.items())


def test_a_folder_that_cannot_be_written_fails_on_every_rank(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RankFailedError) as caught:
        run_ranks(save, 2, str(tmp_path / "file"))
    assert sorted(caught.value.errors) == [0, 1]
    assert all("rank 0 could not write" in text for text in caught.value.errors.values())


def does_not_divide():
    ds.initialize(model=model(), config=CONFIG | {"train_batch_size": 8})


def test_a_batch_that_does_not_divide_is_told_on_every_rank():
    with pytest.raises(RankFailedError) as caught:
        run_ranks(does_not_divide, 3)
    said = "8 / (3 data-parallel ranks * gradient_accumulation_steps 2 = 6) is not whole; "
    said += "the nearest that are: 6 or 12"
    assert [said in text for text in caught.value.errors.values()] == [True, True, True]


def read_data():
    data = TensorDataset(torch.arange(16))
    loader = ds.initialize(model=model(), training_data=data, config=CONFIG)[2]
    return ds_comm.current().rank, [batch.tolist() for (batch,) in loader]


def test_ranks_share_the_data():
    (_, first), (_, second) = run_ranks(read_data, 2)
    assert [len(batch) for batch in first + second] == [2] * 8
    assert sorted(index for batch in first + second for index in batch) == list(range(16))


def lines_in_the_log():
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logger = logging.getLogger("ds")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())
    ds.initialize(model=model(), config=CONFIG | {"zero_optimization": {"overlap_comm": True}})
    return lines


def test_only_rank_0_says_what_all_know():
    first, second = run_ranks(lines_in_the_log, 2)
    assert [line.split()[0] for line in first] == ["zero_optimization.overlap_comm", "optimizer"]
    assert second == []


def rounded(dtype):
    config = CONFIG | {"bf16": {"enabled": True}, "communication_data_type": dtype, "gradient_clipping": 0}
    config |= {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_optimization": {"stage": 2}}
    torch.manual_seed(0)
    engine, *_ = ds.initialize(model=nn.Linear(257, 3, bias=False), config=config | {"scheduler": None})
    generator = torch.Generator().manual_seed(ds_comm.current().rank)
    for _ in range(2):
        batch = torch.randn(2, 257, generator=generator).bfloat16()
        engine.backward(engine(batch).float().square().mean())
        engine.step()
    return engine.module_state_dict()["weight"], engine.get_global_grad_norm()


def test_sums_over_ranks_are_rounded_to_the_dtype_asked_for():
    fp32, absent, bf16 = (run_ranks(rounded, 2, dtype) for dtype in ("fp32", None, "bf16"))
    assert torch.equal(fp32[0][0], absent[0][0])
    assert fp32[0][1] == absent[0][1]
    assert bf16[0][1] == pytest.approx(fp32[0][1], rel=2**-7)  # bf16 keeps 8 bits
    assert bf16[0][1] != fp32[0][1]
