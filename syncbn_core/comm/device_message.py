"""How arrays on GPUs pass from thread to thread: by peer copies and events, never by the host.

Every member works on a stream of its own (and maybe a device of its own), so whoever reads an
array of another has to wait, on its stream, for the stream that writes it; and memory has to
outlive its readers, which CuPy's pool only sees to within one stream. So a member brings an
*inbox*, allocated on its own stream, and the combining member copies the result into it:

    member      part written, inbox allocated, event `ready`
    combiner    waits for every `ready`; combines; copies into the inboxes; event `done`
    member      waits for `done`; goes on with its inbox

Members on one stream of one device need none of that. The default stream "per thread" has one
handle, and is another stream in every thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from syncbn_core.device_moments import DeviceMoments
from syncbn_core.moments import Moments, merge_all

__all__ = ["Parcel", "combine_parcels", "copy_of", "is_captured", "is_on_device"]

Array = Any

_LEGACY_STREAMS = (0, 1)  # never captured
_PER_THREAD_STREAM = 2


def is_on_device(value: Any) -> bool:
    """Whether `value` is a CuPy array, or moments packed in one."""
    return type(_array_of(value)).__module__.partition(".")[0] == "cupy"


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


class Parcel:
    """What a member hands over: its part, and an inbox for the result of `size` members."""

    def __init__(self, value: Any, size: int) -> None:
        import cupy

        array = _array_of(value)
        self.device = array.device
        with self.device:
            if not array.flags.c_contiguous:
                array = array.copy()
            self.value = _with_array(value, array)
            self.stream = cupy.cuda.get_current_stream()
            shape = array.shape
            if isinstance(value, DeviceMoments):  # the result has the parts of all
                shape = (size * shape[0], *shape[1:])
            self.inbox = cupy.empty(shape, array.dtype)
            self.ready = self.stream.record()
        thread = threading.get_ident() if self.stream.ptr == _PER_THREAD_STREAM else 0
        self.place = (self.device.id, self.stream.ptr, thread)


class Reply:
    """A result in an inbox, there once `done` has come."""

    def __init__(self, value: Any, done: Any) -> None:
        self.value = value
        self.done = done

    def open(self) -> Any:
        """The result, for use on the current stream of its device."""
        if self.done is not None:
            import cupy

            with _array_of(self.value).device:
                cupy.cuda.get_current_stream().wait_event(self.done)
        return self.value


def combine_parcels(parcels: Sequence[Parcel]) -> list[Reply]:
    """A reply to each parcel, in their order; called by the first member, on its stream."""
    home = parcels[0]
    with home.device:
        stream = home.stream
        for parcel in parcels:
            if parcel.place != home.place:
                stream.wait_event(parcel.ready)
        values = [_brought(parcel.value, home) for parcel in parcels]
        if isinstance(home.value, Moments):
            total: Any = merge_all(values)
        else:
            total = values[0].copy()
            for value in values[1:]:
                total += value
        result = _array_of(total)
        for parcel in parcels:
            if parcel.place != home.place:
                parcel.inbox.data.copy_from_device_async(result.data, result.nbytes, stream)
        done = stream.record()
        return [
            Reply(total, None)
            if parcel.place == home.place
            else Reply(_with_array(total, parcel.inbox), done)
            for parcel in parcels
        ]


def _array_of(value: Any) -> Array:
    return value.parts if isinstance(value, DeviceMoments) else value


def _with_array(value: Any, array: Array) -> Any:
    """`value` with another array of the same contents."""
    if isinstance(value, DeviceMoments):
        return DeviceMoments(array, value.known_count, value.join)
    return array


def _brought(value: Any, home: Parcel) -> Any:
    """`value` on the device of `home`, by a peer copy on its stream where it is elsewhere."""
    import cupy

    array = _array_of(value)
    if array.device == home.device:
        return value
    copy = cupy.empty(array.shape, array.dtype)
    copy.data.copy_from_device_async(array.data, array.nbytes, home.stream)
    return _with_array(value, copy)
