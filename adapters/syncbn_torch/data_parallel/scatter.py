"""`split` nested arguments into parts, one for each replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from operator import index
from typing import Any, Literal, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from syncbn_core.errors import ArgumentError, ShapeError
from syncbn_torch._torch_private import forward_ad_active
from syncbn_torch.checks import refuse_transforms
from syncbn_torch.data_parallel.containers import PLAIN, Node, find_tensor, is_iterator, node

__all__ = [
    "BatchSizes",
    "Parts",
    "Shared",
    "check_batch_sizes",
    "rebuilt",
    "sizes_of_parts",
    "split",
    "to_device",
]

# Parts of equal size, a size for each replica, or a function from the number of samples to them.
# None leaves it to `torch.chunk`.
Sizes = Sequence[SupportsIndex]
BatchSizes = Literal["even"] | Sizes | Callable[[int], Sizes] | None


def check_batch_sizes(batch_sizes: BatchSizes) -> None:
    """Raise `ArgumentError` for something else than `BatchSizes`."""
    if batch_sizes is None or callable(batch_sizes):
        return
    known = batch_sizes == "even" if isinstance(batch_sizes, str) else _integers(batch_sizes)
    if not known:
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
    """`sizes` as a list of numbers; an empty one unless they are positive integers."""
    if isinstance(sizes, (str, bytes, Mapping, Set)) or not hasattr(sizes, "__len__"):
        return []
    try:
        numbers = [index(size) for size in sizes]
    except TypeError:  # no sequence, or no integers
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
        self.sizes, self.whole = sizes, whole


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
    plan = _Plan(devices, samples=batch_sizes is not None)
    part_of_args, part_of_kwargs = plan.of(args, "args"), plan.of(kwargs, "kwargs")
    sizes = None
    if not plan.cuts:
        count = len(devices) if args or kwargs else 1
    elif batch_sizes is None:
        count = _number_of_chunks(plan.cuts, len(devices), dim)
    else:
        sizes = sizes_of_parts(batch_sizes, _number_of_samples(plan.cuts, dim), len(devices))
        count = len(sizes)
    if count > 1:
        refuse_transforms(lambda: "DataParallelWithCallback")
    for cut in plan.cuts:
        cut.pieces = _pieces(cut, count, sizes, dim, devices)
    samples = {cut.size(dim) for cut in plan.cuts} if count > 1 and sizes is None else set()
    whole = next((path for path, length in plan.plain_lists if length in samples), "")
    parts = range(count)
    return Parts([part_of_args(i) for i in parts], sizes, whole), [part_of_kwargs(i) for i in parts]


@dataclass
class _Cut:
    """A tensor or a list of samples, of which each replica gets a piece."""

    value: Any
    path: str
    pieces: Sequence[Any] = ()

    def size(self, dim: int) -> int:
        if not isinstance(self.value, Tensor):
            return len(self.value)
        if not -self.value.dim() <= dim < self.value.dim():
            raise ShapeError(
                f"expected tensors with an axis {dim}, got a tensor with {self.value.dim()} axes "
                f"at {self.path}; pass what every replica needs as syncbn_torch.Shared(tensor)"
            )
        return self.value.size(dim)  # nested tensors have no shape


class _Plan:
    """How to make the parts of arguments; `cuts` are to be cut before the parts are made."""

    def __init__(self, devices: Sequence[torch.device], samples: bool) -> None:
        self.devices = devices
        self.samples = samples  # whether lists hold samples
        self.cuts: list[_Cut] = []
        self.plain_lists: list[tuple[str, int]] = []  # those that every part gets: path and length

    def of(self, tree: Any, path: str) -> Callable[[int], Any]:
        """A function from the number of a part to this part of `tree`."""
        if isinstance(tree, Shared) or (isinstance(tree, Tensor) and tree.dim() == 0):
            return lambda i: to_device(tree, self.devices[i])
        if isinstance(tree, Tensor) or (self.samples and isinstance(tree, list)):
            cut = _Cut(tree, path)
            self.cuts.append(cut)
            return lambda i: cut.pieces[i]
        if type(tree) in PLAIN:
            return lambda i: tree
        container = node(tree)
        _check_divisible(tree, container, path)
        if container is None or PLAIN.issuperset(map(type, container.values)):
            if isinstance(tree, (list, tuple)):
                self.plain_lists.append((path, len(tree)))
            return lambda i: tree
        inside = [
            self.of(value, path + key)
            for value, key in zip(container.values, container.keys, strict=True)
        ]
        return lambda i: rebuilt(container, [part(i) for part in inside], tree, path)


def _check_divisible(tree: Any, container: Node | None, path: str) -> None:
    """Raise `ShapeError` for an object that holds tensors which would go to every replica."""
    if isinstance(tree, PackedSequence):
        raise ShapeError(
            f"expected arguments that can be split, got a PackedSequence at {path}; pass the "
            "padded tensor and the lengths, and pack them in the model"
        )
    if is_iterator(tree):
        raise ShapeError(
            f"expected arguments that can be split, got an iterator ({type(tree).__name__}) at "
            f"{path}, which only one replica could read; pass a list"
        )
    hidden = find_tensor(tree) if container is None else None
    if hidden is not None:
        raise ShapeError(
            f"expected arguments that can be split, got a {type(tree).__name__} at {path} with a "
            f"tensor at {path}{hidden}; pass its tensors in a dictionary or dataclass, register "
            "its class by torch.utils._pytree.register_pytree_node, or pass it whole to every "
            "replica as syncbn_torch.Shared(...)"
        )


def rebuilt(container: Node, values: list[Any], tree: Any, path: str) -> Any:
    """A container like `tree` with other `values`; `ShapeError` if its class prevents it."""
    try:
        return container.make(values)
    except Exception as error:
        raise ShapeError(
            f"expected a container that can be made from its values, got a {type(tree).__name__} "
            f"at {path}, which raised {type(error).__name__}: {error}; use a dictionary or "
            "dataclass instead"
        ) from error


def _number_of_chunks(cuts: Sequence[_Cut], parts: int, dim: int) -> int:
    counts: dict[int, str] = {}
    sizes: dict[int, str] = {}
    for cut in cuts:
        size = cut.size(dim)
        if size not in sizes:
            sizes[size] = cut.path
            counts[len(_chunks(cut, parts, dim))] = cut.path
    if len(counts) > 1:
        named = [f"{size} at {path}" for size, path in sorted(sizes.items())]
        raise ShapeError(
            f"expected tensors that split alike over {parts} replicas, got on axis {dim} the "
            f"sizes {_listed(named)}; pass a tensor that every replica needs as "
            'syncbn_torch.Shared(tensor), and set batch_sizes="even" if lists hold samples'
        )
    return next(iter(counts))


def _number_of_samples(cuts: Sequence[_Cut], dim: int) -> int:
    sizes: dict[int, str] = {}
    for cut in cuts:
        sizes.setdefault(cut.size(dim), cut.path)
    if len(sizes) > 1:
        named = [f"{size} at {path}" for size, path in sizes.items()]
        raise ShapeError(
            "expected tensors and lists with one number of samples, because batch_sizes is set, "
            f"got {_listed(named)}; use a tuple for a list that does not hold samples, and "
            "syncbn_torch.Shared(...) for what every replica needs"
        )
    return next(iter(sizes))


def _listed(named: list[str]) -> str:
    return ", ".join(named[:4]) + (", ..." if len(named) > 4 else "")


def _chunks(cut: _Cut, parts: int | list[int], dim: int) -> Sequence[Tensor]:
    """The tensor in so many chunks, or in chunks of these sizes."""
    try:
        if isinstance(parts, list):
            return cut.value.split(parts, dim)  # type: ignore[no-any-return]
        return cut.value.chunk(parts, dim)  # type: ignore[no-any-return]
    except RuntimeError as error:  # nothing is allocated, so memory is not the reason
        raise ShapeError(
            f"expected tensors that torch can split, got a tensor at {cut.path} of layout "
            f"{cut.value.layout} and class {type(cut.value).__name__}; pass a dense tensor, or a "
            'list of tensors with batch_sizes="even"'
        ) from error


def _pieces(
    cut: _Cut, count: int, sizes: list[int] | None, dim: int, devices: Sequence[torch.device]
) -> Sequence[Any]:
    """`count` pieces on their devices. A tensor is split once: backward joins its gradient once."""
    value = cut.value
    if sizes is not None and not isinstance(value, Tensor):
        ends = list(accumulate(sizes))
        container = node(value)
        assert container is not None
        several = [
            [to_device(sample, device) for sample in value[end - size : end]]
            for size, end, device in zip(sizes, ends, devices, strict=False)
        ]
        return [rebuilt(container, samples, value, cut.path) for samples in several]
    if count == 1:
        return [value.to(devices[0])]
    if sizes is None and len(set(devices)) > 1:
        return nn.parallel.scatter(value, devices[:count], dim)  # type: ignore[no-any-return]
    pieces = _chunks(cut, sizes or count, dim)
    # Chunks share one version counter: if a replica changed its input in place, autograd
    # would see all inputs as changed. `data` has its own counter, but no graph or tangent.
    copied = value.requires_grad or forward_ad_active()
    return [
        (piece.clone() if copied else piece.data).to(device)
        for piece, device in zip(pieces, devices, strict=False)
    ]


def to_device(tree: Any, device: torch.device | None) -> Any:
    """`tree` with its tensors on `device` (None: where they are), and with nothing `Shared`."""
    if isinstance(tree, Shared):
        return to_device(tree.value, device)
    if isinstance(tree, (Tensor, PackedSequence)):
        return tree if device is None else cast(Any, tree).to(device)
    container = node(tree)
    if container is None:
        return tree
    values = [to_device(value, device) for value in container.values]
    if all(new is old for new, old in zip(values, container.values, strict=True)):
        return tree
    return rebuilt(container, values, tree, "an argument")
