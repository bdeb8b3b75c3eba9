"""fp16, autocast, offload, ZeRO++ and optimizers by the JSON: what is asked for is what runs."""

import pytest
import torch

import ds
import ds_zero
from ds_comm.testing import run_ranks
from ds_zero.engine import engine_of

BASE = {
    "train_batch_size": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


QUANTIZED = ("zero_quantized_weights", "zero_quantized_gradients")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return torch.nn.functional.cross_entropy(
            self.head(self.norm(x)).float().flatten(0, 1), tokens.flatten()
        )


def train(config, steps=12):
    torch.manual_seed(0)
    engine, optimizer, *_ = ds.initialize(model=Net(), config=BASE | config)
    tokens = torch.arange(20).view(2, 10)
    losses = []
    for _ in range(steps):
        loss = engine(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    options = engine_of(engine.module).options
    scale, folder = optimizer.loss_scale, engine_of(engine.module).homes.store
    engine.destroy()
    return losses, options, scale, folder is not None


@pytest.mark.parametrize(
    ("config", "is_set"),
    [
        ({"fp16": {"enabled": True, "initial_scale_power": 8}}, lambda o: o.precision.param == "fp16"),
        ({"fp16": {"enabled": True, "loss_scale": 64}}, lambda o: not o.precision.loss_scale.dynamic),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, lambda o: o.precision.state == "bf16"),
        ({"torch_autocast": {"enabled": True}}, lambda o: o.precision.autocast == "bf16"),
        (
            {"bf16": {"enabled": True}, "data_types": {"keep_in_fp32_modules": ["norm"]}},
            lambda o: o.precision.keep_fp32 == ("norm",),
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            lambda o: (o.offload.optimizer, o.offload.gradients, o.offload.ratio) == ("cpu", "cpu", 0.5),
        ),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}},
            lambda o: (o.offload.optimizer, o.offload.parameters) == ("cpu", "cpu"),
        ),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "zero_quantized_weights": True,
                    "zero_quantized_gradients": True,
                }
            },
            lambda o: (o.reach.weight_bits, o.reach.gradient_bits) == (8, 8),
        ),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, lambda o: o.reach.within_node),
        ({"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}, lambda _: True),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}}, lambda _: True),
        ({"optimizer": {"type": "Muon", "params": {"muon_lr": 1e-2, "lr": 1e-2}}}, lambda _: True),
    ],
)
def test_what_is_asked_for_is_what_runs_and_learns(config, is_set):
    for losses, options, scale, _ in run_ranks(train, 2, config):
        assert is_set(options)
        assert losses[-1] < losses[0] - 0.1
        assert scale == {"initial_scale_power": 256.0, "loss_scale": 64.0}.get(
            next(iter(set(config.get("fp16", {})) - {"enabled"}), ""), 1.0
        )


def test_nvme_is_files_in_the_folder_and_nothing_is_left(tmp_path):
    section = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": section, "offload_param": section}}
    plain = run_ranks(train, 2, {"zero_optimization": {"stage": 3}})
    moved = run_ranks(train, 2, config)
    assert [losses for losses, *_ in plain] == [losses for losses, *_ in moved]
    assert all(has_files for *_, has_files in moved)
    assert not list(tmp_path.iterdir())


def test_muon_leaves_embeddings_and_head_to_adamw():
    engine, optimizer, *_ = ds.initialize(
        model=Net(), config=BASE | {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
    )
    counts = {group["use_muon"]: len(group["params"]) for group in optimizer.param_groups}
    assert counts == {True: 3, False: 8}
    assert isinstance(engine.optimizer, ds_zero.ShardedOptimizer)
    engine.destroy()
