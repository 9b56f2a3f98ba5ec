"""`BatchNorm` for `flax.nnx`: the arguments, the attributes and the state of `nnx.BatchNorm`.

model = convert_model(model, axis_name="batch")
"""

from __future__ import annotations

import warnings
from typing import Any

from flax import nnx

from syncbn_jax import Running, batch_norm

__all__ = ["BatchNorm", "convert_model", "revert_model"]

Array = Any


class BatchNorm(nnx.BatchNorm):  # type: ignore[misc]
    """`nnx.BatchNorm` by `syncbn_jax.batch_norm`; with running averages it is Flax's own layer.

    `use_fast_variance` has no effect: the variance is exact in one pass over x.
    """

    def __call__(
        self, x: Array, use_running_average: bool | None = None, *, mask: Array | None = None
    ) -> Array:
        """As `nnx.BatchNorm`; `mask`: bool, broadcastable to x, uneven over members too."""
        running_average = self.use_running_average
        if use_running_average is not None:
            running_average = use_running_average
        if running_average is None or running_average:  # None is an error of Flax
            return super().__call__(x, use_running_average, mask=mask)
        scale, bias = (each if each is None else each[...] for each in (self.scale, self.bias))
        running = Running(self.mean[...], self.var[...])
        x, _, _, scale, bias = self.promote_dtype((x, *running, scale, bias), dtype=self.dtype)
        y, new = batch_norm(
            x,
            scale,
            bias,
            running,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            mask=mask,
            axis=self.axis,
            momentum=self.momentum,
            eps=self.epsilon,
        )
        self.mean[...], self.var[...] = new  # type: ignore[misc]
        return y


def convert_model(model: Any, axis_name: Any = None) -> Any:
    """Make every `nnx.BatchNorm` in `model` one of ours, in place; returns `model`.

    Parameters, statistics and the layers themselves stay. `axis_name`: for all of them, unless
    None. Subclasses of `nnx.BatchNorm` stay as they are, with a warning that names them; another
    warning says that `model` has no batch norm layer.
    """
    found = False
    for path, layer in nnx.iter_graph(model):
        found = found or isinstance(layer, nnx.BatchNorm)
        if type(layer) in (nnx.BatchNorm, BatchNorm):
            layer.__class__ = BatchNorm
            layer.axis_name = layer.axis_name if axis_name is None else axis_name
        elif isinstance(layer, nnx.BatchNorm):
            name = ".".join(map(str, path))
            message = f"{name} stays as it is: {type(layer).__name__} is a subclass"
            warnings.warn(message, stacklevel=2)
    if not found:
        warnings.warn(f"convert_model found no BatchNorm in {type(model).__name__}", stacklevel=2)
    return model


def revert_model(model: Any) -> Any:
    """The reverse of `convert_model`; the layers keep their `axis_name`."""
    for _, layer in nnx.iter_graph(model):
        if type(layer) is BatchNorm:
            layer.__class__ = nnx.BatchNorm
    return model
