"""Running statistics: one update per forward, of all three or of none."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from syncbn_core.errors import StateError
from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm2d
from syncbn_torch.backends import plain
from syncbn_torch.forward import always_ours

SMALL, LARGE = (6, 3, 4, 4), (18, 3, 100, 100)
NAMES = ("running_mean", "running_var", "num_batches_tracked")
ROUTES = pytest.mark.parametrize("route", ["torch's kernel", "our kernels", "replicas", "plain"])
OURS = pytest.mark.parametrize("route", ["our kernels", "replicas", "plain"])


def buffers(layer: Any) -> list[Tensor]:
    return [getattr(layer, name).clone() for name in NAMES]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@contextmanager
def on(route: str, layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The layer as it is called, by one of the ways to compute it."""
    with always_ours(route != "torch's kernel"), monkeypatch.context() as patch:
        if route == "plain":
            patch.setattr("syncbn_torch.forward.operations_for", lambda x: plain.OPERATIONS)
        yield DataParallelWithCallback(layer, replicas=3) if route == "replicas" else layer


class Reader(nn.Module):
    """Reads running statistics in the forward that has updated them, in three ways."""

    def __init__(self, layer: Callable[..., Any], momentum: float | None) -> None:
        super().__init__()
        self.trained = layer(3, momentum=momentum)
        self.shares = layer(3, momentum=momentum).eval()
        for name in NAMES:
            setattr(self.shares, name, getattr(self.trained, name))

    def forward(self, x: Tensor) -> Tensor:
        y = self.trained(x) + self.trained(2 * x)
        self.trained.eval()
        y = y + self.trained(3 * x)
        self.trained.train()
        normalized = x - self.trained.running_mean[:, None, None]
        return y + self.shares(x) + normalized * self.trained.num_batches_tracked


@pytest.mark.parametrize("momentum", [0.3, None])
def test_code_in_any_replica_reads_the_running_statistics_of_this_step(
    momentum: float | None,
) -> None:
    model = Reader(SynchronizedBatchNorm2d, momentum).double()
    twin = Reader(nn.BatchNorm2d, momentum).double()
    wrapped = DataParallelWithCallback(model, replicas=3)
    for _ in range(3):
        x = torch.randn(SMALL, dtype=torch.float64) * 3 + 4
        torch.testing.assert_close(wrapped(x), twin(x))
    for name in NAMES:
        torch.testing.assert_close(getattr(model.trained, name), getattr(twin.trained, name))


class Model(nn.Module):
    """Two layers, one of them used twice, in a part that may be checkpointed."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.conv = nn.Conv2d(3, 3, 1)
        self.first = SynchronizedBatchNorm2d(3)
        self.second = SynchronizedBatchNorm2d(3, momentum=None)

    def part(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.first(self.conv(x)).sin()))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.part(x)
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


@ROUTES
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_forward_counts_once(
    route: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if route == "replicas" and reentrant:
        pytest.skip("refused: see test_autograd.py")
    results = []
    start = Model(None).state_dict()
    for kind in (None, reentrant):
        model = Model(kind)
        model.load_state_dict(start)
        with on(route, model, monkeypatch) as called:
            for step in range(2):
                generator = torch.Generator().manual_seed(step)
                x = torch.randn(SMALL, generator=generator, requires_grad=True)
                y = called(x)
                y.backward(torch.randn(SMALL, generator=generator))
        results.append([x.grad, *(p.grad for p in model.parameters()), *model.buffers()])
        assert model.first.num_batches_tracked == 4
        assert model.second.num_batches_tracked == 2
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert torch.equal(a, b)


@ROUTES
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_tracks_only_in_the_recomputation_is_updated_there(
    route: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As fairscale's wrapper of checkpoints has it."""
    if route == "torch's kernel" and not reentrant:
        pytest.skip("it saves its buffers, so torch finds another number of saved tensors")
    if route == "replicas" and not reentrant:
        pytest.skip("the recomputation ends at the first saved tensor, before the layer")
    layer, twin = SynchronizedBatchNorm2d(3), nn.BatchNorm2d(3)
    calls = 0

    def forward(called: nn.Module, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        layer.track_running_stats = calls % 2 == 0  # the recomputation
        y: Tensor = called(x)
        return y

    with on(route, layer, monkeypatch) as called:
        for _ in range(3):
            x = torch.randn(SMALL, requires_grad=True)
            checkpoint(forward, called, x, use_reentrant=reentrant).square().sum().backward()
            twin(x)
        assert layer.num_batches_tracked == 3
        torch.testing.assert_close(layer.state_dict(), twin.state_dict())
        called(x)  # tracks again, so that a recomputation updates nothing
        kept, layer.running_mean, layer.running_var = buffers(layer), None, None
        layer.eval()
        called(x)  # by statistics of the batch; it counts for nothing
        layer.running_mean, layer.running_var, _ = kept
        layer.train()
        checkpoint(called, x, use_reentrant=reentrant).sum().backward()
    assert layer.num_batches_tracked == 5


def test_a_replica_that_tracks_only_in_the_recomputation_is_updated_there() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm2d(3)

        def part(self, x: Tensor, calls: list[int]) -> Tensor:
            self.bn.track_running_stats = bool(calls)
            calls.append(1)
            return self.bn(x)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.part, x, [], use_reentrant=False)  # type: ignore[no-any-return]

    model, twin = Late(), nn.BatchNorm2d(3)
    for _ in range(3):
        x = torch.randn(SMALL, requires_grad=True)
        DataParallelWithCallback(model, replicas=3)(x).square().sum().backward()
        twin(x)
    torch.testing.assert_close(model.bn.state_dict(), twin.state_dict())


