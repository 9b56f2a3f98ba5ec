"""Replication: callbacks, splitting and joining, thread replicas, and what happens to errors."""

import contextlib
import copy
import os
import signal
import threading
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from syncbn_core.comm import SyncMaster, set_default_timeout
from syncbn_core.errors import (
    ArgumentError,
    CommAborted,
    CommError,
    CommTimeout,
    ShapeError,
    StateError,
)
from syncbn_torch import (
    CallbackContext,
    DataParallelWithCallback,
    SyncBatchNorm,
    SynchronizedBatchNorm1d,
    execute_replication_callbacks,
    patch_replication_callback,
)
from syncbn_torch.inplace import ABN


class Recorder(nn.Module):
    """Notes the callbacks of its copies in a list that they share."""

    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    def __data_parallel_replicate__(self, context: Any, copy_id: int) -> None:
        self.calls.append((id(context), context.name, copy_id))

    def forward(self, x: Tensor) -> Tensor:
        return x


class Tree(nn.Module):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.a = Recorder(calls)
        self.block = nn.Sequential(nn.Linear(3, 3), Recorder(calls))
        self.again = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.block(self.a(x)))


def test_callbacks_come_once_per_copy_master_first_with_one_context_per_position() -> None:
    calls: list[Any] = []
    model = DataParallelWithCallback(Tree(calls), device_ids=["cpu"] * 3)
    model(torch.randn(6, 3))
    assert [(name, copy_id) for _, name, copy_id in calls] == [
        ("a", 0), ("block.1", 0), ("a", 1), ("block.1", 1), ("a", 2), ("block.1", 2)
    ]  # fmt: skip
    contexts = {name: {c for c, n, _ in calls if n == name} for name in ("a", "block.1")}
    assert [len(ids) for ids in contexts.values()] == [1, 1]
    assert contexts["a"] != contexts["block.1"]


def test_callbacks_can_be_executed_on_any_list_of_copies() -> None:
    calls: list[Any] = []
    contexts = execute_replication_callbacks([Tree(calls), Tree(calls)])
    assert [copy_id for *_, copy_id in calls] == [0, 0, 1, 1]
    assert all(isinstance(context, CallbackContext) for context in contexts)
    assert {context.size for context in contexts} == {2}
    with pytest.raises(CommError, match="copies of one model"):
        execute_replication_callbacks([Tree(calls), nn.Linear(1, 1)])


class Sums(nn.Module):
    """The pattern of user code: one `SyncMaster` for good, `run_master` / `run_slave`."""

    def __init__(self) -> None:
        super().__init__()
        self.master = SyncMaster(self.combine, timeout=30)

    def __data_parallel_replicate__(self, context: Any, copy_id: int) -> None:
        self.copy_id = copy_id
        if copy_id == 0:
            context.sync_master = self.master
        else:
            self.pipe = context.sync_master.register_slave(copy_id)

    @staticmethod
    def combine(messages: list[Any]) -> list[Any]:
        total = torch.stack([message for _, message in messages]).sum(0)
        return [(identifier, total) for identifier, _ in messages]

    def forward(self, x: Tensor) -> Tensor:
        if (x == 7).any():
            raise KeyError("bad sample")
        own = x.sum(0, keepdim=True)
        return self.pipe.run_slave(own) if self.copy_id else self.master.run_master(own)


def test_own_modules_can_keep_a_sync_master_from_forward_to_forward() -> None:
    """Also when the last batch is enough for one replica only, and after a failure."""
    model = DataParallelWithCallback(Sums(), replicas=4)
    for size in (8, 1, 8, 3, 1):
        x = torch.randn(size, 2)
        torch.testing.assert_close(model(x), x.sum(0).expand(min(size, 4), 2))
        with pytest.raises(KeyError):
            model(torch.full((8, 2), 7.0))
    with pytest.raises(AttributeError, match="not set sync_master"):
        _ = CallbackContext("a").sync_master


def test_no_tensors_at_all() -> None:
    class Counts(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return torch.ones(1)

    model = DataParallelWithCallback(Counts(), replicas=3)
    assert model().shape == (1,)  # nothing to split: once
    assert model("a").shape == (3,)  # an object for each
    assert model(a=1).shape == (3,)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6])
