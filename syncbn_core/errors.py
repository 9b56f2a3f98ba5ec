"""Every error a user can meet, one class per cause.

All of them are `SyncBNError`; each is also the built-in error that a caller would catch for
that cause (`ValueError`, `TypeError`, `RuntimeError`, `TimeoutError`). A call that raises one
of these has changed nothing: running statistics, parameters and pipes are as they were.
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
    """A setting is out of its range: eps, momentum, eps_mode, a timeout, a number of replicas."""


class ShapeError(SyncBNError, ValueError):
    """An array has the wrong rank, or the wrong number of channels on axis 1."""


class DTypeError(SyncBNError, TypeError):
    """An array has a dtype that batch normalization does not take, or dtypes do not go together."""


class DeviceError(SyncBNError, RuntimeError):
    """Arrays of one call live on different devices."""


class ReadOnlyError(SyncBNError, ValueError):
    """An array that has to be written (running statistics, `out`) is read-only."""


class BatchSizeError(SyncBNError, ValueError):
    """Training needs more than one value per channel, counted over all members."""


class StateError(SyncBNError, RuntimeError):
    """A call came in the wrong order, or a state dictionary does not fit the layer."""


class BackendError(SyncBNError, RuntimeError):
    """No backend takes this kind of array, or its backend can't run here."""


class CommError(SyncBNError, RuntimeError):
    """Members could not exchange their messages; base of the causes below."""


class CommTimeout(CommError, TimeoutError):
    """A deadline passed; the message names the layer, the call number and who is missing."""


class CommAborted(CommError):
    """Another member failed or left, so this member was released; `__cause__` says why."""


class ProtocolError(CommError):
    """Members disagree: replies of a wrong form, two threads on one pipe, unlike operations."""


class CheckpointError(SyncBNError, RuntimeError):
    """Activation checkpointing recomputed a replica in a way that can't be synchronized."""
