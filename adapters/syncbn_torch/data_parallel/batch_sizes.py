"""How many samples each replica gets, where the user decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from syncbn_core.errors import ArgumentError, ShapeError

__all__ = ["BatchSizes", "check_batch_sizes", "sizes_of_parts"]

# Parts of equal size, a size for each replica, or a function from the number of samples to them.
# None leaves it to `torch.chunk`.
BatchSizes = Literal["even"] | Sequence[int] | Callable[[int], Sequence[int]] | None


def check_batch_sizes(batch_sizes: BatchSizes) -> None:
    """Raise `ArgumentError` for something else than `BatchSizes`."""
    if batch_sizes is None or batch_sizes == "even" or callable(batch_sizes):
        return
    if not _are_sizes(batch_sizes):
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
    sizes = batch_sizes(samples) if callable(batch_sizes) else batch_sizes
    if not _are_sizes(sizes):
        raise ArgumentError(f"expected positive sizes from batch_sizes({samples}), got {sizes!r}")
    if len(sizes) > parts or sum(sizes) != samples:
        raise ShapeError(
            f"expected batch_sizes for a batch of {samples} and at most {parts} replicas, got "
            f"{list(sizes)}, {sum(sizes)} in all; set batch_sizes before the forward, or make it a "
            "function of the number of samples"
        )
    return list(sizes)


def _are_sizes(sizes: object) -> bool:
    return (
        isinstance(sizes, Sequence)
        and len(sizes) > 0
        and all(isinstance(size, int) and size > 0 for size in sizes)
    )
