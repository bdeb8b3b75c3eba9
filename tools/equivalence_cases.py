"""The cases of the equivalence matrix, and what one rank does for all of them."""

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

import ds_comm
import ds_zero
from ds_zero.optimizers import Lamb, Lion, Muon, mark_hidden_matrices
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


# Options that must not change a bit either, each tried at every stage; a stage may refuse one with a reason.
OPTIONS: dict[str, dict[str, str | float]] = {
    "optimizer on the CPU": {"optimizer": "cpu"},
    "half of it on the CPU": {"optimizer": "cpu", "ratio": 0.5},
    "optimizer in files": {"optimizer": "file"},
    "gradients on the CPU": {"gradients": "cpu"},
    "parameters on the CPU": {"parameters": "cpu"},
    "everything on the CPU": {"optimizer": "cpu", "gradients": "cpu", "parameters": "cpu"},
    "everything in files": {"optimizer": "file", "gradients": "file", "parameters": "file"},
}
RECOMPUTES = ("full", "selective", "matmuls", "attention")
FP16_SCALE = 1024.0


def _trained(model: OddModel) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.numel()]


def _muon(model: OddModel) -> Muon:
    mark_hidden_matrices(model)
    return Muon(_trained(model), lr=1e-2, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[[OddModel], torch.optim.Optimizer]] = {
    "adamw": odd_optimizer,
    "sgd": lambda model: torch.optim.SGD(_trained(model), lr=1e-2, momentum=0.9),
    "lion": lambda model: Lion(_trained(model), lr=1e-3, weight_decay=0.1),
    "lamb": lambda model: Lamb(_trained(model), lr=1e-2, weight_decay=0.1),
    "muon": _muon,
    "adafactor": lambda model: torch.optim.Adafactor(_trained(model), lr=1e-2),
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One training run under ds.

    Attributes:
        setting: name of one of ``SETTINGS``.
        option: name of one of ``OPTIONS``, or ``"recompute <policy>"``.
    """

    stage: int
    ranks: int
    accumulation: int
    dtype: str
    clipping: bool
    setting: str = ""
    option: str = ""
    optimizer: str = "adamw"

    @property
    def baseline(self) -> "Case":
        """The stage 0 run whose bits this one must have."""
        return msgspec.structs.replace(self, stage=0, setting="", option="")

    @property
    def is_plain(self) -> bool:
        """Whether it belongs to the first table."""
        return not self.setting and not self.option and self.optimizer == "adamw"

    def arguments(self, folder: str) -> dict[str, object]:
        """For :func:`ds_zero.shard`; swap files go to ``folder``."""
        extra: dict[str, object] = dict({name: values for _, name, values in SETTINGS}.get(self.setting, {}))
        if self.option in OPTIONS:
            extra["offload"] = ds_zero.Offload(path=folder, **OPTIONS[self.option])  # type: ignore[arg-type]
        precision: str | ds_zero.Precision = self.dtype
        if self.dtype == "fp16":
            scale = ds_zero.LossScale(initial=FP16_SCALE)
            precision = ds_zero.Precision(param="fp16", loss_scale=scale)
        clip_norm = CLIP_NORM if self.clipping else None
        return {"stage": self.stage, "precision": precision, "clip_norm": clip_norm, **extra}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a case gave.

    Attributes:
        max_difference: largest difference of any weight from the plain run.
        identical: whether every bit equals stage 0's at the same ranks, dtype and optimizer, on every rank.
        refused: why the combination was refused at start; empty when it ran.
    """

    case: Case
    max_difference: float
    identical: bool
    refused: str = ""


def all_cases(*, quick: bool) -> Iterator[Case]:
    """Every cell of the matrix; ``quick`` leaves out 4 ranks and half of the combinations."""
    for ranks, accumulation, dtype, clipping in itertools.product(
        (1, 2) if quick else (1, 2, 4), (1, 4), ("fp32", "bf16", "fp16"), (False, True)
    ):
        if quick and (accumulation == 4) != clipping:
            continue
        common = {"ranks": ranks, "accumulation": accumulation, "dtype": dtype, "clipping": clipping}
        for stage in (0, 1, 2, 3):
            yield Case(stage=stage, **common)
        for stage, name, _ in SETTINGS:
            yield Case(stage=stage, setting=name, **common)
    yield from _option_cases(quick=quick)


def _option_cases(*, quick: bool) -> Iterator[Case]:
    for dtype, stage in itertools.product(("fp32",) if quick else ("fp32", "bf16", "fp16"), (0, 1, 2, 3)):
        common = {"stage": stage, "ranks": 2, "accumulation": 2, "dtype": dtype, "clipping": True}
        for option in (*OPTIONS, *(f"recompute {policy}" for policy in RECOMPUTES)):
            yield Case(option=option, **common)
        for optimizer in OPTIMIZERS:
            yield Case(optimizer=optimizer, **common)


def train_sharded(case: Case) -> dict[str, torch.Tensor]:
    """The weights after training under ds on this rank and its peers.

    Collective: every rank.
    """
    world = ds_comm.init()
    torch.manual_seed(0)
    model = OddModel()
    if case.option.startswith("recompute"):
        ds_zero.recompute(model, case.option.split()[1])
    with tempfile.TemporaryDirectory() as folder:
        return _train(model, case, folder, world.rank)


def _train(model: OddModel, case: Case, folder: str, rank: int) -> dict[str, torch.Tensor]:
    arguments = case.arguments(folder)
    model, optimizer = ds_zero.shard(model, OPTIMIZERS[case.optimizer](model), **arguments)  # type: ignore[arg-type, assignment]
    if optimizer is None:
        raise ds_zero.InternalError("shard gave no optimizer for one")
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in odd_batches(case.accumulation, batch_size=BATCH_SIZE, seed=step):
            (model(batch.chunk(case.ranks)[rank]) / case.accumulation).backward()
        optimizer.step()
    state = ds_zero.full_state_dict(model)
    ds_zero.close(model)
    return state


def train_plain(case: Case) -> dict[str, torch.Tensor]:
    """The same training in one plain process, with torch's optimizer and clipping and no ds.

    Every micro-batch is taken in as many parts as there are ranks, as a plain loop short of memory would. In
    bf16 and fp16 it is the usual loop by hand: narrow copies of fp32 weights for forward and backward,
    gradients summed in fp32, the loss scaled in fp16.
    """
    torch.manual_seed(0)
    master = OddModel()
    optimizer = OPTIMIZERS[case.optimizer](master)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(case.dtype)
    model = OddModel().to(narrow) if narrow is not None else master
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
    scale = FP16_SCALE if case.dtype == "fp16" else 1.0
    for part in parts:
        model.zero_grad()
        (model(part) / case.accumulation * scale).backward()
        for low, high in zip(model.parameters(), master.parameters(), strict=True):
            if low.grad is not None:
                gradient = low.grad.float() / case.ranks / scale
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
        try:
            state = train_sharded(case)
        except (ValueError, ds_zero.ZeroError) as error:
            outcomes.append(Outcome(case=case, max_difference=0.0, identical=False, refused=str(error)))
            continue
        if case.baseline not in baselines:
            is_own = case == case.baseline
            baselines[case.baseline] = state if is_own else train_sharded(case.baseline)
        baseline = baselines[case.baseline]
        if case.baseline not in plains:
            plains[case.baseline] = train_plain(case)
        identical = all(torch.equal(value, baseline[name]) for name, value in state.items())
        difference = max(_difference(value, plains[case.baseline][name]) for name, value in state.items())
        outcomes.append(Outcome(case=case, max_difference=difference, identical=identical))
    return outcomes


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left.float() - right.float()).abs().max()) if left.numel() else 0.0
