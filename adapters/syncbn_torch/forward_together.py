"""`forward_together`: several layers share one message between processes.

It is for layers whose inputs are ready at the same time, such as the branches of a block. A small
message costs its latency: five layers in one message cost as much as one (docs/scaling.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from syncbn_core.backends.base import Affine
from syncbn_core.comm import Communicator
from syncbn_core.errors import ShapeError
from syncbn_core.moment_exchange import CallSite
from syncbn_torch import ranges
from syncbn_torch._torch_private import records_a_graph, transforming
from syncbn_torch.autograd.exchange import Processes
from syncbn_torch.autograd.node import batch_norm
from syncbn_torch.batchnorm import _SynchronizedBatchNorm
from syncbn_torch.data_parallel import originals
from syncbn_torch.forward import checked_part, processes_of
from syncbn_torch.module_names import LAYER_NAMES, name_of
from syncbn_torch.validation import check_input

__all__ = ["forward_together"]


def forward_together(
    layers: Sequence[_SynchronizedBatchNorm], inputs: Sequence[Tensor]
) -> list[Tensor]:
    """`[layer(x) for layer, x in zip(layers, inputs)]`, with one exchange between processes.

    In training over one process group, forward is one all_gather for all layers and backward is
    one all_reduce, once the gradients of all outputs are there. Otherwise (eval, one process,
    replicas, different groups or devices, hooks, subclasses, forward-mode AD) the layers run one
    after the other. All processes must be in the same case. Raises `ShapeError` if the numbers of
    layers and inputs differ or a layer is given twice, and the errors of the layers.
    """
    if len(layers) != len(inputs) or len(set(layers)) != len(layers):
        raise ShapeError(
            f"expected one input for each of several layers, got {len(inputs)} inputs for "
            f"{len(set(layers))} layers; call a layer with several inputs once for each"
        )
    communicator = _common_communicator(layers, inputs)
    apart = transforming() or records_a_graph()
    if communicator is None or apart or len({(type(x), x.device) for x in inputs}) > 1:
        return [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    for layer, x in zip(layers, inputs, strict=True):
        check_input(layer, x, layer.weight)
    dtypes = tuple(str(x.dtype).removeprefix("torch.") for x in inputs)
    site = CallSite(lambda: ", ".join(map(name_of, layers)), dtypes, tuple(layers), LAYER_NAMES)
    processes = Processes(communicator, site)
    parts = [
        checked_part(layer, x, Affine(layer.weight, layer.bias), processes)
        for layer, x in zip(layers, inputs, strict=True)
    ]
    with ranges.span("forward", site.name):
        _, outputs = batch_norm([[part] for part in parts])
    return list(outputs)


def _common_communicator(
    layers: Sequence[_SynchronizedBatchNorm], inputs: Sequence[Tensor]
) -> Communicator | None:
    """The communicator that all layers use, or None if they can't share a message."""
    if any(layer._replica_sync or layer._runs_other_code() for layer in layers):
        return None
    if not all(isinstance(x, Tensor) for x in inputs):  # the layer will raise
        return None
    if originals.current() is not None:  # in a replica, layers exchange with the other replicas
        return None
    processes = [processes_of(layer, x) for layer, x in zip(layers, inputs, strict=True)]
    communicators = [None if one is None else one.communicator for one in processes]
    same = len(layers) > 1 and all(one is communicators[0] for one in communicators)
    return communicators[0] if same else None
