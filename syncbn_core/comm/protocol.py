"""`Communicator`: what code needs of its group; `CollectiveCall`: what a call is, for errors.

Every member of a group makes the same calls in the same order. A class of your own with `rank`,
`size`, `all_gather` and `all_reduce` can stand wherever one of ours can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from syncbn_core.comm.device_message import copy_of

__all__ = ["CollectiveCall", "Communicator", "CommunicatorBase", "SingleCommunicator"]

Array = Any

SAME_CALLS = "all members have to make the same calls in the same order"


class CollectiveCall(NamedTuple):
    """Describes one call of a group: for errors, and to compare what the members are doing.

    `name()`: what runs, such as "gradients of block.last". It is called only when a text is
    needed. Names of one call may differ between members in what stands before a dot, as a member
    may hold the same model in one more container: "gradients of model.block.last".

    `position`: which call of that name it is, such as "step 5". `details`: what the message is,
    such as "129 numbers, float32". Both have to be the same on all members.

    `key`: a number > 0 that is the same on all members and differs between calls that could be
    taken for each other; 0 for none. It is compared in every call, the texts only on request.

    `remedy`: what errors advise. `number`: the number of the call in its group, from 1; the
    communicator sets it.
    """

    name: Callable[[], str]
    position: str = ""
    details: str = ""
    key: int = 0
    remedy: str = SAME_CALLS
    number: int = 0

    @classmethod
    def plain(cls, operation: str, values: Array) -> CollectiveCall:
        """The description of a call that comes without one."""
        return cls(lambda: operation, details=f"{math.prod(np.shape(values))} numbers")

    def what(self) -> str:
        """Name and position."""
        return f"{self.name()}, {self.position}" if self.position else self.name()

    def __str__(self) -> str:
        details = f": {self.details}" if self.details else ""
        return f"call {self.number} ({self.what()}{details})"


@runtime_checkable
class Communicator(Protocol):
    """A member of a group.

    Both collectives take an array, of one shape and dtype on all members, on the host or a device,
    and return one of the same library and device. They raise a `CommError` where members are
    missing or disagree, `DeviceError` and `DTypeError` for arrays that they don't take. `call`
    describes the call for errors; a class of your own may ignore it.
    """

    @property
    def rank(self) -> int:
        """This member's number, 0 to `size - 1`."""

    @property
    def size(self) -> int:
        """Members in the group."""

    def all_gather(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """`(size, *values.shape)`: the arrays of all members, in the order of ranks.

        Only to be read: members may share it.
        """

    def all_reduce(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """The elementwise sum over all members, bitwise the same on each; a new array."""


class CommunicatorBase:
    """What the communicators of this library have beyond the protocol."""

    calls = 0  # collective calls that this member has begun: the number of the last one

    def all_reduce_sums(self: Communicator, sums: Array) -> Array:
        """The earlier name of `all_reduce`."""
        return self.all_reduce(sums)


class SingleCommunicator(CommunicatorBase):
    """A group of one: nothing to exchange. Takes arrays of any library."""

    rank = 0
    size = 1

    def all_gather(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """`values` as the only row: a view `(1, *values.shape)`."""
        return values[None]

    def all_reduce(self, values: Array, call: CollectiveCall | None = None) -> Array:
        """A copy of `values`."""
        return copy_of(values)
