"""What a backend does, and which one takes an array.

A backend is a module with four functions over `(N, C, *spatial)` arrays. It allocates results,
chooses and launches kernels, and knows nothing of members or communication. Per-channel
arguments and results are float64 `(C,)`; `weight` and `bias` may be None.

    moments(x, *, parallel) -> Moments
    normalize(x, mean, invstd, weight, bias, *, out, parallel) -> y
    backward_reduce(x, dy, mean, invstd, *, parallel) -> (sum_dy, sum_dy_xhat)
    backward_input(x, dy, mean, invstd, weight, mean_dy, mean_dy_xhat, *, out, parallel) -> dx

A backend for devices, where every launch counts, is fused too: `finish_forward`, `finish_eval`,
`local_sums` and `finish_backward` take all that lies between two exchanges at once.

Backends are found by the type of the array and imported on first use.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol, cast

from syncbn_core.errors import BackendError
from syncbn_core.moments import Moments

__all__ = ["Backend", "backend_of", "fused_backend_of"]

Array = Any

# Root package of the array type -> module.
_MODULES = {"cupy": "syncbn_core.backends.cuda.cupy", "numpy": "syncbn_core.backends.cpu.numpy"}
# NumPy's own that are no arrays to us: masks would be ignored, matrices stay 2-D, scalars are
# not written in place.
_UNLIKE_ARRAYS = {"MaskedArray", "matrix", "generic"}


class Backend(Protocol):
    """The four functions above, as a type."""

    def moments(self, x: Array, *, parallel: bool = True) -> Moments: ...

    def normalize(
        self,
        x: Array,
        mean: Array,
        invstd: Array,
        weight: Array | None,
        bias: Array | None,
        *,
        out: Array | None = None,
        parallel: bool = True,
    ) -> Array: ...

    def backward_reduce(
        self, x: Array, dy: Array, mean: Array, invstd: Array, *, parallel: bool = True
    ) -> tuple[Array, Array]: ...

    def backward_input(
        self,
        x: Array,
        dy: Array,
        mean: Array,
        invstd: Array,
        weight: Array | None,
        mean_dy: Array,
        mean_dy_xhat: Array,
        *,
        out: Array | None = None,
        parallel: bool = True,
    ) -> Array: ...


def backend_of(array: Array) -> Backend:
    """The backend for `array`'s type, or `BackendError` when there is none."""
    kind: type = type(array)
    return _backend_of_type(kind)


def fused_backend_of(array: Array) -> Any | None:
    """The backend for `array`'s type if it is a fused one, else None."""
    backend: Any = backend_of(array)
    return backend if hasattr(backend, "finish_forward") else None


@lru_cache(maxsize=64)
def _backend_of_type(kind: type) -> Backend:
    bases = kind.__mro__ if _UNLIKE_ARRAYS.isdisjoint(b.__name__ for b in kind.__mro__) else ()
    for base in bases:
        name = _MODULES.get(base.__module__.partition(".")[0])
        if name is not None:
            return cast(Backend, import_module(name))
    raise BackendError(
        f"expected an array of {' or '.join(sorted(_MODULES))}, got {kind.__module__}."
        f"{kind.__qualname__}; convert it first, for example with numpy.asarray"
    )
