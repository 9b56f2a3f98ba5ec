"""How arrays on GPUs pass from thread to thread: by peer copies and events, never by the host.

Every member works on a stream of its own (and maybe a device of its own), so whoever reads an
array of another has to wait, on its stream, for the stream that writes it; and memory has to
outlive its readers, which CuPy's pool only sees to within one stream. So a member brings an
*inbox*, allocated on its own stream, and the combining member copies the result into it:

    member      array written, inbox allocated, event `ready`
    combiner    waits for every `ready`; combines; copies into the inboxes; event `done`
    member      waits for `done`; goes on with its inbox

Members on one stream of one device need none of that: they share the result. The default stream
"per thread" has one handle, and is another stream in every thread.
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

_LEGACY_STREAMS = (0, 1)  # never captured
_PER_THREAD_STREAM = 2


def is_on_device(array: Array) -> bool:
    """Whether `array` is CuPy's."""
    kind: type = type(array)
    return _is_of_cupy(kind)


@lru_cache(maxsize=64)
def _is_of_cupy(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "cupy" for base in kind.__mro__)


def is_captured(stream: Any) -> bool:
    """Whether a graph is made of what `stream` does: nothing may be asked of the device then."""
    import cupy

    return stream.ptr not in _LEGACY_STREAMS and bool(
        cupy.cuda.runtime.streamIsCapturing(stream.ptr)
    )


def copy_of(array: Array) -> Array:
    """A copy where `array` is; CuPy's own would come to the current device."""
    if not is_on_device(array):
        return array.copy()
    with array.device:
        return array.copy()


class DeviceMessage:
    """An array that a member hands over, and an inbox of shape `(*prefix, *array.shape)`."""

    def __init__(self, array: Array, prefix: tuple[int, ...] = ()) -> None:
        import cupy

        self.device = array.device
        with self.device:
            self.array = array if array.flags.c_contiguous else array.copy()
            self.stream = cupy.cuda.get_current_stream()
            self.inbox = cupy.empty((*prefix, *array.shape), array.dtype)
            self.ready = self.stream.record()
        thread = threading.get_ident() if self.stream.ptr == _PER_THREAD_STREAM else 0
        self.place = (self.device.id, self.stream.ptr, thread)


class Reply:
    """A result for one member; in its inbox, there once `done` has come, or shared: `done` None."""

    def __init__(self, array: Array, done: Any) -> None:
        self.array = array
        self.done = done

    def open(self) -> None:
        """Let the current stream of the device wait for the result.

        The member keeps its message until then: the result may still be computed from it.
        """
        if self.done is not None:
            import cupy

            with self.array.device:
                cupy.cuda.get_current_stream().wait_event(self.done)

    def own(self) -> Array:
        """The result, once opened, in memory that the member shares with nobody."""
        return copy_of(self.array) if self.done is None else self.array


def gather_messages(messages: Sequence[DeviceMessage]) -> list[Reply]:
    """To each sender the arrays of all, `(len(messages), *shape)`.

    They have one shape and one dtype. Called by the first member, on its stream.
    """
    return _combined(messages, _stacked)


def add_messages(messages: Sequence[DeviceMessage]) -> list[Reply]:
    """To each sender the sum of all arrays, in their order; otherwise as `gather_messages`."""
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
        total += _brought(message.array, first)
    return total


def _brought(array: Array, home: DeviceMessage) -> Array:
    """`array` on the device of `home`, by a peer copy on its stream where it is elsewhere."""
    import cupy

    if array.device == home.device:
        return array
    copy = cupy.empty(array.shape, array.dtype)
    copy.data.copy_from_device_async(array.data, array.nbytes, home.stream)
    return copy
