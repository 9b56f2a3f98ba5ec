"""`verify_sync` over the ranks of a process group: all get the same report, and none waits."""

from __future__ import annotations

import gc
import io
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from world import Net, on_ranks, raises

from syncbn_core.errors import ArgumentError
from syncbn_torch import (
    DataParallelWithCallback,
    SynchronizedBatchNorm2d,
    SyncReport,
    convert_model,
    create_syncbn_process_group,
    verify_sync,
)
from syncbn_torch.inplace import ABN, InPlaceABNSync


def sync_net(kind: type[Net] = Net) -> Any:
    torch.manual_seed(0)
    return convert_model(kind())


def batch(samples: int = 5) -> Tensor:
    return torch.randn(samples, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def checked(model: nn.Module, x: Any, **options: Any) -> SyncReport:
    """The report, which is the same on all ranks."""
    report = verify_sync(model, x, **options)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, pickle.dumps(report))
    assert len(set(every)) == 1, "ranks got different reports"
    return report


def verdicts(report: SyncReport) -> dict[str, str]:
    return {layer.name: layer.verdict for layer in report.layers}


@on_ranks(2, 3)
def test_a_converted_model_is_right_to_rounding(rank: int, size: int) -> None:
    model = sync_net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    group = model.bn.process_group
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # of an earlier step
    report = checked(model, batch())
    assert report.ok, report
    assert report.parts == f"{size} ranks"
    assert set(verdicts(report).values()) == {"ok"}
    for figure in (report.output, report.gradient, report.buffer):
        assert figure is not None
        assert figure < 1e-8, report
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.bn.process_group is group
    assert verify_sync(DistributedDataParallel(model), batch()).ok


@on_ranks(2)
def test_no_process_group_outlives_its_end(rank: int, size: int) -> None:
    """Else its threads may abort the process as it exits."""
    group = dist.new_group()
    gc.disable()
    assert checked(sync_net(), batch(), process_group=group).ok
    ends = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    assert ends() is None
    gc.enable()


