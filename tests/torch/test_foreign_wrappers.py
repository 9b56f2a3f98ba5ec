"""Layers under wrappers of other projects: bare contexts, and callbacks executed by hand."""

import copy
import queue
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from syncbn_core.comm import run_in_threads, set_default_timeout
from syncbn_core.errors import CommTimeout
from syncbn_torch import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    execute_replication_callbacks,
)

DOUBLE: dict[str, Any] = {"dtype": torch.float64}


class Bare:
    """A context that says nothing: no size, no name, no end."""


def replicated(module: nn.Module, copy_id: int) -> nn.Module:
    """A copy as torch makes them, with parameters shared; copy 0 has the buffers themselves."""
    made: Any = module._replicate_for_data_parallel()
    made._parameters = dict(module._parameters)
    if copy_id:
        made._buffers = {k: None if b is None else b.clone() for k, b in module._buffers.items()}
    made._modules = {
        name: None if child is None else replicated(child, copy_id)
        for name, child in module._modules.items()
    }
    return made  # type: ignore[no-any-return]


class Foreign(nn.Module):
    """New copies and contexts for every forward; nobody is told when a copy fails or ends."""

    def __init__(self, module: nn.Module, copies: int) -> None:
        super().__init__()
        self.module, self.copies = module, copies

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(self.copies)
        copies = [replicated(self.module, i) for i in range(len(parts))]
        contexts = [Bare() for _ in self.module.modules()]
        for copy_id, made in enumerate(copies):
            for context, submodule in zip(contexts, made.modules(), strict=True):
                if hasattr(submodule, "__data_parallel_replicate__"):
                    submodule.__data_parallel_replicate__(context, copy_id)
        results: dict[int, Any] = {}

        def run(index: int) -> None:
            try:
                results[index] = copies[index](parts[index])
            except Exception as error:
                results[index] = error

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(parts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index in range(len(parts)):
            if isinstance(results[index], Exception):
                raise results[index]
        return torch.cat([results[index] for index in range(len(parts))])


class Net(nn.Module):
    def __init__(self, layer: type[nn.Module], *, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, **DOUBLE)
        self.block = nn.Sequential(layer(4, **DOUBLE), nn.Tanh(), layer(4, **DOUBLE))  # type: ignore[arg-type]
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        if (x == 7).any():
            raise KeyError("bad sample")
        x = self.linear(x)
        if self.checkpointed:
            return checkpoint(self.block, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.block(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("copies", [1, 2, 4])
def test_layers_synchronize_under_a_wrapper_with_bare_contexts(
    copies: int, checkpointed: bool
) -> None:
    model = Net(SynchronizedBatchNorm1d, checkpointed=checkpointed)
    twin = Net(nn.BatchNorm1d)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(10, 3, **DOUBLE, requires_grad=True)
    z = x.detach().clone().requires_grad_()
    wrapper = Foreign(model, copies)
    ys, zs = [wrapper(x), wrapper(x * 2)], [twin(z), twin(z * 2)]
    for y, expected in zip(ys, zs, strict=True):
        torch.testing.assert_close(y, expected)
    cotangent = torch.randn(10, 4, **DOUBLE)
    for y, expected in zip(ys, zs, strict=True):
        y.backward(cotangent)
        expected.backward(cotangent)
    torch.testing.assert_close(x.grad, z.grad)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_deadline_ends_the_wait_for_a_copy_that_failed_and_names_the_layer() -> None:
    model = Net(SynchronizedBatchNorm1d)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(6, 3, **DOUBLE)
    x[4] = 7
    set_default_timeout(0.2)
    try:
        with pytest.raises(CommTimeout, match=r"call 1 of block\.0 \(SynchronizedBatchNorm1d\)"):
            Foreign(model, 3)(x)
    finally:
        set_default_timeout(None)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


# ------------------------------------------------------------------------ callbacks by hand


def forward_by_hand(model: nn.Module, parts: list[Tensor]) -> Tensor:
    """As docs/own-wrappers.md shows it, with copies as torch makes them."""
    copies = [replicated(model, copy_id) for copy_id in range(len(parts))]
    contexts = execute_replication_callbacks(copies)

    def abort(error: BaseException) -> None:
        for context in contexts:
            context.abort(error)

    calls = [lambda own=own, part=part: own(part) for own, part in zip(copies, parts, strict=True)]
    return torch.cat(run_in_threads(calls, abort=abort))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_callbacks_by_hand_train_for_many_steps_with_unlike_numbers_of_copies(
    checkpointed: bool,
) -> None:
    model = Net(SynchronizedBatchNorm1d, checkpointed=checkpointed)
    twin = Net(nn.BatchNorm1d)
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, twin)]
    for sizes in ([2, 3], [4], [1, 2, 3, 2], [5, 0, 1], [2, 2]):
        x, cotangent = torch.randn(sum(sizes), 3, **DOUBLE), torch.randn(sum(sizes), 4, **DOUBLE)
        y, expected = forward_by_hand(model, list(x.split(sizes))), twin(x)
        torch.testing.assert_close(y, expected)
        for output, optimizer in zip((y, expected), optimizers, strict=True):
            optimizer.zero_grad()
            output.backward(cotangent)
            optimizer.step()
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[name], msg=name)
    model.eval()
    twin.eval()
    x = torch.randn(6, 3, **DOUBLE)
    torch.testing.assert_close(forward_by_hand(model, list(x.split(2))), twin(x))


