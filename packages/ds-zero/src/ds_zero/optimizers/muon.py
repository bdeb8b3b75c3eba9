"""Muon for matrices and AdamW for the rest, as one optimizer; both updates are torch's own."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

MATRIX_DIMS = 2


class Muon(Optimizer):
    """Orthogonalised momentum for hidden matrices, AdamW for everything else.

    A parameter goes to Muon when it has two dimensions and no attribute ``use_muon = False``: set that on
    embeddings and on the output head, for which Muon is not meant (:func:`mark_hidden_matrices` does). A
    group may say ``use_muon`` for all its parameters.

    Args:
        params: parameters or groups.
        lr: learning rate of the matrices, adjusted by shape to match AdamW's update size.
        momentum: of the matrices, Nesterov.
        weight_decay: decoupled, of both.
        adam_lr: learning rate of the rest; ``None`` for ``lr``.
        betas: of the rest.
        eps: of the rest.
        ns_steps: Newton-Schulz iterations.

    Raises:
        ValueError: a setting is out of range (by torch).

    Source: Muon is Scalable for LLM Training, arXiv:2502.16982, section 2.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        ns_steps: int = 5,
    ) -> None:  # the settings of two optimizers
        matrices, rest = _split(params)
        matrix_options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "ns_steps": ns_steps}
        matrix_options["adjust_lr_fn"] = "match_rms_adamw"
        rest_options = {"lr": lr if adam_lr is None else adam_lr, "betas": betas, "eps": eps}
        rest_options |= {"weight_decay": weight_decay, "fused": True}
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(torch.optim.Muon(matrices, **matrix_options))  # type: ignore[arg-type]
        if rest:
            self._parts.append(torch.optim.AdamW(rest, **rest_options))  # type: ignore[arg-type]
        # The parts' groups are this optimizer's groups, the same dicts; so is the state.
        groups = [group for part in self._parts for group in part.param_groups]
        super().__init__(groups, {"lr": lr})
        for part in self._parts:
            part.state = self.state

    def needs_whole(self, group: dict[str, Any]) -> bool:
        """Matrices are updated whole, the rest element by element."""
        return bool(group["use_muon"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` gave, for both parts."""
        super().load_state_dict(state_dict)
        for part in self._parts:
            part.state = self.state
            wants_muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [group for group in self.param_groups if group["use_muon"] is wants_muon]


def _split(params: Iterable[Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    given: list[Any] = list(params)
    groups: list[dict[str, Any]] = given if given and isinstance(given[0], dict) else [{"params": given}]
    matrices, rest = [], []
    for group in groups:
        members: list[nn.Parameter] = list(group["params"]) if not _is_one(group) else [group["params"]]
        options = {key: value for key, value in group.items() if key not in ("params", "use_muon")}
        wanted = [p for p in members if group.get("use_muon", _is_hidden_matrix(p))]
        chosen = {id(parameter) for parameter in wanted}
        others = [parameter for parameter in members if id(parameter) not in chosen]
        if wanted:
            matrices.append({"params": wanted, "use_muon": True, **options})
        if others:
            rest.append({"params": others, "use_muon": False, **options})
    return matrices, rest


def _is_one(group: dict[str, Any]) -> bool:
    return isinstance(group["params"], torch.Tensor)


def _is_hidden_matrix(parameter: torch.Tensor) -> bool:
    return parameter.dim() == MATRIX_DIMS and getattr(parameter, "use_muon", True)


def mark_hidden_matrices(model: nn.Module) -> None:
    """Set ``use_muon`` on every parameter: true for matrices that are neither embeddings nor the output head.

    The head is taken to be the last linear layer whose output size is the vocabulary of an embedding.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabularies = {module.num_embeddings for module in embeddings}
    outside = {id(module.weight) for module in embeddings}
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in vocabularies]
    outside |= {id(head.weight) for head in heads[-1:]}
    for parameter in model.parameters():
        parameter.use_muon = parameter.dim() == MATRIX_DIMS and id(parameter) not in outside  # type: ignore[attr-defined]
