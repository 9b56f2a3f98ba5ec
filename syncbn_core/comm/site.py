"""Who calls a group: which layer it is, and in which call of the group its forward was."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from syncbn_core.comm.communicator import Communicator

__all__ = ["Located", "Site", "forward_call", "located"]


class Site(NamedTuple):
    """Who calls.

    `name()` is asked for only when it is needed; `dtypes` are those of the inputs; `layer` is the
    same object in every call of a layer, None for none.
    """

    name: Callable[[], str]
    dtypes: tuple[str, ...] = ()
    layer: Any = None


class Located:
    """A communicator with views for single layers, each of which remembers its forward.

    All members make the same calls in the same order, so the number of the call in which the
    forward was says of which layer and which of its calls a backward is.
    """

    _site: Site | None = None
    _forward: int = 0  # 0: none

    def at(self, site: Site, forward: int = 0) -> Self:
        """The same group, for calls of one layer, whose forward was in call `forward`."""
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__, _site=site, _forward=forward)
        return view


def located(
    communicator: Communicator | None,
    name: Callable[[], str],
    dtype: Any,
    layer: Any = None,
    forward: int = 0,
) -> Communicator | None:
    """`communicator`, for the calls of a layer if it can tell those apart and does not yet."""
    if not isinstance(communicator, Located):
        return communicator
    site = communicator._site
    if site is not None and communicator._forward == forward:
        return communicator
    return communicator.at(site or Site(name, (str(dtype),), layer), forward)


def forward_call(communicator: Communicator) -> int:
    """The number of the call in which the forward of this view was; 0 where nobody counts."""
    return communicator._forward if isinstance(communicator, Located) else 0
