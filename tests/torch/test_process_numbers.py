"""Several processes, each with a part of the batch, equal `nn.BatchNorm` on the undivided batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.func import functional_call
from world import (
    close,
    equals_undivided,
    gradients_equal,
    on_ranks,
    raises,
    rows_of,
    same_on_all_ranks,
    whole_batch,
)

from syncbn_core.errors import DTypeError, StateError
from syncbn_torch import (
    DataParallelWithCallback,
    SyncBatchNorm,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
)

KINDS = (SynchronizedBatchNorm2d, SyncBatchNorm)
UNEVEN = (0, 3, 3, 8)  # rank 1 has no rows


@on_ranks(3)
def test_uneven_and_empty_ranks_equal_the_undivided_batch(rank: int, size: int) -> None:
    x, dy = whole_batch((8, 3, 4, 4))
    for kind in KINDS:
        layer, twin = kind(3).double(), nn.BatchNorm2d(3).double()
        alone = DataParallelWithCallback(layer, replicas=1)
        for _ in range(2):
            equals_undivided(alone, twin, x, dy, rows_of(rank, UNEVEN))


@on_ranks(3)
def test_ranks_of_two_replica_threads_equal_the_undivided_batch(rank: int, size: int) -> None:
    x, dy = whole_batch((8, 3, 4, 4))
    for kind in KINDS:
        layer, twin = kind(3).double(), nn.BatchNorm2d(3).double()
        parallel = DataParallelWithCallback(layer, replicas=2)
        for _ in range(2):
            equals_undivided(parallel, twin, x, dy, rows_of(rank, UNEVEN))


@on_ranks(3)
def test_eval_waits_for_no_other_rank_and_keeps_the_statistics(rank: int, size: int) -> None:
    x, _ = whole_batch((8, 3, 4, 4))
    for kind in KINDS:
        layer = kind(3).double()
        layer(x[rows_of(rank, UNEVEN)])
        before = layer.running_var.clone()
        layer.eval()
        if rank == 0:
            layer(x[:3])
        assert torch.equal(layer.running_var, before)
    if rank == 0:
        SynchronizedBatchNorm2d(3, track_running_stats=False).double().eval()(x)


def channels_last_batch() -> tuple[Tensor, Tensor]:
    x, dy = whole_batch((9, 3, 4, 5))
    return x.to(memory_format=torch.channels_last), dy.to(memory_format=torch.channels_last)


@on_ranks(3)
def test_channels_last_ranks_equal_the_undivided_batch_and_dx_is_channels_last(
    rank: int, size: int
) -> None:
    x, dy = channels_last_batch()
    settings: list[dict[str, Any]] = [{}, {"momentum": None}, {"eps": 0.1}]
    for given in settings:
        layer, twin = SynchronizedBatchNorm2d(3, **given), nn.BatchNorm2d(3, **given)
        mine = rows_of(rank, (0, 2, 6, 9))
        dx = equals_undivided(layer.double(), twin.double(), x, dy, mine)
        assert dx.is_contiguous(memory_format=torch.channels_last)


@on_ranks(3)
def test_ranks_with_images_of_different_sizes_weigh_every_pixel_the_same(
    rank: int, size: int
) -> None:
    layer, twin = SynchronizedBatchNorm2d(3).double(), nn.BatchNorm1d(3).double()
    images = [whole_batch((2, 3, 4 + 3 * r, 5), seed=r) for r in range(size)]
    pixels = torch.cat([x.flatten(2) for x, _ in images], 2).requires_grad_()
    expected = twin(pixels)
    expected.backward(torch.cat([dy.flatten(2) for _, dy in images], 2))
    own = images[rank][0].requires_grad_()
    y = layer(own)
    y.backward(images[rank][1])
    ends = torch.tensor([5 * (4 + 3 * r) for r in range(size)]).cumsum(0).tolist()
    columns = slice(ends[rank] - 5 * (4 + 3 * rank), ends[rank])
    assert own.grad is not None
    assert pixels.grad is not None
    close(y.flatten(2), expected[:, :, columns])
    close(own.grad.flatten(2), pixels.grad[:, :, columns])
    close(layer.running_var, twin.running_var)


@on_ranks(3)
def test_an_empty_batch_on_all_ranks_changes_only_the_counter(rank: int, size: int) -> None:
    layer = SynchronizedBatchNorm2d(3).double()
    before = copy.deepcopy(layer.state_dict())
    empty = torch.empty(0, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    layer(empty).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == empty.shape
    assert torch.equal(layer.running_mean, before["running_mean"])
    assert torch.equal(layer.running_var, before["running_var"])
    assert int(layer.num_batches_tracked) == 1


@on_ranks(3)
def test_one_value_per_channel_in_all_is_refused_by_every_rank_and_the_next_batch_is_right(
    rank: int, size: int
) -> None:
    layer = SynchronizedBatchNorm2d(3).double()
    x, dy = whole_batch((8, 3, 4, 4))
    one = x[:1, :, :1, :1] if rank == 0 else x[:0]
    raises(ValueError, "more than 1 value", call=lambda: layer(one))
    assert int(layer.num_batches_tracked) == 0
    equals_undivided(layer, nn.BatchNorm2d(3).double(), x, dy, rows_of(rank, (0, 1, 2, 8)))


# ----------------------------------------------------------------------------------- dtypes


@on_ranks(3)
def test_float16_ranks_equal_the_undivided_batch_and_keep_float32_statistics(
    rank: int, size: int
) -> None:
    x, _ = whole_batch((9, 3, 4, 5))
    x = x.half().double()  # values that float16 can hold
    layer, twin = SynchronizedBatchNorm2d(3), nn.BatchNorm2d(3).double()
    mine = rows_of(rank, (0, 2, 6, 9))
    y = layer(x[mine].half())
    assert y.dtype is torch.float16
    close(y.double(), twin(x)[mine], rtol=0, atol=4e-3)
    close(layer.running_var.double(), twin.running_var, rtol=0, atol=1e-6)


@on_ranks(3)
def test_ranks_of_different_dtypes_are_told_so_and_the_next_batch_succeeds(
    rank: int, size: int
) -> None:
    x, _ = whole_batch((9, 3, 4, 5))
    part = x[rows_of(rank, (0, 2, 6, 9))]
    layer = SynchronizedBatchNorm2d(3)
    layer(part.half())
    before = layer.running_var.clone()
    wrong = part.to(torch.bfloat16 if rank == 1 else torch.float32)
    words = ("0: 'float32'", "1: 'bfloat16'", "SynchronizedBatchNorm2d")
    raises(TypeError, *words, call=lambda: layer(wrong))
    assert torch.equal(layer.running_var, before)
    layer(part.float())
    same_on_all_ranks(layer.running_mean)


class Wrapper(Tensor):
    """Has no values of its own, like a DTensor."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return made(cls, values.shape, dtype=values.dtype)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise AssertionError("nothing is to be computed")


