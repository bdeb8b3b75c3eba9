"""Laws of the split into units."""

import pytest
from torch import nn

from ds_zero.units import merge_small_units, plan_units


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)


class Model(nn.Module):
    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight


def test_blocks_are_units_and_the_rest_is_the_root_unit():
    plans = plan_units(Model(), names=None)
    assert [plan.name for plan in plans] == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert plans[0].parameters == ("embed.weight",)
    assert plans[0].label == "(root)"


def test_every_parameter_is_in_exactly_one_unit():
    model = Model()
    named = [name for plan in plan_units(model, names=None) for name in plan.parameters]
    assert sorted(named) == sorted(name for name, _ in model.named_parameters())


def test_a_parameter_tied_across_units_belongs_to_the_root_and_is_lent():
    model = Model()
    model.blocks[2].first.weight = model.blocks[0].first.weight
    plans = {plan.name: plan for plan in plan_units(model, names=None)}
    assert "blocks.0.first.weight" in plans[""].parameters
    assert plans["blocks.0"].lenders == plans["blocks.2"].lenders == ("",)
    assert plans["blocks.1"].lenders == ()


def test_units_can_be_named():
    plans = plan_units(Model(), names=["blocks.1", "embed"])
    assert [plan.name for plan in plans] == ["", "embed", "blocks.1"]


def test_an_unknown_unit_name_is_refused():
    with pytest.raises(ValueError, match=r"units must name modules of the model, got \['block.1'\]"):
        plan_units(Model(), names=["block.1"])


def test_a_container_that_is_never_called_is_refused():
    with pytest.raises(
        ValueError, match=r"blocks is a ModuleList, which never is; name its parts, such as blocks\.0"
    ):
        plan_units(Model(), names=["blocks"])


def test_a_sequential_model_is_split_into_its_layers():
    plans = plan_units(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), names=None)
    assert [plan.name for plan in plans] == ["", "0", "2"]


def test_a_model_without_stacks_is_one_unit():
    plans = plan_units(nn.Linear(4, 4), names=None)
    assert [plan.parameters for plan in plans] == [("weight", "bias")]


def test_nested_stacks_split_at_the_outermost():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    assert [plan.name for plan in plan_units(model, names=None)] == ["", "0", "1"]


@pytest.mark.parametrize("bucket_numel", [0, 150, 300, 10**6])
def test_merging_keeps_order_and_every_parameter(bucket_numel):
    model = Model()
    numels = {name: parameter.numel() for name, parameter in model.named_parameters()}
    plans = plan_units(model, names=None)
    merged = merge_small_units(plans, numels, bucket_numel=bucket_numel)
    assert [n for plan in merged for n in plan.parameters] == [n for plan in plans for n in plan.parameters]
    for plan in merged:
        size = sum(numels[name] for name in plan.parameters)
        assert size <= bucket_numel or plan.parameters in {p.parameters for p in plans}
