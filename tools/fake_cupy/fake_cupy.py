"""A `cupy` for tests without a device: arrays on "devices", on one stream at a time.

`install(emulated)` gives a module for `sys.modules["cupy"]`, whose memory the kernels of an
emulated device know: they may touch a block until it is released. New memory is full of NaN. What
runs, runs at once and in the order of the host. It has what the library uses and no more, and
refuses what CuPy 14 refuses: implicit conversion to NumPy, NumPy arrays as operands, arrays that
are not on the current device, attributes that `cupy.ndarray` doesn't have. It is no subclass of
`numpy.ndarray`, as `numpy.asarray` asks a subclass for nothing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import threading
import weakref
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ptx_emulator.memory import Range

if TYPE_CHECKING:
    from emulated_device import Device as Emulated
    from emulated_device import Launch


DEVICES = 2
NAMES = ["float16", "float32", "float64", "int32", "int64"]
NAMES += ["exp", "sqrt", "isfinite", "maximum"]  # which call `__array_ufunc__`

_local = threading.local()
_emulated: Emulated | None = None  # whose kernels know the blocks


class Log:
    """What a test asks for: transfers between host and device, and launches."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.transfers, self.launches = [], []


log = Log()


# ----------------------------------------------------------------- devices and streams


class Device:
    def __init__(self, device=None):
        self.id = _get_device() if device is None else int(device)
        self._device_stack = []

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    __hash__ = None

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

    def __enter__(self):
        self._device_stack.append(_get_device())
        self.use()
        return self

    def __exit__(self, *args):
        _set_device(self._device_stack.pop())

    def use(self):
        if not 0 <= self.id < DEVICES:
            raise RuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        _set_device(self.id)


def _get_device():
    return getattr(_local, "device", 0)


def _set_device(number):
    _local.device = number
    if _emulated is not None:
        _emulated.make_current(number)


class Event:
    done = property(lambda self: not stuck)


class Stream:
    """A handle to be current within a `with`; work never waits for one."""

    _handles = itertools.count(0x1000, 16)

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.ptr = 0 if null else next(Stream._handles)

    def __enter__(self):
        self._before = get_current_stream()
        _local.stream = self
        return self

    def __exit__(self, *args):
        _local.stream = self._before

    def record(self, event=None):
        return event or Event()

    def wait_event(self, event):
        """All work is done as soon as it is launched."""


Stream.null = Stream(null=True)


def get_current_stream(device_id=-1):
    return getattr(_local, "stream", Stream.null)


def _stream_is_capturing(stream):
    if stream == 0:
        raise RuntimeError("cudaErrorStreamCaptureImplicit")
    return stream in capturing


capturing = set()  # handles


class _Stuck(list):
    """If not empty, no event comes, and no copy that nobody waits for arrives."""

    def __init__(self):
        self.late = []

    def clear(self):
        super().clear()
        for out, values in self.late:
            out[...] = values
        self.late.clear()


stuck = _Stuck()


# ------------------------------------------------------------------------------ memory


