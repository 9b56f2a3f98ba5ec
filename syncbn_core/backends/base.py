"""The contract: the steps of batch normalization that each device and array library implements.

A group normalizes one batch, of which each member holds a part x `(N, C, *spatial)`:

    moments           x                      -> count, mean, m2 of this part
                      (exchange: the parts of all members, merged in rank order)
    statistics        moments of the batch   -> mean, invstd
    forward           x, statistics          -> y; running statistics are updated
    backward_reduce   x, dy, statistics      -> sum(dy), sum(dy * xhat) of this part
                      (exchange: both sums, added up over all members)
    backward_input    x, dy, statistics, sums of the batch -> dx

`forward_single` and `backward_single` are the same for a group of one, where an implementation may
be able to do more in one pass. The formulas are those of `syncbn_core.functional`.

An implementation is an object with these methods for the arrays of one library on one kind of
device. It is chosen once per call and passed on. It allocates results, knows nothing of members or
communication, and checks nothing: callers have checked shapes, dtypes and devices.

Options travel in `NormRule` and `Affine`, so that a new one changes no signature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from syncbn_core.moments import NormRule

__all__ = ["Affine", "Forward", "Gradients", "Operations", "RunningStatistics", "Sums"]

Array = Any
PartMoments = Any  # `Moments` on the host, `DeviceMoments` on a device
Statistics = Any  # what the implementation's own `statistics` and `forward` return


class Affine(NamedTuple):
    """`y = xhat * weight + bias`; each `(C,)` floating, or None for ones and zeros."""

    weight: Array | None = None
    bias: Array | None = None


class RunningStatistics(NamedTuple):
    """What a training forward updates.

    `mean`, `var`: `(C,)` floating, both or neither. `num_batches_tracked`: one integer, or None.
    `momentum`: share of the new batch, or None for the average over all batches so far.
    """

    mean: Array | None
    var: Array | None
    num_batches_tracked: Array | None = None
    momentum: float | None = 0.1


class Forward(NamedTuple):
    """Results of a forward.

    `y`: like x. `statistics`: what backward needs besides x. `running`: the updated running
    statistics, the same objects where the library writes in place; None if none were given.
    """

    y: Array
    statistics: Statistics
    running: RunningStatistics | None = None


class Sums(NamedTuple):
    """Results of the first half of backward.

    `exchange`: `(2, C)`, `sum(dy)` and `sum(dy * xhat)`, each times weight, to be added up over
    all members. `grad_weight`, `grad_bias`: `(C,)` in the dtype of weight, else of x; they are
    this member's own share.
    """

    exchange: Array
    grad_weight: Array
    grad_bias: Array


class Gradients(NamedTuple):
    """Gradients of one member: `x` like x; `weight`, `bias` (C,), this member's own share."""

    x: Array
    weight: Array
    bias: Array


class Operations(ABC):
    """The steps for the arrays of one library on one kind of device."""

    @property
    def serial(self) -> Operations:
        """The same steps, each within the calling thread: for members that are threads."""
        return self

    @abstractmethod
    def moments(self, x: Array) -> PartMoments:
        """Moments of this member's part; an empty x gives the empty part."""

    @abstractmethod
    def merge(self, parts: Sequence[PartMoments]) -> PartMoments:
        """Moments of several parts (one or more) together, added up in their order."""

    def one_row(self, part: PartMoments) -> PartMoments:
        """What `merge` has joined, as one part that can be sent."""
        return part

    @abstractmethod
    def statistics(self, total: PartMoments, rule: NormRule) -> Statistics:
        """Statistics of the whole batch, given its moments."""

    @abstractmethod
    def forward(
        self,
        x: Array,
        statistics: Statistics,
        affine: Affine,
        rule: NormRule,
        running: RunningStatistics | None = None,
        out: Array | None = None,
    ) -> Forward:
        """`y = (x - mean) * invstd * weight + bias`; updates `running` if given.

        `out`: where to write y; may be x itself.
        """

    @abstractmethod
    def forward_eval(
        self,
        x: Array,
        running: RunningStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> Forward:
        """y by running statistics, which stay as they are."""

    @abstractmethod
    def backward_reduce(
        self, x: Array, dy: Array, statistics: Statistics, affine: Affine, rule: NormRule
    ) -> Sums:
        """`sum(dy)` and `sum(dy * xhat)` of this part."""

    @abstractmethod
    def backward_input(
        self,
        x: Array,
        dy: Array,
        statistics: Statistics,
        affine: Affine,
        rule: NormRule,
        total: Array | None,
        out: Array | None = None,
    ) -> Array:
        """`dx = invstd * (weight * dy - sum_dy / n - xhat * sum_dy_xhat / n)`.

        `total`: `Sums.exchange` added up over all members, None for constant statistics (eval).
        The last term is left out in channels where "clamp" made invstd a constant. `out`: where
        to write dx; may be dy itself.
        """

    @abstractmethod
    def update_running(
        self, running: RunningStatistics, statistics: Statistics
    ) -> RunningStatistics:
        """Running statistics after this batch: `(1 - factor) * old + factor * new`.

        For callers whose forward could not update them yet. Running statistics take the unbiased
        variance; of an empty batch only the counter moves.
        """

    def forward_single(
        self,
        x: Array,
        affine: Affine,
        rule: NormRule,
        running: RunningStatistics | None = None,
        out: Array | None = None,
    ) -> Forward:
        """Forward of a batch that is x alone."""
        statistics = self.statistics(self.moments(x), rule)
        return self.forward(x, statistics, affine, rule, running, out)

    def backward_single(
        self,
        x: Array,
        dy: Array,
        statistics: Statistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> Gradients:
        """Backward of a batch that is x alone."""
        sums = self.backward_reduce(x, dy, statistics, affine, rule)
        dx = self.backward_input(x, dy, statistics, affine, rule, sums.exchange, out)
        return Gradients(dx, sums.grad_weight, sums.grad_bias)
