"""The `Communicator` protocol, and `CollectiveCall`, which describes one call in error messages.

All members of a group make the same calls in the same order. Any object with `rank`, `size`,
`all_gather` and `all_reduce` can be used as a communicator.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from syncbn_core.arrays import copy_of

Array = Any

SAME_CALLS = "all members have to make the same calls in the same order"


class CollectiveCall(NamedTuple):
    """Describes one collective call, for error messages.

    Attributes:
        name: returns what runs, such as "gradients of block.last"; called only when a text is
            needed. Members may differ in a prefix before a dot, because one of them may wrap the
            model in one more container: "gradients of model.block.last".
        position: which call of that name it is, such as "step 5"; the same on all members.
        details: what is sent, such as "129 numbers, float32"; the same on all members.
        remedy: the advice at the end of an error message.
        number: the number of the call in its group, from 1; set by the communicator.
    """

    name: Callable[[], str]
    position: str = ""
    details: str = ""
    remedy: str = SAME_CALLS
    number: int = 0

    @classmethod
    def plain(cls, operation: str, values: Array) -> CollectiveCall:
        """A default description, for a call made without one."""
        return cls(lambda: operation, details=f"{math.prod(np.shape(values))} numbers")

    def what(self) -> str:
        """Name and position, such as "gradients of block.last, step 5"."""
        return f"{self.name()}, {self.position}" if self.position else self.name()

    def __str__(self) -> str:
        details = f": {self.details}" if self.details else ""
        return f"call {self.number} ({self.what()}{details})"


@runtime_checkable
class Communicator(Protocol):
    """One member's access to its group.

    Both collectives take an array on the host or a device, with the same shape and dtype on all
    members. The result is an array of the same library on the same device. `call` describes the
    call for error messages; your own class may ignore it.

    Raises `CommError` if members are missing or make different calls, `DeviceError` or
    `DTypeError` for arrays that the communicator does not support.
    """

    @property
    def rank(self) -> int:
        """This member's number, 0 to `size - 1`."""

    @property
    def size(self) -> int:
        """The number of members in the group."""

    def all_gather(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """The arrays of all members in rank order, `(size, *values.shape)`, dtype of `values`.

        Do not write to the result: members may share its memory.
        """

    def all_reduce(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """The elementwise sum over all members, a new array like `values`.

        The result is bitwise the same on all members.
        """


class SingleCommunicator:
    """A group of one member, which exchanges nothing. Takes arrays of any library."""

    rank = 0
    size = 1

    def all_gather(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """A view of `values` with shape `(1, *values.shape)`."""
        return values[None]

    def all_reduce(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """A copy of `values`."""
        return copy_of(values)
