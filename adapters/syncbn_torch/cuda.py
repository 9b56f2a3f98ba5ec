"""The steps of batch normalization on CUDA tensors: the kernels of `syncbn_core` by raw pointers.

They run on the current stream of the tensor's device, take memory from torch's allocator, and wait
for nothing. Pointers, because DLPack both ways costs more than the launch of a kernel, and CuPy
need not be installed.
"""

from __future__ import annotations

import threading
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from syncbn_core.backends.cuda import driver
from syncbn_core.backends.cuda import grid as kernels
from syncbn_core.backends.cuda.compiler import Source
from syncbn_core.device_moments import DeviceMoments
from syncbn_core.layout import Layout, layout_of_strides
from syncbn_core.moments import Moments
from syncbn_torch.statistics import RunningStatistics, Sums

__all__ = ["CudaStatistics", "collapse", "has_cuda_kernels", "moments"]

_CODES = {getattr(torch, name): code for name, code in kernels.CODES.items()}
_NAMES = {getattr(torch, name): name for name in kernels.SIZES}

_TICKETS = 4096  # at first; as many as a reduction has channels or tiles
_LEGACY_STREAMS = (0, 1)  # never captured
_PER_THREAD_STREAM = 2  # one handle, another stream in every thread
_tickets: dict[tuple[int, int, int], Tensor] = {}


def has_cuda_kernels(tensor: Tensor) -> bool:
    """Whether the kernels take this tensor; warns once where something is missing for them."""
    return (
        tensor.device.type == "cuda"
        and type(tensor) in (Tensor, Parameter)  # a subclass may have no data of its own
        and tensor.dtype in _NAMES
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and _ready(tensor.device.index, tensor.dtype)
    )


@cache
def _ready(device: int, dtype: torch.dtype) -> bool:
    # bfloat16 is rounded by an instruction of that capability
    oldest = (8, 0) if dtype is torch.bfloat16 else driver.OLDEST
    return not _missing() and driver.compute_capability(device) >= oldest


@cache
def _missing() -> tuple[str, ...]:
    lacks = tuple(driver.missing())
    if lacks:
        warnings.warn(
            "syncbn runs CUDA tensors in plain torch operations, which is slow, because "
            + "; ".join(lacks),
            stacklevel=2,
        )
    return lacks


def _pointer(tensor: Tensor) -> Any:
    return tensor.data_ptr()


class _Runner:
    """Launches on the current stream of a device."""

    __slots__ = ("device", "index", "stream")

    threads = kernels.THREADS

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.index: int = device.index
        self.stream: int = torch._C._cuda_getCurrentRawStream(device.index)

    def launch(self, source: Source, grid: tuple[int, int], *arguments: Any) -> None:
        kernel = driver.kernel_for(source, self.index)
        if torch.cuda.current_device() == self.index:
            kernel.launch(grid, self.stream, *arguments)
        else:
            with torch.cuda.device(self.index):
                kernel.launch(grid, self.stream, *arguments)

    def _captures(self) -> bool:
        if torch.cuda.current_device() == self.index:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.device(self.index):
            return torch.cuda.is_current_stream_capturing()

    def scratch(self, size: int) -> tuple[Any, Tensor]:
        tensor = torch.empty(size, dtype=torch.float64, device=self.device)
        return _pointer(tensor), tensor

    def tickets(self, size: int) -> tuple[Any, Tensor]:
        """Zeros of this stream; a captured graph has its own, it may run beside its stream."""
        stream = self.stream
        if stream not in _LEGACY_STREAMS and self._captures():
            tensor = torch.zeros(size, dtype=torch.int32, device=self.device)
        else:
            thread = threading.get_ident() if stream == _PER_THREAD_STREAM else 0
            key = (self.index, stream, thread)
            known = _tickets.get(key)
            if known is None or known.numel() < size:
                known = torch.zeros(max(size, _TICKETS), dtype=torch.int32, device=self.device)
                _tickets[key] = known
            tensor = known
        return _pointer(tensor), tensor


