"""`split` nested arguments into parts, one for each replica, and `join` what these return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import IOBase
from itertools import accumulate
from operator import index
from typing import Any, Literal, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from syncbn_core.errors import ArgumentError, ShapeError
from syncbn_torch._torch_private import forward_ad_active
from syncbn_torch.checks import refuse_transforms
from syncbn_torch.data_parallel.pytrees import SIMPLE_TYPES, Tree, hidden_tensor

# Parts of equal size, a size for each replica, or a function from the number of samples to them.
# None leaves it to `torch.chunk`.
Sizes = Sequence[SupportsIndex]
BatchSizes = Literal["even"] | Sizes | Callable[[int], Sizes] | None


def check_batch_sizes(batch_sizes: BatchSizes) -> None:
    """Raise `ArgumentError` for something else than `BatchSizes`."""
    even = isinstance(batch_sizes, str) and batch_sizes == "even"
    if not (batch_sizes is None or even or callable(batch_sizes) or _integers(batch_sizes)):
        raise ArgumentError(
            'expected batch_sizes="even", a list of sizes such as [8, 4], or a function from the '
            f"number of samples to such a list, got {batch_sizes!r}"
        )


def sizes_of_parts(batch_sizes: BatchSizes, samples: int, parts: int) -> list[int]:
    """The number of samples in each part, for at most `parts` parts.

    Raises `ArgumentError` for sizes that are not positive integers, and `ShapeError` if there are
    more sizes than parts or their sum is not `samples`.
    """
    check_batch_sizes(batch_sizes)
    if batch_sizes is None or isinstance(batch_sizes, str):
        used = max(1, min(parts, samples))
        return [samples // used + (i < samples % used) for i in range(used)]
    given = batch_sizes(samples) if callable(batch_sizes) else batch_sizes
    sizes = _integers(given)
    if not sizes:
        raise ArgumentError(f"expected positive sizes from batch_sizes({samples}), got {given!r}")
    if len(sizes) > parts or sum(sizes) != samples:
        raise ShapeError(
            f"expected batch_sizes for a batch of {samples} and at most {parts} replicas, got "
            f"{sizes}, {sum(sizes)} in all; set batch_sizes before the forward, or make it a "
            "function of the number of samples"
        )
    return sizes


def _integers(sizes: Any) -> list[int]:
    """A list or array of positive integers as a list; an empty one for anything else."""
    try:
        numbers = [index(sizes[i]) for i in range(len(sizes))]
    except (TypeError, KeyError):
        return []
    return numbers if all(number > 0 for number in numbers) else []


@dataclass(frozen=True)
class Shared:
    """An argument that every replica gets whole: `model(x, Shared(weights))`.

    The model gets `value`. Its tensors are moved to the device of each replica.
    """

    value: Any


class Parts(list[Any]):
    """Something for each replica, with the numbers of samples if the caller asked for some.

    `whole`: the path of a list that each replica got whole, though it has an entry for each sample.
    """

    def __init__(
        self, parts: Sequence[Any], sizes: list[int] | None = None, whole: str = ""
    ) -> None:
        super().__init__(parts)
        self.sizes: list[int] | None = sizes
        self.whole: str = whole


def split(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dim: int,
    devices: Sequence[torch.device],
    batch_sizes: BatchSizes = None,
) -> tuple[Parts, list[dict[str, Any]]]:
    """Split each tensor along axis `dim`: positional and keyword arguments by part.

    There is one part for each of `devices`, or fewer for a small batch. Without `batch_sizes`
    tensors are split like `torch.chunk`. With them, all tensors and lists must hold the same
    number of samples. Each part gets all scalars (0 axes) and other objects.

    Raises `ShapeError` for what can't be split, or not into the same number of parts, and
    `StateError` inside a function transform.
    """
    if len(devices) == 1:
        return Parts([to_device(args, devices[0])]), [to_device(kwargs, devices[0])]
    lists = batch_sizes is not None

    def stops(thing: Any) -> bool:
        return isinstance(thing, Shared) or (lists and isinstance(thing, list))

    named = {f"args[{n}]": argument for n, argument in enumerate(args)}
    named |= {f"kwargs[{key!r}]": argument for key, argument in kwargs.items()}
    trees = {root: Tree(argument, stops) for root, argument in named.items()}
    values = [value for tree in trees.values() for value in tree.values]

    def path(n: int) -> str:
        return [path for root, tree in trees.items() for path in tree.paths(root)][n]

    cuts: dict[int, _Cut] = {}
    for n, value in enumerate(values):
        if (isinstance(value, Tensor) and value.dim() > 0) or (lists and isinstance(value, list)):
            cuts[n] = _Cut(value, partial(path, n))
        elif type(value) not in SIMPLE_TYPES and not isinstance(value, (Tensor, Shared)):
            _check_divisible(value, partial(path, n))
    sizes = None
    if not cuts:
        count = len(devices) if values else 1
    elif batch_sizes is None:
        count = _number_of_chunks(cuts.values(), len(devices), dim)
    else:
        sizes = sizes_of_parts(batch_sizes, _number_of_samples(cuts.values(), dim), len(devices))
        count = len(sizes)
    if count > 1:
        refuse_transforms(lambda: "DataParallelWithCallback")
    used = devices[:count]
    columns = [
        cuts[n].pieces(used, sizes, dim) if n in cuts else [_moved(value, d) for d in used]
        for n, value in enumerate(values)
    ]
    numbers = {cut.size(dim) for cut in cuts.values()} if count > 1 and sizes is None else set()
    alike = (n for n, v in enumerate(values) if isinstance(v, (list, tuple)) and len(v) in numbers)
    whole = next(map(path, alike), "")
    parts = []
    for i in range(count):
        pieces = iter([column[i] for column in columns])
        parts.append([tree.made_of(pieces) for tree in trees.values()])
    first = len(args)
    keywords = [dict(zip(kwargs, part[first:], strict=True)) for part in parts]
    return Parts([tuple(part[:first]) for part in parts], sizes, whole), keywords


@dataclass
class _Cut:
    """A tensor or a list of samples, of which each replica gets a piece."""

    value: Any
    path: Callable[[], str]

    def size(self, dim: int) -> int:
        if not isinstance(self.value, Tensor):
            return len(self.value)
        if not -self.value.dim() <= dim < self.value.dim():
            raise ShapeError(
                f"expected tensors with an axis {dim}, got a tensor with {self.value.dim()} axes "
                f"at {self.path()}; pass what every replica needs as syncbn_torch.Shared(tensor)"
            )
        return self.value.size(dim)  # nested tensors have no shape

    def chunks(self, parts: int | list[int], dim: int) -> Sequence[Tensor]:
        """The tensor in so many chunks, or in chunks of these sizes."""
        try:
            if isinstance(parts, list):
                return self.value.split(parts, dim)  # type: ignore[no-any-return]
            return self.value.chunk(parts, dim)  # type: ignore[no-any-return]
        except RuntimeError as error:  # nothing is allocated, so memory is not the reason
            raise ShapeError(
                f"expected tensors that torch can split, got a tensor at {self.path()} of layout "
                f"{self.value.layout} and class {type(self.value).__name__}; pass a dense tensor, "
                'or a list of tensors with batch_sizes="even"'
            ) from error

    def pieces(
        self, devices: Sequence[torch.device], sizes: list[int] | None, dim: int
    ) -> Sequence[Any]:
        """A piece on each device. A tensor is split once: backward joins its gradient once."""
        value = self.value
        if sizes is not None and not isinstance(value, Tensor):
            ends = accumulate(sizes)
            return [
                [to_device(sample, device) for sample in value[end - size : end]]
                for size, end, device in zip(sizes, ends, devices, strict=True)
            ]
        if len(devices) == 1:
            return [value.to(devices[0])]
        if sizes is None and len(set(devices)) > 1:
            return nn.parallel.scatter(value, devices, dim)  # type: ignore[no-any-return]
        # Chunks share one version counter: if a replica changed its input in place, autograd
        # would see all inputs as changed. `data` has its own counter, but no graph or tangent.
        copied = value.requires_grad or forward_ad_active()
        return [
            (piece.clone() if copied else piece.data).to(device)
            for piece, device in zip(self.chunks(sizes or len(devices), dim), devices, strict=True)
        ]


def _check_divisible(value: Any, path: Callable[[], str]) -> None:
    """Raise `ShapeError` for an object that holds tensors which would go to every replica."""
    why = None
    if isinstance(value, Iterator) and not isinstance(value, IOBase):
        why = ", an iterator, which only one replica could read; pass a list"
    elif (hidden := hidden_tensor(value)) is not None:
        why = (
            f" with a tensor at {path()}{hidden}; pass its tensors in a dictionary or dataclass, "
            "register its class by torch.utils._pytree.register_pytree_node, or pass it whole to "
            "every replica as syncbn_torch.Shared(...)"
        )
    if why is not None:
        kind = type(value).__name__
        raise ShapeError(f"expected arguments that can be split, got a {kind} at {path()}{why}")


def _number_of_chunks(cuts: Iterable[_Cut], parts: int, dim: int) -> int:
    counts: dict[int, int] = {}  # of the first tensor of each size
    sizes: dict[int, _Cut] = {}
    for cut in cuts:
        size = cut.size(dim)
        if size not in sizes:
            sizes[size] = cut
            counts[len(cut.chunks(parts, dim))] = size
    if len(counts) > 1:
        named = [f"{size} at {sizes[size].path()}" for size in sorted(sizes)]
        raise ShapeError(
            f"expected tensors that split alike over {parts} replicas, got on axis {dim} the "
            f"sizes {_listed(named)}; pass a tensor that every replica needs as "
            'syncbn_torch.Shared(tensor), and set batch_sizes="even" if lists hold samples'
        )
    return next(iter(counts))


def _number_of_samples(cuts: Iterable[_Cut], dim: int) -> int:
    sizes = {cut.size(dim): cut for cut in cuts}
    if len(sizes) > 1:
        named = [f"{size} at {sizes[size].path()}" for size in sorted(sizes)]
        raise ShapeError(
            "expected tensors and lists with one number of samples, because batch_sizes is set, "
            f"got {_listed(named)}; use a tuple for a list that does not hold samples, and "
            "syncbn_torch.Shared(...) for what every replica needs"
        )
    return next(iter(sizes))


def _listed(named: list[str]) -> str:
    return ", ".join(named[:4]) + (", ..." if len(named) > 4 else "")


def to_device(tree: Any, device: torch.device | None) -> Any:
    """`tree` with its tensors on `device` (None: where they are), and with nothing `Shared`."""
    if type(tree) in SIMPLE_TYPES:
        return tree
    found = Tree(tree, lambda thing: isinstance(thing, Shared))
    moved = [_moved(value, device) for value in found.values]
    same = all(new is old for new, old in zip(moved, found.values, strict=True))
    return tree if same else found.made_of(moved)


def _moved(value: Any, device: torch.device | None) -> Any:
    if isinstance(value, Shared):
        return to_device(value.value, device)
    moves = device is not None and isinstance(value, (Tensor, PackedSequence))
    return cast(Any, value).to(device) if moves else value


def join(
    outputs: Sequence[Any], dim: int, device: torch.device, sizes: list[int] | None = None
) -> Any:
    """Join the outputs of all parts into one tree, with tensors concatenated along axis `dim`.

    Scalars (0 axes) become a vector with one entry per part. Lists are joined to one list if
    there are `sizes`, the numbers of samples in the parts. Other objects, such as None, must be
    equal in all parts. Raises `ShapeError` for outputs that can't be joined.
    """
    tree = Tree(outputs[0], lambda thing: sizes is not None and isinstance(thing, list))
    rows = [tree.values]
    for replica, output in enumerate(outputs[1:], 1):
        try:
            rows.append(tree.values_of(output))
        except ValueError as error:
            raise ShapeError(
                "expected outputs in the same containers from all replicas, got others from "
                f"replica {replica} than from replica 0: {error}"
            ) from error
    joined = []
    for n, values in enumerate(zip(*rows, strict=True)):
        path = partial(lambda n: tree.paths("output")[n], n)
        joined.append(_joined(values, dim, device, sizes, path))
    return tree.made_of(joined)


def _joined(
    values: Sequence[Any],
    dim: int,
    device: torch.device,
    sizes: list[int] | None,
    path: Callable[[], str],
) -> Any:
    """What all replicas have returned in one place."""
    first = values[0]
    kinds = [type(value).__name__ for value in values]
    if len(set(map(type, values))) > 1:
        raise ShapeError(
            f"expected outputs of one type from all replicas, got at {path()} {_by_replica(kinds)}"
        )
    if isinstance(first, Tensor):
        return _joined_tensors(values, dim, device, path)
    if sizes is not None and isinstance(first, list):
        if [len(value) for value in values] != sizes:
            raise ShapeError(
                f"expected lists with an entry for each sample, because batch_sizes is set, got "
                f"at {path()} "
                + _by_replica([f"{len(v)} for {n}" for v, n in zip(values, sizes, strict=True)])
                + "; return a tuple if its entries are not samples"
            )
        return [to_device(sample, device) for value in values for sample in value]
    if len(values) == 1:
        return first
    if hidden_tensor(first) is not None:
        raise ShapeError(
            f"expected outputs that can be joined, got a {kinds[0]} with tensors at {path()} from "
            "each replica; return its tensors in a dictionary or dataclass"
        )
    if not all(_same(value, first) for value in values):
        raise ShapeError(
            f"expected tensors, or the same {kinds[0]} from all replicas, got at {path()} "
            + _by_replica([f"{value!r:.60}" for value in values])
            + "; return a tensor"
        )
    return first


def _joined_tensors(
    tensors: Sequence[Tensor], dim: int, device: torch.device, path: Callable[[], str]
) -> Tensor:
    if all(tensor.dim() == 0 for tensor in tensors):
        tensors, dim = [tensor.view(1) for tensor in tensors], 0
    try:
        if len({tensor.device for tensor in tensors}) > 1 and all(not t.is_cpu for t in tensors):
            target: Any = "cpu" if device.type == "cpu" else device
            return nn.parallel.gather(tensors, target, dim)  # type: ignore[no-any-return]
        here = [tensor.to(device) for tensor in tensors]
        return here[0] if len(here) == 1 else torch.cat(here, dim)
    except (RuntimeError, IndexError) as error:
        shapes = [tuple(tensor.shape) for tensor in tensors if not tensor.is_nested]
        if len({(len(shape), *shape[:dim], *shape[dim:][1:]) for shape in shapes}) == 1:
            raise
        raise ShapeError(
            f"expected tensors from all replicas that differ in size on axis {dim} only, got at "
            f"{path()} " + _by_replica([f"shape {shape}" for shape in shapes]) + "; pad them to "
            "one size in the model"
        ) from error


def _by_replica(named: Sequence[str]) -> str:
    return ", ".join(f"{what} from replica {i}" for i, what in enumerate(named))


def _same(a: Any, b: Any) -> bool:
    """Whether two objects are equal; NaN equals NaN, and arrays (no single truth value) differ."""
    try:
        return a is b or bool(a == b) or bool(a != a and b != b)
    except (ValueError, RuntimeError):
        return False
