"""What importing costs, and that what is public is there and documented."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import syncbn_core
from syncbn_core.steps import Operations

PUBLIC = [
    "syncbn_core",
    "syncbn_core.backends",
    "syncbn_core.comm",
    "syncbn_core.dlpack",
    "syncbn_core.errors",
    "syncbn_core.functional",
    "syncbn_core.layers",
    "syncbn_core.layout",
    "syncbn_core.moments",
]
HEAVY = ["numba", "llvmlite", "cupy", "torch", "jax", "scipy", "mpi4py", "syncbn_torch"]


@pytest.mark.parametrize("module", PUBLIC)
def test_import_costs_numpy_and_nothing_heavy(
    module: str, fresh_python: Callable[..., str]
) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    assert fresh_python(code).strip() == "[]"


def test_first_call_imports_no_framework(fresh_python: Callable[..., str]) -> None:
    code = f"""
import sys, numpy, syncbn_core
syncbn_core.batch_norm_forward(numpy.ones((4, 3), numpy.float32), parallel=False)
print([name for name in {HEAVY} if name in sys.modules])
"""
    printed = fresh_python(code).strip()
    assert "numba" in printed
    for name in ("cupy", "torch", "jax", "mpi4py", "syncbn_torch"):
        assert f"'{name}'" not in printed


WITHOUT = """
import sys
{setup}
try:
    import {module}
except ImportError as error:
    print(type(error).__name__, error.name, error)
"""


@pytest.mark.parametrize(
    ("framework", "name"), [("torch", "PyTorch"), ("jax", "JAX"), ("paddle", "PaddlePaddle")]
)
def test_adapter_without_its_framework_says_what_to_install(
    framework: str, name: str, fresh_python: Callable[..., str]
) -> None:
    if importlib.util.find_spec("syncbn_torch") is None:
        pytest.skip("the core alone")
    setup = f'sys.modules["{framework}"] = None'
    printed = fresh_python(WITHOUT.format(setup=setup, module=f"syncbn_{framework}"))
    assert printed.startswith(f"ModuleNotFoundError {framework} expected {name}")
    assert f"pip install 'syncbn[{framework}]'" in printed


def test_the_name_of_the_project_says_which_package_to_import(
    fresh_python: Callable[..., str],
) -> None:
    if importlib.util.find_spec("syncbn_torch") is None:
        pytest.skip("the core alone")
    printed = fresh_python(WITHOUT.format(setup="", module="syncbn"))
    assert printed.startswith("ImportError syncbn expected one of the packages of syncbn")
    for package in ("syncbn_torch", "syncbn_jax", "syncbn_paddle", "syncbn_core"):
        assert package in printed


def test_module_that_torch_lacks_is_not_taken_for_torch(
    fresh_python: Callable[..., str], tmp_path: Path
) -> None:
    if importlib.util.find_spec("syncbn_torch") is None:
        pytest.skip("the core alone")
    (tmp_path / "torch.py").write_text("import no_such_module")
    setup = f"sys.path.insert(0, {str(tmp_path)!r})"
    printed = fresh_python(WITHOUT.format(setup=setup, module="syncbn_torch"))
    assert printed.strip() == "ModuleNotFoundError no_such_module No module named 'no_such_module'"


def public_names() -> Iterator[tuple[str, str]]:
    for module in PUBLIC:
        for name in importlib.import_module(module).__all__:
            yield module, name


@pytest.mark.parametrize(("module", "name"), list(public_names()))
def test_public_name_exists_and_is_documented(module: str, name: str) -> None:
    value: Any = getattr(importlib.import_module(module), name)
    if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
        return  # a type alias, or the version
    text = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
    assert text, f"{name} has no docstring"
    assert not text.startswith(f"{name}("), f"{name} has only the docstring that Python made"


@pytest.mark.parametrize("module", PUBLIC)
def test_module_is_documented_and_lists_its_public_names_once(module: str) -> None:
    namespace = importlib.import_module(module)
    assert namespace.__doc__
    assert len(set(namespace.__all__)) == len(namespace.__all__)


@pytest.mark.parametrize("module", ["numpy_steps", "backends.reference"])
def test_every_implementation_has_the_whole_contract(module: str) -> None:
    found = importlib.import_module(f"syncbn_core.{module}").OPERATIONS
    assert isinstance(found, Operations)
    for name, step in inspect.getmembers(Operations, inspect.isfunction):
        if not name.startswith("_"):
            own = inspect.signature(getattr(type(found), name)).parameters
            assert list(own) == list(inspect.signature(step).parameters), name


def test_version_is_a_version() -> None:
    assert [int(part) for part in syncbn_core.__version__.split(".")[:2]]
    assert sys.modules["syncbn_core"] is syncbn_core
