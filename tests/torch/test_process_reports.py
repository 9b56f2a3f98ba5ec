"""What the error of a call that has failed says of the other ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from world import hosts_apart, on_ranks, raises, set_timeout

from syncbn_core.errors import CommError
from syncbn_torch import convert_model


def called_once(model: nn.ModuleDict, group: Any) -> Any:
    """The converted model, after one step; from now on a call of its layers waits four seconds."""
    model = convert_model(model, process_group=group)
    sum(layer(torch.randn(2, 3)).sum() for layer in model.values()).backward()
    dist.barrier()
    set_timeout(4, group)
    return model


@on_ranks(4)
def test_ranks_in_another_call_of_the_same_number_are_named_and_those_without_sign(
    rank: int, size: int
) -> None:
    """Ranks 0 and 1 are in a forward, rank 2 is in a backward, rank 3 does nothing."""
    for begin in (lambda: None, hosts_apart):
        begin()
        model = nn.ModuleDict({"a": nn.BatchNorm1d(3), "b": nn.BatchNorm1d(3)})
        container = nn.ModuleDict({"model": model} if rank == 0 else {})
        told_from_each_rank(called_once(model, dist.new_group()), rank)
        dist.barrier()
        assert container is not None


def told_from_each_rank(model: nn.ModuleDict, rank: int) -> None:
    x = torch.randn(2, 3)
    y = model["a"](x)
    silent = (
        "; no sign in this call of rank 3; look there for the first error, or for fewer batches"
    )
    if rank < 2:
        own = f"call 6 (forward of {'model.' if rank == 0 else ''}b ("
        words = (own, "; rank 2 waited in call 6 (backward of a (", silent, "in the same order")
        message = raises(CommError, *words, call=lambda: model["b"](x))
        assert message.count("waited in call") == 1, message  # the other forward is the same call
    elif rank == 2:
        words = ("call 6 (backward of a (", "waited in call 6 (forward of ", silent, "same order")
        message = raises(CommError, *words, call=lambda: y.square().sum().backward())
        assert "rank 0 waited" in message, message
        assert "rank 1 waited" in message, message


@on_ranks(2)
def test_reports_of_processes_before_a_restart_count_for_nothing(rank: int, size: int) -> None:
    """The launcher may keep the store."""
    hosts_apart()
    group = dist.new_group()
    key = f"syncbn/{group.group_name}/{rank}"
    group.get_group_store().set(key, "call 17 (forward of b)")
    model = called_once(nn.ModuleDict({"a": nn.BatchNorm1d(3)}), group)
    if rank == 0:
        silent = "no sign in this call of rank 1; look there"
        message = raises(CommError, silent, call=lambda: model["a"](torch.randn(2, 3)))
        assert "call 17" not in message, message
