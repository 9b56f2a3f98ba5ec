"""The state and the settings of a layer; `forward` chooses how to compute."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from itertools import count
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from syncbn_core.checks import check_eps_mode
from syncbn_core.errors import StateError
from syncbn_core.moments import EpsMode, NormRule
from syncbn_torch.activations import NONE, Activation
from syncbn_torch.module_names import name_of

_default_eps_mode: EpsMode = "plus"


def set_sbn_eps_mode(mode: str) -> None:
    """Set the mode of every layer whose own `eps_mode` is None.

    "plus": `1 / sqrt(var + eps)`, as `nn.BatchNorm2d`. "clamp": `1 / sqrt(max(var, eps))`, for
    checkpoints of Synchronized-BatchNorm-PyTorch. Applies in eval too. Raises `ArgumentError`
    for other modes.
    """
    global _default_eps_mode
    _default_eps_mode = check_eps_mode(mode)


_layers: weakref.WeakValueDictionary[int, LayerState] = weakref.WeakValueDictionary()
_numbers = count(1)
_NO_NUMBER = torch.from_numpy(np.zeros(1))  # not `torch.zeros`: see `give_number`


def give_number(layer: LayerState) -> None:
    """Set the number by which a compiled graph tells that it is in this layer."""
    number = next(_numbers)
    _layers[number] = layer
    # not `torch.tensor`: it would be on the default device
    layer.__dict__["_graph_number"] = torch.from_numpy(np.array([number], np.float64))


def layer_of(number: int) -> LayerState | None:
    """The layer with this number, if it still exists."""
    return _layers.get(number)


_GROUPS: Any = getattr(torch.distributed, "ProcessGroup", ())  # builds of torch may have none


class _UnpicklableGroup:
    """A process group in the state of a layer: `copy.copy` takes it along, pickle refuses it."""

    def __init__(self, group: Any, layer: nn.Module) -> None:
        self.group, self.layer = group, layer

    def __reduce__(self) -> Any:
        raise StateError(
            f"expected no process group in {name_of(self.layer)}, which is to be pickled, got a "
            "ProcessGroup, which belongs to this process; save model.state_dict(), or set the "
            "layer's process_group to None before"
        )


def own_activation(layer: nn.Module) -> Activation:
    """The activation that a layer was made with; not that of a module which it holds."""
    activation: Activation = vars(layer).get("_activation", NONE)
    return activation


class LayerState(_NormBase):
    """The state of a layer; its subclasses in `batchnorm` and `inplace` define forward.

    Only those in `batchnorm` are a `_BatchNorm`: torch and timm would put a layer without an
    activation in the place of the others (`convert_sync_batchnorm`).
    """

    # Attributes of an instance that torch's layers do not have.
    _own_attributes: ClassVar[tuple[str, ...]] = (
        "eps_mode",
        "_activation",
        "_frozen",
        "_replica_sync",
        "_copied_from",
        "_graph_number",
        "_plans",
        "_last_forward_tracked",
    )
    # Class-level defaults: converted layers and old pickles never ran __init__.
    process_group: Any = None
    eps_mode: EpsMode | None = None
    _activation: Activation = NONE
    # set by `frozen.freeze`: the names of the parameters whose gradients it has stopped
    _frozen: list[str] | None = None
    _replica_sync: Any = None  # in replicas the link to the others
    _copied_from: weakref.ref[nn.Module] | None = None  # set in replicas
    _plans: Sequence[Any] = ()  # see `plan`
    # whether the last forward in training, outside of backward, updated running statistics
    _last_forward_tracked: bool = True
    _graph_number: Tensor = _NO_NUMBER  # (1,) on the CPU, see `give_number`

    @property
    def _rule(self) -> NormRule:
        """The layer's settings apart from arrays."""
        return NormRule(float(self.eps), self.eps_mode or _default_eps_mode, *self._activation)

    @property
    def _agreed(self) -> NormRule:
        """The settings that all members must have alike, whatever hooks make of an activation."""
        own = self.__dict__.get("_activation", NONE)  # see `own_activation`
        return NormRule(float(self.eps), self.eps_mode or _default_eps_mode, *own)

    @property
    def _setting_torch_lacks(self) -> str | None:
        """The setting that the batch norm of other libraries does not have, None for none."""
        if self._frozen is not None:
            return "freeze()"
        name = own_activation(self)[0]
        return self._rule.extra_setting if name is None else f"activation={name!r}"

    @property
    def effective_eps_mode(self) -> EpsMode:
        """The layer's own mode, or else the one set by `set_sbn_eps_mode`."""
        return self.eps_mode or _default_eps_mode

    def __getstate__(self) -> dict[str, Any]:
        # a copy or pickle of a replica is an ordinary layer
        state = {**self.__dict__, "_replica_sync": None, "_copied_from": None}
        state.pop("_graph_number", None)
        state.pop("_plans", None)
        if isinstance(self.process_group, _GROUPS):
            state["process_group"] = _UnpicklableGroup(self.process_group, self._original)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(self.process_group, _UnpicklableGroup):
            self.process_group = self.process_group.group
        give_number(self)

    @property
    def _original(self) -> Any:
        """The layer that this replica copies, or self. Every forward makes new replicas."""
        original = None if self._copied_from is None else self._copied_from()
        return self if original is None else original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        group = self.process_group
        memo[id(group)] = group  # share the process group: it can't be copied
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        # not `self.__getstate__()`, which raises in a parametrized layer
        state = LayerState.__getstate__(self)
        state["process_group"] = group
        copied.__setstate__(copy.deepcopy(state, memo))
        return copied

    def extra_repr(self) -> str:
        mode = "" if self.eps_mode is None else f", eps_mode={self.eps_mode!r}"
        name, slope = own_activation(self)
        act = "" if name is None else f", activation={name!r}"
        act += f", negative_slope={slope}" if name == "leaky_relu" else ""
        frozen = "" if self._frozen is None else ", frozen"
        return f"{super().extra_repr()}{mode}{act}{frozen}"
