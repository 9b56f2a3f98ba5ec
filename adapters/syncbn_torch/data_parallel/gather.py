"""`join` the nested outputs of all replicas into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from syncbn_core.errors import ShapeError
from syncbn_torch.data_parallel.containers import PLAIN, Node, find_tensor, node
from syncbn_torch.data_parallel.scatter import rebuilt, to_device

__all__ = ["join"]


def join(
    outputs: Sequence[Any],
    dim: int,
    device: torch.device,
    sizes: list[int] | None = None,
    path: str = "output",
) -> Any:
    """Join the outputs of all parts into one tree, with tensors concatenated along axis `dim`.

    Scalars (0 axes) become a vector with one entry per part. Lists are joined to one list if
    there are `sizes`, the numbers of samples in the parts. Other objects, such as None, must be
    equal in all parts. Raises `ShapeError` for outputs that can't be joined.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        raise ShapeError(
            f"expected outputs of one type from all replicas, got at {path} "
            + _by_replica([type(output).__name__ for output in outputs])
        )
    if isinstance(first, Tensor):
        return _joined_tensors(outputs, dim, device, path)
    if sizes is not None and isinstance(first, list):
        if [len(output) for output in outputs] != sizes:
            raise ShapeError(
                f"expected lists with an entry for each sample, because batch_sizes is set, got "
                f"at {path} "
                + _by_replica([f"{len(o)} for {n}" for o, n in zip(outputs, sizes, strict=True)])
                + "; return a tuple if its entries are not samples"
            )
        return [to_device(sample, device) for output in outputs for sample in output]
    if type(first) in (list, tuple) and _are_plain(outputs) and all(o == first for o in outputs):
        return first  # quick also for thousands of numbers
    found = [container for output in outputs if (container := node(output)) is not None]
    if not found:
        _check_same(outputs, path)
        return first
    like = found[0]
    if any(c.keys != like.keys and sorted(c.keys) != sorted(like.keys) for c in found):
        raise ShapeError(
            "expected dictionaries with the same keys and sequences of one length from all "
            f"replicas, got at {path} "
            + _by_replica([f"{len(c.keys)} values ({' '.join(c.keys):.100})" for c in found])
        )
    if not all(_same(c.settings, like.settings) for c in found):
        raise ShapeError(
            f"expected a {type(first).__name__} with the same settings from all replicas, got at "
            f"{path} " + _by_replica([f"{c.settings!r:.100}" for c in found])
        )
    rows = [c.values if c.keys == like.keys else _in_order(c, like.keys) for c in found]
    columns = zip(like.keys, *rows, strict=True)
    values = [join(column, dim, device, sizes, path + key) for key, *column in columns]
    return rebuilt(like, values, first, path)


def _are_plain(outputs: Sequence[Any]) -> bool:
    return all(PLAIN.issuperset(map(type, output)) for output in outputs)


def _in_order(container: Node, keys: Sequence[str]) -> list[Any]:
    named = dict(zip(container.keys, container.values, strict=True))
    return [named[key] for key in keys]


def _joined_tensors(tensors: Sequence[Tensor], dim: int, device: torch.device, path: str) -> Tensor:
    if all(tensor.dim() == 0 for tensor in tensors):
        tensors, dim = [tensor.view(1) for tensor in tensors], 0
    try:
        if len({tensor.device for tensor in tensors}) > 1 and all(not t.is_cpu for t in tensors):
            target: Any = "cpu" if device.type == "cpu" else device
            return nn.parallel.gather(tensors, target, dim)  # type: ignore[no-any-return]
        here = [tensor.to(device) for tensor in tensors]
        return here[0] if len(here) == 1 else torch.cat(here, dim)
    except (RuntimeError, IndexError) as error:
        _check_shapes(tensors, dim, path, error)
        raise


def _check_shapes(tensors: Sequence[Tensor], dim: int, path: str, error: Exception) -> None:
    """Raise `ShapeError` from `error` unless the shapes differ on axis `dim` only."""
    shapes = [list(t.shape) for t in tensors if not t.is_nested and t.shape != (0,)]
    if all(-len(shape) <= dim < len(shape) for shape in shapes):
        others = [(len(shape), shape[:dim] + shape[dim:][1:]) for shape in shapes]
        if all(other == others[0] for other in others):
            return
    raise ShapeError(
        f"expected tensors from all replicas that differ in size on axis {dim} only, got at {path} "
        + _by_replica([f"shape {tuple(t.shape)}" for t in tensors])
        + "; pad them to one size in the model"
    ) from error


def _check_same(outputs: Sequence[Any], path: str) -> None:
    """Raise `ShapeError` unless there is only one output, or no tensor in it and all are equal."""
    first = outputs[0]
    if len(outputs) == 1:
        return
    hidden = find_tensor(first)
    if hidden is not None or isinstance(first, PackedSequence):
        raise ShapeError(
            f"expected outputs that can be joined, got a {type(first).__name__} with tensors "
            f"at {path} from each replica; return its tensors in a dictionary or dataclass"
        )
    if not all(_same(output, first) for output in outputs):
        raise ShapeError(
            f"expected tensors, or the same {type(first).__name__} from all replicas, got at "
            f"{path} "
            + _by_replica([f"{output!r:.60}" for output in outputs])
            + "; return a tensor"
        )


def _by_replica(named: Sequence[str]) -> str:
    return ", ".join(f"{what} from replica {i}" for i, what in enumerate(named))


def _same(a: Any, b: Any) -> bool:
    """Whether two objects are equal; NaN equals NaN, and arrays (no single truth value) differ."""
    try:
        return a is b or bool(a == b) or bool(a != a and b != b)
    except (ValueError, RuntimeError):
        return False
