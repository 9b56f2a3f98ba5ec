"""Whatever `fake_cupy.py` offers, CuPy itself has too."""

import inspect
import warnings
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

if find_spec("cupy") is None:
    pytest.skip("needs CuPy", allow_module_level=True)

import cupy


def fake_cupy() -> ModuleType:
    path = Path(__file__).with_name("fake_cupy.py")
    spec = spec_from_file_location("fake_cupy", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    installed: ModuleType = module.install()
    return installed


FAKE: Any = fake_cupy()


def public(thing: Any) -> list[str]:
    return [name for name in vars(thing) if not name.startswith("_")]


@pytest.mark.parametrize(
    ("path", "fake", "real"),
    [
        ("cupy", FAKE, cupy),
        ("cupy.ndarray", FAKE.ndarray, cupy.ndarray),
        ("cupy.cuda", FAKE.cuda, cupy.cuda),
        ("cupy.cuda.runtime", FAKE.cuda.runtime, cupy.cuda.runtime),
        ("cupy.cuda.Device", FAKE.cuda.Device, cupy.cuda.Device),
        ("cupy.cuda.Event", FAKE.cuda.Event, cupy.cuda.Event),
        ("cupy.cuda.Stream", FAKE.cuda.Stream, cupy.cuda.Stream),
        ("cupy.cuda.MemoryPointer", FAKE.cuda.MemoryPointer, cupy.cuda.MemoryPointer),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_name_is_one_of_cupy(path: str, fake: Any, real: Any) -> None:
    names = public(fake)
    assert names
    missing = [name for name in names if not hasattr(real, name)]
    assert [name for name in missing if find_spec(f"{path}.{name}") is None] == [], path


def test_every_name_is_one_of_nccl() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy's, where the library is not installed
        from cupy.cuda import nccl
    if not nccl.available:
        pytest.skip("needs NCCL")
    pairs = [(FAKE.cuda.nccl, nccl), (FAKE.cuda.nccl.NcclCommunicator, nccl.NcclCommunicator)]
    for fake, real in pairs:
        assert [name for name in public(fake) if not hasattr(real, name)] == []


def test_functions_take_what_those_of_cupy_take() -> None:
    compared = 0
    for name in public(FAKE):
        fake, real = getattr(FAKE, name), getattr(cupy, name)
        if inspect.isfunction(fake) and inspect.isfunction(real):
            assert list(inspect.signature(fake).parameters) == [
                *inspect.signature(real).parameters
            ], name
            compared += 1
    assert compared > 5