# ------------------------------------------------------- contexts belong to those who use them


class TheirMaster:
    """In the manner of the `SyncMaster` of Synchronized-BatchNorm-PyTorch."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Any] = queue.Queue()
        self.replies: dict[int, queue.Queue[Any]] = {}

    def register_slave(self, copy_id: int) -> Any:
        self.replies[copy_id] = queue.Queue()

        def run_slave(message: Any) -> Any:
            self.messages.put(message)
            return self.replies[copy_id].get(timeout=30)

        return run_slave

    def run_master(self, message: Any) -> Any:
        messages = [message, *(self.messages.get(timeout=30) for _ in self.replies)]
        total = sum(messages)
        for replies in self.replies.values():
            replies.put(total)
        return total


class TheirLayer(nn.Module):
    """Subtracts the mean of the whole batch, by a master that it puts on the context."""

    def __data_parallel_replicate__(self, context: Any, copy_id: int) -> None:
        if copy_id == 0:
            context.sync_master = TheirMaster()
            self.run = context.sync_master.run_master
        else:
            self.run = context.sync_master.register_slave(copy_id)

    def forward(self, x: Tensor) -> Tensor:
        total = self.run(torch.cat([x.sum(0), x.new_tensor([len(x)])]))
        return x - total[:-1] / total[-1]


class Centred(nn.Module):
    """What `TheirLayer` gives for an undivided batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_layers_of_another_package_go_together_with_ours() -> None:
    ours = [SynchronizedBatchNorm1d(3, **DOUBLE) for _ in range(2)]
    model = nn.Sequential(ours[0], TheirLayer(), nn.Linear(3, 3, **DOUBLE), ours[1])
    theirs = [nn.BatchNorm1d(3, **DOUBLE) for _ in range(2)]
    twin = nn.Sequential(theirs[0], Centred(), copy.deepcopy(model[2]), theirs[1])
    wrapper = DataParallelWithCallback(model, replicas=4)
    for size in (9, 4, 3, 8):
        x = torch.randn(size, 3, **DOUBLE)
        y, z = wrapper(x), twin(x)
        torch.testing.assert_close(y, z)
    torch.testing.assert_close(ours[1].running_var, theirs[1].running_var)
    y.pow(3).sum().backward()
    z.pow(3).sum().backward()
    torch.testing.assert_close(ours[0].weight.grad, theirs[0].weight.grad)
