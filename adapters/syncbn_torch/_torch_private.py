"""The private names of torch that this package uses, and why it needs each of them.

A torch release may remove any of them, so each has a test in tests/torch/test_torch_private.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.utils import _python_dispatch
from torch.utils import _pytree as pytree

__all__ = [
    "COMPARES_GROUPS_BY_TYPE",
    "HOOKS",
    "HOOK_OPTIONS",
    "active_ddp",
    "backward_task",
    "constant_while_tracing",
    "current_device",
    "current_raw_stream",
    "current_stream_number",
    "default_group",
    "exporting",
    "finished_work",
    "forward_ad_active",
    "function_transforms_active",
    "has_group",
    "has_tangent_or_wrapper",
    "is_jit_tracing",
    "is_watched",
    "like",
    "profiled",
    "pytree",
    "raise_sequence_number",
    "records_a_graph",
    "register_group",
    "resolve_group",
    "saving_runs_hooks",
    "timeout_of",
    "traced_graph",
    "transforming",
    "untraced",
    "watch_saving",
    "without_dispatch_modes",
]

# A module's dictionaries of hooks that run when it is called. For each, torch.nn.modules.module
# has one of hooks for all modules, such as `_global_forward_hooks`.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# The dictionaries that say how to call some of these hooks.
HOOK_OPTIONS = (
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
)

# Whether torch.compile, unless asked for more, only guards that a process group is one.
COMPARES_GROUPS_BY_TYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)

# There are builds of torch without process groups.
_c10d: Any = (
    torch.distributed.distributed_c10d
    if torch.distributed.is_available()
    else SimpleNamespace(_world=SimpleNamespace(default_pg=None))
)

# These are bare C functions: Python wrappers would double their cost, which slows small layers.
# The number of the backward pass that runs in this thread; -1 outside of a backward pass:
backward_task: Callable[[], int] = torch._C._current_graph_task_id
# Whether a transform of torch.func (grad, jvp, vmap) runs in this thread:
function_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
# Whether torch.jit.trace records the operations of this thread; torch.compile can trace it:
is_jit_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
# The handle of the current stream of a CUDA device, given its index; None in builds without CUDA:
current_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# The index of the current CUDA device, where a tensor of one exists:
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)

_current_stream: Any = getattr(torch._C, "_cuda_getCurrentStream", None)

_top_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
_is_functorch_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
_is_legacy_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def current_stream_number(index: int) -> int:
    """torch's number of a device's current stream; its handle if torch did not create it."""
    return int(_current_stream(index)[0])


def saving_runs_hooks() -> bool:
    """Whether saving tensors for backward runs hooks of the user, which may raise."""
    return torch.is_grad_enabled() and _top_hooks(True) is not None


def watch_saving(check: Callable[[], None]) -> None:
    """Call `check()` before each call of the innermost hook for saved tensors, until it is left.

    Does nothing if a check is there already.
    """
    hooks = _top_hooks(True)
    if hooks is None or hasattr(hooks[0], "checks"):
        return

    def pack(tensor: Tensor) -> Any:
        check()
        return hooks[0](tensor)

    pack.checks = True  # type: ignore[attr-defined]
    torch._C._autograd._pop_saved_tensors_default_hooks()
    torch._C._autograd._push_saved_tensors_default_hooks(pack, hooks[1])


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """No dispatch mode sees what runs inside.

    That of a selective checkpoint raises an error in backward for what it has not seen in forward.
    """
    if not torch._C._len_torch_dispatch_stack():  # the other way takes 8 us
        return nullcontext()
    return cast(AbstractContextManager[Any], _python_dispatch._disable_current_modes())


def raise_sequence_number(least: int = 0) -> int:
    """Raise this thread's counter of autograd nodes to at least `least`; returns the counter.

    autograd runs the nodes that are ready by their numbers, which each thread counts from 0.
    """
    while (number := torch._C._autograd._get_sequence_nr()) < least:
        torch._C._functions.DelayedError("", 0)  # a node that no tensor has
    return int(number)


def records_a_graph() -> bool:
    """Whether torch.jit.trace or make_fx records operations; torch.compile does not count."""
    if is_jit_tracing():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return any(type(mode).__name__ == "ProxyTorchDispatchMode" for mode in modes)


def forward_ad_active() -> bool:
    """Whether forward AD is active in any thread (torch has one level for all threads)."""
    return forward_ad._current_level >= 0


def transforming() -> bool:
    """Whether tensors may have tangents or be wrapped by a function transform of this thread."""
    return forward_ad_active() or function_transforms_active()


def is_watched() -> bool:
    """Whether transforms, modes or tracing want to see operations of torch, not our kernels."""
    return (
        forward_ad._current_level >= 0
        or function_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._is_tracing()
    )


def has_tangent_or_wrapper(*tensors: Tensor | None) -> bool:
    """Whether one has a tangent of forward-mode AD, or is wrapped by a transform or batched.

    Batched are those of `is_grads_batched`. Our kernels only see addresses, and would miss all.
    """
    given = [t for t in tensors if t is not None]
    if any(map(_is_functorch_wrapped, given)) or any(map(_is_legacy_batched, given)):
        return True
    dual = forward_ad._current_level >= 0
    return dual and any(forward_ad.unpack_dual(t).tangent is not None for t in given)


def exporting() -> bool:
    """Whether torch.export is tracing."""
    # not `torch.compiler.is_exporting()`: torch.compile takes it for True in some versions
    return torch.compiler._is_exporting_flag


CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def untraced(reason: str) -> Callable[[CallableT], CallableT]:
    """A decorator: torch.compile breaks the graph at calls of the function, and says `reason`."""

    def decorated(function: CallableT) -> CallableT:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            # also what the function calls runs without graphs; to import the module takes a second
            compiler = sys.modules.get("torch._dynamo")
            call = function if compiler is None else compiler.disable(function)
            return call(*args, **kwargs)

        run._torchdynamo_disable = True  # type: ignore[attr-defined]
        run._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return cast(CallableT, run)

    return decorated


def like(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function: whether as many tensors are like these for all code, but for values and place.

    That is what torch.compile guards: type, dtype, device, sizes, strides, `requires_grad`, and
    what else decides which code runs, such as a negated view, inference mode or autocast.
    """
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards: Any = torch._C._dynamo.guards
    made = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = made.check

    def are_like(*others: Tensor) -> bool:
        # nested ones have no strides, for which torch would end the process
        return True not in [other.is_nested for other in others] and check(*others)

    return are_like


