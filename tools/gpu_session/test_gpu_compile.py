"""The stage of `tools/gpu_session/gpu_session.sh` that compiles kernels without a device."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import variants

from syncbn_core.backends.cuda import compiler
from syncbn_core.backends.cuda import grid as cuda
from syncbn_core.errors import BackendError

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("gpu_compile.py")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)  # the processes of its pool import it too
    return importlib.import_module(SCRIPT.stem)


def run(folder, *arguments, paths=()):
    path = folder / "result.json"
    places = os.pathsep.join(map(str, [*paths, ROOT]))
    done = subprocess.run(
        [sys.executable, SCRIPT, "9.0", "--json", path, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"PYTHONPATH": places, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert not done.stderr, done.stderr
    return done, json.loads(path.read_text(encoding="utf-8"))


def test_all_kernels_are_compiled_the_most_used_first(script):
    found = list(script.kernels())
    assert sorted(found) == sorted(variants())
    first = {(name.partition("_")[0], dtype, ragged) for name, dtype, _, ragged in found[:24]}
    forms = [("planes", False), ("planes", True), ("rows", False)]
    assert first == {(name, d, ragged) for name, ragged in forms for d in ("float32", "float16")}


def test_compiled_kernels_are_found_again(tmp_path, monkeypatch, script):
    kernel = next(script.kernels())
    folder = tmp_path / "kernels"
    done, result = run(tmp_path, "--first", "1", "--cache", folder)
    assert done.returncode == 0, done.stdout
    assert (result["done"], result["kernels"], result["cached"]) == (1, 1, 0)
    assert not result["missing"] + result["failures"] + result["notes"]
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    path = compiler.cache_file(cuda.source(*kernel, cuda.THREADS), (9, 0))
    assert compiler.stored(path).cubin.startswith(b"\x7fELF")
    assert script.compile_one(kernel, (9, 0)) == {"cached": True}


def test_a_numpy_that_is_too_new_is_named_with_its_remedy(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import numpy\ndel numpy.row_stack\n")
    done, result = run(tmp_path, paths=[tmp_path])
    assert done.returncode == 3
    (sentence,) = result["missing"]
    assert "row_stack" in sentence
    assert sentence.endswith('pip install "numpy<2.5"')
    assert done.stdout.splitlines()[-1] == f"NO KERNEL CAN BE COMPILED: {sentence}"


def test_a_kernel_that_does_not_compile_is_named(script, monkeypatch, tmp_path):
    def compile_source(source, capability):
        raise BackendError("wrapped") from ValueError("no such\n  instruction")

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_source", compile_source)
    row = script.compile_one(("rows_moments", "float32", 4, False), (9, 0))
    key = f"rows_moments-float32-4-{cuda.THREADS}"
    failure = f"{key} does not compile for 9.0: ValueError: no such instruction"
    assert row == {"failure": failure}
    assert not any(tmp_path.iterdir())


def test_what_has_no_time_is_counted_and_no_failure(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "missing", lambda capabilities: [])
    start = time.monotonic()
    result = script.run([(9, 0)], processes=1, seconds=0.3, first=3)
    assert time.monotonic() - start < 5
    assert (result["done"], result["late"], result["failures"]) == (0, 3, [])
    script.show(result)
    assert "3 had no time and compile at first use" in capsys.readouterr().out


def test_more_spills_than_in_the_table_are_told(script, tools):
    kernel = ("planes_moments", "float16", 8, False)
    ptx = compiler.compile_source(cuda.source(*kernel, cuda.THREADS), (9, 0)).ptx
    assert script.more_spills(kernel, (9, 0), ptx) == ""
    # blocks that must fit on a multiprocessor leave few registers to each thread
    crowded, changed = re.subn(r"\.minnctapersm \d+", ".minnctapersm 8", ptx)
    assert changed == 1
    assert script.more_spills(kernel, (9, 0), crowded).startswith("spills ")
