"""Which block recomputes what in backward: policies, measured costs, the choice under a budget. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

# What a block keeps for backward, from everything to its input alone.
POLICIES = {
    "none": "everything autograd saves",
    "selective": "attention outputs, and outputs of matrix products at least as wide as their input; norms, "
    "activations and narrowing products are recomputed",
    "matmuls": "outputs of all matrix products and of attention",
    "attention": "outputs of attention",
    "full": "the input of the block",
}
# Bins of the knapsack: budgets are met within 1/4096 of them.
NUM_BINS = 4096


class BlockCost(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy costs in one block, measured on one micro-batch.

    Attributes:
        saved_bytes: held from forward to backward.
        seconds: of forward and backward together.
    """

    saved_bytes: int
    seconds: float


class RecomputePlan(msgspec.Struct, frozen=True, kw_only=True):
    """A policy for every block; costs where they were measured.

    Attributes:
        policies: block name -> policy.
        saved_bytes: held by all blocks from forward to backward, ``None`` when not measured.
        added_s: seconds of recomputation in a micro-batch, ``None`` when not measured.
    """

    policies: dict[str, str]
    saved_bytes: int | None
    added_s: float | None

    def describe(self) -> str:
        """One line for a log."""
        counts = {name: list(self.policies.values()).count(name) for name in POLICIES}
        parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        if self.saved_bytes is None or self.added_s is None:
            return f"recompute: {parts}"
        return f"recompute: {parts}; {self.saved_bytes / 1e6:.1f} MB held, {self.added_s * 1e3:.1f} ms added"


def plan_policies(names: Sequence[str], policy: str | Mapping[str, str]) -> RecomputePlan:
    """The same policy for every block, or each block's own.

    Raises:
        ValueError: a policy or a block is not known.
    """
    given = dict.fromkeys(names, policy) if isinstance(policy, str) else dict(policy)
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"recompute: {unknown[0]!r} is not one of the blocks, such as {list(names)[:3]}")
    wrong = sorted(set(given.values()) - set(POLICIES))
    if wrong:
        raise ValueError(
            f"recompute: policy must be one of {sorted([*POLICIES, 'budget'])}, got {wrong[0]!r}"
        )
    return RecomputePlan(
        policies={name: given.get(name, "none") for name in names}, saved_bytes=None, added_s=None
    )


def choose(costs: Mapping[str, Mapping[str, BlockCost]], budget_bytes: int) -> RecomputePlan:
    """The policies with the least time whose saved bytes fit the budget: a multiple-choice knapsack.

    Args:
        costs: block name -> policy -> its cost; ``"none"`` must be among the policies.
        budget_bytes: what all blocks together may hold.

    Raises:
        ValueError: even the smallest choice does not fit; the message says how much it needs.

    Source: Reducing Activation Recomputation in Large Transformer Models, arXiv:2205.05198, for what is worth
    keeping; Kellerer et al., Knapsack Problems, 2004, section 11.5, for the dynamic program.
    """
    least = sum(min(cost.saved_bytes for cost in options.values()) for options in costs.values())
    if least > budget_bytes:
        raise ValueError(f"recompute: the blocks need at least {least} bytes, the budget is {budget_bytes}")
    bin_bytes = max(1, budget_bytes // NUM_BINS)
    best: dict[int, tuple[float, tuple[str, ...]]] = {0: (0.0, ())}
    for options in costs.values():
        best = _extend(best, options, bin_bytes, budget_bytes // bin_bytes)
        if not best:  # rounding up to bins can hide a choice that only just fits
            return _smallest(costs)
    _, chosen = min(best.values())
    return _plan(costs, dict(zip(costs, chosen, strict=True)))


def _extend(
    best: Mapping[int, tuple[float, tuple[str, ...]]],
    options: Mapping[str, BlockCost],
    bin_bytes: int,
    num_bins: int,
) -> dict[int, tuple[float, tuple[str, ...]]]:
    """Every way to go on with one more block, the fastest for each number of bins, without dominated ones."""
    found: dict[int, tuple[float, tuple[str, ...]]] = {}
    for used, (seconds, chosen) in best.items():
        for policy, cost in options.items():
            bins = used + -(-cost.saved_bytes // bin_bytes)
            candidate = (seconds + cost.seconds, (*chosen, policy))
            if bins <= num_bins and (bins not in found or candidate < found[bins]):
                found[bins] = candidate
    kept: dict[int, tuple[float, tuple[str, ...]]] = {}
    fastest = float("inf")
    for bins in sorted(found):
        if found[bins][0] < fastest:
            kept[bins] = found[bins]
            fastest = found[bins][0]
    return kept


def _smallest(costs: Mapping[str, Mapping[str, BlockCost]]) -> RecomputePlan:
    chosen = {
        name: min(options, key=lambda policy, options=options: options[policy].saved_bytes)
        for name, options in costs.items()
    }
    return _plan(costs, chosen)


def _plan(costs: Mapping[str, Mapping[str, BlockCost]], chosen: dict[str, str]) -> RecomputePlan:
    return RecomputePlan(
        policies=chosen,
        saved_bytes=sum(costs[name][policy].saved_bytes for name, policy in chosen.items()),
        added_s=sum(
            max(0.0, costs[name][policy].seconds - costs[name]["none"].seconds)
            for name, policy in chosen.items()
        ),
    )
