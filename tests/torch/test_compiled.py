"""torch.compile over processes: one graph, numbers of the undivided batch, errors as in eager."""

from __future__ import annotations

import copy
import datetime
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from world import (
    close,
    equals_undivided,
    on_ranks,
    raises,
    rows_of,
    whole_batch,
)

from syncbn_core import exchange
from syncbn_core.errors import (
    BatchSizeError,
    CommAborted,
    CommTimeout,
    ProtocolError,
    StateError,
)
from syncbn_torch import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    compiled_exchange,
    convert_model,
    forward,
    traced,
)
from syncbn_torch.backends import plain
from syncbn_torch.inplace import InPlaceABNSync

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BOUNDS = (0, 2, 6)


def compiled(module: nn.Module, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(module, backend=backend, fullgraph=True, **options)


def one_graph(call: Callable[[], Any]) -> None:
    """`call` compiles a single graph, and nothing breaks it."""
    torch._dynamo.reset()
    counters.clear()
    call()
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    assert not counters["graph_break"], counters["graph_break"]


class Branches(nn.Module):
    """Two layers in a row, beside a third one."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.BatchNorm2d(3, **options) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y: Tensor = self.left(x.relu()) + self.right(x.cos())
        return y


def network(**options: Any) -> nn.Module:
    return Branches(**options).double()


def steps_equal(
    layer: nn.Module, model: nn.Module, twin: nn.Module, mine: slice, shape: tuple[int, ...]
) -> None:
    """Two training steps of `model`, which is `layer` compiled, equal those of `twin`."""
    for seed in range(2):
        layer.zero_grad()
        twin.zero_grad()
        equals_undivided(model, twin, *whole_batch(shape, seed), mine)


SHAPE = (6, 3, 5, 5)


class Twice(nn.Module):
    """One layer, called twice with the same x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + 2 * self.layer(x).cos()


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Tensors go the way of those of a device without our kernels."""
    with (
        patch.object(compiled_exchange, "_on_host", lambda *_: False),
        patch.object(
            exchange.Exchange, "_on_its_device", lambda _, own: (exchange.arrays_of(own), -1)
        ),
        patch.object(forward, "operations_for", lambda x: plain.OPERATIONS),
    ):
        torch._dynamo.reset()  # graphs of the two ways have the same guards
        yield
    torch._dynamo.reset()


@pytest.mark.slow
@on_ranks(2)
def test_inductor_finds_a_graph_in_its_cache_after_another_one(rank: int, size: int) -> None:
    x = torch.randn(4, 3, 5, 5)

    def misses(*models: nn.Module) -> int:
        """Of the last one, compiled after the others."""
        torch._dynamo.reset()
        for model in models:
            counters.clear()
            compiled(model, "inductor")(x).square().mean().backward()
        return int(counters["inductor"]["fxgraph_cache_miss"])

    model, other = (convert_model(own) for own in (Branches(), nn.Sequential(nn.BatchNorm2d(3))))
    with fresh_cache():
        assert misses(model) > 0
        assert misses(other, model) == 0
        assert counters["inductor"]["fxgraph_cache_hit"] > 0


@pytest.mark.slow
@on_ranks(2)
def test_a_checkpoint_of_another_version_is_not_taken_from_a_cache(rank: int, size: int) -> None:
    x, layer = torch.randn(4, 3), SynchronizedBatchNorm1d(3)

    def hits() -> int:
        torch._dynamo.reset()
        counters.clear()
        whole = torch.compile(lambda: checkpoint(layer, x, use_reentrant=False), fullgraph=True)
        whole().square().sum().backward()
        return int(counters["aot_autograd"]["autograd_cache_hit"])

    with fresh_cache():
        hits()
        with patch.object(traced, "_digest", lambda: "of another version"):
            assert hits() == 0


@pytest.mark.slow
@on_ranks(2)
def test_a_graph_sends_what_ranks_without_a_graph_send(rank: int, size: int) -> None:
    """A message for each call of a layer and direction, also where torch sees equal ones."""
    sent: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        sent.append(sum("all_reduce" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph)

    counting: Any = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    for backend, both in ((counting, True), ("inductor", True), ("inductor", False)):
        for on_host in (True, False):
            with nullcontext() if on_host else as_on_a_device():
                layer, twin = convert_model(Twice()).double(), Twice().double()
                model = compiled(layer, backend) if both or rank else layer
                steps_equal(layer, model, twin, rows_of(rank, BOUNDS), SHAPE)
    assert sent == [2, 2, 2, 2], sent


@pytest.mark.slow
@on_ranks(2)
def test_uneven_and_empty_parts_are_one_graph(rank: int, size: int) -> None:
    for backend in ("aot_eager", "inductor"):
        for bounds in (BOUNDS, (0, 0, 6)):
            layer, twin = convert_model(network()), network()
            model, mine = compiled(layer, backend), rows_of(rank, bounds)
            one_graph(lambda: steps_equal(layer, model, twin, mine, SHAPE))  # noqa: B023


@pytest.mark.slow
@on_ranks(2)
def test_every_setting_of_a_layer_is_one_graph(rank: int, size: int) -> None:
    settings: list[dict[str, Any]] = [
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.1, "momentum": 0.5},
    ]
    for options in settings:
        layer, twin = convert_model(network(**options)), network(**options)
        model, mine = compiled(layer), rows_of(rank, BOUNDS)
        one_graph(lambda: steps_equal(layer, model, twin, mine, SHAPE))  # noqa: B023


@on_ranks(2)
def test_layers_of_16_bits_have_the_running_statistics_of_eager_ones(rank: int, size: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = whole_batch(SHAPE)[0][rows_of(rank, BOUNDS)].to(dtype)
        eager = SynchronizedBatchNorm2d(3, momentum=None).to(dtype)
        layer = copy.deepcopy(eager)
        for _ in range(2):
            close(compiled(layer)(x), eager(x), atol=0.02, rtol=0.02)
        for buffer, other in zip(layer.buffers(), eager.buffers(), strict=True):
            assert torch.equal(buffer, other), dtype


@on_ranks(2)
def test_mode_clamp_is_one_graph(rank: int, size: int) -> None:
    alone = SynchronizedBatchNorm2d(3, eps_mode="clamp", eps=3.0).double()
    alone.process_group = dist.new_subgroups(1)[0]
    layer = SynchronizedBatchNorm2d(3, eps_mode="clamp", eps=3.0).double()
    model, mine = compiled(layer), rows_of(rank, BOUNDS)
    one_graph(lambda: steps_equal(layer, model, alone, mine, SHAPE))
    one_graph(lambda: compiled(alone)(whole_batch(SHAPE)[0]).sum().backward())


@pytest.mark.slow
@on_ranks(2)
def test_16_bits_large_means_and_channels_last_are_one_graph(rank: int, size: int) -> None:
    """Forward, backward and running statistics are those of float64."""
    x, dy = whole_batch((6, 3, 16, 16))
    mine, last = rows_of(rank, BOUNDS), torch.channels_last
    cases: list[tuple[Tensor, torch.memory_format, float]] = [
        (x.float() + 1e4, torch.contiguous_format, 2e-3),
        (x.float() + 1e4, last, 2e-3),
        (x.bfloat16(), last, 5e-2),
    ]
    for values, memory_format, error in cases:
        wide, whole = nn.BatchNorm2d(3).double(), values.double().requires_grad_()
        y_wide = wide(whole)
        y_wide.backward(dy.to(values.dtype).double())
        assert whole.grad is not None
        layer = convert_model(nn.BatchNorm2d(3))
        part = values[mine].contiguous(memory_format=memory_format).requires_grad_()
        y: Any = None

        def step() -> None:
            nonlocal y
            y = compiled(layer, "inductor")(part)  # noqa: B023
            y.backward(dy[mine].to(y.dtype))

        one_graph(step)
        alike = partial(close, atol=error, rtol=error, check_dtype=False)
        assert y.dtype is part.dtype
        assert y.is_contiguous(memory_format=memory_format)
        alike(y, y_wide[mine])
        alike(part.grad, whole.grad[mine])
        for buffer, other in zip(layer.buffers(), wide.buffers(), strict=True):
            close(buffer, other, atol=0, rtol=1e-6, check_dtype=False)
        for parameter, other in zip(layer.parameters(), wide.parameters(), strict=True):
            assert parameter.grad is not None
            assert other.grad is not None
            dist.all_reduce(parameter.grad)
            close(parameter.grad, other.grad, atol=0.1, rtol=error, check_dtype=False)


@pytest.mark.slow
@on_ranks(2)
def test_six_sizes_of_the_batch_are_one_graph(rank: int, size: int) -> None:
    layer, twin = SynchronizedBatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
    model = compiled(layer)

    def all_sizes() -> None:
        for count in range(2, 8):
            x, _ = whole_batch((2 * count + rank, 3, 4, 4), seed=rank)
            torch._dynamo.mark_dynamic(x, 0)
            parts: list[Any] = [None, None]
            dist.all_gather_object(parts, x)
            close(
                model(x),
                twin(torch.cat(parts))[: len(x)]
                if rank == 0
                else twin(torch.cat(parts))[-len(x) :],
            )

    one_graph(all_sizes)


@pytest.mark.slow
@on_ranks(2)
def test_equal_blocks_that_are_compiled_one_by_one_share_a_graph(rank: int, size: int) -> None:
    """More blocks than torch would compile anew."""
    blocks = [SynchronizedBatchNorm1d(3).double() for _ in range(12)]
    models = nn.Sequential(*blocks)
    for block in blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    twins = nn.Sequential(*(nn.BatchNorm1d(3).double() for _ in blocks))
    mine = rows_of(rank, BOUNDS)
    one_graph(lambda: steps_equal(models, models, twins, mine, (6, 3)))


@pytest.mark.slow
@on_ranks(4)
def test_groups_and_meshes_are_one_graph(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "data"))
    mine = rows_of(rank % 2, BOUNDS)
    for group in (dist.new_subgroups(2)[0], mesh["data"], mesh.get_group("data")):
        layer, twin = convert_model(network(), process_group=group), network()
        model = compiled(layer)

        def steps() -> None:
            x, dy = whole_batch(SHAPE, seed=rank // 2)
            y = model(x[mine])  # noqa: B023
            close(y, twin(x)[mine])  # noqa: B023
            y.backward(dy[mine])

        one_graph(steps)


@pytest.mark.slow
@on_ranks(2)
def test_ranks_with_and_without_a_graph_go_together(rank: int, size: int) -> None:
    for backend in ("aot_eager", "inductor"):
        layer, twin = convert_model(network()), network()
        model = compiled(layer, backend) if rank else layer
        steps_equal(layer, model, twin, rows_of(rank, BOUNDS), SHAPE)
        with torch.compiler.set_stance("force_eager"):
            steps_equal(layer, model, twin, rows_of(rank, BOUNDS), SHAPE)


@pytest.mark.slow
@on_ranks(2)
def test_a_checkpoint_within_the_graph(rank: int, size: int) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convert_model(network())

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    for backend in ("inductor", "aot_eager"):  # the first call of a process by Inductor
        layer, twin = Checkpointed(), network()
        model = compiled(layer, backend)
        one_graph(lambda: steps_equal(layer, model, twin, rows_of(rank, BOUNDS), SHAPE))  # noqa: B023


@pytest.mark.slow
@on_ranks(2)
def test_distributed_data_parallel_around_and_within(rank: int, size: int) -> None:
    x, dy = whole_batch(SHAPE)
    mine = rows_of(rank, BOUNDS)
    wrap = nn.parallel.DistributedDataParallel
    torch._logging.set_logs(all=logging.ERROR)  # torch warns of its own profiler ranges
    for around in (True, False):
        layer, twin = convert_model(network()), network()
        model = wrap(compiled(layer)) if around else torch.compile(wrap(layer), backend="aot_eager")

        def steps() -> None:
            for _ in range(2):
                y, y_twin = model(x[mine]), twin(x)  # noqa: B023
                close(y, y_twin[mine])
                y.backward(dy[mine])
                y_twin.backward(dy)
                for mean, total in zip(layer.parameters(), twin.parameters(), strict=True):  # noqa: B023
                    assert total.grad is not None
                    close(mean.grad, total.grad / 2)
                for buffer, other in zip(layer.buffers(), twin.buffers(), strict=True):  # noqa: B023
                    close(buffer, other)
                layer.zero_grad()  # noqa: B023
                twin.zero_grad()  # noqa: B023

        if around:
            one_graph(steps)
        else:
            torch._dynamo.reset()
            steps()


@pytest.mark.slow
@on_ranks(2)
def test_a_graph_on_one_rank_only_within_distributed_data_parallel_is_told_in_forward(
    rank: int, size: int
) -> None:
    """Its backward would mix messages of layers with gradients; not in a group of the layers."""
    x, dy = whole_batch(SHAPE)
    mine, wrap = rows_of(rank, BOUNDS), nn.parallel.DistributedDataParallel
    words = ("forward of first", "forward, compiled within", "torch.compile")
    for group in (None, dist.new_group([0, 1])):
        layer = convert_model(network(), process_group=group)
        model = wrap(torch.compile(layer, backend="aot_eager") if rank == 0 else layer)
        if group is None:
            raises(ProtocolError, *words, call=lambda: model(x[mine]))  # noqa: B023
            with model.no_sync():  # gradients are not reduced
                model(x[mine]).backward(dy[mine])
        else:
            close(model(x[mine]), network()(x)[mine])


@on_ranks(2)
def test_unlike_layers_are_named_on_both_ranks(rank: int, size: int) -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = (SynchronizedBatchNorm1d(3) for _ in range(2))

        def forward(self, x: Tensor) -> Any:
            return self.left(x) if rank == 0 else self.right(x)

    model, x = Choice(), torch.randn(4, 3)
    raises(ProtocolError, "left", "right", call=lambda: compiled(model)(x))


@pytest.mark.slow
@on_ranks(2)
def test_one_value_per_channel_over_all_ranks_is_an_error_and_changes_nothing(
    rank: int, size: int
) -> None:
    layer = SynchronizedBatchNorm1d(3)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    x = torch.randn(1 - rank, 3)
    raises(BatchSizeError, "more than 1 value", call=lambda: compiled(layer)(x))
    for name, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.slow
@on_ranks(2)
def test_blocks_of_fsdp(rank: int, size: int) -> None:
    x, dy = whole_batch(SHAPE)
    mine = rows_of(rank, BOUNDS)
    twin = nn.Sequential(*(network() for _ in range(2)))
    model = convert_model(copy.deepcopy(twin))
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block)
    fully_shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin)]

    def steps() -> None:
        for _ in range(2):
            # both blocks get an input that needs a gradient
            y, y_twin = model(x[mine].clone().requires_grad_()), twin(x)
            close(y, y_twin[mine])
            y.backward(size * dy[mine])  # FSDP averages gradients
            y_twin.backward(dy)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for shard, parameter in zip(model.parameters(), twin.parameters(), strict=True):
                whole: Any = shard
                close(whole.full_tensor(), parameter)
            for buffer, other in zip(model.buffers(), twin.buffers(), strict=True):
                close(buffer, other)

    one_graph(steps)


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_that_is_late_is_an_error_that_names_the_layer(rank: int, size: int) -> None:
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=1))
    layer = SynchronizedBatchNorm1d(3, process_group=group)
    model, x = compiled(nn.Sequential(nn.Linear(3, 3), layer)), torch.ones(4, 3)
    model(x)
    store: Any = dist.distributed_c10d._get_default_store()
    if rank == 0:
        raises(CommTimeout, "1 (SynchronizedBatchNorm1d)", "rank 1", call=lambda: model(x))
        store.set("rank 0 is done", "")
    store.wait(["rank 0 is done"])


@pytest.mark.slow
@on_ranks(2)
def test_a_layer_alone_compiles_and_exports_as_nn_batch_norm(rank: int, size: int) -> None:
    alone = dist.new_subgroups(1)[0]
    x, _ = whole_batch(SHAPE)
    for mode in ("plus", "clamp"):
        layer = SynchronizedBatchNorm2d(3, eps_mode=mode, eps=3.0, process_group=alone).double()
        twin = copy.deepcopy(layer)
        for training in (True, False):
            model = compiled(layer.train(training))
            one_graph(lambda: close(model(x), twin.train(training)(x)))  # noqa: B023
    layers = [
        SynchronizedBatchNorm2d(3, process_group=alone).double(),
        nn.BatchNorm2d(3).double(),
    ]
    programs = [torch.export.export(module, (x,)) for module in layers]
    operations = [sorted(str(node.target) for node in p.graph.nodes) for p in programs]
    assert operations[0] == operations[1]
    synchronized = SynchronizedBatchNorm2d(3).double()
    raises(StateError, "torch.export", call=lambda: torch.export.export(synchronized, (x,)))


@pytest.mark.slow
@on_ranks(2)
def test_messages_that_stay_on_a_device(rank: int, size: int) -> None:
    """On the CPU: there a GPU's messages go the same way."""
    with as_on_a_device():
        for bounds in (BOUNDS, (0, 0, 6)):
            layer, twin = convert_model(network()), network()
            model = compiled(layer)
            steps_equal(layer, model, twin, rows_of(rank, bounds), SHAPE)
        one, other = (compiled(SynchronizedBatchNorm1d(3)) for _ in range(2))
        x = torch.randn(4, 3, requires_grad=True)
        outputs = [one(x), other(x)]
        outputs[rank].sum().backward()
        assert x.grad is not None
        assert x.grad.isnan().all()
        raises(ProtocolError, "different ones", call=lambda: one(x))


@pytest.mark.slow
@on_ranks(2)
def test_compiled_autograd_gives_the_gradients_of_backward(rank: int, size: int) -> None:
    x, dy = whole_batch((6, 3, 4, 4))
    mine = rows_of(rank, BOUNDS)
    for make in (SynchronizedBatchNorm2d, InPlaceABNSync):
        found = []
        for engine in (nullcontext(), _enable(partial(torch.compile, backend="eager"))):
            layer, leaf = make(3).double(), x[mine].clone().requires_grad_()
            with engine:
                layer(leaf.clone()).backward(dy[mine])
            found.append([leaf.grad, *(parameter.grad for parameter in layer.parameters())])
        assert all(map(torch.equal, *found)), make


@on_ranks(2)
def test_a_rank_that_is_gone_is_an_error_that_names_the_layer(rank: int, size: int) -> None:
    model, x = (
        compiled(nn.Sequential(nn.Linear(3, 3), SynchronizedBatchNorm1d(3))),
        torch.ones(4, 3),
    )
    model(x)
    if rank == 1:
        os._exit(0)
    raises(CommAborted, "1 (SynchronizedBatchNorm1d)", "rank 1", call=lambda: model(x))
    os._exit(0)