@on_ranks(2)
def test_slices_of_channels_by_functional_call_equal_the_undivided_batch(
    rank: int, size: int
) -> None:
    x, _ = whole_batch((6, 4, 5, 5))
    rows = rows_of(rank, (0, 2, 6))
    for width in (4, 2):
        layer, twin = SynchronizedBatchNorm2d(4).double(), nn.BatchNorm2d(4).double()
        outputs = []
        for each, part in ((layer, x[rows]), (twin, x)):
            named = {**dict(each.named_parameters()), **dict(each.named_buffers())}
            sliced = {name: t[:width] if t.dim() else t for name, t in named.items()}
            outputs.append(functional_call(each, sliced, (part[:, :width],)))
        close(outputs[0], outputs[1][rows])
        close(layer.running_var, twin.running_var)


@on_ranks(2)
def test_a_distributed_tensor_in_a_distributed_layer_is_the_whole_batch(
    rank: int, size: int
) -> None:
    mesh = dist.init_device_mesh("cpu", (size,))
    x, cotangent = whole_batch((4, 3, 2, 2))
    torch_layer, z = nn.BatchNorm2d(3).double(), x.clone().requires_grad_()
    torch_layer(z).relu().backward(cotangent)
    for placement in (Shard(0), Shard(2), Replicate()):
        layer = SynchronizedBatchNorm2d(3, activation="relu").double()
        layer = distribute_module(layer, mesh)
        part = distribute_tensor(x, mesh, [placement]).requires_grad_()
        (layer(part) * distribute_tensor(cotangent, mesh, [placement])).sum().backward()
        close(part.grad.full_tensor(), z.grad)
        close(layer.weight.grad.full_tensor(), torch_layer.weight.grad)
        close(layer.running_var.full_tensor(), torch_layer.running_var)
    channels = distribute_tensor(x, mesh, [Shard(1)])
    raises(DTypeError, "SynchronizedBatchNorm2d", "all channels", call=lambda: layer(channels))
    half = dist.init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"))["tp"]
    layer = distribute_module(SynchronizedBatchNorm2d(3).double(), half)
    own = distribute_tensor(x, half, [Shard(0)])
    raises(DTypeError, "x.to_local()", "all of its processes", call=lambda: layer(own))


@on_ranks(2)
def test_tensors_without_values_of_their_own_are_refused_before_anything_is_exchanged(
    rank: int, size: int
) -> None:
    x, _ = whole_batch((4, 3, 2, 2))
    layer = SyncBatchNorm(3).double()
    raises(DTypeError, "values of its own", "a plain tensor", call=lambda: layer(Wrapper(x)))
    part = distribute_tensor(x, dist.init_device_mesh("cpu", (size,)), [Shard(0)])
    raises(DTypeError, "values of its own", "x.to_local()", call=lambda: layer(part))
    freed = SyncBatchNorm(3).double()
    freed.weight.untyped_storage().resize_(0)
    if rank == 0:  # the others would wait for a message
        raises(StateError, "storage was freed", call=lambda: freed(x))
    assert int(layer.num_batches_tracked) == 0
    close(layer(x[2 * rank : 2 * rank + 2]), nn.BatchNorm2d(3).double()(x)[2 * rank : 2 * rank + 2])


# -------------------------------------------------------------------- replica threads in ranks


@on_ranks(3)
def test_parameters_get_their_gradients_where_no_or_not_every_rank_needs_dx(
    rank: int, size: int
) -> None:
    layer, twin = SynchronizedBatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    parallel = DataParallelWithCallback(layer, replicas=2)
    x, dy = whole_batch((7, 3))
    for bounds in ((0, 4, 5, 7), (0, 3, 3, 7)):
        mine = rows_of(rank, bounds)
        for ranks_with_dx in ((), (0,), (1, 2)):
            layer.zero_grad()
            twin.zero_grad()
            parallel(x[mine].requires_grad_(rank in ranks_with_dx)).backward(dy[mine])
            twin(x).backward(dy)
            gradients_equal(layer, twin)
