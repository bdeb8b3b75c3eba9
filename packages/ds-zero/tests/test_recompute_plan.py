"""The choice of what to recompute: the budget holds, and nothing faster would fit."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_zero.recompute_plan import BlockCost, choose, plan_policies

COSTS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 50)), min_size=3, max_size=3)


def table(rows):
    policies = ("none", "selective", "full")
    return {
        f"blocks.{index}": {
            policy: BlockCost(saved_bytes=saved, seconds=float(seconds))
            for policy, (saved, seconds) in zip(policies, options, strict=True)
        }
        for index, options in enumerate(rows)
    }


@given(st.lists(COSTS, min_size=1, max_size=4), st.integers(0, 250))
def test_no_other_choice_within_the_budget_is_faster(rows, budget):
    costs = table(rows)
    least = sum(min(cost.saved_bytes for cost in options.values()) for options in costs.values())
    if least > budget:
        with pytest.raises(ValueError, match=f"at least {least} bytes, the budget is {budget}"):
            choose(costs, budget)
        return
    plan = choose(costs, budget)
    assert plan.policies.keys() == costs.keys()
    assert plan.saved_bytes <= budget
    seconds = sum(costs[name][policy].seconds for name, policy in plan.policies.items())
    every = itertools.product(*(options.values() for options in costs.values()))
    fitting = [choice for choice in every if sum(cost.saved_bytes for cost in choice) <= budget]
    assert seconds == min(sum(cost.seconds for cost in choice) for choice in fitting)


def test_policies_are_by_name_or_for_all():
    plan = plan_policies(["a", "b"], "full")
    assert plan.policies == {"a": "full", "b": "full"}
    assert plan_policies(["a", "b"], {"b": "selective"}).policies == {"a": "none", "b": "selective"}
    assert plan.describe() == "recompute: 2 full"
    with pytest.raises(ValueError, match="'c' is not one of the blocks"):
        plan_policies(["a"], {"c": "full"})
    with pytest.raises(ValueError, match=r"policy must be one of .*'budget'.*, got 'all'"):
        plan_policies(["a"], "all")
