"""Passing GPU arrays between threads, with peer copies and events; the host does not wait.

Each member works on its own stream, and perhaps its own device. A member that reads another's array
must make its stream wait for the stream that writes the array. Memory must also stay allocated
until its readers are done, and CuPy's pool ensures that only within one stream. Therefore each
member allocates an *inbox* on its own stream, and one member copies the result into all inboxes:

    member      writes its array, allocates its inbox, records the event `ready`
    combiner    waits for every `ready`, combines, copies to the inboxes, records the event `done`
    member      waits for `done`, then uses its inbox

Members that share one stream of one device skip this and share the result. CUDA's "per-thread
default stream" has the same handle in all threads but is a different stream in each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

__all__ = [
    "DeviceMessage",
    "Reply",
    "add_messages",
    "copy_of",
    "gather_messages",
    "is_captured",
    "is_on_device",
]

Array = Any

_LEGACY_STREAMS = (0, 1)  # CUDA can't capture them
_PER_THREAD_STREAM = 2


def is_on_device(array: Array) -> bool:
    """Whether `array` is a CuPy array."""
    kind: type = type(array)
    return _is_of_cupy(kind)


@lru_cache(maxsize=64)
def _is_of_cupy(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "cupy" for base in kind.__mro__)


def is_captured(stream: Any) -> bool:
    """Whether `stream` is being captured into a CUDA graph; the host must not query it then."""
    import cupy

    return stream.ptr not in _LEGACY_STREAMS and bool(
        cupy.cuda.runtime.streamIsCapturing(stream.ptr)
    )


def copy_of(array: Array) -> Array:
    """A copy on the device of `array`; `copy()` of CuPy uses the current device."""
    if not is_on_device(array):
        return array.copy()
    with array.device:
        return array.copy()


class DeviceMessage:
    """A member's array, and its inbox of shape `(*prefix, *array.shape)` for the result."""

    def __init__(self, array: Array, prefix: tuple[int, ...] = ()) -> None:
        import cupy

        self.device: Any = array.device
        with self.device:
            self.array: Array = array if array.flags.c_contiguous else array.copy()
            self.stream: Any = cupy.cuda.get_current_stream()
            self.inbox: Array = cupy.empty((*prefix, *array.shape), array.dtype)
            self.ready: Any = self.stream.record()
        thread = threading.get_ident() if self.stream.ptr == _PER_THREAD_STREAM else 0
        self.place: tuple[int, int, int] = (self.device.id, self.stream.ptr, thread)


class Reply:
    """A result for one member: in its inbox after the event `done`, or shared if `done` is None."""

    def __init__(self, array: Array, done: Any) -> None:
        self.array = array
        self.done = done

    def open(self) -> None:
        """Make the current stream of the result's device wait for the result.

        Until then the member must keep its message: the result may be computed from it later.
        """
        if self.done is not None:
            import cupy

            with self.array.device:
                cupy.cuda.get_current_stream().wait_event(self.done)

    def own(self) -> Array:
        """The result in memory that no other member uses; call `open` first."""
        return copy_of(self.array) if self.done is None else self.array


def gather_messages(messages: Sequence[DeviceMessage]) -> list[Reply]:
    """One reply per sender: the arrays of all, `(len(messages), *shape)`.

    All arrays have the same shape and dtype. The first member calls this; its stream does the work.
    """
    return _combined(messages, _stacked)


def add_messages(messages: Sequence[DeviceMessage]) -> list[Reply]:
    """One reply per sender: the sum of all arrays, in their order. See `gather_messages`."""
    return _combined(messages, _added)


def _combined(
    messages: Sequence[DeviceMessage], combine: Callable[[Sequence[DeviceMessage]], Array]
) -> list[Reply]:
    home = messages[0]
    with home.device:
        stream = home.stream
        for message in messages:
            if message.place != home.place:
                stream.wait_event(message.ready)
        result = combine(messages)
        for message in messages:
            if message.place != home.place:
                message.inbox.data.copy_from_device_async(result.data, result.nbytes, stream)
        done = stream.record()
        return [
            Reply(result, None) if message.place == home.place else Reply(message.inbox, done)
            for message in messages
        ]


def _stacked(messages: Sequence[DeviceMessage]) -> Array:
    import cupy

    first = messages[0]
    rows = cupy.empty((len(messages), *first.array.shape), first.array.dtype)
    for index, message in enumerate(messages):
        array, row = message.array, rows[index : index + 1]
        row.data.copy_from_device_async(array.data, array.nbytes, first.stream)
    return rows


def _added(messages: Sequence[DeviceMessage]) -> Array:
    first = messages[0]
    total = first.array.copy()
    for message in messages[1:]:
        total += _on_device_of(message.array, first)
    return total


def _on_device_of(array: Array, home: DeviceMessage) -> Array:
    """`array`, or a peer copy of it on the device and stream of `home` if it is elsewhere."""
    import cupy

    if array.device == home.device:
        return array
    copy = cupy.empty(array.shape, array.dtype)
    copy.data.copy_from_device_async(array.data, array.nbytes, home.stream)
    return copy
