"""How many samples each replica gets, where the user decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from operator import index
from typing import Any, Literal, SupportsIndex

from syncbn_core.errors import ArgumentError, ShapeError

__all__ = ["BatchSizes", "check_batch_sizes", "sizes_of_parts"]

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