def profiled(name: str) -> Callable[[CallableT], CallableT]:
    """A decorator: torch's profilers see a range. While none runs, it would take 13 us."""

    def decorated(function: CallableT) -> CallableT:
        @wraps(function)
        def run(*args: Any) -> Any:
            if not profiler._is_profiler_enabled:
                return function(*args)
            with profiler.record_function(name):
                return function(*args)

        return cast(CallableT, run)

    return decorated


def constant_while_tracing(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which torch.compile calls while it traces; the result is a constant."""
    # what `torch.compiler.assume_constant_result` does, which imports torch._dynamo: one second
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def traced_graph() -> Any:
    """What torch.compile keeps of the graph that it traces now; None outside of torch.compile."""
    return torch._guards.TracingContext.try_get()


def default_group() -> Any:
    """The default process group, or None. torch.compile guards it, unlike `is_initialized()`."""
    return _c10d._world.default_pg  # `_world` changes where threads are ranks


def active_ddp() -> Any:
    """The `DistributedDataParallel` whose forward runs now, or None."""
    return torch.nn.parallel.DistributedDataParallel._get_active_ddp_module()


def timeout_of(group: Any) -> float:
    """The seconds that a collective of a group may take, as `init_process_group` or so set it."""
    device = min(group._device_types, key=lambda device: device.type)
    return float(group._get_backend(device).options._timeout.total_seconds())


def has_group(name: str) -> bool:
    """Whether collectives in a graph know a group by `name`; torch forgets all with the world."""
    try:
        resolve_group(name)
    except (RuntimeError, ValueError):
        return False
    return True


def register_group(name: Any, group: Any) -> None:
    """Make `group` the process group that collectives in a graph know by `name`."""
    torch._C._distributed_c10d._register_process_group(name, group)


def resolve_group(name: Any) -> Any:
    """The process group of this name."""
    return torch._C._distributed_c10d._resolve_process_group(name)


def finished_work(tensors: list[Tensor]) -> Any:
    """What a collective returns that has finished."""
    future: Any = torch.futures.Future()
    future.set_result(tensors)
    c10d: Any = torch._C._distributed_c10d
    return c10d._create_work_from_future(future)
