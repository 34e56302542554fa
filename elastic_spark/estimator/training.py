"""What each worker of a fit runs.

*The loss of a global batch* is the mean over its rows, or, with sample weights, sum(w * loss) / sum(w) over all of
them, wherever they lie: each worker contributes its rows' share, so the gradient does not depend on how many workers
there are. A batch whose weights are all zero changes nothing.

*Validation* follows each epoch: sums over the true rows of all workers, and one sum of these over the workers. The best
weights so far are part of the elastic state, so they survive what the model survives. A world that changes between the
last step of an epoch and its validation comes back to the validation, not to a step.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

from elastic_spark.errors import ConfigError

if TYPE_CHECKING:
    from elastic_spark.worker.context import Context
    from elastic_spark.worker.data import Batch

#: Losses that want the number of a class as label; all others get float32.
_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_CLASS_FUNCTIONS = (F.cross_entropy, F.nll_loss, F.multi_margin_loss)


@dataclass(frozen=True)
class FitTask:
    """A fit, as it travels to the workers.

    ``loss`` and ``metrics`` are called with ``(output, label)`` and give a value for each row, or their mean.
    """

    module: nn.Module
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    loss: Callable[..., torch.Tensor]
    metrics: Mapping[str, Callable[..., torch.Tensor]]
    features: tuple[str, ...]
    labels: tuple[str, ...]
    weight: str | None
    epochs: int
    patience: int | None
    validates: bool


# ---- from columns to numbers


def as_feature(column: torch.Tensor) -> torch.Tensor:
    """A column as the model gets it: whole numbers as int64, all else as float32; [n] or [n, width]."""
    whole = not column.is_floating_point() and column.dtype != torch.bool
    return column.to(torch.int64 if whole else torch.float32).contiguous()


def output_of(module: nn.Module, columns: Mapping[str, torch.Tensor], features: Sequence[str]) -> torch.Tensor:
    """What the model gives for these rows: [n], or [n, k] with k > 1.

    Raises ConfigError where it gives anything else than a tensor with a row for each row.
    """
    inputs = [as_feature(columns[name]) for name in features]
    output = module(*inputs)
    if not isinstance(output, torch.Tensor) or output.dim() == 0 or len(output) != len(inputs[0]):
        shown = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ConfigError(f"the model must give one tensor with a row for each of {len(inputs[0])} rows, not {shown}")
    return _narrow(output)


def label_of(columns: Mapping[str, torch.Tensor], labels: Sequence[str], loss: Any) -> torch.Tensor:
    """The labels as the loss gets them: [n], or [n, k] where there are several, side by side."""
    plain = loss.func if isinstance(loss, functools.partial) else loss
    by_class = isinstance(plain, _CLASS_LOSSES) or plain in _CLASS_FUNCTIONS
    parts = [columns[name] for name in labels]
    if len(parts) == 1:
        classes = by_class and parts[0].dim() == 1
        return _narrow(parts[0].to(torch.int64 if classes else torch.float32).contiguous())
    return torch.cat([part.to(torch.float32).reshape(len(part), -1) for part in parts], dim=1)


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    """[n, 1] as [n]: one against the other would broadcast to [n, n] in a loss."""
    return tensor.squeeze(1) if tensor.dim() == 2 and tensor.shape[1] == 1 else tensor


def unreduced(loss: Any) -> Callable[..., torch.Tensor]:
    """A loss of torch so that it gives a value for each row; others as they are."""
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        loss = copy.deepcopy(loss)
        loss.reduction = "none"
    elif not isinstance(loss, nn.Module) and "reduction" in inspect.signature(loss).parameters:
        loss = functools.partial(loss, reduction="none")
    checked: Callable[..., torch.Tensor] = loss
    return checked


def by_row(values: torch.Tensor) -> torch.Tensor:
    """[n, ...] as the mean over all but the first: [n]; a scalar stays one."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def try_out(task: FitTask, columns: Mapping[str, torch.Tensor]) -> int:
    """The model, the loss and the metrics, once, on a few rows, before anything is started.

    Returns:
        Numbers that the model gives for each row: 0 for one, k for [n, k].

    Raises:
        ConfigError: they do not fit each other or the columns; the cause is what torch, or the model, said.
    """
    shapes = {name: tuple(as_feature(columns[name]).shape) for name in task.features}
    before = task.module.training
    task.module.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size")
            output = output_of(task.module, columns, task.features)
            label = label_of(columns, task.labels, task.loss)
            for name, function in {"loss": task.loss, **task.metrics}.items():
                value = function(output, label)
                if value.dim() and len(value) != len(output):
                    raise ConfigError(f"{name} gives {tuple(value.shape)} for {len(output)} rows")
                if name == "loss" and task.weight is not None and not value.dim():
                    raise ConfigError("sample_weight_col needs a loss with a value for each row, not their mean")
    except Exception as error:
        raise ConfigError(
            f"model, loss and columns do not fit: {error}. The model is called with one tensor for each of "
            f"feature_cols, here {shapes}; a VectorAssembler makes one column of vectors of one or several"
        ) from error
    finally:
        task.module.train(before)
    return output[0].numel() if output.dim() > 1 else 0


