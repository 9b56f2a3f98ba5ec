"""What a user reads who asks for a GPU where something is missing for it."""

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from syncbn_core import BatchNorm
from syncbn_core.backends.cuda import kernels
from syncbn_core.errors import ArgumentError, BackendError

no_device = pytest.mark.skipif(kernels.device_count() > 0, reason="there is a device")


@no_device
def test_layer_for_a_gpu_says_what_is_missing_and_what_to_install() -> None:
    with pytest.raises(BackendError) as caught:
        BatchNorm(4, device="cuda")
    message = str(caught.value)
    assert message.startswith("expected a machine ready for CUDA; ")
    assert "driver" in message
    for module, word in (("numba_cuda", "numba-cuda is not installed"), ("cupy", "CuPy")):
        assert (word in message) is (find_spec(module) is None), message
    assert message.count("pip install") <= 1, "one hint is enough"
    if find_spec("cupy") is None:
        assert 'pip install ".[cuda12]"' in message
        assert '".[cuda13]"' in message


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CUDA", "", None, 0, "cuda:-1"])
def test_devices_have_names(device: object) -> None:
    with pytest.raises(ArgumentError, match=r'expected device "cpu", "cuda" or "cuda:<number>"'):
        BatchNorm(4, device=device)  # type: ignore[arg-type]


@pytest.mark.skipif(find_spec("cupy") is None, reason="needs CuPy")
@no_device
def test_backend_of_cupy_arrays_needs_a_device() -> None:
    with pytest.raises(BackendError, match="driver"):
        __import__("syncbn_core.backends.cuda.cupy")


def test_nothing_of_cuda_is_imported_before_it_is_used(fresh_python: Callable[..., str]) -> None:
    code = """
import sys, numpy, syncbn_core
layer = syncbn_core.BatchNorm(3)
layer.backward(layer(numpy.ones((4, 3), numpy.float32)))
import syncbn_core.backends.cuda, syncbn_core.backends.cuda.kernels
print([name for name in sys.modules if name.startswith(("cupy", "numba.cuda", "numba_cuda"))])
"""
    assert fresh_python(code).strip() == "[]"
