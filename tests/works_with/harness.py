"""Compare one training step of a model over parts of a batch with the step over the whole batch.

Models should be in float64 and draw no random numbers (dropout 0), else the two steps differ.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from syncbn_torch import DataParallelWithCallback, convert_model

# Largest difference that a test allows, as a share of the largest value of its kind.
LIMIT = 1e-9

Convert = Callable[[nn.Module], nn.Module]


def over_replicas(
    model: nn.Module,
    batch: Any,
    *,
    replicas: int = 2,
    convert: Convert = convert_model,
    names: tuple[str, ...] = (),
) -> float:
    """The largest difference between a step of replicas and one of the undivided batch.

    `batch`: the argument of the model, or a tuple of arguments; `names` makes them keyword
    arguments. Compared are outputs, gradients
    of all parameters, buffers, and outputs in eval afterwards. `model`: unconverted; not changed.
    """
    parallel = DataParallelWithCallback(convert(copy.deepcopy(model)), replicas=replicas)
    expected = _step(copy.deepcopy(model), batch, lambda y: y, names=names)
    return _difference(_step(parallel, batch, lambda y: y, names=names), expected)


def over_ranks(
    model: nn.Module,
    batch: Any,
    *,
    convert: Convert = convert_model,
    names: tuple[str, ...] = (),
) -> float:
    """The same over the ranks of the default group, each with an equal share of the batch.

    Call it in every rank with the same `model` and `batch`; see `on_ranks` in tests/torch/world.py.
    """
    rank, size = dist.get_rank(), dist.get_world_size()

    def own(tree: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.chunk(size)[rank] if t.dim() else t, tree)

    alone = copy.deepcopy(model)
    expected = _step(alone, batch, own, names=names)
    parallel = DistributedDataParallel(convert(copy.deepcopy(model)))
    # DistributedDataParallel averages the gradients of the ranks
    actual = _step(parallel, own(batch), lambda y: y, own, float(size), names)
    return _difference(actual, expected)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The batch norm layers of a model, converted or not."""
    return [m for m in model.modules() if isinstance(m, _BatchNorm)]


def record(library: str, subject: str, **figures: Any) -> None:
    """Add a row to the page "Works with".

    `library`: name of the package (its version is looked up), `subject`: the model or program.
    Known figures: `layers` (batch norm layers), `converted`, `over` ("2 replicas", "2 ranks"),
    `difference` (the largest), `note`, and `kind`, which is "program" for rows that are no models.
    """
    path = os.environ.get("SYNCBN_WORKS_WITH")
    if path and (not dist.is_initialized() or dist.get_rank() == 0):
        row = {"library": library, "version": metadata.version(library), "subject": subject}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({**row, **figures}) + "\n")


def _step(
    model: nn.Module,
    batch: Any,
    shown: Callable[[Any], Any],
    of_cotangents: Callable[[Any], Any] = lambda tree: tree,
    factor: float = 1.0,
    names: tuple[str, ...] = (),
) -> dict[str, list[Tensor]]:
    """Forward, backward with random cotangents, eval; `shown`: the part of outputs to compare."""
    arguments = batch if isinstance(batch, tuple) else (batch,)
    named = dict(zip(names, arguments, strict=True)) if names else {}
    arguments = () if names else arguments
    model.train()
    outputs = _tensors(model(*arguments, **named))
    generator = torch.Generator().manual_seed(1)
    size = dist.get_world_size() if factor != 1.0 else 1
    cotangents = [
        of_cotangents(
            torch.randn((y.shape[0] * size, *y.shape[1:]), generator=generator, dtype=y.dtype)
        )
        for y in outputs
    ]
    loss = sum(((y * c).sum() for y, c in zip(outputs, cotangents, strict=True)), torch.zeros(()))
    (loss * factor).backward()
    inner = model.module if hasattr(model, "module") else model
    gradients = [p.grad for p in inner.parameters() if p.grad is not None]
    buffers = [b.detach().clone() for b in inner.buffers()]
    inner.eval()
    with torch.no_grad():
        evaluated = _tensors(inner(*arguments, **named))
    return {
        "output": [shown(y).detach() for y in outputs],
        "gradient": gradients,
        "buffer": buffers,
        "output in eval": [shown(y) for y in evaluated],
    }


def _tensors(tree: Any) -> list[Tensor]:
    if not isinstance(tree, (Tensor, tuple, list, dict)):  # a ModelOutput or dataclass
        tree = {key: value for key, value in vars(tree).items() if value is not None}
    return [
        leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def _difference(actual: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> float:
    largest = 0.0
    for kind, wanted in expected.items():
        got = actual[kind]
        assert [t.shape for t in got] == [t.shape for t in wanted], f"shapes of {kind} differ"
        scale = max((t.abs().max().item() for t in wanted if t.numel()), default=0.0)
        for a, b in zip(got, wanted, strict=True):
            if b.numel() == 0:
                continue
            # a gradient of rounding errors alone (a bias before batch norm) has no scale
            own = max(b.abs().max().item(), 1e-3 * scale) or 1.0
            largest = max(largest, (a - b).abs().max().item() / own)
    return largest