class Block:
    """Memory of a device. Full of NaN, or of minus ones. No address comes twice."""

    _lock = threading.Lock()
    _free = 1 << 32
    _live: ClassVar = weakref.WeakValueDictionary()  # by address

    def __init__(self, nbytes, name):
        with Block._lock:
            self.ptr = Block._free
            Block._free += (nbytes // 512 + 2) * 512  # between two blocks lies nobody's memory
            Block._live[self.ptr] = self
        self.raw = np.full(nbytes, 0xFF, np.uint8)
        self.device_id = _get_device()
        self.name = name
        self._memory = None
        if _emulated is not None and nbytes:
            self._memory = _emulated.memory
            self._area = self._memory.add(Range(self.ptr, self.raw, name=name))

    def __del__(self):
        if self._memory is not None:
            self._memory.remove(self._area)


def _alloc_pinned_memory(size):
    """Memory of the host to which kernels of all devices may write, also at once."""
    memory = bytearray(size)
    if _emulated is not None:
        data = np.frombuffer(memory, np.uint8)
        area = _emulated.memory.add(Range(data.ctypes.data, data, name="page-locked memory"))
        area.ordered = False
        _pinned.add(area.start)
    return memory


_pinned = set()


def _after_launch(launch: Launch) -> None:
    """Log what a kernel has touched; raises for what another device owns."""
    kernel = _name(launch.program.kernel.name)
    log.launches.append(kernel)
    if _get_device() != launch.device:
        raise ValueError(f"{kernel} runs on device {launch.device}, not on the current one")
    for address in {*launch.read_bytes, *launch.stored_bytes} - _pinned:
        block = Block._live.get(address)
        if block is None:
            raise ValueError(f"{kernel} touches memory that is released while it runs")
        if block.device_id != launch.device:
            raise ValueError(
                f"{kernel} on device {launch.device} touches memory of device "
                f"{block.device_id}: {block.name}"
            )


def _name(entry):
    """`planes_moments`, from the name that the compiler has made of it."""
    found = re.search(r"\d((?:planes|rows)_[a-z_]+|merge_parts)\d", entry)
    return entry if found is None else found[1]


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem = mem
        self.ptr = mem.ptr + offset

    @property
    def device_id(self):
        return self.mem.device_id

    @property
    def device(self):
        return Device(self.device_id)

    def copy_from_host_async(self, mem, size, stream=None):
        start = self.ptr - self.mem.ptr
        source = np.frombuffer((ctypes.c_uint8 * size).from_address(mem), np.uint8)
        self.mem.raw[start : start + size] = source


# ------------------------------------------------------------------------------ arrays


def _compute(name, *arrays):
    """Check an operation on the current device."""
    current = _get_device()
    for array in arrays:
        if array.data.device_id != current:
            raise ValueError(
                "Array device must be same as the current device: array device = "
                f"{array.data.device_id} while current = {current} ({name})"
            )


def _operand(value):
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return value


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):  # noqa: N801
    """`_a`: a NumPy array over the bytes of a block."""

    __array_priority__ = 100

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        dtype = np.dtype(dtype)
        shape = tuple(shape) if isinstance(shape, (tuple, list)) else (int(shape),)
        if memptr is None:
            nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            memptr = MemoryPointer(Block(nbytes, f"{dtype} {shape}"), 0)
        start = memptr.ptr - memptr.mem.ptr
        if strides is None and 0 in shape:
            strides = (0,) * len(shape)  # CuPy's, of an empty array
        self._a = np.ndarray(shape, dtype, memptr.mem.raw, start, strides, order)
        self.data = memptr

    def _view(self, values):
        view = object.__new__(ndarray)
        view._a = values
        at = values.__array_interface__["data"][0]
        first = self.data.mem.raw.__array_interface__["data"][0]
        view.data = MemoryPointer(self.data.mem, at - first if values.size else 0)
        return view

    device = property(lambda self: self.data.device)
    shape = property(lambda self: self._a.shape)
    strides = property(lambda self: self._a.strides)
    dtype = property(lambda self: self._a.dtype)
    ndim = property(lambda self: self._a.ndim)
    size = property(lambda self: self._a.size)
    itemsize = property(lambda self: self._a.itemsize)
    nbytes = property(lambda self: self._a.nbytes)
    T = property(lambda self: self._view(self._a.T))

    @property
    def flags(self):
        return SimpleNamespace(
            c_contiguous=self._a.flags.c_contiguous,
            f_contiguous=self._a.flags.f_contiguous,
            owndata=self._a.size * self._a.itemsize == self.data.mem.raw.size,
        )

    def __array__(self, *args, **kwargs):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )

    def __array_function__(self, function, types, args, kwargs):
        if function in (np.shape, np.ndim):
            return getattr(self, function.__name__)
        raise TypeError(f"the tests' cupy has no {function.__name__}")

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        if method != "__call__" or kwargs:
            return NotImplemented
        inputs = [_operand(value) for value in inputs]
        arrays = [value for value in inputs if isinstance(value, ndarray)]
        with np.errstate(all="ignore"):
            values = ufunc(*[v._a if isinstance(v, ndarray) else v for v in inputs])
        target = empty(values.shape, values.dtype) if out is None else out[0]
        _compute(ufunc.__name__, *arrays, target)
        np.copyto(target._a, values, casting="same_kind")
        return target

    __hash__ = None

    def __getitem__(self, index):
        values = self._a[index]
        if not isinstance(values, np.ndarray):  # a number: CuPy gives a view of shape ()
            values = self._a[(*index, ...) if isinstance(index, tuple) else (index, ...)]
        assert np.may_share_memory(values, self._a) or not values.size, "basic indexing only"
        return self._view(values)

    def __setitem__(self, index, value):
        part = self[index]
        if not isinstance(value, ndarray):
            part.fill(_operand(value))
            return
        _compute("assignment", value, part)
        np.copyto(part._a, value._a, casting="same_kind")

    def __len__(self):
        return len(self._a)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __bool__(self):
        return bool(self.item())

    def __int__(self):
        return int(self.item())

    def item(self):
        return self.get().item()

    def get(self, stream=None, order="C", out=None, blocking=True):
        with self.device:
            _compute("get", self)
            if blocking:
                log.transfers.append("get")
            if out is None:
                return self._a.copy()
            assert out.flags.c_contiguous
            assert (out.shape, out.dtype) == (self.shape, self.dtype)
            if stuck and not blocking:
                stuck.late.append((out, self._a.copy()))
            else:
                out[...] = self._a
            return out

    def fill(self, value):
        _compute("fill", self)
        self._a.fill(value)

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        assert casting is None
        assert subok is None
        values = self._a.astype(dtype, order=order, copy=copy)
        if values is self._a:
            return self
        axes = np.argsort([-stride for stride in values.strides], kind="stable")
        new = empty([values.shape[axis] for axis in axes], values.dtype)
        new = new.transpose(np.argsort(axes).tolist()) if values.ndim else new
        _compute("astype", self, new)
        new._a[...] = values
        return new

    def copy(self, order="C"):
        """A copy on the *current* device."""
        if not self.size or self.data.device_id == _get_device():
            return self.astype(self.dtype, order=order)
        with self.device:
            near = self.astype(self.dtype, order=order, copy=False)
        if not (near.flags.c_contiguous or near.flags.f_contiguous):
            raise NotImplementedError("CuPy cannot copy non-contiguous array between devices.")
        new = empty(near.shape, near.dtype, "C" if near.flags.c_contiguous else "F")
        new._a[...] = near._a
        return new

    def transpose(self, *axes):
        return self._view(self._a.transpose(*axes))

    def reshape(self, *shape, order="C"):
        values = self._a.reshape(*shape)
        if not np.may_share_memory(values, self._a) and values.size:
            return ascontiguousarray(self).reshape(*shape)
        return self._view(values)

    def sum(self, axis=None, dtype=None, out=None, keepdims=False):
        return self._reduced("sum", self._a.sum(axis, dtype, keepdims=keepdims))

    def clip(self, min=None, max=None, out=None):
        return self._reduced("clip", self._a.clip(min, max))

    def any(self, axis=None, out=None, keepdims=False):
        return self._reduced("any", self._a.any(axis, keepdims=keepdims))

    def max(self, axis=None, out=None, keepdims=False):
        return self._reduced("max", self._a.max(axis, keepdims=keepdims))

    def _reduced(self, name, values):
        values = np.asarray(values)
        new = empty(values.shape, values.dtype)
        _compute(name, self, new)
        new._a[...] = values
        return new


