"""`update_bn_stats`: running statistics of a whole data set, instead of an average over steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from syncbn_core.comm import SingleCommunicator
from syncbn_core.errors import BatchSizeError
from syncbn_core.moments import Moments, merged_rows, require_more_than_one_value
from syncbn_torch.conversion.convert import convert_model
from syncbn_torch.conversion.replacement import modules_of
from syncbn_torch.conversion.rules import convertible
from syncbn_torch.layer_state import LayerState
from syncbn_torch.processes import processes_of


class _Population(SingleCommunicator):
    """Stands for the group of a layer, and merges the moments that the layer sends.

    A batch of one value per channel is doubled: then the layer takes it, and y is its bias.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.total = np.zeros(2 * num_features + 2)  # a row, as `Moments` has it

    def all_gather(self, values: Any, call: Any = None) -> Any:
        self.total[:-1] = np.concatenate(merged_rows(np.stack([self.total, values])))
        return np.stack([values] * (2 if values[0] == 1 else 1))


def update_bn_stats(
    model: nn.Module,
    loader: Iterable[Any],
    device: Any = None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> None:
    """Set running statistics to those of all batches of `loader`, of all processes together.

    Runs `model` in training mode without gradients, on each batch, or its first element if it is a
    list or tuple, moved to `device` if that is given. Or it calls `forward(model, batch)`, for a
    model that takes more: `lambda model, batch: model(batch["x"], batch["lengths"])`. Each layer
    normalizes by the batch of its own process, so the processes may have loaders of unlike lengths.
    Mean and variance are merged exactly: batches count by their sizes. Every process has to call
    it, with the same model.

    For the layers that keep running statistics and are not frozen, ours and those of torch that
    `convert_model` knows; other modules see a step of training. Raises `BatchSizeError`, with
    nothing changed, if no process has a batch, or if a layer has seen one value per channel in
    all; a layer that has seen none keeps its statistics.

    "Precise BN" of Wu and Johnson, "Rethinking 'Batch' in BatchNorm" (arXiv:2105.07576).
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module  # whose own forward waits for the other processes
    plain = [(layer, type(layer), set(vars(layer))) for layer in convertible(model)]
    try:
        for layer, _, _ in plain:
            vars(convert_model(layer))["eps_mode"] = "plus"
        _update(model, loader, forward or partial(_forward_of_first, device))
    finally:
        for layer, kind, attributes in plain:
            layer.__class__ = kind
            for name in vars(layer).keys() - attributes:
                del vars(layer)[name]


def _forward_of_first(device: Any, model: nn.Module, batch: Any) -> None:
    x = batch[0] if isinstance(batch, list | tuple) else batch
    model(x if device is None else x.to(device))


def _update(model: nn.Module, loader: Iterable[Any], forward: Callable[..., Any]) -> None:
    layers = [m for m in modules_of(model) if isinstance(m, LayerState) and _updates(m)]
    modes = [(module, module.training) for module in model.modules()]
    before = [(layer.process_group, layer._last_forward_tracked) for layer in layers]
    found = [_Population(layer.num_features) for layer in layers]
    try:
        model.train()
        for layer, population in zip(layers, found, strict=True):
            layer.process_group, layer.track_running_stats = population, False
        # a graph can't call Python for each layer
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in loader:
                forward(model, batch)
    finally:
        for layer, (group, tracked) in zip(layers, before, strict=True):
            layer.process_group, layer.track_running_stats = group, True
            layer._last_forward_tracked = tracked  # as the recomputation of a checkpoint expects
        for module, mode in modes:
            module.training = mode
    totals = [_of_all_processes(*each) for each in zip(layers, found, strict=True)]
    if totals and not any(total.count for total in totals):
        raise BatchSizeError(
            "expected batches with samples, got none in any process; is the loader an iterator "
            "that was used up before?"
        )
    for total in totals:
        require_more_than_one_value(total.count)
    with torch.no_grad():
        for layer, total in zip(layers, totals, strict=True):
            count, mean, m2 = merged_rows(total.rows)
            if count:
                layer.running_mean.copy_(torch.from_numpy(mean))  # type: ignore[union-attr]
                layer.running_var.copy_(torch.from_numpy(m2 / (count - 1)))  # type: ignore[union-attr]


def _updates(layer: LayerState) -> bool:
    kept = layer.running_mean is not None and layer.running_var is not None
    return kept and layer.track_running_stats and layer._frozen is None


def _of_all_processes(layer: LayerState, population: _Population) -> Moments:
    training, group = layer.training, layer.process_group
    layer.training = True
    if type(group) is SingleCommunicator:
        layer.process_group = None  # those of all processes count for a layer in place too
    try:
        processes = processes_of(layer, layer.running_mean)  # type: ignore[arg-type]
    finally:
        layer.training, layer.process_group = training, group
    total = Moments(population.total[None], int(population.total[0]))
    if processes is not None:
        total, _ = processes.moments(total, processes.begin(total.num_features))
    return total
