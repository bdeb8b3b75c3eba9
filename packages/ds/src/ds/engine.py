"""The engine that initialize() returns: forward, backward, step and counting, over ds_zero."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

import ds_comm
import ds_zero
from ds.compat import DeepSpeedNames
from ds.config import Batch, Config
from ds.rank_log import log_once
from ds.zero_options import offload_of, precision_of, reach_of

logger = logging.getLogger(__name__)


class NotYetError(NotImplementedError):
    """A call that DeepSpeed has and ds does not have yet."""


class Engine(DeepSpeedNames, nn.Module):
    """A sharded model with its optimizer and schedule.

    The usual loop is ``loss = engine(batch)``, ``engine.backward(loss)``, ``engine.step()`` for every
    micro-batch; the weights change at every accumulation boundary. With a plain ``loss.backward()``, which
    ``step`` counts too, dividing the loss by the accumulation steps is the caller's.

    Attributes:
        module: the user's model, sharded.
        optimizer: the sharded optimizer, ``None`` for inference.
        lr_scheduler: advanced once per step that changed weights.
        micro_steps: micro-batches so far.
        global_steps: steps that changed weights or were skipped.
        skipped_steps: steps skipped for a gradient that is not finite.
        training_dataloader: what :func:`ds.initialize` made of ``training_data``.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: LRScheduler | None,
        *,
        config: Config,
        batch: Batch,
    ) -> None:
        super().__init__()
        self.parsed_config = config
        self.batch = batch
        self.micro_steps = 0
        self.global_steps = 0
        self.skipped_steps = 0
        self.training_dataloader: Any = None
        self._world = ds_comm.init()
        self._forced_boundary: bool | None = None
        self._step_applied = False
        module, sharded = ds_zero.shard(
            module,
            optimizer,
            stage=config.zero_optimization.stage,
            precision=precision_of(config),
            offload=offload_of(config),
            reach=reach_of(config),
            clip_norm=config.gradient_clipping or None,
            bucket_numel=min(config.zero_optimization.reduce_bucket_size, ds_zero.BUCKET_NUMEL),
            on_nonfinite="skip" if config.bf16.enabled and config.bf16.check_grad_overflow else "raise",
        )
        self.module = module
        self.optimizer = sharded
        self.lr_scheduler = lr_scheduler

    def __getattr__(self, name: str) -> Any:
        """What the engine does not have is the module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name == "module":
                raise
            return getattr(module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.module(*args, **kwargs)

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Gradients of one micro-batch; the loss is divided by the accumulation steps unless told not to.

        Collective: every rank.
        """
        scaled = self.scale(loss) if scale_wrt_gas else loss
        self._trained("backward").scale(scaled).backward(retain_graph=retain_graph)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """A micro-batch's share of the loss of a step, for those who call ``loss.backward()`` themselves."""
        return loss / self.batch.accumulation if self.batch.accumulation > 1 else loss

    def _trained(self, call: str) -> ds_zero.ShardedOptimizer:
        if self.optimizer is None:
            raise RuntimeError(f"{call} needs an optimizer, and this engine has none; give initialize() one")
        return self.optimizer

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at the accumulation boundary step the optimizer and the schedule.

        Collective: every rank.
        """
        optimizer = self._trained("step")
        at_boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._step_applied = False
        if not at_boundary:
            return
        optimizer.step()
        optimizer.zero_grad()
        self.global_steps += 1
        if optimizer.step_skipped:
            self.skipped_steps += 1
        else:
            self._step_applied = True
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        self._print_progress()

    def _print_progress(self) -> None:
        every = self.parsed_config.steps_per_print
        if every and self.global_steps % every == 0:
            log_once(
                logger,
                logging.INFO,
                "step %d, skipped %d, lr %s, gradient norm %s",
                self.global_steps,
                self.skipped_steps,
                self.get_lr(),
                self.get_global_grad_norm(),
            )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next :meth:`step` changes weights: as forced, else by the count of micro-batches."""
        if self._forced_boundary is not None:
            return self._forced_boundary
        return (self.micro_steps + 1) % self.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """From now on the caller says where the boundaries are."""
        self._forced_boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Whether the last :meth:`step` changed weights."""
        return self._step_applied

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backwards inside on this rank; see :func:`ds_zero.no_sync`."""
        with ds_zero.no_sync(self.module):
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        self.module.zero_grad(set_to_none)

    @property
    def global_samples(self) -> int:
        """Samples of all ranks up to the last step."""
        return self.global_steps * self.batch.train

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm of the last step, before clipping; ``None`` before the first."""
        return self.optimizer.grad_norm if self.optimizer is not None and self.global_steps else None

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """The whole model on the CPU under its own names, on every rank.

        Collective: every rank.
        """
        return self._whole(exclude_frozen_parameters, rank0_only=False)

    def _whole(self, exclude_frozen_parameters: bool, *, rank0_only: bool) -> dict[str, torch.Tensor]:
        state = ds_zero.full_state_dict(self.module, rank0_only=rank0_only)
        frozen = {
            name for name, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad
        }
        return {name: t for name, t in state.items() if not (exclude_frozen_parameters and name in frozen)}

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "model.safetensors", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole model, in the dtype of its parameters, as one safetensors file on rank 0.

        Collective: every rank. Tied parameters are stored once, under their first name.

        Raises:
            OSError: rank 0 could not write; on every rank.
        """
        state = self._whole(exclude_frozen_parameters, rank0_only=True)
        names = [*self.module.named_parameters(), *self.module.named_buffers()]
        path = Path(save_dir) / save_filename
        failure = _write(path, {name: state[name].contiguous() for name, _ in names if name in state})
        told = ds_comm.Mesh.world().axis("dp").all_gather_object(failure, tag="saved the model")
        if told[0]:
            raise OSError(f"rank 0 could not write {path}: {told[0]}")
        return True

    def save_checkpoint(self, save_dir: str, *_: Any, **__: Any) -> bool:
        """Not there yet."""
        raise NotYetError("save_checkpoint arrives with ds-ckpt; save_16bit_model(dir) writes the weights")

    def load_checkpoint(self, load_dir: str, *_: Any, **__: Any) -> tuple[str | None, dict[str, Any]]:
        """Not there yet."""
        raise NotYetError("load_checkpoint arrives with ds-ckpt; module.load_state_dict(...) loads weights")

    def destroy(self) -> None:
        """Take the engine off the model; harmless when done already.

        Collective: every rank, as long as the ranks are connected.
        """
        if ds_zero.is_sharded(self.module) and ds_comm.is_initialized():
            ds_zero.close(self.module)


def _write(path: Path, state: dict[str, torch.Tensor]) -> str:
    """Write a file when there is something to write; what went wrong, or nothing."""
    from safetensors.torch import save_file

    if not state:
        return ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(state, str(path), metadata={"format": "pt"})
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return f"{type(error).__name__}: {error}"
    return ""
