"""Configurations as people write them: what is read, what is refused, and what the message says."""

# ruff: noqa: E501, ISC004 -- messages are compared whole, one case a line

import base64
import copy
import json
import logging
from pathlib import Path

import pytest

from ds.config import Config, ConfigError, solve_batch
from ds.config_reader import known_paths, read_config

BATCH = {"train_micro_batch_size_per_gpu": 2}


def reasons(config: dict, **options) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_config(config, **options)
    return caught.value.reasons


def test_a_dict_a_file_and_base64_say_the_same(tmp_path):
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    encoded = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    assert read_config(config) == read_config(path) == read_config(str(path)) == read_config(encoded)
    assert read_config(config).zero_optimization.stage == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[1]", "must hold a JSON object, got list"),
        ('{"train_batch_size": 1, "train_batch_size": 2}', "train_batch_size: given twice"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "enabled: given twice"),
    ],
)
def test_files_that_hold_no_configuration(tmp_path, text, said):
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_config(path)


@pytest.mark.parametrize("source", ["nowhere.json", "", "a" * 5000, 3])
def test_sources_that_are_none(source):
    with pytest.raises(ConfigError, match="config must be a dict"):
        read_config(source)


def test_the_users_dict_stays_as_it_is():
    config = {
        **BATCH,
        "bfloat16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "offload_param": {"device": "none"}},
    }
    before = copy.deepcopy(config)
    read_config(config, data_parallel_size=2)
    assert config == before


def test_auto_and_null_are_the_defaults():
    config = read_config(
        {
            **BATCH,
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "optimizer": None,
            "scheduler": None,
        }
    )
    assert config == read_config(BATCH)
    assert config.gradient_clipping == 1.0


def test_sizes_may_be_whole_floats():
    assert read_config({**BATCH, "zero_optimization": {"reduce_bucket_size": 5e8}}) == read_config(BATCH)
    assert reasons({"train_micro_batch_size_per_gpu": 1.5}) == (
        "train_micro_batch_size_per_gpu: must be a valid integer, got 1.5",
    )


def test_steps_per_print_may_be_infinite(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"steps_per_print": Infinity}')
    assert read_config(path).steps_per_print == float("inf")
    assert read_config({"steps_per_print": 10}).steps_per_print == 10


def test_clipping_by_default_is_said_once(caplog):
    caplog.set_level(logging.INFO)
    read_config(BATCH)
    assert [record.message for record in caplog.records] == [
        "gradient_clipping is not set: DeepSpeed's default of 1.0 applies; set it to 0 for none"
    ]
    caplog.clear()
    assert read_config({**BATCH, "gradient_clipping": 0}).gradient_clipping == 0
    assert caplog.records == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"gradient_acumulation_steps": 4},
            "gradient_acumulation_steps: unknown key; did you mean gradient_accumulation_steps?",
        ),
        ({"zero_optimisation": {}}, "zero_optimisation: unknown key; did you mean zero_optimization?"),
        (
            {"zero_optimization": {"stge": 3}},
            "zero_optimization.stge: unknown key; did you mean zero_optimization.stage?",
        ),
        ({"bf16": {"enable": True}}, "bf16.enable: unknown key; did you mean bf16.enabled?"),
        (
            {"fp16": {"enabled": False, "los_scale": 1}},
            "fp16.los_scale: unknown key; did you mean fp16.loss_scale?",
        ),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "zero_optimization.offload_param.devise: unknown key; "
            "did you mean zero_optimization.offload_param.device?",
        ),
        ({"hello": 1}, "hello: unknown key; docs/reference/config.md lists the known ones"),
        ({"checkpoint": {"writers": {}}}, "checkpoint.writers: unknown key; did you mean checkpoint.writer?"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: must be 0, 1, 2 or 3, got 4"),
        (
            {"communication_data_type": "fp8"},
            "communication_data_type: must be 'fp32', 'bf16' or 'fp16', got 'fp8'",
        ),
        ({"gradient_clipping": -1}, "gradient_clipping: must be greater than or equal to 0, got -1"),
        ({"train_batch_size": 0}, "train_batch_size: must be greater than or equal to 1, got 0"),
        ({"train_batch_size": "8"}, "train_batch_size: must be a valid integer, got '8'"),
        ({"train_batch_size": True}, "train_batch_size: must be a valid integer, got True"),
        ({"bf16": True}, "bf16: must be an object, got True"),
        ({"optimizer": {}}, "optimizer.type: missing; it is required"),
        (
            {"zero_optimization": True},
            'zero_optimization: must be an object, got true; DeepSpeed takes it as {"stage": 1}',
        ),
        ({"bf16": {}, "bfloat16": {}}, "bfloat16: the same as bf16, which is given too; keep one"),
    ],
)
def test_wrong_keys_are_named_with_what_was_meant(config, reason):
    assert reasons({**BATCH, **config}) == (reason,)


