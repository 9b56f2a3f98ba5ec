"""The processes that a layer synchronizes with."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from syncbn_core.comm import Communicator
from syncbn_core.exchange import Exchange
from syncbn_torch.arrays import NAMES
from syncbn_torch.layer_state import LayerState
from syncbn_torch.module_names import LAYER_NAMES, name_of
from syncbn_torch.process_group import communicator_for


def exchange_of(layer: LayerState, communicator: Communicator, dtype: str) -> Exchange:
    """The layer's access to its group, by which it exchanges for x of `dtype`."""
    name = partial(name_of, layer)
    return Exchange(communicator, name, dtype, layer, LAYER_NAMES, layer._agreed)


def processes_of(layer: LayerState, x: Tensor) -> Exchange | None:
    """The processes to synchronize with; None in eval, where each may run any number of batches."""
    communicator = communicator_for(layer.process_group) if layer.training else None
    if communicator is None:
        return None
    return exchange_of(layer._original, communicator, NAMES[x.dtype])
