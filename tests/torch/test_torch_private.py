"""Each private name of torch does what syncbn needs; each test says what breaks without it."""

import datetime
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from world import on_ranks, set_timeout

from syncbn_torch import _torch_private as private


def in_thread(call: Callable[[], Any]) -> Any:
    """The result of `call()` in a new thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def in_backward(*calls: Callable[[], Any]) -> list[Any]:
    """The results of `calls` within one backward pass."""
    leaf = torch.ones(1, requires_grad=True)
    results: list[Any] = []
    y = leaf * 2
    for call in calls:
        y.register_hook(lambda _, call=call: results.append(call()))
    y.sum().backward()
    return results


def in_vmap(call: Callable[[Tensor], Any]) -> Any:
    """The result of `call(wrapped tensor)` inside `torch.func.vmap`."""
    results: list[Any] = []

    def wrapped(x: Tensor) -> Tensor:
        results.append(call(x))
        return x

    torch.func.vmap(wrapped)(torch.ones(2))
    return results[0]


def test_every_private_name_has_a_test() -> None:
    tests = [name for name in globals() if name.startswith("test_")]
    for name in private.__all__:
        assert any(test.startswith(f"test_{name}_") for test in tests), name


def test_active_ddp_is_known_within_its_forward_alone() -> None:
    seen: list[Any] = []

    class Looks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(private.active_ddp())
            return super().forward(x)

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        model = nn.parallel.DistributedDataParallel(Looks(2, 2))
        model(torch.ones(1, 2))
    finally:
        dist.destroy_process_group()
    assert seen == [model]
    assert private.active_ddp() is None


LIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "type": lambda x: nn.Parameter(x),
    "dtype": lambda x: x.double(),
    "device": lambda x: x.to("meta"),
    "sizes": lambda x: x[:2],
    "axes": lambda x: x[0],
    "strides": lambda x: x.to(memory_format=torch.channels_last),
    "gaps": lambda x: torch.cat([x, x], 3)[..., :4],
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "negative": lambda x: torch.complex(x, x).conj().imag,
    "zeros without memory": lambda x: torch._efficientzerotensor(x.shape),
    "inference": lambda x: torch.inference_mode()(lambda: x + 1)(),
    "sparse": lambda x: x.to_sparse(),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[1]]),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of nested tensors
@pytest.mark.parametrize("name", LIKE)
def test_like_sees_what_differs(name: str) -> None:
    x, other = torch.randn(3, 2, 4, 4), torch.ones(2)
    are_like = private.like((x, other))
    assert are_like(torch.randn(3, 2, 4, 4), other + 1)
    changed = LIKE[name](x)
    assert not are_like(changed, other)
    if not changed.is_nested:
        assert private.like((changed, other))(LIKE[name](x + 1), other)


def test_like_keeps_no_tensor() -> None:
    x = torch.ones(3)
    kept, are_like = weakref.ref(x), private.like((x,))
    del x
    assert kept() is None
    assert are_like(torch.ones(3))


def test_profiled_shows_a_range_while_a_profiler_runs() -> None:
    @private.profiled("a range of ours")
    def double(x: Tensor) -> Tensor:
        return x * 2

    with torch.autograd.profiler.profile() as profiled:
        assert double(torch.ones(2)).tolist() == [2, 2]
    assert double(torch.ones(2)).tolist() == [2, 2]
    assert [event.name for event in profiled.function_events].count("a range of ours") == 1


def test_is_watched_sees_transforms_modes_and_tracing() -> None:
    assert not private.is_watched()
    assert in_vmap(lambda _: private.is_watched())
    with forward_ad.dual_level():
        assert private.is_watched()
    for mode in (TorchDispatchMode, TorchFunctionMode):
        with mode():
            assert private.is_watched()
    assert not private.is_watched()
    seen: list[bool] = []

    def traced(x: Tensor) -> Tensor:
        seen.append(private.is_watched())
        return x + 1

    torch.jit.trace(traced, torch.ones(2), check_trace=False)
    assert seen == [True]


def test_without_dispatch_modes_no_mode_sees_an_operation() -> None:
    with FlopCounterMode(display=False) as counter:
        with private.without_dispatch_modes():
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert counter.get_total_flops() == 0
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert counter.get_total_flops() == 16


def test_raise_sequence_number_orders_nodes_of_several_threads() -> None:
    def next_number() -> int:
        leaf = torch.ones(1, requires_grad=True)
        return int((leaf * 2).grad_fn._sequence_nr())

    def raised() -> tuple[int, int]:
        with torch.no_grad():
            private.raise_sequence_number(50)
        return private.raise_sequence_number(7), next_number()

    assert in_thread(next_number) == 0
    assert in_thread(raised) == (50, 50)


def test_HOOKS_are_those_that_a_call_runs() -> None:  # noqa: N802
    """Without them, replicas register hooks in the model, and tracing runs hooks twice."""
    layer = torch.nn.Linear(1, 1)
    for hooks in private.HOOKS:
        assert vars(layer)[hooks] == {}
        assert getattr(torch.nn.modules.module, f"_global{hooks}") == {}
    state = {"_state_dict_hooks", "_state_dict_pre_hooks"}
    state |= {"_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
    all_hooks = {name for name in vars(layer) if "hooks" in name} - state
    assert all_hooks == {*private.HOOKS, *private.HOOK_OPTIONS}


def test_HOOK_OPTIONS_hold_an_entry_for_a_hook_with_keywords() -> None:  # noqa: N802
    """Without them, replicas leave entries in the model that torch never removes."""
    layer = torch.nn.Linear(1, 1)
    layer.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True)
    layer.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
    assert all(vars(layer)[options] for options in private.HOOK_OPTIONS)


def test_backward_task_numbers_backward_passes() -> None:
    """Without it, checkpointing counts a batch twice."""
    assert private.backward_task() == -1
    first = in_backward(private.backward_task, private.backward_task)
    second = in_backward(private.backward_task)
    assert first[0] == first[1] >= 0
    assert second[0] not in (-1, first[0])
    assert private.backward_task() == -1


def test_saving_runs_hooks_sees_the_hooks_of_saved_tensors() -> None:
    """Without it, running statistics change in a forward that fails in a hook."""
    with saved_tensors_hooks(lambda t: t, lambda t: t):
        assert private.saving_runs_hooks()
        with torch.no_grad():
            assert not private.saving_runs_hooks()
    assert not private.saving_runs_hooks()


def recorded(record: Any, look: Callable[[], bool]) -> list[bool]:
    seen: list[bool] = []

    def function(x: Tensor) -> Tensor:
        seen.append(look())
        return x + 1

    record(function)(torch.ones(2))
    return seen


def by_jit(function: Any) -> Any:
    return lambda x: torch.jit.trace(function, x, check_trace=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_is_jit_tracing_is_true_in_torch_jit_trace_alone() -> None:
    """Without it, a traced layer keeps what it computed while it was traced."""
    assert recorded(by_jit, private.is_jit_tracing) == [True]
    assert recorded(make_fx, private.is_jit_tracing) == [False]
    assert not private.is_jit_tracing()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_records_a_graph_is_true_for_make_fx_and_torch_jit_trace() -> None:
    """Without it, a graph of a layer that exchanges messages lacks them, and nobody is told."""
    assert recorded(by_jit, private.records_a_graph) == [True]
    assert recorded(make_fx, private.records_a_graph) == [True]
    with FlopCounterMode(display=False):
        assert not private.records_a_graph()
    assert not private.records_a_graph()


def test_forward_ad_active_sees_the_level_of_every_thread() -> None:
    """Without it, our kernels silently drop tangents, also in replica threads."""
    assert not private.forward_ad_active()
    with forward_ad.dual_level():
        assert private.forward_ad_active()
        assert in_thread(private.forward_ad_active)
    assert not private.forward_ad_active()


def test_function_transforms_active_sees_transforms_of_this_thread() -> None:
    """Without it, our kernels read the address of a wrapped tensor, which has no data."""
    assert not private.function_transforms_active()
    assert in_vmap(lambda _: private.function_transforms_active())
    assert not in_vmap(lambda _: in_thread(private.function_transforms_active))


def test_transforming_sees_forward_ad_and_transforms() -> None:
    """Without it, a layer alone uses our kernels, which can't be transformed."""
    assert not private.transforming()
    assert in_vmap(lambda _: private.transforming())
    with forward_ad.dual_level():
        assert private.transforming()