@pytest.mark.parametrize(
    ("config", "paths"),
    [
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, ["fp16.fp16_master_weights_and_grads"]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}, ["zero_optimization.offload_optimizer.super_offload"]),
        ({"zero_optimization": {"zero_quantized_nontrainable_weights": True}}, ["zero_optimization.zero_quantized_nontrainable_weights"]),
        ({"activation_checkpointing": {"partition_activations": True}}, ["activation_checkpointing.partition_activations"]),
        ({"tensor_parallel": {"autotp_size": 2}}, ["tensor_parallel.autotp_size"]),
        ({"tensor_parallel": {"tp": {"tp_size": 2}}}, ["tensor_parallel.tp.tp_size"]),
        ({"wall_clock_breakdown": True}, ["wall_clock_breakdown"]),
        ({"wandb": {"enabled": True, "project": "p"}}, ["wandb.enabled"]),
        ({"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op"]),
        ({"amp": {"enabled": True, "opt_level": "O1"}}, ["amp.enabled"]),
        ({"compile": {"deepcompile": True}}, ["compile.deepcompile"]),
        ({"checkpoint": {"load_universal": True}}, ["checkpoint.load_universal"]),
        ({"sparse_attention": {"mode": "fixed"}}, ["sparse_attention"]),
        ({"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}}, ["compression_training"]),
        ({"data_types": {"param_dtype": "bf16"}}, ["data_types.param_dtype"]),
        ({"sequence_parallel_size": 2, "sparse_gradients": True}, ["sequence_parallel_size", "sparse_gradients"]),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_by_name(config, paths):
    found = reasons({**BATCH, **config})
    assert [reason.partition(": not yet supported by ds 0.1; ")[0] for reason in found] == paths
    assert all(reason.partition("; ")[2] for reason in found)


@pytest.mark.parametrize(
    "config",
    [
        {"fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 100}},
        {"fp16": {"loss_scale": 0}},
        {"fp16": {"enabled": "auto"}},
        {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True, "nvme_path": "none"}}},
        {"zero_optimization": {"offload_param": None, "overlap_comm": True, "contiguous_gradients": True}},
        {"zero_optimization": {"stage3_prefetch_bucket_size": 0.9, "sub_group_size": 1e9, "mics_shard_size": -1}},
        {"zero_optimization": False},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": 4}},
        {"tensor_parallel": {"autotp_size": 0, "tp": {"tp_size": 1}}},
        {"wall_clock_breakdown": False, "memory_breakdown": False, "dump_state": False, "prescale_gradients": True},
        {"comms_logger": {"enabled": False, "verbose": True}, "tensorboard": {"enabled": False, "output_path": "x"}},
        {"amp": {"enabled": False, "opt_level": "O1"}, "elasticity": {"enabled": False, "version": 0.2}},
        {"gradient_allreduce_op": "mean", "data_types": {"grad_accum_dtype": "fp32"}, "data_parallel_size": 1},
        {"checkpoint": {"tag_validation": "Warn", "load_universal": False, "writer": None}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {"a": {"params": {"start_bits": 8}}}}}},
        {"data_efficiency": {"enabled": False, "data_sampling": {"enabled": False}}},
        {"zero_optimization.reduce_bucket_size": 10},
        {"aio": {"block_size": 1}, "pipeline": {"stages": "auto"}, "timers": {"throughput": {"enabled": True}}},
    ],
)  # fmt: skip
def test_what_asks_for_nothing_is_fine(config):
    assert isinstance(read_config({**BATCH, **config}), Config)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled: bf16.enabled is true too"),
        ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, "torch_autocast.enabled: autocast runs over"),
        ({"torch_autocast": {"enabled": True, "dtype": "int8"}}, "torch_autocast.dtype: must be bfloat16 or float16"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "zero_optimization.offload_optimizer.nvme_path: "),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "zero_optimization.offload_param.device: needs stage 3"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype: bf16 needs bf16.enabled"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_optimization.zero_quantized_weights: needs stage 3"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_optimization.zero_hpz_partition_size: needs stage 3"),
        ({"zero_optimization": {"mics_shard_size": 0}}, "zero_optimization.mics_shard_size: must be -1 or at least 1"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 2}}, "zero_optimization.mics_shard_size: does not go with"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32"}, "data_types.grad_accum_dtype: bf16 does not go with"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(config, reason):
    (found,) = reasons({**BATCH, **config})
    assert found.startswith(reason)


def test_accepted_keys_are_said_with_a_reason(caplog):
    caplog.set_level(logging.INFO)
    read_config({**BATCH, "gradient_clipping": 1.0, "zero_optimization": {"overlap_comm": False}})
    assert [record.message for record in caplog.records] == [
        "zero_optimization.overlap_comm is accepted and not needed: reductions always overlap with backward"
    ]