class _View:
    """A dense tensor as the kernels see it."""

    __slots__ = ("channels", "dtype", "inner", "offset", "outer", "pointer")

    def __init__(self, tensor: Tensor, layout: Layout) -> None:
        self.pointer = _pointer(tensor)
        self.offset = tensor.data_ptr() % 16
        self.dtype = _NAMES[tensor.dtype]
        self.outer, self.channels, self.inner = layout.outer, layout.channels, layout.inner


def _dense(x: Tensor) -> tuple[Tensor, Layout]:
    """`x`, or a dense copy of it, and its layout."""
    x = x.detach()
    layout = layout_of_strides(x.shape, x.stride())
    if layout is None:
        x = x.contiguous()
        layout = layout_of_strides(x.shape, x.stride())
        assert layout is not None
    return x, layout


def _like(other: Tensor, x: Tensor, layout: Layout) -> Tensor:
    """`other` with the dtype and layout of the dense `x`."""
    same = other.dtype == x.dtype and layout_of_strides(other.shape, other.stride()) == layout
    if same and not other.is_neg() and type(other) in (Tensor, Parameter):
        return other.detach()
    return torch.empty_like(x).copy_(other)


def _parameters(weight: Tensor | None, bias: Tensor | None = None) -> tuple[Any, list[Any]]:
    """Pointers to weight and bias, and the contiguous tensors behind them."""
    tensors = [None if t is None else t.detach().contiguous() for t in (weight, bias)]
    pointers = [0 if t is None else _pointer(t) for t in tensors]
    codes = [0 if t is None else _CODES[t.dtype] for t in tensors]
    return kernels.Parameters(pointers[0], codes[0], pointers[1], codes[1]), tensors


def _wide(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float64, device=x.device)


