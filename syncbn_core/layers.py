"""Batch normalization for array pipelines: a layer with no framework around it.

    layer = BatchNorm(64, communicator=communicator)
    y = layer(x)                  # x (N, 64, *spatial)
    dx = layer.backward(dy)       # adds to layer.weight_grad and layer.bias_grad

The formulas and dtypes are those of `syncbn_core.functional`. x and dy may be arrays of any library
that speaks DLPack, y and dx are of the library of x; what the layer holds is NumPy's or CuPy's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from syncbn_core import functional
from syncbn_core.arrays import NUMPY, arrays_of, at_device_of
from syncbn_core.backends.devices import array_library
from syncbn_core.checks import (
    check_activation,
    check_eps,
    check_eps_mode,
    check_momentum,
    check_num_features,
)
from syncbn_core.comm import Communicator
from syncbn_core.errors import ArgumentError, DTypeError, StateError
from syncbn_core.exchange import Exchange
from syncbn_core.moments import ActivationName, EpsMode, NormRule

__all__ = ["BatchNorm"]

Array = Any


class BatchNorm:
    """`y = (x - mean) / sqrt(var + eps) * weight + bias` over the batch of a whole group.

    Args:
        num_features: C, channels on axis 1.
        eps: added to the variance; > 0.
        momentum: share of the new batch in the running statistics, 0 to 1; None averages over
            all batches.
        affine: have `weight` (ones) and `bias` (zeros).
        track_running_stats: keep `running_mean`, `running_var`, `num_batches_tracked`; without
            them eval uses the statistics of the batch.
        dtype: of parameters and running statistics.
        device: where those are, and the inputs have to be: "cpu" (the layer holds NumPy arrays),
            "cuda" for the current device (it holds CuPy arrays), "cuda:1" for another;
            `BackendError` where something that GPUs need is missing.
        communicator: the group; None is a group of one. Every member has a layer of its own.
        eps_mode: "plus" as in the formula, "clamp" for `1 / sqrt(max(var, eps))`.
        activation: of y: None, "relu", "leaky_relu", "silu", "hardswish" or "relu6".
        negative_slope: that of "leaky_relu"; >= 0.
        name: what errors of the communicator call this layer.

    Attributes:
        weight: `(C,)`, or None without `affine`.
        bias: the same.
        weight_grad: `(C,)` or None; this member's own share, to be added up over the group
            (`communicator.all_reduce`).
        bias_grad: the same.
        running_mean: `(C,)`.
        running_var: `(C,)`.
        num_batches_tracked: `()` int64.
        training: True after `train()`, False after `eval()`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        dtype: Any = np.float32,
        device: str = "cpu",
        communicator: Communicator | None = None,
        eps_mode: EpsMode = "plus",
        activation: ActivationName | None = None,
        negative_slope: float = 0.01,
        name: str = "BatchNorm",
    ) -> None:
        if not isinstance(num_features, int | np.integer) or num_features < 1:
            raise ArgumentError(
                f"expected an integer num_features of 1 or more, got {num_features!r}"
            )
        dtype = np.dtype(dtype)
        if dtype.kind != "f":
            raise DTypeError(f"expected a floating dtype, got {dtype}")
        self.num_features = num_features
        self.eps: float = check_eps(eps)
        self.momentum: float | None = check_momentum(momentum)
        self.eps_mode = check_eps_mode(eps_mode)
        self.activation: ActivationName | None
        self.negative_slope: float
        self.activation, self.negative_slope = check_activation(activation, negative_slope)
        self.communicator = communicator
        self.name = name
        self.training: bool = True
        with array_library(device) as xp:
            self.weight: Any = xp.ones(num_features, dtype) if affine else None
            self.bias: Any = xp.zeros(num_features, dtype) if affine else None
            self.weight_grad: Any = xp.zeros(num_features, dtype) if affine else None
            self.bias_grad: Any = xp.zeros(num_features, dtype) if affine else None
            kept = track_running_stats
            self.running_mean: Any = xp.zeros(num_features, dtype) if kept else None
            self.running_var: Any = xp.ones(num_features, dtype) if kept else None
            self.num_batches_tracked: Any = xp.zeros((), np.int64) if kept else None
        self._saved: functional.Saved | None = None
        self._forwards = 0  # that no backward has followed

    def __repr__(self) -> str:
        activation = "" if self.activation is None else f", activation={self.activation!r}"
        return (
            f"BatchNorm({self.num_features}, eps={self.eps}, momentum={self.momentum}, "
            f"affine={self.weight is not None}, "
            f"track_running_stats={self.running_mean is not None}, eps_mode={self.eps_mode!r}"
            f"{activation})"
        )

    def train(self, mode: bool = True) -> BatchNorm:
        """Use the statistics of the batch, and update the running ones; returns self.

        Forgets forwards that no backward has followed, as `discard` does.
        """
        self.training = mode
        self.discard()
        return self

    def eval(self) -> BatchNorm:
        """Use the running statistics; forgets forwards as `train` does; returns self."""
        return self.train(False)

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        return self.forward(x, mask)

    def forward(self, x: Array, mask: Array | None = None) -> Array:
        """Normalized x, `(N, C, *spatial)`; remembers what `backward` needs until then.

        `mask`: which elements count, as in `syncbn_core.functional`.

        Raises what `syncbn_core.functional.batch_norm_forward` does, with nothing changed.
        """
        check_num_features(x, self.num_features)
        settings: dict[str, Any] = {
            "mask": mask,
            "eps": self.eps,
            "eps_mode": self.eps_mode,
            "activation": self.activation,
            "negative_slope": self.negative_slope,
        }
        if self.training or self.running_mean is None:
            y, self._saved = functional.batch_norm_forward(
                x,
                self.weight,
                self.bias,
                running_mean=self.running_mean,
                running_var=self.running_var,
                num_batches_tracked=self.num_batches_tracked,
                momentum=self.momentum,
                communicator=self.communicator,
                exchange=self._exchange,
                **settings,
            )
        else:
            y, self._saved = functional.batch_norm_eval(
                x, self.running_mean, self.running_var, self.weight, self.bias, **settings
            )
        self._forwards += 1
        return y

    def backward(self, dy: Array) -> Array:
        """Gradient by x of the last forward; adds to `weight_grad` and `bias_grad`.

        Every member has to call it, once per forward. `StateError` unless just one forward came
        before, since the last backward, `train()`, `eval()` or `discard()`.
        """
        if self._saved is None:
            raise StateError(
                "expected a forward before each backward, got a backward without one; for a "
                "layer used several times in a forward take syncbn_core.functional"
            )
        forwards, self._forwards = self._forwards, 0  # the next step is right, whatever happens
        if forwards > 1:
            self.discard()
            raise StateError(
                f"expected one forward before each backward, got {forwards}; call discard() "
                "after a forward that no backward follows, and take syncbn_core.functional for a "
                "layer used several times"
            )
        saved = self._saved
        gradients = functional.gradients_of(dy, saved, self.communicator, self._exchange)
        self.discard()
        if self.weight_grad is not None and self.bias_grad is not None:
            with at_device_of(self.weight_grad):
                self.weight_grad += gradients.weight
                self.bias_grad += gradients.bias
        return saved.caller.give(gradients.x)

    def discard(self) -> None:
        """Forget forwards that no backward has followed, and the x of the last one."""
        self._saved = None
        self._forwards = 0

    def _exchange(self, dtype: str) -> Exchange:
        """This layer's access to its communicator."""
        assert self.communicator is not None
        rule = NormRule(self.eps, self.eps_mode, self.activation, self.negative_slope)
        return Exchange(self.communicator, lambda: self.name, dtype, self, rule=rule)

    def parameters(self) -> list[Array]:
        """`[weight, bias]`, or nothing without `affine`; update them in place."""
        return [p for p in (self.weight, self.bias) if p is not None]

    def gradients(self) -> list[Array]:
        """`[weight_grad, bias_grad]`, in the order of `parameters`."""
        return [g for g in (self.weight_grad, self.bias_grad) if g is not None]

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        for gradient in self.gradients():
            with at_device_of(gradient):
                gradient[...] = 0

    def state_dict(self, convert: Callable[[Array], Any] | None = None) -> dict[str, Any]:
        """Copies of parameters and running statistics, under the names that PyTorch uses.

        `convert`: applied to each copy; `state_dict(torch.as_tensor)` is what `nn.BatchNorm2d`
        loads.
        """
        state = {}
        for name, array in self._state().items():
            with at_device_of(array):
                state[name] = array.copy() if convert is None else convert(array.copy())
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy `state` into the layer: CuPy arrays, or what NumPy reads, as tensors on the CPU.

        `StateError`, with nothing changed, unless names and shapes fit exactly.
        """
        own = self._state()
        if state.keys() != own.keys():
            raise StateError(
                f"expected a state with the keys {sorted(own)}, got {sorted(state)}; build the "
                "layer with the same affine and track_running_stats"
            )
        for name, array in own.items():
            if np.shape(state[name]) != array.shape:
                raise StateError(
                    f"expected {name} of shape {array.shape}, got {np.shape(state[name])}"
                )
        new = {name: _as_like(name, state[name], array) for name, array in own.items()}
        for name, array in own.items():
            with at_device_of(array):
                array[...] = new[name]

    def _state(self) -> dict[str, Array]:
        named = {
            "weight": self.weight,
            "bias": self.bias,
            "running_mean": self.running_mean,
            "running_var": self.running_var,
            "num_batches_tracked": self.num_batches_tracked,
        }
        return {name: array for name, array in named.items() if array is not None}


def _as_like(name: str, value: Any, array: Array) -> Array:
    """`value` in the dtype of `array`; `StateError` unless it is of numbers of that kind."""
    try:
        value = (arrays_of(value) or NUMPY).to_host(value)
    except (TypeError, RuntimeError) as error:  # torch's, of tensors that NumPy can't read
        raise StateError(
            f"expected {name} as an array that NumPy reads, got {type(value).__name__}: {error}"
        ) from error
    if value.dtype.kind not in "fiu":
        raise StateError(f"expected {name} of dtype {array.dtype}, got {value.dtype}")
    return arrays_of(array).from_host(value.astype(array.dtype), array)
