"""Batch normalization with its activation in place, as of inplace_abn: y overwrites x.

    w = |weight| + eps        z = (x - mean) * invstd * w + bias        y = activation(z)

Backward keeps y alone. The activations have an inverse, so it computes z from y, and takes z for
the input of a layer with mean = bias and invstd = 1 / w: that layer has the same xhat, and dx but
for the factor w * invstd. The method is that of Rota Bulo, Porzi and Kontschieder, "In-Place
Activated BatchNorm for Memory-Optimized Training of DNNs" (arXiv:1712.02616).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from syncbn_core import order
from syncbn_core.comm import SingleCommunicator
from syncbn_core.errors import ArgumentError, StateError
from syncbn_core.exchange import Exchange
from syncbn_core.moments import Moments, NormRule
from syncbn_core.steps import Affine, Norm, Operations
from syncbn_torch._torch_private import exporting, records_a_graph, untraced
from syncbn_torch.arrays import HALVES
from syncbn_torch.backends import plain
from syncbn_torch.conversion.registry import register_conversion
from syncbn_torch.forward import (
    ERRORS_OF_INPUT,
    add_name,
    batch_norm,
    by_running_statistics,
    checked_part,
    uses_running_statistics,
)
from syncbn_torch.layer_state import LayerState, give_number
from syncbn_torch.module_names import name_of
from syncbn_torch.plan import host_steps, kept_steps, planned
from syncbn_torch.process_group import checked_process_group
from syncbn_torch.processes import processes_of
from syncbn_torch.traced import traced_batch_norm

__all__ = ["ABN", "InPlaceABN", "InPlaceABNSync"]

_Name = Literal["leaky_relu", "elu", "relu", "identity"]
_ALIKE = NormRule(1e-300)  # an eps that rounds away


class _Activation(NamedTuple):
    name: str
    param: float

    def apply_(self, z: Tensor) -> Tensor:
        """`activation(z)`, written to z."""
        if self.name == "leaky_relu":
            return F.leaky_relu(z, self.param, inplace=True)
        if self.name == "elu":
            return F.elu(z, self.param, inplace=True)
        return F.relu(z, inplace=True) if self.name == "relu" else z

    def inverted(self, y: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """z and its gradient, given y and its; 16 bits in float32."""
        if self.name == "identity":
            return y, dy
        if y.dtype in HALVES:
            y, dy = y.float(), dy.float()
        if self.name == "leaky_relu":
            dz = torch.ops.aten.leaky_relu_backward(dy, y, self.param, True)
            return F.leaky_relu(y, 1 / self.param), dz
        # y may be rounded to its limit, -param
        share = (y / self.param).clamp(min=torch.finfo(y.dtype).eps - 1)
        dz = torch.ops.aten.elu_backward(dy, self.param, 1, 1, True, y)
        return torch.where(y > 0, y, share.log1p()), dz


class ABN(LayerState):
    """Batch normalization and an activation, one after the other: `inplace_abn.ABN`.

    Input `(N, C, *spatial)`, 2 or more axes. It takes statistics of its own input, like torch's
    layers, and has their `state_dict`.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as of `nn.BatchNorm2d`.
        activation: "leaky_relu", "elu", "relu" or "identity".
        activation_param: the slope of leaky_relu, the alpha of elu.

    Raises `ArgumentError` for another activation, and for an `activation_param` < 0.
    """

    process_group: Any = SingleCommunicator()
    _activations: tuple[_Name, ...] = get_args(_Name)
    _has_inverse = False

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: _Name = "leaky_relu",
        activation_param: float = 0.01,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        give_number(self)
        if activation not in self._activations:
            raise ArgumentError(
                f"expected activation to be one of {', '.join(self._activations)}, got "
                f"{activation!r}"
            )
        if activation in ("leaky_relu", "elu") and not activation_param >= 0:
            raise ArgumentError(f"expected activation_param >= 0, got {activation_param!r}")
        if self._has_inverse and activation != "identity" and not activation_param > 0:
            raise ArgumentError(
                f"expected activation_param > 0, because {activation} with {activation_param} has "
                "no inverse; use ABN for other activations"
            )
        self.activation: _Name = activation
        self.activation_param: float = activation_param

    @property
    def _applied(self) -> _Activation:
        return _Activation(self.activation, float(self.activation_param))

    @property
    def _agreed(self) -> NormRule:
        return NormRule(float(self.eps), self.effective_eps_mode, *self._applied)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ArgumentError(
                f"expected at least 2D input (N, C, *spatial), got shape {tuple(input.shape)}"
            )

    def forward(self, input: Tensor) -> Tensor:
        """y, a new tensor like `input`."""
        compute = traced_batch_norm if torch.compiler.is_compiling() else batch_norm
        return self._applied.apply_(compute(self, input))

    def extra_repr(self) -> str:
        shown = f", activation_param={self.activation_param}"
        shown = shown if self.activation in ("leaky_relu", "elu") else ""
        return f"{super().extra_repr()}, activation={self.activation!r}{shown}"


class InPlaceABN(ABN):
    """`inplace_abn.InPlaceABN`: in training y overwrites `input`, and backward keeps y alone.

    The scale is `|weight| + eps`, in eval too. The activation is "leaky_relu" with a slope > 0,
    "elu" with an alpha > 0 or "identity". Where `|weight|` is small, backward loses digits: its
    error is that of y over `|weight|`.
    """

    _activations = ("leaky_relu", "elu", "identity")
    _has_inverse = True

    def forward(self, input: Tensor) -> Tensor:
        """y: `input` itself, overwritten; in eval, from running statistics, a new tensor.

        Raises `StateError` for an input that autograd or other tensors need as it is: a leaf that
        requires a gradient, a tensor with gaps or that is expanded, a part of `chunk`, `split` or
        `unbind`; and the errors of `SynchronizedBatchNorm2d`.
        """
        if torch.compiler.is_compiling() and not uses_running_statistics(self):
            if exporting():
                raise StateError(
                    f"expected {type(self).__name__} in eval for torch.export, got it in training, "
                    "which computes by Python; call model.eval()"
                )
            return self._without_a_graph(input)
        w = self.weight  # not `abs`, whose derivative at 0 is 0: such a weight would stay 0
        weight = None if w is None else torch.where(w < 0, -w, w) + self.eps
        if uses_running_statistics(self):
            return self._applied.apply_(by_running_statistics(self, input, weight))
        self._check_may_be_overwritten(input)
        try:
            call = planned(self, input, None)
            if call is None:
                processes = processes_of(self, input)
                part, steps = checked_part(self, input, processes)
                if steps is plain.DIFFERENTIABLE:  # this node is not differentiated
                    steps = plain.OPERATIONS
                call = kept_steps(self, part, steps), part, processes
            y: Tensor = _InPlace.apply(input, weight, self.bias, call, self)
        except ERRORS_OF_INPUT as error:
            add_name(self, error)
            raise
        return y

    _without_a_graph = untraced("an in-place layer computes by Python")(forward)

    def _check_may_be_overwritten(self, x: Tensor) -> None:
        if records_a_graph():
            raise StateError(
                f"expected no torch.jit.trace or make_fx around {name_of(self)} in training, which "
                "computes by Python; call model.eval()"
            )
        why = ""
        if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
            why = "a leaf that requires a gradient"
        elif x.stride() != torch.empty_like(x).stride():
            why = "a tensor with gaps, or one that is expanded"
        elif x._is_view():
            try:
                x[:0].zero_()  # torch raises for parts of chunk, split and unbind, among others
            except RuntimeError as error:
                why = f"a view for which torch says: {error}"
        if why:
            raise StateError(
                f"expected an input that {name_of(self)} may overwrite, got {why}; pass a copy "
                "(input.clone()), or use ABN, which is not in place"
            )


class InPlaceABNSync(InPlaceABN):
    """`inplace_abn.InPlaceABNSync`: `InPlaceABN` over all processes of `group`, also on CPU.

    `group`: as `process_group` of `SynchronizedBatchNorm2d`; None for the default group, if any.
    Raises `StateError` in replicas of `nn.DataParallel`: use one process per part.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: _Name = "leaky_relu",
        activation_param: float = 0.01,
        group: Any = None,
    ) -> None:
        settings = (eps, momentum, affine, track_running_stats, activation, activation_param)
        super().__init__(num_features, *settings)
        self.set_group(group)

    def set_group(self, group: Any) -> None:
        """Synchronize over `group` from now on; `ArgumentError` if it has the wrong type."""
        self.process_group: Any = checked_process_group(group)

    def forward(self, input: Tensor) -> Tensor:
        """As `InPlaceABN.forward`, with the statistics of all processes."""
        if self.training and "_is_replica" in self.__dict__:
            raise StateError(
                f"expected {type(self).__name__} in a model without replicas, which it can't "
                "synchronize; use one process per part, or ABN by SynchronizedBatchNorm2d and an "
                "activation"
            )
        return super().forward(input)


