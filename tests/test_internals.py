"""Tests state promises by public names. Those of torch that reach for internals say here why."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent / "torch"
ADAPTER = Path(__file__).parents[1] / "adapters"
PUBLIC = {"syncbn_torch", "syncbn_torch.inplace", "syncbn_torch.lightning"}
# Our kernels also for small tensors on a CPU, where torch's are as quick.
PUBLIC.add("syncbn_torch.forward")
WHY = {
    "test_autograd.py": "a device without kernels: no other way leads to plain operations here",
    "test_compiled.py": "a part of torch that is missing in older versions is switched off",
    "test_conversion_report.py": "what a test has registered is taken back",
    "test_convert.py": "what the plugin of Lightning calls, which is not installed here",
    "test_cpu.py": "the arrays of torch's CPU tensors, by the contract of backends",
    "test_cuda_tensors.py": "tensors of a device that is not there, by the contract of backends",
    "test_arrays.py": "one address and one shape per call: the contract of backends",
    "test_module_names.py": "names in errors, by a function of many small cases",
    "test_plans.py": "the key of a plan, of which the test leaves out each element once",
    "test_plain.py": "plain operations, by the contract of backends",
    "test_running_statistics.py": "a device without kernels, as in test_autograd.py",
    "test_streams.py": "streams of a device, by stand-ins",
    "test_torch_private.py": "each private name of torch that the adapter uses",
}


def internals(path: Path) -> Iterator[str]:
    """The modules of the adapter that a file imports, other than public ones."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            place = ADAPTER.joinpath(*name.split("."))
            is_module = place.with_suffix(".py").is_file() or place.is_dir()
            if name.startswith("syncbn_torch") and is_module and name not in PUBLIC:
                yield name


def test_a_test_that_reaches_for_internals_says_why() -> None:
    reach = {path.name for path in TESTS.glob("*.py") if any(internals(path))}
    assert reach == WHY.keys()