def test_a_batch_smaller_than_the_number_of_replicas(batch: int) -> None:
    """In turn with full batches, as the last one of an epoch."""
    layer = SynchronizedBatchNorm1d(3)
    twin = nn.BatchNorm1d(3)
    model = DataParallelWithCallback(layer, replicas=4)
    for size in (8, batch, 8, batch):
        x = torch.randn(size, 3)
        if size == 1:
            for alone in (model, twin):  # a layer alone is torch's, which counts the batch
                with pytest.raises(ValueError, match="more than 1 value"):
                    alone(x)
            continue
        torch.testing.assert_close(model(x), twin(x))
    torch.testing.assert_close(layer.running_var, twin.running_var)
    assert torch.equal(layer.num_batches_tracked, torch.tensor(4))


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (lambda i: i, "the same int"),
        (lambda i: np.zeros(3), "the same ndarray"),
        (lambda i: [0] * i, "the same list"),
        (lambda i: {str(i): 1}, r"missing key\(s\): {'0'}"),
        (lambda i: 1 if i else None, "one type"),
    ],
)
def test_results_that_do_not_join_are_named(outputs: Any, text: str) -> None:
    class Differs(nn.Module):
        def __data_parallel_replicate__(self, context: Any, copy_id: int) -> None:
            self.copy_id = copy_id

        def forward(self, x: Tensor) -> Any:
            return outputs(self.copy_id)

    with pytest.raises(ShapeError, match=text):
        DataParallelWithCallback(Differs(), replicas=2)(torch.randn(2, 1))


@pytest.mark.filterwarnings("ignore:1 .BatchNorm1d. does not synchronize")
def test_replicas_share_parameters_and_the_first_has_the_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), SynchronizedBatchNorm1d(3), ABN(3))
    model.add_module("shared", model[0])
    wrapper = DataParallelWithCallback(model, replicas=3)
    replicas = wrapper.replicate(model, wrapper.device_ids)
    for copy_id, replica in enumerate(replicas):
        assert [id(p) for p in replica.parameters()] == [id(p) for p in model.parameters()]
        assert replica[0] is not model[0]
        assert replica.shared is replica[0]
        for n in (1, 3):
            assert (replica[n].running_mean is model[n].running_mean) is (copy_id == 0)
        assert replica[2].running_mean is model[2].running_mean
    wrapper(torch.randn(9, 3))
    # 1 and 3 as under nn.DataParallel: those of the first replica
    assert [int(model[n].num_batches_tracked) for n in (1, 2, 3)] == [1, 1, 1]


def test_hooks_that_a_replica_registers_are_its_own() -> None:
    """As models of transformers do in their first forward, to collect hidden states."""

    class Collects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: list[Tensor] = []
            self.inner.register_forward_hook(lambda module, args, y: found.append(y))
            self.inner(x)
            return torch.cat(found, 1)

    model, x = Collects(), torch.randn(6, 3)
    calls: list[int] = []
    model.inner.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    wrapper = DataParallelWithCallback(model, replicas=3)
    for _ in range(2):
        torch.testing.assert_close(wrapper(x), model.inner(x))
    assert sorted(calls) == [2] * 6 + [6] * 2  # hooks of the model run in every replica
    assert not model.inner._forward_hooks


def test_parameters_get_the_gradient_of_all_replicas() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), SynchronizedBatchNorm1d(4), nn.Linear(4, 2)).double()
    twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    twin.load_state_dict(model.state_dict())
    x = torch.randn(10, 3, dtype=torch.float64)
    DataParallelWithCallback(model, replicas=4)(x).pow(3).sum().backward()
    twin(x).pow(3).sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


variable: ContextVar[str] = ContextVar("variable", default="unset")


def test_replicas_inherit_the_modes_of_the_caller() -> None:
    class Modes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = torch.mm(x, x.T)
            return {
                "grad": torch.is_grad_enabled(),
                "inference": torch.is_inference_mode_enabled(),
                "dtype": str(y.dtype),
                "variable": variable.get(),
                "training": self.training,
            }

    model = DataParallelWithCallback(Modes(), replicas=3)
    x = torch.randn(6, 2)
    variable.set("set")
    assert model(x) == {
        "grad": True, "inference": False, "dtype": "torch.float32", "variable": "set",
        "training": True,
    }  # fmt: skip
    with torch.no_grad():
        assert model(x)["grad"] is False
    with torch.inference_mode():
        assert model(x)["inference"] is True
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x)["dtype"] == "torch.bfloat16"
    assert model.eval()(x)["training"] is False


