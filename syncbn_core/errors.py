"""All errors that syncbn raises, one class per cause.

Every class derives from `SyncBNError` and from the matching built-in error (`ValueError`,
`TypeError`, `RuntimeError`, `TimeoutError`). A call that raises one of them leaves running
statistics and parameters unchanged. docs/troubleshooting.md has a section for each, and
`python -m syncbn_core docs` says where that is.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BackendError",
    "BatchSizeError",
    "CheckpointError",
    "CommAborted",
    "CommError",
    "CommTimeout",
    "DTypeError",
    "DeviceError",
    "ProtocolError",
    "ReadOnlyError",
    "ShapeError",
    "StateError",
    "SyncBNError",
]


class SyncBNError(Exception):
    """Base of every error raised by syncbn."""


class ArgumentError(SyncBNError, ValueError):
    """A setting has an invalid value: eps, momentum, eps_mode, a timeout, a number of replicas."""


class ShapeError(SyncBNError, ValueError):
    """An array has a wrong shape, such as a wrong number of channels on axis 1."""


class DTypeError(SyncBNError, TypeError):
    """The dtype of an array is not supported, or the dtypes of several arrays do not match."""


class DeviceError(SyncBNError, RuntimeError):
    """The arrays of one call are on different devices, or of a library that is not supported."""


class ReadOnlyError(SyncBNError, ValueError):
    """An array that must be written (running statistics, `out`) is read-only."""


class BatchSizeError(SyncBNError, ValueError):
    """Training got one value per channel, over all members; or a rank has no batch at all."""


class StateError(SyncBNError, RuntimeError):
    """Calls were made in the wrong order, or a state dictionary does not fit the layer."""


class BackendError(SyncBNError, RuntimeError):
    """No backend supports this type of array, or the backend can't run on this machine."""


class CommError(SyncBNError, RuntimeError):
    """Members could not exchange their messages; base of the three classes below."""


class CommTimeout(CommError, TimeoutError):
    """A member waited too long; the text names the call and, if known, the missing members."""


class CommAborted(CommError):
    """Another member failed or left, so this call can't complete; `__cause__` holds its error."""


class ProtocolError(CommError):
    """The rules of an exchange were broken: members in different calls, two threads on one pipe."""


class CheckpointError(SyncBNError, RuntimeError):
    """Activation checkpointing recomputed a replica in a way that can't be synchronized."""


def without_framework(error: ModuleNotFoundError, framework: str, title: str) -> Exception:
    """What an adapter raises for `error`: what to install, if it is `framework` that is missing."""
    if error.name != framework:  # it is there, and lacks something itself
        return error
    return ModuleNotFoundError(
        f"expected {title}, which syncbn_{framework} needs, got none; pip install "
        f"'syncbn[{framework}]', or take syncbn_core, which needs no framework",
        name=framework,
    )
