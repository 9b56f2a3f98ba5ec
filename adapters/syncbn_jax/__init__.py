"""syncbn for JAX: `batch_norm`, a pure function, and in `syncbn_jax.nnx` a layer for Flax.

    y, running = batch_norm(x, weight, bias, running, axis_name="batch", axis=-1)

y = (x - mean) / sqrt(var + eps) * weight + bias, with the statistics of all members of the mesh
axis `axis_name`. It works under jit, grad, jvp, vmap, pmap, shard_map, scan and checkpoint, and has
derivatives of any order. Under jit alone arrays are whole, also if they are sharded: then give
`axis_name=None`, and XLA exchanges the sums.

JAX has no float64 unless asked for, so a mean is kept as two float32 numbers, `base` and `rest`:
`base` is near the values, and x - base loses nothing. Parts merge as in `syncbn_core.moments`.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from syncbn_core.errors import without_framework

try:
    import jax
except ModuleNotFoundError as error:
    raise without_framework(error, "jax", "JAX") from None

import jax.numpy as jnp
from jax import lax

from syncbn_core.checks import check_eps, check_momentum
from syncbn_core.errors import ArgumentError, DTypeError, ShapeError
from syncbn_core.moments import blend, merged

__all__ = ["Running", "batch_norm"]

Array = Any


class Running(NamedTuple):
    """Running statistics: `mean` and `var`, each `(C,)`."""

    mean: Array
    var: Array


class _Settings(NamedTuple):
    axis: int
    eps: float
    axis_name: Any
    groups: tuple[tuple[int, ...], ...] | None


class _Total(NamedTuple):
    """Statistics of the whole batch, each `(C,)`; the mean is `base + rest`."""

    count: Array
    base: Array
    rest: Array
    m2: Array


def batch_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    running: Running | None = None,
    *,
    axis_name: Any = None,
    axis_index_groups: Any = None,
    mask: Array | None = None,
    training: bool = True,
    axis: int = -1,
    momentum: float = 0.99,
    eps: float = 1e-5,
    unbiased: bool = False,
) -> tuple[Array, Running | None]:
    """y, in the shape and dtype of x, and the new running statistics, None without old ones.

    Args:
        x: two or more axes, channels on `axis`; float64, float32, float16 or bfloat16. The parts
            of the members may be masked unevenly, also wholly.
        weight: `(C,)`, or None for ones.
        bias: `(C,)`, or None for zeros.
        running: `(C,)` each. They stay as they are where no value of a channel is valid.
        axis: that of the channels.
        axis_name: one or several names of axes of pmap, vmap or shard_map, whose members have
            parts of the batch. None: x is the batch.
        axis_index_groups: as in `jax.lax.psum`: members are synchronized within these groups.
        mask: bool, broadcastable to x: values that count for the statistics. All of x is
            normalized, also where the mask is False; there x must be finite.
        training: False normalizes with `running`, and returns it.
        eps: > 0, added to the variance.
        momentum: the share that `running` keeps, as in Flax, Haiku and Equinox.
        unbiased: whether the running variance is m2 / (n - 1); those libraries use m2 / n.

    Raises:
        ShapeError, DTypeError: of x, the mask, or an array that is not `(C,)`.
        ArgumentError: of another argument, or if there is no axis `axis_name` here.
    """
    weight, bias = (each if each is None else jnp.asarray(each) for each in (weight, bias))
    x, axis = _checked(x, axis, weight, bias, running)
    if not isinstance(momentum, jax.Array) and check_momentum(momentum) is None:
        raise ArgumentError("expected momentum to be a number from 0 to 1, got None")
    groups = axis_index_groups and tuple(map(tuple, axis_index_groups))
    settings = _Settings(axis, check_eps(eps), axis_name, groups)
    if not training:
        if running is None:
            raise ArgumentError("expected running statistics with training=False, got None")
        mean, var = (jnp.asarray(each, _wide(x)) for each in running)
        total = _Total(jnp.ones_like(mean), mean, jnp.zeros_like(mean), var)
        return _affine(_xhat(settings, x, total), settings, x, weight, bias), running
    y, total = _normalized(settings, x, weight, bias, _checked_mask(mask, x))
    if running is None:
        return y, None
    total = _Total(*map(lax.stop_gradient, total))
    count, mean = total.count, total.base + total.rest
    var = total.m2 / jnp.maximum(count - unbiased, 1)
    new = [
        jnp.where(count > 0, blend(old, batch, 1 - momentum), old).astype(jnp.result_type(old))
        for old, batch in zip(running, (mean, var), strict=True)
    ]
    return y, Running(*new)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _normalized(
    settings: _Settings, x: Array, weight: Array | None, bias: Array | None, mask: Array | None
) -> tuple[Array, _Total]:
    total = _statistics(settings, x, mask)
    return _affine(_xhat(settings, x, total), settings, x, weight, bias), total


@_normalized.defjvp  # type: ignore[untyped-decorator]
def _tangent(settings: _Settings, primals: Any, tangents: Any) -> Any:
    """The tangent; its transpose is the usual backward, with one sum over the members.

    dy = weight * invstd * (dx - mean(dx) - xhat * mean(dx * xhat)) + dweight * xhat + dbias
    """
    x, weight, bias, mask = primals
    total = _statistics(settings, x, mask)

    # By `checkpoint`, x itself is kept for backward, not also xhat.
    @partial(jax.checkpoint, prevent_cse=False)
    def of_y(x: Array, total: _Total, dx: Array, dweight: Any, dbias: Any) -> Array:
        wide = dx.astype(_wide(x))
        xhat = _xhat(settings, x, total)
        counted = wide if mask is None else jnp.where(mask, wide, 0)
        sums = jnp.stack([_sum(settings, counted), _sum(settings, counted * xhat)])
        if settings.axis_name is not None:
            sums = lax.psum(sums, settings.axis_name, axis_index_groups=settings.groups)
        scale = _invstd(settings, total)
        scale = scale if weight is None else scale * weight
        # Summed per channel first, so that the transpose sums dy and dy * xhat once each.
        shift, slope = -scale * sums / jnp.maximum(total.count, 1)
        shift = shift if dbias is None else shift + dbias
        slope = slope if dweight is None else slope + dweight
        scale, slope, shift = (_column(each, x, settings.axis) for each in (scale, slope, shift))
        return (scale * wide + slope * xhat + shift).astype(x.dtype)

    dx, dweight, dbias, _ = tangents
    y = _affine(_xhat(settings, x, total), settings, x, weight, bias)
    dy = of_y(x, total, dx, dweight, dbias)
    return (y, total), (dy, jax.tree.map(jnp.zeros_like, total))


def _statistics(settings: _Settings, x: Array, mask: Array | None) -> _Total:
    """Those of all members, by one `all_gather` of `(4, C)`."""
    if mask is None:
        channels = max(x.shape[settings.axis], 1)
        count = jnp.full(x.shape[settings.axis], x.size // channels, _wide(x))
        some = x  # or one in 16 values, whose mean is at most 4 standard deviations off
        with suppress(Exception):  # of JAX, where that axis is sharded explicitly
            within = [each for each in range(1, x.ndim) if each != settings.axis][:1]
            some = lax.slice_in_dim(x, 0, None, 16, *within) if within else x
        base = _sum(settings, some) / max(some.size // channels, 1)
    else:
        count = _sum(settings, jnp.broadcast_to(mask, x.shape), int).astype(_wide(x))
        base = _sum(settings, jnp.where(mask, x, 0)) / jnp.maximum(count, 1)
    base = lax.stop_gradient(jnp.where(jnp.isfinite(base), base, 0))
    deviations = x.astype(base.dtype) - _column(base, x, settings.axis)
    if mask is not None:
        deviations = jnp.where(mask, deviations, 0)
    rest = _sum(settings, deviations) / jnp.maximum(count, 1)
    m2 = _sum(settings, deviations * deviations) - count * rest * rest
    own = _Total(count, base, rest, jnp.where(m2 < 0, 0, m2))
    if settings.axis_name is None:
        return own
    counts, bases, rests, m2s = jnp.moveaxis(_gathered(settings, jnp.stack(own)), 1, 0)
    count = counts.sum(0)
    base = lax.stop_gradient((counts / jnp.maximum(count, 1) * bases).sum(0))
    rest, m2 = merged(counts, bases - base + rests, m2s)
    return _Total(count, base, rest, m2)


def _gathered(settings: _Settings, rows: Array) -> Array:
    """The rows of all members, `(members, *rows.shape)`."""
    name, groups = settings.axis_name, settings.groups
    try:
        if groups is not None:
            gathered = lax.all_gather(rows, name, axis_index_groups=groups)
        else:
            gathered = _of_all(rows, name)
    except NameError as error:
        raise ArgumentError(
            f"expected to run under pmap, shard_map or vmap with an axis {name!r}, got none; under "
            "jit alone arrays are whole, so give axis_name=None"
        ) from error
    return gathered.reshape(-1, *rows.shape)


def _of_all(rows: Array, name: Any) -> Array:
    """`(members, *rows.shape)`; an axis for each name of several under vmap."""
    try:  # shard_map must know that all members get the same, else it refuses `running`
        return lax.all_gather(rows, name, to="invarying")
    except (ValueError, AssertionError):  # vmap knows no such thing, nor several names at once
        if not isinstance(name, tuple) or len(name) == 1:
            return lax.all_gather(rows, name)
        for each in reversed(name):
            rows = _of_all(rows, each)
        return rows


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _sum(settings: _Settings, values: Array, dtype: Any = None) -> Array:
    """Per channel, `(C,)`; by default in float32 or float64."""
    axes = tuple(each for each in range(values.ndim) if each != settings.axis)
    return values.sum(axes, dtype=dtype or _wide(values))


def _column(values: Array, x: Array, axis: int) -> Array:
    """`(..., C)` reshaped to broadcast with x."""
    ones = (1,) * (x.ndim - axis - 1)
    return values.reshape(*values.shape[:-1], *(1,) * axis, values.shape[-1], *ones)


def _invstd(settings: _Settings, total: _Total) -> Array:
    return 1 / jnp.sqrt(total.m2 / jnp.maximum(total.count, 1) + settings.eps)


def _xhat(settings: _Settings, x: Array, total: _Total) -> Array:
    columns = total.base, total.rest, _invstd(settings, total)
    base, rest, invstd = (_column(each, x, settings.axis) for each in columns)
    return (x.astype(base.dtype) - base - rest) * invstd


def _affine(y: Array, settings: _Settings, x: Array, weight: Any, bias: Any) -> Array:
    if weight is not None:
        y = y * _column(weight, x, settings.axis)
    if bias is not None:
        y = y + _column(bias, x, settings.axis)
    return y.astype(x.dtype)


def _checked(x: Array, axis: int, weight: Any, bias: Any, running: Any) -> tuple[Array, int]:
    x = jnp.asarray(x)
    if x.ndim < 2 or not -x.ndim <= axis < x.ndim:
        raise ShapeError(
            f"expected x with two or more axes and an axis {axis}, got shape {x.shape}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise DTypeError(f"expected float16, bfloat16, float32 or float64, got {x.dtype}")
    mean, var = (None, None) if running is None else running
    arrays = {"weight": weight, "bias": bias, "running mean": mean, "running var": var}
    for name, array in arrays.items():
        if array is not None and jnp.shape(array) != (x.shape[axis],):
            raise ShapeError(
                f"expected {name} of shape ({x.shape[axis]},) for x of shape {x.shape} with "
                f"channels on axis {axis}, got {jnp.shape(array)}"
            )
    return x, axis % x.ndim


def _checked_mask(mask: Array | None, x: Array) -> Array | None:
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if mask.dtype != bool:
        raise DTypeError(
            f"expected a mask of bool, got {mask.dtype}; use mask != 0 if 0 is padding"
        )
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.ndim > x.ndim or any(own not in (1, of_x) for own, of_x in sizes):
        raise ShapeError(
            f"expected a mask that broadcasts to x of shape {x.shape}, got shape {mask.shape}"
        )
    return mask
