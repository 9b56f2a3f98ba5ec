"""The processes that a layer synchronizes with."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.profiler import record_function

from syncbn_core.exchange import Exchange, Message
from syncbn_core.moments import Moments
from syncbn_torch.layer_state import LayerState
from syncbn_torch.module_names import LAYER_NAMES, name_of
from syncbn_torch.process_group import communicator_for

__all__ = ["Processes", "processes_of"]


class Processes(Exchange):
    """`Exchange` over processes, which torch's profiler shows."""

    __slots__ = ()

    def moments(self, own: Moments, message: Message) -> tuple[Moments, int]:
        with record_function("syncbn.exchange"):
            return super().moments(own, message)

    def sums(self, sums: Any, message: Message) -> Any:
        with record_function("syncbn.exchange"):
            return super().sums(sums, message)


def processes_of(layer: LayerState, x: Tensor) -> Processes | None:
    """The processes to synchronize with; None in eval, where each may run any number of batches."""
    communicator = communicator_for(layer.process_group) if layer.training else None
    if communicator is None:
        return None
    original = layer._original
    dtype = str(x.dtype).removeprefix("torch.")  # as NumPy calls it
    name = partial(name_of, original)
    return Processes(communicator, name, dtype, original, LAYER_NAMES, layer._agreed)