def test_all_mistakes_are_told_at_once():
    found = reasons(
        {
            "train_batch_size": 7,
            "zero_optimization": {"stge": 1, "stage": 9},
            "amp": {"enabled": True},
            "optimizer": {"type": "Lambda"},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_steps": 3}},
            "gradient_clipping": "much",
        },
        data_parallel_size=2,
    )
    assert [reason.partition(":")[0] for reason in found] == [
        "zero_optimization.stge",
        "amp.enabled",
        "gradient_clipping",
        "zero_optimization.stage",
        "optimizer.type",
        "scheduler.params.warmup_steps",
        "scheduler.params.total_num_steps",
        "train_batch_size",
    ]
    assert str(ConfigError(*found)).startswith(
        "the configuration has 8 mistakes:\n  zero_optimization.stge: "
    )


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "solved"),
    [
        (24, None, None, (24, 8, 1)),
        (None, 2, None, (6, 2, 1)),
        (24, 2, None, (24, 2, 4)),
        (24, None, 4, (24, 2, 4)),
        (None, 2, 4, (24, 2, 4)),
        (24, 2, 4, (24, 2, 4)),
    ],
)
def test_any_two_sizes_give_the_third(train, micro, accumulation, solved):
    config = Config(
        train_batch_size=train,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=accumulation,
    )
    batch = solve_batch(config, 3)
    assert (batch.train, batch.micro, batch.accumulation) == solved


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"train_batch_size": 8},
            "8 / (3 data-parallel ranks * gradient_accumulation_steps 1 = 3) is not whole; "
            "the nearest that are: 6 or 9",
        ),
        (
            {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4},
            "2 / (3 data-parallel ranks * train_micro_batch_size_per_gpu 4 = 12) is not whole; "
            "the nearest that are: 12",
        ),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2},
            "8 is not train_micro_batch_size_per_gpu 1 * gradient_accumulation_steps 2 * 3 data-parallel ranks "
            "= 6; leave one of the three keys out to have it computed",
        ),
        (
            {"gradient_accumulation_steps": 2},
            "give it or train_micro_batch_size_per_gpu; neither is there (a value of 'auto' counts as absent)",
        ),
    ],
)
def test_batch_sizes_that_do_not_fit_show_the_arithmetic(config, said):
    assert reasons(config, data_parallel_size=3) == (f"train_batch_size: {said}",)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        ({"type": "AdmW"}, "optimizer.type: AdmW is not known; did you mean AdamW?"),
        ({"type": "OneBitAdam"}, "optimizer.type: OneBitAdam is not yet supported by ds 0.1; use AdamW, Lion, Lamb or Muon"),
        ({"type": "Adam", "params": {"max_grad_norm": 1}}, "optimizer.params.max_grad_norm: not an optimizer's; set gradient_clipping at the top level"),
        ({"type": "Adam", "params": {"bets": [0.9, 0.9]}}, "optimizer.params.bets: unknown key; did you mean optimizer.params.betas?"),
        ({"type": "SGD", "params": {"adam_w_mode": True}}, None),
        ({"type": "Adam", "params": {"bias_correction": False}}, "optimizer.params.bias_correction: false is not yet supported by ds 0.1; leave it out"),
    ],
)  # fmt: skip
def test_optimizers_that_are_not_there(optimizer, reason):
    found = reasons({**BATCH, "optimizer": optimizer})
    assert (
        found == (reason,) if reason else found[0].startswith("optimizer.params.adam_w_mode: unknown key; ")
    )


def test_schedules_that_are_not_there():
    assert reasons({**BATCH, "scheduler": {"type": "WarmupRL"}}) == (
        "scheduler.type: WarmupRL is not known; did you mean WarmupLR?",
    )


def test_every_key_that_deepspeed_documents_has_a_standing():
    """The file lists the keys of DeepSpeed 0.19.8 and of the version before it, free-form sections by name only."""
    documented = (Path(__file__).parent / "deepspeed_keys.txt").read_text().split()
    standings = known_paths()
    assert len(documented) > 200
    assert [path for path in documented if path not in standings and not has_inside(path, standings)] == []
    assert set(standings.values()) == {"supported", "accepted", "refused"}
    assert standings["zero_optimization.stage"] == "supported"
    assert standings["tensorboard.enabled"] == "refused"


def has_inside(path: str, standings: dict[str, str]) -> bool:
    return any(name.startswith(f"{path}.") for name in standings)


def test_nothing_is_supported_and_refused_at_once():
    from ds.config_keys import ACCEPTED, REFUSED
    from ds.config_reader import supported_paths

    supported = set(supported_paths())
    assert supported & set(ACCEPTED) == supported & set(REFUSED) == set(ACCEPTED) & set(REFUSED) == set()