# ---- the loop


class _Best:
    """The weights with the lowest validation loss so far; kept in the elastic state."""

    def __init__(self) -> None:
        self.loss, self.epoch = float("inf"), -1
        self.weights: dict[str, torch.Tensor] = {}

    def consider(self, loss: float, epoch: int, module: nn.Module) -> None:
        if loss < self.loss:
            self.loss, self.epoch, self.weights = loss, epoch, _copy_of(module)

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "epoch": self.epoch, "weights": dict(self.weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss, self.epoch, self.weights = state["loss"], state["epoch"], state["weights"]


def train(ctx: Context, task: FitTask) -> bytes | None:
    """Rank 0 returns the best weights, without validation the last ones, as safetensors; the others None."""
    import horovod.torch as hvd

    from elastic_spark.worker.state import ElasticState

    module = task.module
    torch.manual_seed(ctx.seed)  # rank 0's dropout; the other ranks derive theirs from it
    optimizer = hvd.DistributedOptimizer(
        task.optimizer(module.parameters()), named_parameters=module.named_parameters()
    )
    best = _Best()
    state = ElasticState(model=module, optimizer=optimizer, best=best, validated=0, stopped=False)
    steps = ctx.steps_per_epoch("train")

    def validate_if_due() -> None:
        epoch = state.validated
        if not task.validates or state.cursor("train") != (epoch, steps):
            return
        figures = _validate(ctx, task)
        best.consider(figures["val_loss"], epoch, module)
        state.stopped = task.patience is not None and epoch - best.epoch >= task.patience
        state.validated = epoch + 1
        state.commit(**figures)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def loop(state: Any) -> bytes | None:
        validate_if_due()
        module.train()
        for batch in () if state.stopped else ctx.batches("train", state, epochs=task.epochs):
            optimizer.zero_grad()
            loss = _share_of_loss(task, batch, ctx.size)
            if loss is not None:
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                state.commit(loss=loss.item())
            else:
                state.commit()
            validate_if_due()
            if state.stopped:
                break
        return safetensors.torch.save(best.weights or _copy_of(module)) if hvd.rank() == 0 else None

    result: bytes | None = loop(state)
    return result


def _share_of_loss(task: FitTask, batch: Batch, size: int) -> torch.Tensor | None:
    """This worker's part: the mean of it over the workers is the loss of the global batch. None where no row counts."""
    if task.weight is None:
        return _losses(task, batch).mean() * batch.weight
    import horovod.torch as hvd

    weights = _weights(task, batch)
    total = float(hvd.allreduce(weights.sum(), op=hvd.Sum, name="fit.weights"))
    if total == 0.0:
        return None
    losses = _losses(task, batch)
    return (losses * weights.to(losses.dtype)).sum() * (size / total)


def _losses(task: FitTask, batch: Batch) -> torch.Tensor:
    output = output_of(task.module, batch, task.features)
    return by_row(task.loss(output, label_of(batch, task.labels, task.loss)))


def _weights(task: FitTask, batch: Batch) -> torch.Tensor:
    """float64[n]; 0 for the row that stands in where this worker has none."""
    rows = len(batch[task.features[0]])
    if not batch.rows:
        return torch.zeros(rows, dtype=torch.float64)
    return batch[task.weight].to(torch.float64) if task.weight else torch.ones(rows, dtype=torch.float64)


def _validate(ctx: Context, task: FitTask) -> dict[str, float]:
    """Weighted means of loss and metrics over all validation rows, the same on every rank."""
    import horovod.torch as hvd

    functions = {"val_loss": task.loss, **{f"val_{name}": metric for name, metric in task.metrics.items()}}
    sums = torch.zeros(1 + len(functions), dtype=torch.float64)
    task.module.eval()
    with torch.no_grad():
        for batch in ctx.batches("val", epochs=1):
            weights = _weights(task, batch)
            output = output_of(task.module, batch, task.features)
            label = label_of(batch, task.labels, task.loss)
            sums[0] += weights.sum()
            for place, function in enumerate(functions.values(), 1):
                values = by_row(function(output, label)).to(torch.float64)
                sums[place] += (values * weights).sum() if batch.rows else 0.0
    task.module.train()
    sums = hvd.allreduce(sums, op=hvd.Sum, name="fit.validation")
    return dict(zip(functions, (sums[1:] / sums[0]).tolist(), strict=True))


def _copy_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in module.state_dict().items()}
