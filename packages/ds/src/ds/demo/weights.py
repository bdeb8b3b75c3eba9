"""Save a sharded model as safetensors, one file per rank; what is saved loads without ds."""

import dataclasses
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

import ds_comm
import ds_zero
from ds.demo import model as model_file
from ds.demo.model import GPTConfig

INDEX = "model.safetensors.index.json"


def group_of(name: str) -> str:
    """The block, or the part beside the blocks, that a parameter belongs to."""
    return ".".join(name.split(".")[:2])


def plan_files(numels: dict[str, int], world_size: int) -> dict[str, int]:
    """Tensor name to the rank that writes it: blocks stay whole, and each goes where least is so far.

    Pure: every rank computes the same answer.

    Args:
        numels: elements of every tensor by name.
        world_size: ranks, one file each.
    """
    groups: dict[str, list[str]] = {}
    for name in numels:
        groups.setdefault(group_of(name), []).append(name)
    load = [0] * world_size
    owner: dict[str, int] = {}
    for names in groups.values():
        rank = load.index(min(load))
        load[rank] += sum(numels[name] for name in names)
        owner |= dict.fromkeys(names, rank)
    return owner


def save_weights(model: nn.Module, config: GPTConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``model-0000i-of-0000n.safetensors`` with index, ``config.json``, tokenizer and ``model.py``.

    Blocks are gathered one after the other, and only the rank that writes a block copies it, so that no rank
    holds the whole model. Tied tensors are stored once.

    Collective: every rank.
    """
    world = ds_comm.current()
    folder.mkdir(parents=True, exist_ok=True)
    parameters = dict(model.named_parameters())
    with torch.device("meta"):
        numels = {name: whole.numel() for name, whole in model_file.GPT(config).named_parameters()}
    owner = plan_files(numels, world.world_size)
    files = [f"model-{n + 1:05d}-of-{world.world_size:05d}.safetensors" for n in range(world.world_size)]
    mine: dict[str, torch.Tensor] = {}
    for group in dict.fromkeys(map(group_of, owner)):
        names = [name for name in owner if group_of(name) == group]
        with ds_zero.gathered([parameters[name] for name in names]):
            if owner[names[0]] == world.rank:
                mine |= {name: parameters[name].detach().to("cpu", copy=True) for name in names}
    save_file(mine, folder / files[world.rank], metadata={"format": "pt"})
    if world.rank == 0:
        itemsize = next(iter(parameters.values())).element_size()
        index = {
            "metadata": {"total_size": sum(numels.values()) * itemsize},
            "weight_map": {name: files[rank] for name, rank in owner.items()},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2))
        (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2))
        tokenizer.save(str(folder / "tokenizer.json"))
        shutil.copyfile(model_file.__file__, folder / "model.py")
    ds_comm.Mesh.world().axis("dp").barrier(tag="demo saved")