def test_autocast_trains_through_the_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 4), SynchronizedBatchNorm1d(4), nn.Linear(4, 2))
    wrapper = DataParallelWithCallback(model, replicas=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = wrapper(torch.randn(8, 3)).float().square().mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert model[1].running_mean.dtype == torch.float32


class Fails(nn.Module):
    """Raises, or returns early, in the replica that gets the number 7."""

    def __init__(self, fault: Any) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(1)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        if (x == 7).any() and self.fault is not None:
            if isinstance(self.fault, BaseException):
                raise self.fault
            return x
        return self.bn(self.bn(x))


class CustomError(Exception):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(code)
        self.reason = reason


@pytest.mark.parametrize("replica", [0, 1, 3])
@pytest.mark.parametrize(
    "error",
    [KeyError("bad sample"), MemoryError(), CustomError(3, reason="own"), KeyboardInterrupt()],
)
def test_error_of_a_replica_reaches_the_caller_and_releases_the_others(
    replica: int, error: BaseException
) -> None:
    model = Fails(error)
    wrapper = DataParallelWithCallback(model, replicas=4)
    before = copy.deepcopy(model.state_dict())
    x = torch.arange(-8.0, 0).view(8, 1)
    x[2 * replica] = 7
    with pytest.raises(type(error)) as caught:
        wrapper(x)
    assert caught.value is error  # the object itself, with whatever it carries
    if isinstance(error, Exception) or replica > 0:  # else it is Ctrl-C, for the caller
        assert error.__notes__[-1] == f"raised in replica {replica} of 4"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not [t for t in threading.enumerate() if t.name.startswith("replica")]
    model.fault = None
    torch.testing.assert_close(wrapper(x).mean(), torch.tensor(0.0), atol=1e-6, rtol=0)


def test_replicas_in_unlike_layers_are_told_at_the_deadline_who_is_missing() -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = SynchronizedBatchNorm1d(1), SynchronizedBatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] != 7:
                x = self.left(x)
            return self.right(x)

    x = torch.arange(-8.0, 0).view(8, 1)
    x[4] = 7
    model = DataParallelWithCallback(Skips(), replicas=4)
    set_default_timeout(0.5)
    try:
        with pytest.raises(
            CommTimeout, match=r"in call 1 of layer '(left|right)'; missing: replica "
        ):
            model(x)
    finally:
        set_default_timeout(None)


