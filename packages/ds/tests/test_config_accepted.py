"""Keys that need nothing here are still checked by name, and files that cannot be read say why."""

import os

import pytest
import torch

import ds
from ds.config_reader import read_config
from ds_zero.engine import engine_of

BATCH = {"train_batch_size": 4, "gradient_clipping": 0}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"aio": {"blok_size": 1}}, "aio.blok_size: unknown key; did you mean aio.block_size?"),
        ({"pipeline": {"stagez": 2}}, "pipeline.stagez: unknown key; did you mean pipeline.stages?"),
        ({"timers": {"throughputt": {}}}, "timers.throughputt: unknown key; did you mean timers.throughput?"),
    ],
)
def test_typos_in_sections_that_are_not_needed(config, reason):
    with pytest.raises(ds.ConfigError) as caught:
        read_config(BATCH | config)
    assert caught.value.reasons == (reason,)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'\xff\xfe{"train_batch_size": 4}', "cannot be read as UTF-8 text"),
        (b'// batch\n{"train_batch_size": 4}', "comments and commas at the end are not JSON"),
        (b'{"train_batch_size": 4,}', "comments and commas at the end are not JSON"),
    ],
)
def test_files_that_exist_are_not_said_to_be_missing(tmp_path, content, said):
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    with pytest.raises(ds.ConfigError, match=said):
        read_config(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(ds.ConfigError, match="Permission denied"):
        read_config(path)


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('\ufeff{"train_batch_size": 4}', encoding="utf-8")
    assert read_config(path).train_batch_size == 4


@pytest.mark.parametrize(("bf16", "dtype"), [(False, "fp32"), (True, "fp32"), (True, "bf16")])
def test_gradients_are_summed_in_the_dtype_asked_for(bf16, dtype):
    config = BATCH | {"bf16": {"enabled": bf16}, "communication_data_type": dtype}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.5}}
    torch.manual_seed(0)
    engine = ds.initialize(model=torch.nn.Linear(3, 1), config=config)[0]
    engine.backward(engine(torch.ones(4, 3, dtype=torch.bfloat16 if bf16 else torch.float32)).sum())
    engine.step()
    assert engine.was_step_applied()


def test_fp32_parameters_can_send_narrow_gradients():
    config = BATCH | {"communication_data_type": "bf16", "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    engine = ds.initialize(model=torch.nn.Linear(3, 1), config=config)[0]
    precision = engine_of(engine.module).options.precision
    assert (precision.param, precision.grad, precision.reduce) == ("fp32", "bf16", "bf16")
    engine.backward(engine(torch.ones(4, 3)).sum())
    engine.step()


def test_arguments_that_torch_cannot_use_are_named():
    config = BATCH | {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}
    with pytest.raises(ds.ConfigError, match=r"optimizer\.params: AdamW refuses them"):
        ds.initialize(model=torch.nn.Linear(3, 1), config=config)
