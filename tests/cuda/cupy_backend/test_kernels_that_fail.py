"""CuPy's path when kernels fail or are switched off: CuPy's operations take their place."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import pytest
from cupy_arrays import (
    BACKEND,
    LAYOUTS,
    as_float64,
    check_group,
    close,
    one_stream,
    pair,
    parameters,
    to_device,
    two_devices,
)
from failing import WAYS, failing

from syncbn_core import backends, functional
from syncbn_core.backends.cuda import kernels

STEPS = ["moments", "normalize", "backward_reduce", "backward_input"]


def step_equals_numpy(rng, layout="NCHW", dtype="float32"):
    x, host = pair(rng, layout, dtype)
    dy = rng.normal(size=host.shape).astype(x.dtype)
    weight, bias = parameters(rng, host.shape[1])
    mean, var = np.zeros(host.shape[1]), np.ones(host.shape[1])
    own = [to_device(mean), to_device(var)]
    y, saved = functional.batch_norm_forward(
        x, to_device(weight), to_device(bias), running_mean=own[0], running_var=own[1]
    )
    gradients = functional.batch_norm_backward(to_device(dy), saved)
    expected, kept = functional.batch_norm_forward(
        host, as_float64(weight), as_float64(bias), running_mean=mean, running_var=var
    )
    wanted = functional.batch_norm_backward(as_float64(dy), kept)
    close(y, expected, dtype)
    for actual, value in zip((*gradients, *own), (*wanted, mean, var), strict=True):
        close(actual, value, "float32" if actual.shape != x.shape else dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", STEPS)
def test_plain_operations_take_the_place_of_kernels_that_fail(step, way, gpu, rng):
    with failing(way, f"planes_{step}", gpu) as warned:
        for _ in range(2):
            step_equals_numpy(rng)
    gpu.fault = None  # of the loader
    assert len(warned) == 1, [str(w.message) for w in warned]


@pytest.mark.parametrize("place", [one_stream, two_devices], ids=lambda place: place.__name__)
@pytest.mark.parametrize("step", STEPS)
def test_members_some_of_whose_kernels_fail(step, place, gpu, rng):
    with failing("wrong", f"planes_{step}", gpu) as warned:
        check_group((3, 4, 5), place, rng)
    assert len(warned) == (2 if place is two_devices else 1), "once per device"


@pytest.fixture
def off(monkeypatch):
    """The backend imported with kernels switched off, on a machine that can't compile any."""

    def missing():
        raise AssertionError("nothing is needed then")

    monkeypatch.setenv("SYNCBN_KERNELS", "off")
    monkeypatch.setattr(kernels, "missing", missing)
    before = sys.modules.pop(BACKEND)
    backends._operations_for_type.cache_clear()
    yield importlib.import_module(BACKEND)
    sys.modules[BACKEND] = backends.cuda.cupy = before
    backends._operations_for_type.cache_clear()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_kernels(layout, off, gpu, rng):
    step_equals_numpy(rng, layout)
    assert not gpu.launches


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_dtypes_without_kernels(dtype, off, rng):
    step_equals_numpy(rng, dtype=dtype)


@pytest.mark.parametrize("place", [one_stream, two_devices], ids=lambda place: place.__name__)
def test_members_without_kernels(place, off, gpu, rng):
    check_group((3, 0, 5), place, rng)
    assert not gpu.launches