@on_ranks(2)
def test_the_model_and_the_batch_of_the_first_rank_are_used(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    assert checked(convert_model(Net()), torch.randn(4, 3, 6, 6)).ok


def frozen(model: Any) -> Any:
    model.conv.weight.requires_grad_(False)
    return model


def with_layer(make: Callable[[], nn.Module]) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        model.bn_left = make()
        return model

    return change


# What differs on rank 1: the model, the batch and the arguments; and what the error says of it.
UNLIKE: list[tuple[Callable[[Any], Any], Callable[[Tensor], Any], dict[str, Any], str]] = [
    (
        frozen,
        lambda x: x,
        {},
        "on all ranks, got conv.weight: (8, 3, 3, 3) float32 on cpu, requires_grad on",
    ),
    (lambda model: model.bn.eval() and model, lambda x: x, {}, "got bn: training mode"),
    (lambda model: model.head.eval() and model, lambda x: x, {}, "got head: training mode"),
    (
        with_layer(lambda: nn.BatchNorm2d(8)),
        lambda x: x,
        {},
        "SynchronizedBatchNorm2d(8",
    ),
    (with_layer(lambda: SynchronizedBatchNorm2d(8, eps=1)), lambda x: x, {}, "eps=1e-05"),
    (with_layer(lambda: SynchronizedBatchNorm2d(8, eps_mode="clamp")), lambda x: x, {}, "clamp"),
    (with_layer(lambda: SynchronizedBatchNorm2d(8, activation="relu")), lambda x: x, {}, "relu"),
    (with_layer(lambda: SynchronizedBatchNorm2d(8, affine=False)), lambda x: x, {}, "affine=True"),
    (lambda model: model.to(torch.bfloat16), lambda x: x, {}, "float32 on cpu"),
    (lambda model: model, lambda x: (x, x), {}, "on all ranks, got batch"),
    (lambda model: model, lambda x: {"x": x}, {}, "on all ranks, got batch"),
    (lambda model: model, lambda x: x.double(), {}, "on all ranks, got batch"),
    (lambda model: model, lambda x: x, {"dtype": None}, "argument dtype"),
    (lambda model: model, lambda x: x, {"loss": torch.sum}, "argument loss"),
    (lambda model: model, lambda x: x, {"batch_sizes": [5, 1]}, "division of the batch"),
]


@on_ranks(2, 3)
def test_whatever_decides_the_messages_has_to_be_the_same_on_all_ranks(
    rank: int, size: int
) -> None:
    for change, change_batch, options, words in UNLIKE:
        model, x = sync_net(), batch(6)
        own: dict[str, Any] = options
        if "batch_sizes" in options and size == 3:
            own = {"batch_sizes": [4, 1, 1]}
        if rank == 1:
            model, x = change(model), change_batch(x)
        else:
            own = {}

        def call(model: Any = model, x: Any = x, own: Any = own) -> Any:
            return verify_sync(model, x, **own)

        raises(ArgumentError, words, call=call)
    assert checked(sync_net(), batch(6)).ok  # the group can go on


@on_ranks(2)
def test_two_groups_of_the_same_ranks_are_told_apart(rank: int, size: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    model = sync_net()
    model.bn.process_group = groups[rank]
    report = checked(model, batch())
    assert verdicts(report)["bn"] == "wrong group"
    assert "another one on some ranks" in str(report)
    model.bn.process_group = groups[0]
    assert checked(model, batch()).ok


class SetsAndCalls(Net):
    """Sets mode and momentum in forward, calls by keyword, and holds a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = DataParallelWithCallback(nn.BatchNorm2d(3), replicas=2)

    def forward(self, x: Tensor) -> Tensor:
        self.bn_left.eval()
        self.bn.momentum = 0.3
        x = self.bn(input=self.conv(self.inner(x)))
        self.bn.momentum = 0.7
        out: Tensor = self.bn(self.bn_left(x)).mean((2, 3))
        return out


@on_ranks(2)
def test_a_right_model_that_changes_its_layers_is_not_accused(rank: int, size: int) -> None:
    model = sync_net(SetsAndCalls)
    model.bn.register_forward_hook(lambda layer, args, y: 2 * y)
    report = checked(model, batch(6))
    assert report.conclusion == "ok", report


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm2d(3, activation="silu")

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return self.bn(x, mask=mask)


@on_ranks(2)
def test_masks_and_layers_that_work_in_place_are_judged(rank: int, size: int) -> None:
    mask = torch.arange(6) < torch.tensor([6, 0, 3, 1, 5])[:, None, None]
    report = checked(Masked(), (batch(), mask))
    assert report.ok, report
    layers = [nn.Conv2d(3, 4, 3), InPlaceABNSync(4), nn.Conv2d(4, 4, 3), ABN(4), nn.Conv2d(4, 4, 1)]
    report = checked(nn.Sequential(*layers), batch())
    assert verdicts(report) == {"1": "ok", "3": "not synchronized"}, report
    report = checked(nn.Sequential(*layers[:3]), batch())
    assert report.ok, report


class Functional(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.batch_norm(x, None, None, training=True))


@on_ranks(2)
def test_functional_and_compiled_batch_norm_are_found_on_all_ranks(rank: int, size: int) -> None:
    report = checked(sync_net(Functional), batch())
    assert report.model_differs
    assert not report.faulty
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.jit.script(nn.BatchNorm2d(3))
    report = checked(nn.Sequential(compiled, sync_net()), batch())
    assert [layer.name for layer in report.faulty] == ["0"]


class Scaled(Net):
    def forward(self, x: Tensor, scale: float, name: str) -> Tensor:  # type: ignore[override]
        assert name == "0"
        return super().forward(x) * scale


@on_ranks(2)
def test_numbers_and_strings_of_the_first_rank_are_used(rank: int, size: int) -> None:
    report = checked(sync_net(Scaled), (batch(), 1.0 + rank, str(rank)))
    assert report.ok, report


@on_ranks(2)
def test_a_plain_layer_is_blamed_and_not_those_after_it(rank: int, size: int) -> None:
    model = sync_net()
    model.bn_left = nn.BatchNorm2d(8)
    report = checked(model, batch())
    assert [layer.name for layer in report.faulty] == ["bn_left"]
    assert "plain nn.BatchNorm2d" in str(report)


@on_ranks(4)
def test_a_layer_with_a_smaller_group_is_named_with_its_ranks(rank: int, size: int) -> None:
    model = sync_net()
    model.bn_left.process_group = create_syncbn_process_group(2)
    report = checked(model, batch(8))
    assert [layer.name for layer in report.faulty] == ["bn_left"]
    assert verdicts(report)["bn_left"] == "wrong group"
    assert "bn_left: its process_group has the ranks [0, 1]; the batch was split" in str(report)


@on_ranks(4)
def test_a_group_can_be_checked_alone(rank: int, size: int) -> None:
    group = create_syncbn_process_group(2)
    model = convert_model(sync_net(), process_group=group)
    report = verify_sync(model, batch(), process_group=group)
    assert report.ok, report
    assert report.sizes == (3, 2)


@on_ranks(2)
def test_a_group_without_this_rank_is_named_and_nothing_runs(rank: int, size: int) -> None:
    model, group = sync_net(), dist.new_group([0])
    model.bn.process_group = group
    report = checked(model, batch())
    assert verdicts(report)["bn"] == "wrong group"
    assert "its process_group has the ranks [0]; the" in str(report)
    assert "was not run" in report.error
    assert not report.ok


@on_ranks(3)
def test_layers_that_would_wait_for_ranks_outside_of_the_checked_group_do_not_run(
    rank: int, size: int
) -> None:
    pair = dist.new_group([0, 1])
    if rank < 2:
        report = verify_sync(sync_net(), batch(), process_group=pair)
        assert set(verdicts(report).values()) == {"wrong group"}
        assert "its process_group has the ranks [0, 1, 2]" in str(report)
        assert "was not run" in report.error
    else:
        call = lambda: verify_sync(sync_net(), batch(), process_group=pair)  # noqa: E731
        raises(ArgumentError, "that this process belongs to", call=call)


class Skips(Net):
    """Rank 0, which has more samples, calls `bn_left` and rank 1 does not."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        if len(x) > 2:
            x = self.bn_left(x)
        out: Tensor = self.bn_right(x).mean((2, 3))
        return out


class SkipsLast(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        out: Tensor = self.bn_left(x) if len(x) > 2 else x
        return out


@on_ranks(2)
def test_a_layer_that_one_rank_skips_is_named_and_nobody_waits(rank: int, size: int) -> None:
    for kind in (Skips, SkipsLast):
        report = checked(sync_net(kind), batch())
        assert verdicts(report)["bn"] == "ok"
        assert verdicts(report)["bn_left"] == "unequal calls"
        assert "rank 0: forward of bn_left" in report.error
        assert "bn_left: the parts called it 1 and 0 times" in str(report)
    assert checked(sync_net(), batch()).ok  # the group can go on


class Unused(Net):
    """The loss of rank 1 does not depend on `bn_left`."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        y = self.bn_left(x)
        out: Tensor = (x + y if len(x) > 2 else x + y.detach()).mean((2, 3))
        return out


@on_ranks(2)
def test_a_backward_that_one_rank_skips_ends_with_the_layer_named(rank: int, size: int) -> None:
    report = checked(sync_net(Unused), batch())
    assert not report.ok
    assert "rank 0: backward of bn_left" in report.error


class Raises(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x))
        if len(x) == 2:
            raise ZeroDivisionError("mine")
        out: Tensor = self.bn_left(x)
        return out


@on_ranks(2)
def test_what_a_rank_raises_is_in_every_report(rank: int, size: int) -> None:
    report = checked(sync_net(Raises), batch())
    assert report.error == "rank 1: ZeroDivisionError: mine"
    assert verdicts(report) == {"bn": "ok", "bn_left": "not reached", "bn_right": "not reached"}


class RaisesOnOne(Net):
    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("mine")
        out: Tensor = super().forward(x)
        return out


@on_ranks(2)
def test_an_undivided_step_that_fails_on_one_rank_ends_on_all(rank: int, size: int) -> None:
    kind: Any = ZeroDivisionError if rank == 1 else ArgumentError
    raises(kind, "mine", call=lambda: verify_sync(sync_net(RaisesOnOne), batch()))


class Uncopyable(Net):
    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("mine")


@on_ranks(2)
def test_what_one_rank_refuses_ends_on_all(rank: int, size: int) -> None:
    model = sync_net().train(rank == 0)
    words = "on rank 1 it raised" if rank == 0 else "training mode"
    raises(ArgumentError, words, call=lambda: verify_sync(model, batch()))
    other = sync_net(Uncopyable if rank else Net)
    words = "on rank 1 it raised" if rank == 0 else "deepcopy can copy"
    raises(ArgumentError, words, call=lambda: verify_sync(other, batch()))
    given = "path" if rank else batch()
    raises(ArgumentError, "got batch", call=lambda: verify_sync(sync_net(), given))
    raises(ArgumentError, "a batch with tensors", call=lambda: verify_sync(sync_net(), "path"))
    assert checked(sync_net(), batch()).ok


class Activated(nn.SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@on_ranks(2)
def test_torchs_sync_batch_norm_on_the_cpu_is_named_with_a_remedy(rank: int, size: int) -> None:
    for kind, remedy in ((nn.SyncBatchNorm, "convert_model(model)"), (Activated, "Replace")):
        report = checked(nn.Sequential(nn.Conv2d(3, 4, 1), kind(4)), batch())
        assert verdicts(report) == {"1": "not synchronized"}, report
        assert "CUDA tensors of several processes only" in str(report)
        assert remedy in str(report)


def factory() -> Any:
    return sync_net(), batch()


def factory_of_the_first_rank() -> Any:
    assert dist.get_rank() == 0, "mine"
    return factory()


@on_ranks(2)
def test_a_factory_that_fails_on_one_rank_ends_the_command_on_all(rank: int, size: int) -> None:
    from syncbn_verify.command import main

    os.environ |= {"WORLD_SIZE": str(size), "RANK": str(rank)}
    arguments = ["verify", f"{__name__}:factory_of_the_first_rank"]
    words = "mine" if rank else "on rank 1 it raised AssertionError: mine"
    raises(AssertionError if rank else ArgumentError, words, call=lambda: main(arguments))


@on_ranks(2)
def test_the_command_checks_over_the_processes_of_torchrun(rank: int, size: int) -> None:
    from syncbn_verify.command import main

    os.environ |= {"WORLD_SIZE": str(size), "RANK": str(rank)}
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main(["verify", f"{__name__}:factory"]) == 0
    for printed, words in ((out, "OK: 3 layers"), (err, "the step in 2 ranks")):
        assert (words in printed.getvalue()) is (rank == 0), printed.getvalue()
