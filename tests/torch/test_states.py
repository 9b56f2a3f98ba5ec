"""State dictionaries go between the array layer and torch's, and both packages tell one version."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import syncbn_core
import syncbn_torch
from syncbn_core.errors import StateError

KINDS = [nn.BatchNorm2d, syncbn_torch.SynchronizedBatchNorm2d]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"affine": False}, {"track_running_stats": False}])
def test_state_of_the_array_layer_loads_into_torch_and_back(
    kind: Any, settings: dict[str, bool]
) -> None:
    x = np.random.default_rng(0).normal(2, 3, size=(4, 3, 5, 6)).astype(np.float32)
    ours = syncbn_core.BatchNorm(3, **settings)
    for seed, parameter in enumerate(ours.parameters()):
        parameter[...] = np.random.default_rng(seed).normal(size=3)
    ours(x)
    layer = kind(3, **settings)
    layer.load_state_dict(ours.state_dict(torch.as_tensor), strict=True)
    expected = layer.eval()(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(ours.eval()(x), expected, atol=1e-5)
    back = syncbn_core.BatchNorm(3, **settings)
    back.load_state_dict(layer.state_dict())
    for name, value in ours.state_dict().items():
        np.testing.assert_array_equal(back.state_dict()[name], value)


def test_tensors_that_numpy_can_not_read_are_refused_and_change_nothing() -> None:
    layer = syncbn_core.BatchNorm(3)
    before = layer.state_dict()
    for wrong in (torch.ones(3, dtype=torch.bfloat16), torch.ones(3, device="meta")):
        state = {**layer.state_dict(torch.as_tensor), "running_var": wrong}
        with pytest.raises(StateError, match="expected running_var as an array that NumPy reads"):
            layer.load_state_dict(state)
    for name, value in layer.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


def test_both_packages_tell_one_version() -> None:
    assert syncbn_torch.__version__ is syncbn_core.__version__