class Loops(nn.Module):
    """Calls a layer for each block of two samples that begins with a positive value."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.bn, self.least = SynchronizedBatchNorm1d(1), least

    def forward(self, x: Tensor) -> Tensor:
        blocks = [block for block in x.split(2) if block[0, 0] > 0]
        blocks += [x[:0]] * (self.least - len(blocks))
        return torch.cat([self.bn(block) for block in blocks])


def test_a_replica_with_fewer_calls_is_named_and_goes_along_with_empty_inputs() -> None:
    x = torch.tensor([1.0, 2, 3, 5, 4, 1, -1, 8]).view(8, 1)  # two blocks, and one
    with pytest.raises(
        CommAborted, match=r"call 2 of layer 'bn' .* replica 1 left .* input \(x\[:0\]\)"
    ):
        DataParallelWithCallback(Loops(least=0), replicas=2)(x)
    y = DataParallelWithCallback(Loops(least=2), replicas=2)(x)
    twin = nn.BatchNorm1d(1)
    first, second = twin(torch.cat([x[0:2], x[4:6]])), twin(x[2:4])
    torch.testing.assert_close(y, torch.cat([first[:2], second, first[2:]]))


def test_deadline_ends_the_wait_for_a_replica_that_is_stuck() -> None:
    """The caller gets the error while the stuck replica is still at it."""
    release = threading.Event()

    class Stuck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = SynchronizedBatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            if (x == 7).any():
                release.wait()
            return self.norm(x)

    x = torch.arange(8.0).view(8, 1)
    set_default_timeout(0.2)
    try:
        with pytest.raises(
            CommTimeout, match=r"call 1 of layer 'norm'; missing: .*replica 3"
        ) as caught:
            DataParallelWithCallback(Stuck(), replicas=4)(x)
    finally:
        set_default_timeout(None)
        release.set()
    assert "still running: replica 3" in caught.value.__notes__


def test_unequal_channels_in_the_replicas() -> None:
    from syncbn_torch import SyncBatchNorm

    class Differs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SyncBatchNorm(3, affine=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(x[:, :2]) if (x == 7).any() else self.bn(x)

    x = torch.randn(4, 3)
    x[3] = 7
    with pytest.raises(ShapeError, match="expected 3 channels"):
        DataParallelWithCallback(Differs(), replicas=2)(x)


def test_many_forwards_at_the_same_time() -> None:
    """Each forward has contexts of its own; one wrapper may serve several threads."""
    model = DataParallelWithCallback(
        nn.Sequential(SynchronizedBatchNorm1d(3, track_running_stats=False)), replicas=3
    )
    xs = [torch.randn(9, 3) for _ in range(8)]
    ys: dict[int, Tensor] = {}

    def run(index: int) -> None:
        for _ in range(5):
            ys[index] = model(xs[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, x in enumerate(xs):
        torch.testing.assert_close(ys[index], nn.BatchNorm1d(3)(x))


def test_is_a_data_parallel_with_the_same_state() -> None:
    wrapper = DataParallelWithCallback(nn.Linear(2, 2), device_ids=["cpu"] * 2)
    assert isinstance(wrapper, nn.DataParallel)
    assert list(wrapper.state_dict()) == ["module.weight", "module.bias"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"replicas": 2, "device_ids": ["cpu"]}, "got both"),
        ({"device_ids": 4}, "expected a list as device_ids, got 4; .* pass replicas=4"),
        ({"replicas": 0}, "1 or more replicas"),
        ({"replicas": "4"}, "1 or more replicas, got '4'"),
        ({"device_ids": ["cpu", "cuda:0"]}, "on CPU or on GPUs"),
    ],
)
def test_bad_choices_of_devices_are_named(arguments: Any, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        DataParallelWithCallback(nn.Linear(1, 1), **arguments)


def test_existing_data_parallel_gets_the_callbacks() -> None:
    plain = nn.DataParallel(SynchronizedBatchNorm1d(3))
    patch_replication_callback(plain)
    assert isinstance(plain, DataParallelWithCallback)
    x = torch.randn(4, 3)
    torch.testing.assert_close(plain(x), nn.BatchNorm1d(3)(x))
    patch_replication_callback(plain)  # twice does no harm
    assert type(copy.deepcopy(plain)) is DataParallelWithCallback
    with pytest.raises(TypeError, match=r"expected an nn\.DataParallel, got Linear"):
        patch_replication_callback(nn.Linear(1, 1))


def test_a_subclass_of_data_parallel_keeps_its_methods() -> None:
    class Own(nn.DataParallel):
        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return super().forward(*inputs, **kwargs) + 1

    own = Own(SynchronizedBatchNorm1d(3))
    patch_replication_callback(own)
    assert isinstance(own, Own)
    assert isinstance(own, DataParallelWithCallback)
    x = torch.randn(4, 3)
    torch.testing.assert_close(copy.deepcopy(own)(x), nn.BatchNorm1d(3)(x) + 1)


def test_a_patched_wrapper_splits_and_joins_by_its_own_methods() -> None:
    class Scattered(nn.DataParallel):
        """Takes a list with the batch of each replica."""

        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            return [(batch,) for batch in inputs[0]], [{} for _ in inputs[0]]

        def gather(self, outputs: Any, output_device: Any) -> Any:
            return list(outputs)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm1d(3)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.bn(batch["x"])

    wrapper: Any = Scattered(Net())
    cpu = torch.device("cpu")
    wrapper.device_ids, wrapper.output_device, wrapper.src_device_obj = [cpu] * 2, cpu, cpu
    wrapper.dim = 0
    patch_replication_callback(wrapper)
    xs = [torch.randn(2, 3), torch.randn(5, 3)]
    ys = wrapper([{"x": x} for x in xs])
    assert [len(y) for y in ys] == [2, 5]
    torch.testing.assert_close(torch.cat(ys), nn.BatchNorm1d(3)(torch.cat(xs)))


def test_results_are_bitwise_the_same_in_every_run() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 8), SynchronizedBatchNorm1d(8), nn.Linear(8, 2))
        wrapper = DataParallelWithCallback(model, replicas=4)
        for _ in range(3):
            wrapper(torch.randn(11, 3)).pow(3).sum().backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    first = run()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("hooks", [False, True])
def test_large_and_small_parts_equal_the_undivided_batch(
    memory_format: torch.memory_format, hooks: bool
) -> None:
    """Replicas compute large parts themselves, here the first two; the master computes the last."""
    layers = [nn.BatchNorm2d(4).double(), SyncBatchNorm(4).double()]
    models = layers[0], DataParallelWithCallback(layers[1], replicas=3)
    given = torch.randn(5, 4, 120, 100).double().to(memory_format=memory_format) + 3
    dy, results = torch.randn_like(given), []
    for model in models:
        x = given.clone().requires_grad_()
        keep = torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda saved: saved)
        with keep if hooks else contextlib.nullcontext():
            y = model(x)
        y.backward(dy)
        results.append([y, x.grad])
    assert results[1][0].is_contiguous(memory_format=memory_format)
    for layer, found in zip(layers, results, strict=True):
        found += [layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("hooks", [False, True])
def test_a_weight_that_is_modified_before_backward_is_an_error(hooks: bool) -> None:
    layer = SyncBatchNorm(4)
    model = DataParallelWithCallback(layer, replicas=2)
    with torch.autograd.graph.save_on_cpu() if hooks else contextlib.nullcontext():
        y = model(torch.randn(6, 4, 3, 3, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("training", "around"), [(False, False), (True, False), (True, True)])
def test_a_replica_left_behind_stops_at_its_next_layer(training: bool, around: bool) -> None:
    """The caller has gone on after another replica's error and the deadline."""
    release, stopped = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    class Stuck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = SynchronizedBatchNorm1d(1)
            self.layers = [self.norm]

        def forward(self, x: Tensor) -> Tensor:
            if (x == 0).any():
                raise KeyError("bad sample")
            release.wait()
            try:
                return (self.layers[0] if around else self.norm)(x)
            except BaseException as error:
                errors.append(error)
                raise
            finally:
                stopped.set()

    model = Stuck().train(training)
    before = copy.deepcopy(model.state_dict())
    set_default_timeout(0.1)
    try:
        with pytest.raises(KeyError):
            DataParallelWithCallback(model, replicas=2)(torch.arange(4.0).view(4, 1))
    finally:
        set_default_timeout(None)
        release.set()
    stopped.wait()
    if around:
        assert isinstance(errors[0], StateError)
    else:
        assert isinstance(errors[0], CommAborted)
        told = "layer 'norm': the forward that this replica belonged to was given up: KeyError"
        assert told in str(errors[0])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_master_left_behind_within_a_layer_does_not_go_on_alone() -> None:
    within, release, stopped = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def wait(saved: Tensor) -> Tensor:
        within.set()
        release.wait()
        return saved

    class Stuck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = SynchronizedBatchNorm1d(1)

        def forward(self, x: Tensor) -> Tensor:
            if (x == 0).any():
                within.wait()
                raise KeyError("bad sample")
            try:
                with torch.autograd.graph.saved_tensors_hooks(wait, lambda saved: saved):
                    y: Tensor = self.norm(x)
                    return y
            except BaseException as error:
                errors.append(error)
                raise
            finally:
                stopped.set()

    model = Stuck()
    before = copy.deepcopy(model.state_dict())
    x = torch.arange(4.0).flip(0).view(4, 1).requires_grad_()
    set_default_timeout(0.1)
    try:
        with pytest.raises(KeyError):
            DataParallelWithCallback(model, replicas=2)(x)
    finally:
        set_default_timeout(None)
        release.set()
    stopped.wait()
    assert isinstance(errors[0], CommAborted)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_model_alone_trains_while_a_replica_that_was_given_up_still_runs() -> None:
    go_on = threading.Event()

    class Stuck(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm1d(3)
            self.waits = True

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.bn(x)
            if self.waits:
                if threading.current_thread().name == "replica 0":
                    os.kill(os.getpid(), signal.SIGINT)  # arrives in the main thread
                else:
                    go_on.wait(60)
            return y

    model = Stuck()
    with pytest.raises(KeyboardInterrupt):
        DataParallelWithCallback(model, replicas=2)(torch.randn(6, 3))
    model.waits = False
    x = torch.randn(6, 3)
    expected = nn.BatchNorm1d(3)(x)
    try:
        for again in (model, *(DataParallelWithCallback(model, replicas=n) for n in (1, 2))):
            torch.testing.assert_close(again(x), expected)
    finally:
        go_on.set()
