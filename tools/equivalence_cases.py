"""The cases of the equivalence matrix, and what one rank does for all of them."""

import itertools
from collections.abc import Iterator, Sequence

import msgspec
import torch

import ds_comm
import ds_zero
from ds_zero.testing import OddModel, odd_batches, odd_optimizer

STEPS = 4
BATCH_SIZE = 8
CLIP_NORM = 0.05
# Settings that must not change a bit, each tried on top of its stage.
SETTINGS: tuple[tuple[int, str, dict[str, int]], ...] = (
    (1, "bucket_numel=0", {"bucket_numel": 0}),
    (2, "bucket_numel=1e9", {"bucket_numel": 10**9}),
    (3, "max_gathered_units=1", {"max_gathered_units": 1}),
    (3, "max_gathered_units=4", {"max_gathered_units": 4}),
)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One training run under ds."""

    stage: int
    ranks: int
    accumulation: int
    dtype: str
    clipping: bool
    setting: str = ""

    @property
    def baseline(self) -> "Case":
        """The stage 0 run whose bits this one must have."""
        return msgspec.structs.replace(self, stage=0, setting="")

    def arguments(self) -> dict[str, object]:
        """For :func:`ds_zero.shard`."""
        extra = {name: values for _, name, values in SETTINGS}.get(self.setting, {})
        clip_norm = CLIP_NORM if self.clipping else None
        return {"stage": self.stage, "precision": self.dtype, "clip_norm": clip_norm, **extra}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a case gave.

    Attributes:
        max_difference: largest difference of any weight from the plain run.
        identical: whether every bit equals stage 0's at the same ranks and dtype, on every rank.
    """

    case: Case
    max_difference: float
    identical: bool


def all_cases(*, quick: bool) -> Iterator[Case]:
    """Every cell of the matrix; ``quick`` leaves out 4 ranks and half of the combinations."""
    for ranks, accumulation, dtype, clipping in itertools.product(
        (1, 2) if quick else (1, 2, 4), (1, 4), ("fp32", "bf16"), (False, True)
    ):
        if quick and (accumulation == 4) != clipping:
            continue
        common = {"ranks": ranks, "accumulation": accumulation, "dtype": dtype, "clipping": clipping}
        for stage in (0, 1, 2, 3):
            yield Case(stage=stage, **common)
        for stage, name, _ in SETTINGS:
            yield Case(stage=stage, setting=name, **common)


def train_sharded(case: Case) -> dict[str, torch.Tensor]:
    """The weights after training under ds on this rank and its peers.

    Collective: every rank.
    """
    world = ds_comm.init()
    torch.manual_seed(0)
    model = OddModel()
    model, optimizer = ds_zero.shard(model, odd_optimizer(model), **case.arguments())  # type: ignore[arg-type]
    if optimizer is None:
        raise ds_zero.InternalError("shard gave no optimizer for one")
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in odd_batches(case.accumulation, batch_size=BATCH_SIZE, seed=step):
            (model(batch.chunk(case.ranks)[world.rank]) / case.accumulation).backward()
        optimizer.step()
    state = ds_zero.full_state_dict(model)
    ds_zero.close(model)
    return state


def train_plain(case: Case) -> dict[str, torch.Tensor]:
    """The same training in one plain process, with torch's optimizer and clipping and no ds.

    Every micro-batch is taken in as many parts as there are ranks, as a plain loop short of memory would. In
    bf16 it is the usual loop by hand: bf16 copies of fp32 weights for forward and backward, gradients summed
    in fp32.
    """
    torch.manual_seed(0)
    master = OddModel()
    optimizer = odd_optimizer(master)
    model = OddModel().to(torch.bfloat16) if case.dtype == "bf16" else master
    model.scale = master.scale
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in odd_batches(case.accumulation, batch_size=BATCH_SIZE, seed=step):
            _add_gradients(model, master, batch.chunk(case.ranks), case)
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(master.parameters(), CLIP_NORM)
        optimizer.step()
    with torch.no_grad():
        _copy_weights(model, master)
    return model.state_dict()


def _add_gradients(model: OddModel, master: OddModel, parts: Sequence[torch.Tensor], case: Case) -> None:
    if model is master:
        for part in parts:
            (model(part) / (case.accumulation * case.ranks)).backward()
        return
    with torch.no_grad():
        _copy_weights(model, master)
    for part in parts:
        model.zero_grad()
        (model(part) / case.accumulation).backward()
        for low, high in zip(model.parameters(), master.parameters(), strict=True):
            if low.grad is not None:
                gradient = low.grad.float() / case.ranks
                high.grad = gradient if high.grad is None else high.grad + gradient


def _copy_weights(model: OddModel, master: OddModel) -> None:
    for low, high in zip(model.parameters(), master.parameters(), strict=True):
        if low is not high:
            low.copy_(high)


def run_cases(encoded: bytes) -> list[Outcome]:
    """Run cases of one number of ranks and compare; for :func:`ds_comm.testing.run_ranks`.

    Collective: every rank.
    """
    cases = msgspec.json.decode(encoded, type=list[Case])
    baselines: dict[Case, dict[str, torch.Tensor]] = {}
    plains: dict[Case, dict[str, torch.Tensor]] = {}
    outcomes = []
    for case in cases:
        state = train_sharded(case)
        baseline = baselines.setdefault(case.baseline, state)
        if case.baseline not in plains:
            plains[case.baseline] = train_plain(case)
        identical = all(torch.equal(value, baseline[name]) for name, value in state.items())
        difference = max(_difference(value, plains[case.baseline][name]) for name, value in state.items())
        outcomes.append(Outcome(case=case, max_difference=difference, identical=identical))
    return outcomes


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.float() - right.float()).abs().max()) if left.numel() else 0.0