def test_checkpointing_the_replicated_model_counts_once() -> None:
    for reentrant in (False, True):
        model = Model(None)
        parallel = DataParallelWithCallback(model, replicas=3)
        x = torch.randn(SMALL, requires_grad=True)
        checkpoint(parallel, x, use_reentrant=reentrant).backward(torch.randn(SMALL))
        assert model.first.num_batches_tracked == 2


UNFIT: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "expanded mean": ("running_mean", lambda: torch.zeros(1).expand(3)),
    "expanded variance": ("running_var", lambda: torch.ones(1).expand(3)),
    "mean that requires grad": ("running_mean", lambda: torch.zeros(3, requires_grad=True)),
    "variance that requires grad": ("running_var", lambda: torch.ones(3, requires_grad=True)),
    "floating counter": ("num_batches_tracked", lambda: torch.tensor(0.0)),
    "counter of two": ("num_batches_tracked", lambda: torch.zeros(2, dtype=torch.int64)),
}


@OURS
@pytest.mark.parametrize("unfit", UNFIT)
def test_buffers_that_can_not_all_be_written_are_refused(
    unfit: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = SynchronizedBatchNorm2d(3)
    name, make = UNFIT[unfit]
    setattr(layer, name, make())
    before = buffers(layer)
    with on(route, layer, monkeypatch), pytest.raises(StateError, match="expected"):
        layer(torch.randn(SMALL))
    assert equal(buffers(layer), before)


def test_a_graph_that_has_saved_running_statistics_notices_their_update() -> None:
    layer = SynchronizedBatchNorm2d(3)
    loss = (layer.running_mean * torch.ones(3, requires_grad=True)).sum()
    DataParallelWithCallback(layer, replicas=2)(torch.randn(SMALL))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("route", ["our kernels", "plain"])
def test_an_interrupt_leaves_running_statistics_all_old_or_all_new(
    route: str, momentum: float | None, monkeypatch: pytest.MonkeyPatch, interrupt: Any
) -> None:
    """At every step of ours. (Replicas are in threads, which no interrupt reaches.)"""
    x = torch.randn(SMALL)
    start = SynchronizedBatchNorm2d(3, momentum=momentum)
    reference = copy.deepcopy(start)
    states = [buffers(reference)]
    seen = []
    with on(route, reference, monkeypatch) as called:
        for _ in range(2):
            called(x)
            states.append(buffers(reference))
    step = 0
    while True:
        layer = copy.deepcopy(start)
        with on(route, layer, monkeypatch) as called:
            if not interrupt(lambda: called(x), step, "syncbn_torch", "syncbn_core"):
                break
            now = buffers(layer)
            seen.append(next(i for i, state in enumerate(states) if equal(state, now)))
            called(x)
            assert equal(buffers(layer), states[seen[-1] + 1])
        step += 1
    assert sorted(set(seen)) == [0, 1]
    assert seen == sorted(seen)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_interrupt_of_replicas_leaves_running_statistics_all_old_or_all_new(
    momentum: float | None, interrupt: Any
) -> None:
    x = torch.randn(SMALL)
    start = SynchronizedBatchNorm2d(3, momentum=momentum)
    reference = copy.deepcopy(start)
    states = [buffers(reference)]
    for _ in range(2):
        DataParallelWithCallback(reference, replicas=3)(x)
        states.append(buffers(reference))
    step = 0
    while True:
        layer = copy.deepcopy(start)
        wrapper = DataParallelWithCallback(layer, replicas=3)
        call = functools.partial(wrapper, x)
        if not interrupt(call, step, "core/comm/threads", "data_parallel/replicate"):
            break
        now = buffers(layer)
        before = next(i for i, state in enumerate(states[:2]) if equal(state, now))
        wrapper(x)
        assert equal(buffers(layer), states[before + 1])
        step += 1
    assert step > 50
