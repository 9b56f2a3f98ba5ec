"""Which class a layer gets from `convert_model` and `revert_model`, by the class that it has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

# A class: the layer becomes an object of it. A function: it gets the layer and returns the new one.
# None: such layers stay as they are.
Target = type[nn.Module] | Callable[[Any], nn.Module] | None

# Libraries that need conversions of their own: the module that defines them is imported only if
# the user has imported the library.
_KNOWN_LIBRARIES = {"timm.layers": "syncbn_torch.for_timm"}


class _Conversion(NamedTuple):
    """What becomes of a layer, and how it comes back."""

    to: Target
    back: Target


conversions: dict[type[nn.Module], _Conversion] = {}
origins: dict[type[nn.Module], type[nn.Module]] = {}  # class of a converted layer -> before


def register_conversion(cls: type[nn.Module], to: Target, back: Target = None) -> None:
    """Tell `convert_model` what to do with layers whose class is `cls`, for the whole process.

    `to`: a class, for example a subclass of `SynchronizedBatchNorm2d`. The layer becomes an object
    of it, in place: it keeps parameters, buffers, hooks and attributes; no `__init__` runs. Or a
    function that gets the layer and returns the new module. Or None: such layers stay as they are,
    without a warning.

    `back`: the same for `revert_model`. If `to` is a class, None means `cls`. If `to` is a
    function, None means that there is no way back.

    Subclasses of `cls` are not matched. A later call for the same `cls` replaces the earlier one.
    Raises `TypeError` for anything else.
    """
    check_target(cls, to)
    if back is not None:
        check_target(cls, back)
    conversions[cls] = _Conversion(to, back)
    if isinstance(to, type):
        origins.setdefault(to, cls)


def check_target(cls: Any, target: Any) -> None:
    """Raise `TypeError` unless `target` can say what becomes of layers of class `cls`."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"expected a subclass of nn.Module as the class to convert, got {cls!r}")
    fits = issubclass(target, nn.Module) if isinstance(target, type) else callable(target)
    if target is not None and not fits:
        raise TypeError(
            f"expected a subclass of nn.Module, a function or None for {cls.__name__}, "
            f"got {target!r}"
        )


def load_known_libraries() -> None:
    """Register the conversions for the libraries that the user has imported."""
    for library, ours in _KNOWN_LIBRARIES.items():
        if library in sys.modules and ours not in sys.modules:
            import_module(ours)


def name_of_class(cls: type[nn.Module]) -> str:
    """The name of a class for a report."""
    return cls.__qualname__.rpartition("<locals>.")[2]


_made: dict[type[nn.Module], type[nn.Module]] = {}  # by `synchronized_subclass`

# A subclass that defines one of these may compute something else than BatchNorm, or can't be
# combined with our classes.
_DECISIVE = {
    "__call__",
    "__copy__",
    "__deepcopy__",
    "__getattribute__",
    "__getstate__",
    "__new__",
    "__reduce__",
    "__reduce_ex__",
    "__setstate__",
    "_check_input_dim",
    "_replicate_for_data_parallel",
    "cls_to_become",
    "forward",
}


def synchronized_subclass(cls: type[nn.Module]) -> type[nn.Module] | str:
    """For a subclass of BatchNorm with the same forward: a subclass of it that synchronizes.

    For other subclasses: why there is none.
    """
    if cls in _made:
        return _made[cls]
    base = next((c for c in cls.__mro__ if c in conversions), None)
    ours = None if base is None else conversions[base].to
    if base is None or not isinstance(ours, type) or not issubclass(ours, base):
        above = nn.SyncBatchNorm if issubclass(cls, nn.SyncBatchNorm) else _BatchNorm
        return f"unknown subclass of {above.__name__}"
    for parent in cls.__mro__[: cls.__mro__.index(base)]:
        found = sorted(_DECISIVE & vars(parent).keys())
        if found:
            return f"unknown subclass of {base.__name__} with its own {found[0]}"
    attributes = {"__module__": __name__, "__reduce_ex__": _reduce, "__doc__": cls.__doc__}
    try:
        new = type(f"Synchronized{cls.__name__}", (ours, cls), {**attributes, "_made_of": cls})
    except Exception as error:  # of an __init_subclass__ or metaclass
        return f"subclass of {base.__name__} of which no subclass can be made ({error})"
    _made[cls] = new
    origins[new] = cls
    return new


def _reduce(layer: Any, protocol: Any) -> tuple[Any, ...]:
    """How to pickle a layer whose class `synchronized_subclass` has made."""
    return _restored, (layer._made_of,), layer.__getstate__()


def _restored(cls: type[nn.Module]) -> nn.Module:
    """A layer without state, of the class that `synchronized_subclass` makes of `cls`."""
    new = synchronized_subclass(cls)
    if isinstance(new, str):
        raise TypeError(f"expected a layer that convert_model can convert, got {cls}: {new}")
    return new.__new__(new)
