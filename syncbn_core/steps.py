"""`Operations`: the steps of batch normalization that every backend implements.

A group of members normalizes one batch. Each member holds one part of it, x `(N, C, *spatial)`:

    moments           x                      -> count, mean, m2 of this part: a row
                      (exchange: the rows of all parts, in rank order)
    statistics        rows of the batch      -> mean, invstd: a table
    forward           x, statistics          -> y; running statistics are updated
    backward_reduce   x, dy, statistics      -> sum(dy), sum(dy * xhat) of this part
                      (exchange: both sums, added up over all members)
    backward_input    x, dy, statistics, sums of the batch -> dx

`syncbn_core.functional` states the formulas.

`take` and `take_pair` first turn arrays into what kernels need. `order` calls the steps in turn.

A backend handles the arrays of one library on one kind of device. It is chosen once per call and
passed on. It allocates results, and knows nothing of members or communication. It checks nothing:
callers have checked shapes, dtypes and devices.

Settings are passed in `Norm`, so that a new setting changes no signature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from syncbn_core.labels import Labels
from syncbn_core.moments import Moments, NormRule, Statistics

Array = Any


class Affine(NamedTuple):
    """`y = xhat * weight + bias`; each `(C,)` floating; None means ones or zeros."""

    weight: Array | None = None
    bias: Array | None = None


class Norm(NamedTuple):
    """What a step needs beside x and dy to compute y and dx: one layer in one call.

    Attributes:
        statistics: of the whole batch.
        affine: as `Operations.take` gave it.
        rule: the settings.
    """

    statistics: Statistics
    affine: Any
    rule: NormRule


class RunningStatistics(NamedTuple):
    """The running statistics that a training forward updates.

    Attributes:
        mean, var: `(C,)` floating; both or neither are None.
        num_batches_tracked: an integer array `()`, or None.
        momentum: the share of the new batch; None for the average over all batches so far.
    """

    mean: Array | None
    var: Array | None
    num_batches_tracked: Array | None = None
    momentum: float | None = 0.1

    @property
    def held(self) -> list[Array]:
        """Mean, var and counter, as far as there are."""
        return [array for array in self[:3] if array is not None]


class Sums(NamedTuple):
    """The results of `backward_reduce`, over this member's part.

    Attributes:
        exchange: `(2, C)`: `sum(dy) * weight` and `sum(dy * xhat) * weight`, which the members
            then add up; `(2 C + 1,)` if kernels have written a label behind them.
        grad_weight: `(C,)`, this member's share, in the dtype of weight, else of x.
        grad_bias: like `grad_weight`.
    """

    exchange: Array
    grad_weight: Array
    grad_bias: Array


class Gradients(NamedTuple):
    """Gradients of one member: `x` like x; `weight` and `bias` `(C,)`, this member's share."""

    x: Array
    weight: Array
    bias: Array


class Operations(ABC):
    """A backend: the steps for the arrays of one library on one kind of device."""

    takes_masks = False  # whether `take` does; for others `order` fills x, see `masks`
    arrays: Any = None  # the `Arrays` of the library, of steps that take no mask

    def on(self, array: Array) -> Operations:
        """The steps for arrays on the device of `array`: plain ones if its kernels fail."""
        return self

    @property
    def serial(self) -> Operations:
        """The same steps, computed in the calling thread only; for members that are threads."""
        return self

    def take(
        self, x: Array, affine: Affine, running: RunningStatistics | None, mask: Any = None
    ) -> tuple[Any, Any, Any]:
        """`x`, `affine` and `running` in the form that the other steps expect.

        `mask`: bool, `(N, 1, *spatial)` or 1 for any axis, if `takes_masks`: of the elements that
        count; y and dx are 0 elsewhere.

        Called once in a forward, before anything is sent. Raises an error for arrays that the steps
        can't read, or for running statistics that they can't write.
        """
        return x, affine, running

    def take_pair(self, x: Array, dy: Array, affine: Any = None) -> tuple[Any, Any]:
        """x and dy as the steps of backward take them; `affine`: as `take` gave it."""
        return x, dy

    @abstractmethod
    def moments(self, x: Array, labels: Labels | None = None) -> Moments:
        """Moments of this member's part x; count 0 and zeros if x is empty.

        `labels`: those of the message on a device: the row ends with `labels.own`, and may be
        `labels.row`.
        """

    @abstractmethod
    def merge(self, parts: Sequence[Moments], labels: Labels | None = None) -> Moments:
        """The moments of one or more parts together, in one row, merged in their order.

        `labels`: as in `moments`, which has got the same if there is one part.
        """

    @abstractmethod
    def statistics(self, total: Moments, rule: NormRule) -> Statistics:
        """The statistics of the whole batch from the moments of all its parts.

        Here the labels in `total` are compared; or, on a device, by `forward`, which also fills the
        table then.
        """

    @abstractmethod
    def forward(
        self,
        x: Array,
        norm: Norm,
        running: RunningStatistics | None = None,
        out: Any = None,
        total: Moments | None = None,
    ) -> Array:
        """`y = activation((x - mean) * invstd * weight + bias)`; updates `running` if given.

        `out`: an array like x to write y into, or None; may be x itself. `total`: the moments that
        `statistics` was given.
        """

    @abstractmethod
    def forward_eval(
        self,
        x: Array,
        running: RunningStatistics,
        affine: Affine,
        rule: NormRule,
        out: Array | None = None,
    ) -> tuple[Array, Statistics]:
        """y from the running statistics, which do not change, and these. `out` as in `forward`."""

    @abstractmethod
    def backward_reduce(
        self, x: Array, dy: Array, norm: Norm, labels: Labels | None = None
    ) -> Sums:
        """`sum(dy)` and `sum(dy * xhat)` over this part, and the gradients of weight and bias.

        Here and in `backward_input`, dy counts as multiplied by the derivative of the activation.
        `labels`: those of the message on a device.
        """

    @abstractmethod
    def backward_input(
        self,
        x: Array,
        dy: Array,
        norm: Norm,
        total: Array | None,
        out: Any = None,
        labels: Labels | None = None,
    ) -> Array:
        """`dx = invstd * (weight * dy - sum_dy / n - xhat * sum_dy_xhat / n)`.

        The last term is 0 in channels where eps_mode "clamp" made invstd a constant.

        `total`: `Sums.exchange` added up over all members; None for constant statistics (eval),
        where both sums count as 0. `out`: an array like x to write dx into, or None; may be dy
        itself. With `labels`, and a total `(2 C + 1,)`, dx is NaN where the label is wrong.
        """

    @abstractmethod
    def update_running(self, running: RunningStatistics, statistics: Statistics) -> None:
        """Write `(1 - factor) * old + factor * new`, with the mean and the unbiased variance.

        For callers that run `forward` without `running`. An empty batch only increments the
        counter.
        """
