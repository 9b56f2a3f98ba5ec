"""`split` nested arguments into parts and `join` nested outputs, as in `nn.DataParallel`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncbn_core.errors import ShapeError
from syncbn_torch._torch_private import forward_ad_active
from syncbn_torch.autograd.transforms import refuse_in_replicas

__all__ = ["join", "split"]


def split(tree: Any, parts: int, dim: int, device: torch.device) -> list[Any]:
    """Split each tensor of `tree` along axis `dim`: at most `parts` trees, on `device`.

    `tree` is `(args, kwargs)`, nested. Tensors are split like `torch.chunk`; each part gets all
    scalars (0 axes) and other objects. Raises `ShapeError` if a tensor has no such axis or two
    tensors give different numbers of parts, `StateError` inside a function transform.
    """
    leaves: list[Tensor] = []
    _collect(tree, leaves)
    sizes = {}
    for leaf in leaves:
        if not -leaf.dim() <= dim < leaf.dim():
            raise ShapeError(f"expected tensors with an axis {dim}, got shape {tuple(leaf.shape)}")
        sizes[leaf.shape[dim]] = len(leaf.chunk(parts, dim))
    if len(set(sizes.values())) > 1:
        raise ShapeError(
            f"expected tensors that split alike over {parts} replicas, got sizes "
            f"{sorted(sizes)} on axis {dim}; pass a tensor for all replicas in an object"
        )
    count = next(iter(sizes.values()), parts if _has_anything(tree) else 1)
    if count > 1:
        refuse_in_replicas("DataParallelWithCallback")
    return _parts(tree, count, dim, device)


def _has_anything(tree: Any) -> bool:
    args, kwargs = tree
    return bool(args) or bool(kwargs)


def _collect(tree: Any, leaves: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        if tree.dim() > 0:
            leaves.append(tree)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            _collect(value, leaves)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            _collect(value, leaves)


def _parts(tree: Any, count: int, dim: int, device: torch.device) -> list[Any]:
    """`count` trees. Each tensor is split once, so that backward joins its gradient once."""
    if isinstance(tree, Tensor):
        if tree.dim() == 0 or count == 1:
            return [tree.to(device)] * count
        # Chunks share one version counter: if a replica changed its input in place, autograd
        # would see all inputs as changed. `data` has its own counter, but no graph or tangent.
        pieces = tree.chunk(count, dim)
        copied = tree.requires_grad or forward_ad_active()
        return [(p.clone() if copied else p.data).to(device) for p in pieces]
    if isinstance(tree, Mapping):
        cut = {key: _parts(value, count, dim, device) for key, value in tree.items()}
        return [_like(tree, {key: cut[key][i] for key in tree}) for i in range(count)]
    if isinstance(tree, (list, tuple)):
        several = [_parts(value, count, dim, device) for value in tree]
        return [_like(tree, [values[i] for values in several]) for i in range(count)]
    return [tree] * count


def _like(tree: Any, values: Any) -> Any:
    """`values` in a container of the same type as `tree`."""
    if isinstance(tree, MutableMapping):
        filled = copy.copy(tree)  # keeps settings such as the factory of a defaultdict
        filled.update(values)
        return filled
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*values)
    if type(values) is type(tree):
        return values
    return type(tree)(values)


def join(outputs: Sequence[Any], dim: int, device: torch.device) -> Any:
    """Join the outputs of all parts into one tree, with tensors concatenated along axis `dim`.

    Scalars (0 axes) become a vector with one entry per part. Other objects, such as None, must be
    equal in all parts. Raises `ShapeError` for outputs that differ in structure.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        kinds = [type(output).__name__ for output in outputs]
        raise ShapeError(f"expected outputs of one type from all replicas, got {kinds}")
    if isinstance(first, Tensor):
        moved = [output.to(device) for output in outputs]
        if first.dim() == 0:
            return torch.stack(moved)
        return moved[0] if len(moved) == 1 else torch.cat(moved, dim)
    if isinstance(first, Mapping):
        if any(output.keys() != first.keys() for output in outputs):
            keys = [sorted(map(str, output)) for output in outputs]
            raise ShapeError(f"expected dictionaries with the same keys, got {keys}")
        return _like(first, {k: join([o[k] for o in outputs], dim, device) for k in first})
    if isinstance(first, (list, tuple)):
        lengths = [len(output) for output in outputs]
        if len(set(lengths)) > 1:
            raise ShapeError(f"expected sequences of one length from all replicas, got {lengths}")
        return _like(first, [join(list(o), dim, device) for o in zip(*outputs, strict=True)])
    if not all(_same(output, first) for output in outputs):
        raise ShapeError(
            f"expected tensors, or the same {type(first).__name__} from all replicas, got "
            f"{outputs!r:.200}; return a tensor"
        )
    return first


def _same(a: Any, b: Any) -> bool:
    """Whether two objects are equal; NaN equals NaN, and arrays (no single truth value) differ."""
    try:
        return a is b or bool(a == b) or bool(a != a and b != b)
    except (ValueError, RuntimeError):
        return False