def test_has_tangent_or_wrapper_sees_tensors_of_transforms() -> None:
    """Without it, a wrapped tensor is sent to other processes, or read by our kernels."""
    assert not private.has_tangent_or_wrapper(torch.ones(2))
    assert in_vmap(private.has_tangent_or_wrapper)


def test_has_tangent_or_wrapper_sees_tangents() -> None:
    """Without it, the tangent of a gradient is lost."""
    with forward_ad.dual_level():
        x = torch.ones(2)
        assert not private.has_tangent_or_wrapper(x, None)
        assert private.has_tangent_or_wrapper(None, forward_ad.make_dual(x, x))


def test_has_tangent_or_wrapper_sees_tensors_of_batched_gradients() -> None:
    """Without it, our kernels read the address of a gradient that is wrapped by the older vmap."""
    x = torch.ones(2, requires_grad=True)
    y, seen = x * 2, []
    y.register_hook(
        lambda dy: seen.append(
            (private.has_tangent_or_wrapper(dy), private.function_transforms_active())
        )
    )
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert seen == [(True, False)]


def test_watch_saving_checks_before_the_hook_and_ends_with_it() -> None:
    calls: list[str] = []
    x = torch.ones(1, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        calls.append("pack")
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        for name in ("first", "second"):  # the second is not needed
            private.watch_saving(lambda name=name: calls.append(name))
        x.exp()
    x.exp()
    private.watch_saving(lambda: calls.append("without hooks"))
    x.exp()
    assert calls == ["first", "pack"]


def test_current_raw_stream_gives_the_stream_of_kernels() -> None:
    """Without it, our kernels can't be launched on torch's current stream."""
    if torch.backends.cuda.is_built():
        assert private.current_raw_stream is not None
    if torch.cuda.is_available():
        with torch.cuda.stream(torch.cuda.Stream()):
            current = torch.cuda.current_stream().cuda_stream
            assert private.current_raw_stream(torch.cuda.current_device()) == current


def test_current_device_is_that_of_launches() -> None:
    """Without it, kernels might be launched on another device than that of their tensors."""
    if torch.backends.cuda.is_built():
        assert private.current_device is not None
    if torch.cuda.is_available():
        assert private.current_device() == torch.cuda.current_device()


def test_current_stream_number_tells_streams_of_others() -> None:
    """Without it, two streams may count in the same numbers, and sums may be wrong."""
    if torch.backends.cuda.is_built():
        assert private._current_stream is not None
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        own = torch.cuda.Stream()
        with torch.cuda.stream(own):
            assert private.current_stream_number(index) != own.cuda_stream
        with torch.cuda.stream(torch.cuda.ExternalStream(own.cuda_stream)):
            assert private.current_stream_number(index) == own.cuda_stream


def test_untraced_breaks_the_graph_and_says_why() -> None:
    """Without it, torch.compile traces replicas, and fails somewhere within."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    inside: list[bool] = []

    def inner(x: Tensor) -> Tensor:
        inside.append(torch.compiler.is_compiling())
        return x + 1

    @private.untraced("a reason")
    def call(x: Tensor) -> Tensor:
        return inner(x)

    def whole(x: Tensor) -> Tensor:
        return call(x * 2) * 3

    torch._dynamo.reset()
    assert torch.compile(whole, backend=backend)(torch.ones(1)).item() == 9
    assert len(graphs) == 2
    assert inside == [False]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a reason"):
        torch.compile(whole, backend=backend, fullgraph=True)(torch.ones(1))


def test_pytree_takes_apart_and_makes_what_is_registered() -> None:
    """Without it, replicas can't take and return the containers of other libraries."""
    values, spec = private.pytree.tree_flatten([{"b": deque([1, [2]], maxlen=2)}, 3])
    assert values == [1, 2, 3]
    assert spec.flatten_up_to([{"b": deque([4, [[5]]])}, "text"]) == [4, [5], "text"]
    made = private.pytree.tree_unflatten([4, 5, 6], spec)
    assert made == [{"b": deque([4, [5]])}, 6]
    assert made[0]["b"].maxlen == 2
    for other in ([{"b": 1}, 3], [{"c": deque([1, [2]])}, 3], [1, 3]):
        with pytest.raises(ValueError, match=r"mismatch"):
            spec.flatten_up_to(other)


def test_constant_while_tracing_calls_once_and_breaks_no_graph() -> None:
    """Without it, the graph breaks at each layer over processes."""
    calls: list[str] = []

    @private.constant_while_tracing
    def chosen(text: str) -> int:
        calls.append(text)
        return len(text)

    torch._dynamo.reset()
    f = torch.compile(lambda x: x * chosen("four"), backend="eager", fullgraph=True)
    for _ in range(2):
        assert f(torch.ones(1)).item() == 4
    assert calls == ["four"]


def test_traced_graph_is_one_object_in_each_graph() -> None:
    """Without it, Inductor does not find a graph in its cache that another one came before."""
    seen: list[Any] = []

    @private.constant_while_tracing
    def look(_: int) -> int:
        seen.append(private.traced_graph())
        return 1

    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(lambda x: x * look(1) + look(2), backend="eager")(torch.ones(1))
    first, second, third, fourth = seen
    assert first is second is not None
    assert third is fourth is not first
    assert private.traced_graph() is None


def test_exporting_is_true_for_torch_export_alone() -> None:
    """Without it, export of a layer over processes gives a program with wrong gradients."""
    seen: list[bool] = []

    @private.constant_while_tracing
    def look() -> int:
        seen.append(private.exporting())
        return 1

    class Looking(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * look()

    torch._dynamo.reset()
    torch.compile(Looking(), backend="eager", fullgraph=True)(torch.ones(1))
    assert seen == [False]
    torch.export.export(Looking(), (torch.ones(1),))
    assert seen[-1]
    assert not private.exporting()


@on_ranks(1)
def test_timeout_of_is_the_present_timeout_of_a_group(rank: int, size: int) -> None:
    """Without it, local connections wait for another time than the group."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=70))
    assert private.timeout_of(group) == 70
    set_timeout(5, group)
    assert private.timeout_of(group) == 5


class Doubling(dist.ProcessGroup):
    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        tensors[0].mul_(2)
        return private.finished_work(tensors)


def test_register_group_lets_collectives_of_a_graph_find_it() -> None:
    """Without it, layers in a graph can't exchange; the same holds for the next two."""
    group = Doubling(0, 1)
    private.register_group("a group of test_register_group", group)
    ops = torch.ops._c10d_functional
    total = ops.all_reduce(torch.ones(3), "sum", "a group of test_register_group")
    assert ops.wait_tensor(total).tolist() == [2, 2, 2]


def test_resolve_group_gives_the_group_of_a_name() -> None:
    group = Doubling(0, 1)
    private.register_group("a group of test_resolve_group", group)
    assert private.resolve_group("a group of test_resolve_group") is group


def test_has_group_tells_names_that_were_registered() -> None:
    """Without it, a graph keeps to the process groups of a world that has ended."""
    assert not private.has_group("a group of test_has_group")
    group = Doubling(0, 1)
    private.register_group("a group of test_has_group", group)
    assert private.has_group("a group of test_has_group")


def test_default_group_is_guarded_by_torch_compile() -> None:
    """Without it, a graph from before init_process_group does not synchronize afterwards."""
    torch._dynamo.reset()
    f = torch.compile(
        lambda x: x * (1 if private.default_group() is None else 2), backend="eager", fullgraph=True
    )
    assert f(torch.ones(1)).item() == 1
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert private.default_group() is dist.group.WORLD
        assert f(torch.ones(1)).item() == 2
    finally:
        dist.destroy_process_group()
    assert private.default_group() is None
    assert f(torch.ones(1)).item() == 1


def test_COMPARES_GROUPS_BY_TYPE_says_whether_the_identity_must_be_read() -> None:  # noqa: N802
    """Without it, a layer with another group runs the graph of the former one."""
    holder = torch.nn.Module()
    traced: list[Any] = []

    @private.constant_while_tracing
    def note(group: Any, number: int) -> int:
        traced.append(group)
        return number

    def call(x: Tensor) -> Tensor:
        group = holder.group
        note(group, id(group) if private.COMPARES_GROUPS_BY_TYPE else 0)
        return x + 1

    torch._dynamo.reset()
    f = torch.compile(call, backend="eager", fullgraph=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            holder.group = dist.new_group([0])
            f(torch.ones(1))
    finally:
        dist.destroy_process_group()
    assert len(traced) == 2


def test_finished_work_need_not_be_waited_for() -> None:
    values = [torch.ones(3)]
    work = private.finished_work(values)
    assert work.wait()
    assert work.is_completed()
    assert work.get_future().value() == values
