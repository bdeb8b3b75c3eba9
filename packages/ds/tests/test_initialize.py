"""DeepSpeed's call: what may be given, in which forms, and what comes back."""

import argparse
import json
import logging

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset, TensorDataset

import ds
from ds.loader import ShardedLoader
from ds.schedules import WarmupLR

CONFIG = {"train_batch_size": 4, "gradient_clipping": 0, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
BARE = {"train_batch_size": 4, "gradient_clipping": 0}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def test_the_configuration_comes_in_three_ways(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    args = argparse.Namespace(deepspeed_config=str(path))
    for given in ({"config": CONFIG}, {"config_params": CONFIG}, {"args": args}, {"config": str(path)}):
        engine, optimizer, loader, scheduler = ds.initialize(model=model(), **given)
        assert engine.optimizer is optimizer
        assert (loader, scheduler) == (None, None)
        assert engine.get_lr() == [0.5]
    with pytest.raises(ValueError, match="not both"):
        ds.initialize(model=model(), config=CONFIG, config_params=CONFIG)
    with pytest.raises(ValueError, match="initialize needs config="):
        ds.initialize(model=model(), args=argparse.Namespace(device_rank=0))
    with pytest.raises(ValueError, match="initialize needs model="):
        ds.initialize(config=CONFIG)


def test_an_optimizer_or_a_callable_goes_before_the_configuration(caplog):
    caplog.set_level(logging.INFO)
    module = model()
    given = torch.optim.Adagrad(module.parameters(), lr=0.25)
    engine, *_ = ds.initialize(model=module, optimizer=given, config=CONFIG)
    assert engine.optimizer.inner is given
    assert "optimizer of the configuration is not used" in caplog.text
    engine, *_ = ds.initialize(model=model(), optimizer=lambda p: torch.optim.Adam(p, lr=0.125), config=BARE)
    assert engine.get_lr() == [0.125]


def test_parameters_may_be_an_iterator_or_groups():
    module = model()
    engine, *_ = ds.initialize(
        model=module, model_parameters=filter(lambda _: True, module.parameters()), config=CONFIG
    )
    assert len(engine.optimizer.param_groups) == 1
    module = model()
    groups = [{"params": list(module[0].parameters())}, {"params": list(module[2].parameters()), "lr": 0.1}]
    engine, *_ = ds.initialize(model=module, model_parameters=groups, config=CONFIG)
    assert engine.get_lr() == [0.5, 0.1]


@pytest.mark.parametrize("given", [{"config": BARE}, {"config": CONFIG, "model_parameters": []}])
def test_without_anything_to_train_it_is_an_engine_for_inference(given):
    engine, optimizer, *_ = ds.initialize(model=model(), **given)
    assert optimizer is None
    assert engine.get_lr() == []
    assert engine(torch.ones(2, 3)).shape == (2, 1)
    with pytest.raises(RuntimeError, match="backward needs an optimizer"):
        engine.backward(engine(torch.ones(2, 3)).sum())


def test_a_schedule_comes_in_three_ways(caplog):
    caplog.set_level(logging.INFO)
    scheduled = CONFIG | {"scheduler": {"type": "WarmupLR", "params": {}}}
    *_, scheduler = ds.initialize(model=model(), config=scheduled)
    assert isinstance(scheduler, WarmupLR)
    engine, *_, scheduler = ds.initialize(
        model=model(),
        config=scheduled,
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    )
    assert isinstance(scheduler, LambdaLR)
    assert "scheduler of the configuration is not used" in caplog.text
    for _ in range(2):
        engine.backward(engine(torch.ones(4, 3)).sum())
        engine.step()
    assert engine.get_lr() == pytest.approx([0.5 / 3])
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    given = LambdaLR(optimizer, lambda _: 0.5)
    assert ds.initialize(model=module, optimizer=optimizer, lr_scheduler=given, config=BARE)[3] is given
    with pytest.raises(ds.ConfigError, match="scheduler: there is no optimizer to schedule"):
        ds.initialize(model=model(), config=BARE | {"scheduler": {"type": "WarmupLR"}})


@pytest.mark.parametrize("name", ["mpu", "mesh_param"])
def test_model_parallel_units_are_refused_by_name(name):
    with pytest.raises(ds.ConfigError, match=f"{name}: not yet supported by ds 0.1"):
        ds.initialize(model=model(), config=CONFIG, **{name: object()})


def test_a_wrong_configuration_leaves_the_model_alone():
    module = model()
    with pytest.raises(ds.ConfigError, match=r"zero_optimization\.stge: unknown key"):
        ds.initialize(model=module, config=CONFIG | {"zero_optimization": {"stge": 3}})
    assert not ds.zero.is_sharded(module)


def test_the_loader_gives_micro_batches_in_a_new_order_every_epoch():
    data = TensorDataset(torch.arange(10))
    _, _, loader, _ = ds.initialize(
        model=model(), training_data=data, config=CONFIG | {"gradient_accumulation_steps": 2}
    )
    epochs = [[batch.tolist() for (batch,) in loader] for _ in range(2)]
    assert [len(batch) for batch in epochs[0]] == [2] * 5
    assert [sorted(index for batch in epoch for index in batch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(("drop", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
def test_the_last_batch_may_be_left_out(drop, sizes):
    data = TensorDataset(torch.arange(10))
    config = CONFIG | {"dataloader_drop_last": drop}
    loader = ds.initialize(model=model(), training_data=data, collate_fn=len, config=config)[2]
    assert list(loader) == sizes


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


def test_streams_are_read_as_they_are():
    loader = ShardedLoader(Stream(), micro_batch_size=2, rank=0, world_size=1)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_ranks_see_different_samples_and_equally_many():
    data = TensorDataset(torch.arange(10))
    parts = [
        [
            int(i)
            for (batch,) in ShardedLoader(data, micro_batch_size=2, rank=rank, world_size=4)
            for i in batch
        ]
        for rank in range(4)
    ]
    assert [len(part) for part in parts] == [3, 3, 3, 3]
    assert {index for part in parts for index in part} == set(range(10))


def test_scripts_find_their_arguments():
    parser = ds.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "ds.json")
    assert parser.parse_args([]).deepspeed_config is None


def test_init_distributed_takes_deepspeeds_arguments():
    ds.init_distributed("nccl", distributed_port=29500, dist_init_required=True)
    assert ds.comm.is_initialized()


def test_packages_resolve_on_first_use_and_name_their_distribution(monkeypatch):
    import ds_zero

    assert ds.zero is ds_zero
    monkeypatch.setitem(ds._PACKAGES, "zero", "ds_zeppelin")
    with pytest.raises(AttributeError, match="is the distribution ds-zeppelin, which is not installed"):
        _ = ds.zero
    with pytest.raises(AttributeError, match="module 'ds' has no attribute 'zerro'"):
        _ = ds.zerro
    assert {"initialize", "zero"} <= set(dir(ds))
