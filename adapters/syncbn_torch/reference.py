"""A readable reference layer in plain tensor operations; autograd computes its backward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from syncbn_core.backends.plain import column
from syncbn_core.moments import averaging_factor, blend, require_more_than_one_value


class BatchNorm2dReimpl(nn.BatchNorm2d):
    """`nn.BatchNorm2d(num_features, eps, momentum)` in plain operations, to read and to modify.

        mean = sum(x) / n        var = sum((x - mean)**2) / n
        y = (x - mean) / sqrt(var + eps) * weight + bias

    Args:
        num_features: the number of channels C.
        eps: added to the variance.
        momentum: weight of the new batch in the running statistics; None averages all batches.

    Input (N, C, H, W), else ValueError. The running variance uses `sum((x - mean)**2) / (n - 1)`.
    All arithmetic is in the dtype of the input. It does not synchronize.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1) -> None:
        super().__init__(num_features, eps, momentum)

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        running_mean, running_var = self.running_mean, self.running_var
        counter = self.num_batches_tracked
        assert running_mean is not None
        assert running_var is not None
        assert counter is not None
        if not self.training:
            mean, var = running_mean, running_var
        else:
            count = input.numel() // input.shape[1]
            require_more_than_one_value(count, input.shape)
            axes = [0, 2, 3]
            mean = input.sum(axes) / count
            m2 = (input - column(mean, input)).square().sum(axes)
            var = m2 / count
            with torch.no_grad():
                factor = averaging_factor(self.momentum, counter)
                counter.add_(1)
                if count == 0:
                    return input * 1
                running_mean.copy_(blend(running_mean, mean, factor))
                running_var.copy_(blend(running_var, m2 / (count - 1), factor))
        invstd = (var + self.eps).rsqrt()
        xhat: Tensor = (input - column(mean, input)) * column(invstd, input)
        return xhat.mul(column(self.weight, input)).add(column(self.bias, input))