def moments(x: Tensor) -> DeviceMoments:
    """Moments of this part; an empty x gives the empty part."""
    channels = x.shape[1]
    parts = _wide(x, 1, 2 * channels + 1)
    if x.numel() == 0:
        return DeviceMoments(parts.zero_(), 0, torch.cat)
    dense, layout = _dense(x)
    kernels.moments(_Runner(x.device), _View(dense, layout), _pointer(parts))
    return DeviceMoments(parts, x.numel() // channels, torch.cat)


class CudaStatistics:
    """Moments of the whole batch on one device, and the steps that use them."""

    __slots__ = ("clamp", "eps", "packed", "parts", "updated")

    def __init__(self, parts: Tensor, eps: float, eps_mode: str) -> None:
        self.parts: Tensor | None = parts  # [P, 2 C + 1]
        self.eps = eps
        self.clamp = eps_mode == "clamp"
        self.updated = False
        self.packed: Tensor  # [3 C + 1] count, mean, m2, invstd; by `normalize`

    def normalize(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: RunningStatistics | None,
        *,
        parallel: bool,
    ) -> Tensor:
        """`y = (x - mean) * invstd * weight + bias`; updates `running` where the kernel can."""
        assert self.parts is not None
        dense, layout = _dense(x)
        y = torch.empty_like(dense)
        self.packed = _wide(x, 3 * x.shape[1] + 1)
        parameters, tensors = _parameters(weight, bias)
        by_kernel = running is not None and _can_update(running, x.device)
        in_kernel = _running(running) if running is not None and by_kernel else kernels.NO_RUNNING
        kernels.normalize(
            _Runner(x.device),
            _View(dense, layout),
            _View(y, layout),
            parameters,
            _pointer(self.parts),
            len(self.parts),
            _pointer(self.packed),
            eps=self.eps,
            clamp=self.clamp,
            running=in_kernel,
        )
        del tensors
        self.parts = None  # `packed` has all that backward needs
        if running is not None and by_kernel:
            self.updated = True
            if running.counter is not None and in_kernel.factor < 0:
                running.counter.add_(1)  # the kernel has read it in many blocks
        return y

    def update(self, running: RunningStatistics) -> None:
        """Blend the batch into `running`, unless `normalize` has."""
        if not self.updated:
            running.update(self.total())

    def total(self) -> Moments:
        """Moments of the whole batch; waits for the device."""
        count, mean, m2, _ = self.packed.tensor_split(self._ends())
        return Moments(int(count), mean, m2)

    def _ends(self) -> tuple[int, int, int]:
        channels = len(self.packed) // 3
        return 1, 1 + channels, 1 + 2 * channels

    def backward_reduce(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, *, parallel: bool
    ) -> Sums:
        """The sums of this member."""
        channels = x.shape[1]
        exchange = _wide(x, 2, channels)
        dtype = x.dtype if weight is None else weight.dtype
        gradients = torch.empty(2, channels, dtype=dtype, device=x.device)
        by_weight, by_bias = gradients.unbind()
        if x.numel() == 0:
            gradients.zero_()
            return Sums(exchange.zero_(), by_weight, by_bias)
        dense, layout = _dense(x)
        grad = _like(dy, dense, layout)
        parameters, tensors = _parameters(weight)
        kernels.backward_reduce(
            _Runner(x.device),
            _View(dense, layout),
            _View(grad, layout),
            _pointer(self.packed),
            parameters,
            _pointer(exchange),
            _pointer(by_weight),
            _pointer(by_bias),
            code=_CODES[dtype],
        )
        del tensors
        return Sums(exchange, by_weight, by_bias)

    def backward_alone(self, x: Tensor, dy: Tensor, weight: Tensor | None) -> None:
        """The two kernels of backward are what there is."""

    def backward_input(
        self, x: Tensor, dy: Tensor, weight: Tensor | None, total: Tensor, *, parallel: bool
    ) -> Tensor:
        """dx from the sums over all members, `[2, C]`."""
        dense, layout = _dense(x)
        grad = _like(dy, dense, layout)
        dx = torch.empty_like(dense)
        parameters, tensors = _parameters(weight)
        total = total.to(x.device).contiguous()
        kernels.backward_input(
            _Runner(x.device),
            _View(dense, layout),
            _View(grad, layout),
            _View(dx, layout),
            _pointer(self.packed),
            parameters,
            _pointer(total),
            eps=self.eps,
            clamp=self.clamp,
        )
        del tensors
        return dx


def _can_update(running: RunningStatistics, device: torch.device) -> bool:
    """Whether the kernel can write these buffers: on its device, contiguous, of known dtypes."""
    mean, var, counter = running.mean, running.var, running.counter
    tensors = [t for t in (mean, var) if t is not None]
    return (
        all(t.device == device and t.is_contiguous() and t.dtype in _CODES for t in tensors)
        and len({t.dtype for t in tensors}) <= 1
        and (counter is None or (counter.device == device and counter.dtype is torch.int64))
        and (counter is not None or running.momentum is not None)
    )


def _running(running: RunningStatistics) -> kernels.Running:
    mean, var, counter = running.mean, running.var, running.counter
    factor = -1.0 if running.momentum is None else float(running.momentum)
    tracked = 0 if counter is None else _pointer(counter)
    if mean is None or var is None:
        return kernels.Running(tracked=tracked, factor=factor)
    return kernels.Running(_pointer(mean), _pointer(var), _CODES[mean.dtype], tracked, factor)


def collapse(part: DeviceMoments) -> DeviceMoments:
    """The same moments in one part."""
    if len(part.parts) == 1:
        return part
    parts = part.parts.contiguous()
    into = parts.new_empty(1, parts.shape[1])
    run = _Runner(parts.device)
    kernels.merge_parts(run, _pointer(parts), len(parts), part.num_features, _pointer(into))
    return DeviceMoments(into, part.known_count, torch.cat)