ndarray.__module__ = "cupy"


def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def zeros(shape, dtype=float, order="C"):
    return full(shape, 0, dtype, order)


def full(shape, fill_value, dtype=None, order="C"):
    new = empty(shape, np.array(fill_value).dtype if dtype is None else dtype, order)
    new.fill(fill_value)
    return new


def ones(shape, dtype=float, order="C"):
    return full(shape, 1, dtype, order)


def ones_like(a, dtype=None, order="K", subok=None, shape=None):
    return full(a.shape if shape is None else shape, 1, a.dtype if dtype is None else dtype)


def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    if isinstance(a, ndarray):
        if a.data.device_id != _get_device():
            a = a.copy()
        return a.astype(a.dtype if dtype is None else dtype, order=order or "K", copy=bool(copy))
    values = np.array(a, dtype, order=order or "K")
    axes = sorted(range(values.ndim), key=lambda axis: -values.strides[axis])
    new = empty([values.shape[axis] for axis in axes], values.dtype)
    new = new.transpose(np.argsort(axes).tolist()) if axes else new
    _compute("upload", new)
    log.transfers.append("asarray")
    new._a[...] = values
    return new


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    return a.get(stream, order, out, blocking)


def ascontiguousarray(a, dtype=None):
    dtype = a.dtype if dtype is None else np.dtype(dtype)
    if a.flags.c_contiguous and a.dtype == dtype:
        return a if a.ndim else a.reshape(1)
    return a.astype(dtype, order="C")


def concatenate(tup, axis=0, out=None, *, dtype=None, casting="same_kind"):
    return _joined("concatenate", np.concatenate, tup, axis, out)


def stack(tup, axis=0, out=None, *, dtype=None, casting="same_kind"):
    return _joined("stack", np.stack, tup, axis, out)