register_conversion(InPlaceABNSync, None)  # it stays as it is


class _InPlace(Function):
    """x, w, bias -> y, in the memory of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        call: tuple[Operations, order.Part, Exchange | None],
        layer: InPlaceABN,
    ) -> Tensor:
        activation, rule, (do, part, processes) = layer._applied, layer._rule, call
        own = part._replace(affine=Affine(weight, bias), out=x)
        if activation.name == "leaky_relu":  # in the pass that normalizes
            rule = rule._replace(activation="leaky_relu", negative_slope=activation.param)
        _, known = order.forward(do, [own], rule, processes)
        if rule.activation is None:
            activation.apply_(x)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, weight, bias)
        ctx.known, ctx.activation, ctx.layer = known, activation, layer
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():  # compiled autograd
            return _untraced_backward(ctx, dy)
        try:
            y, weight, bias = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            raise StateError(
                f"expected y of {name_of(ctx.layer)} as it was in forward, because backward "
                "computes from it, got one that was changed in place; write y = y + x for y += x"
            ) from error
        known: order.Forward = ctx.known
        applied: _Activation = ctx.activation
        rule_of_y = _ALIKE
        if applied.name == "leaky_relu" and known.steps is not plain.OPERATIONS:
            z, dz = y, dy  # which kernels invert
            rule_of_y = _ALIKE._replace(
                activation="inverse_leaky_relu", negative_slope=applied.param
            )
        else:
            z, dz = applied.inverted(y, dy)
        statistics, _, rule = known.norms[0]
        arrays = statistics.table[:1], statistics.m2, statistics.invstd
        count, m2, invstd = map(torch.as_tensor, arrays)
        ones = torch.ones_like(m2)
        w = ones if weight is None else weight.detach().double()
        b = ones * 0 if bias is None else bias.detach().double()
        factor = w * invstd
        clamped = rule.clamped(m2 / count)
        # where clamped, dx does not depend on the sum of dy * xhat
        scale = torch.stack([factor, factor if clamped is None else factor * ~clamped])
        rows = torch.cat([count, b, count * w * w, count])[None]
        affine = Affine(ones if weight is None else weight)
        numbers: Any = (rows, scale)
        do: Any = plain.OPERATIONS  # on a GPU only `forward` fills a table
        if not isinstance(statistics.table, Tensor):
            do, numbers = host_steps(order.Part(z, affine)), (rows.numpy(), scale.numpy())
            known = known._replace(steps=do)
        layer = do.statistics(Moments(numbers[0], statistics.count), _ALIKE)
        _, affine, _ = known.steps.take(z, affine, None)
        known = known._replace(norms=[Norm(layer, affine, rule_of_y)], scale=numbers[1])
        (dx,), (sums,) = order.backward(known, [z], [dz])
        assert dx is not None
        grad_weight = None if weight is None else sums.grad_weight
        return dx.to(y.dtype), grad_weight, None if bias is None else sums.grad_bias, None, None


_untraced_backward = untraced("syncbn's kernels and messages are not traced")(_InPlace.backward)