def _joined(name, function, arrays, axis, out):
    if not all(isinstance(array, ndarray) for array in arrays):
        raise TypeError("Only cupy arrays can be concatenated")
    assert out is None
    values = function([array._a for array in arrays], axis)
    new = empty(values.shape, values.dtype)
    _compute(name, *arrays, new)
    new._a[...] = values
    return new


def where(condition, x, y):
    arrays = [v for v in (condition, x, y) if isinstance(v, ndarray)]
    values = np.where(*(v._a if isinstance(v, ndarray) else v for v in (condition, x, y)))
    new = empty(values.shape, values.dtype)
    _compute("where", *arrays, new)
    new._a[...] = values
    return new


def may_share_memory(a, b, max_work=None):
    return np.may_share_memory(a._a, b._a)


# -------------------------------------------------------------------------------- NCCL


class NcclError(RuntimeError):
    pass


def _block_at(address):
    """The block there, and how many bytes the address is from its start."""
    with Block._lock:
        start = max(own for own in Block._live if own <= address)
        return Block._live[start], address - start


class NcclCommunicator:
    """Ranks are threads; each call waits on the host for all of them, which NCCL does not."""

    _groups: ClassVar = {}

    def __init__(self, ndev, comm_id, rank):
        shared = SimpleNamespace(barrier=threading.Barrier(ndev, timeout=30), sent=[None] * ndev)
        self._shared = NcclCommunicator._groups.setdefault(comm_id, shared)
        self._rank, self._device = rank, _get_device()
        self.aborted = False
        self._shared.barrier.wait()

    def check_async_error(self):
        pass

    def abort(self):
        self.aborted = True

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):  # noqa: N802
        parts = self._exchange(sendbuf, recvbuf, count, datatype, stream)
        self._write(recvbuf, np.concatenate(parts))

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):  # noqa: N802
        assert op == nccl.NCCL_SUM
        self._write(recvbuf, sum(self._exchange(sendbuf, recvbuf, count, datatype, stream)))

    def _exchange(self, sendbuf, recvbuf, count, datatype, stream):
        assert stream == get_current_stream().ptr
        assert _get_device() == self._device, "NCCL takes arrays of its own device"
        shared = self._shared
        block, start = _block_at(sendbuf)
        size = count * np.dtype(datatype).itemsize
        shared.barrier.wait()
        shared.sent[self._rank] = block.raw[start : start + size].view(datatype)
        shared.barrier.wait()
        if len({part.shape for part in shared.sent}) > 1:
            raise NcclError("NCCL_ERROR_INVALID_USAGE")
        parts = [part.copy() for part in shared.sent]
        shared.barrier.wait()  # until all have copied: a result may go where the values were
        return parts

    def _write(self, recvbuf, values):
        raw, block = values.view(np.uint8), Block._live[recvbuf]
        block.raw[: raw.size] = raw
        self._shared.barrier.wait()  # before anybody's memory is used for something else


nccl = SimpleNamespace(
    available=True,
    NcclCommunicator=NcclCommunicator,
    NcclError=NcclError,
    get_unique_id=lambda: os.urandom(128),
    NCCL_SUM=0,
    NCCL_FLOAT32="float32",
    NCCL_FLOAT64="float64",
    NCCL_INT64="int64",
)


def install(emulated: Emulated | None = None) -> ModuleType:
    """The module; the same classes every time. New blocks are memory of `emulated`."""
    global _emulated
    _emulated = emulated
    if emulated is not None:
        emulated.after_launch = _after_launch
    module = ModuleType("cupy")
    module.__version__ = "14"
    for function in (
        *(ndarray, empty, zeros, ones, ones_like, full, asarray, asnumpy, ascontiguousarray),
        *(concatenate, stack, where, may_share_memory),
    ):
        setattr(module, function.__name__, function)
    for name in NAMES:
        setattr(module, name, getattr(np, name))
    module.cuda = ModuleType("cupy.cuda")
    module.cuda.Device, module.cuda.Event, module.cuda.Stream = Device, Event, Stream
    module.cuda.MemoryPointer = MemoryPointer
    module.cuda.get_current_stream = get_current_stream
    module.cuda.alloc_pinned_memory = _alloc_pinned_memory
    module.cuda.nccl = nccl
    module.cuda.runtime = SimpleNamespace(
        getDevice=_get_device,
        getDeviceCount=lambda: DEVICES,
        streamIsCapturing=_stream_is_capturing,
    )
    return module
