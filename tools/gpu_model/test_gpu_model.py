"""The model of the time of the CUDA kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from math import prod
from pathlib import Path

import gpu_model
import gpu_times
import pytest
from gpu_devices import GPUS
from gpu_times import CALIBRATED, LIMITS, STEPS, Shape

from syncbn_core.backends.cuda import grid
from syncbn_core.kernels.cuda.constants import THREADS

ROOT = Path(__file__).parents[2]
H100 = GPUS["H100"]
LARGE = Shape(256, 256, 3136, "float16", "NCHW")


def test_the_tables_in_the_docs_are_those_of_the_model() -> None:
    page = (ROOT / "docs" / "internals" / "gpu-model.md").read_text(encoding="utf-8")
    for table in gpu_model.docs_tables():
        assert f"\n{table.markdown()}\n" in page, table.title


def test_the_model_is_within_a_third_of_what_an_h100_took() -> None:
    found = gpu_times.over_measured()
    assert sum(map(len, found.values())) == 2 * 221
    for group, ratios in found.items():
        assert 0.9 < gpu_model.mean(ratios) < 1.1, group
        assert min(ratios) > 1 / 1.33, group
        assert max(ratios) < 1.33, group


def test_the_constants_are_those_that_fit_the_h100() -> None:
    least = gpu_times.error(CALIBRATED)
    page = (Path(__file__).parents[2] / "docs/internals/gpu-model.md").read_text(encoding="utf-8")
    assert f"mean of |log| is {least:.3f}" in page
    for field in fields(CALIBRATED):
        for factor in (0.9, 1.1):
            moved = replace(CALIBRATED, **{field.name: getattr(CALIBRATED, field.name) * factor})
            assert gpu_times.error(moved) >= least, field.name


# What binds on an H100 that is slow in one thing, and has more than enough of the others.
ENOUGH = {"bandwidth": 1e20, "issue": 1e9, "float64": 1e9, "conversions64": 1e9}
ENOUGH |= {"conversions16": 1e9}
SLOW = {
    "bandwidth": {"bandwidth": 1e9},
    "latency": {},
    "issue slots": {"issue": 0.1},
    "float64": {"float64": 1e-3},
    "conversions": {"conversions16": 1e-2},
}


@pytest.mark.parametrize("form", ["NCHW", "channels_last"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("limit", LIMITS)
def test_each_limit_binds_where_it_must(limit: str, step: str, form: str) -> None:
    gpu = replace(H100, **(ENOUGH | SLOW[limit]))
    shape = replace(LARGE, layout=form)
    assert gpu_times.binding(gpu, shape, step) == limit
    found = gpu_times.seconds(gpu, gpu_times.launch(gpu, shape, step))
    assert found["all"] > found[limit]


def test_conversions_to_float64_count_too() -> None:
    gpu = replace(H100, **(ENOUGH | {"conversions64": 1e-3}))
    assert gpu_times.binding(gpu, LARGE, "moments") == "float64"


def test_a_launch_and_each_merge_are_counted() -> None:
    run = gpu_times.launch(H100, LARGE, "moments")
    before = gpu_times.seconds(H100, run)["all"]
    merged = replace(CALIBRATED, merge=CALIBRATED.merge + 1)
    launched = replace(CALIBRATED, launch=CALIBRATED.launch + 1)
    assert run.merged == 1
    for constants in (merged, launched):
        assert gpu_times.seconds(H100, run, constants)["all"] == pytest.approx(before + 1)
    rows = gpu_times.launch(H100, replace(LARGE, channels=64, layout="channels_last"), "moments")
    assert rows.merged == 2  # in groups
    assert gpu_times.launch(H100, replace(LARGE, channels=2048), "moments").merged == 0


def test_a_block_more_than_fit_takes_another_wave() -> None:
    gpu = replace(H100, **ENOUGH)  # so that only latency is left
    run = gpu_times.launch(gpu, LARGE, "moments")
    slots = gpu.multiprocessors * run.resident
    full, more = replace(run, blocks=slots), replace(run, blocks=slots + 1)
    times = [gpu_times.seconds(gpu, each)["latency"] for each in (full, more)]
    assert times[1] == pytest.approx(2 * times[0])
    assert full.used(gpu) == 1
    assert more.used(gpu) == pytest.approx((slots + 1) / (2 * slots))


def test_a_multiprocessor_holds_what_its_registers_and_shared_memory_allow() -> None:
    key = "rows_moments-float16-8-256"  # 124 registers, 32 KiB
    assert gpu_times.resident_blocks(H100, key) == 2
    assert gpu_times.resident_blocks(replace(H100, registers=32768), key) == 1
    assert gpu_times.resident_blocks(replace(H100, shared=65536), key) == 1
    assert gpu_times.resident_blocks(GPUS["T4"], key) == 2  # where nothing is reserved
    assert gpu_times.resident_blocks(replace(H100, threads=THREADS), key) == 1


@pytest.mark.parametrize("name", GPUS)
def test_the_plan_is_that_of_the_backends(name: str) -> None:
    gpu, view = GPUS[name], (LARGE.dtype, *LARGE.sizes)
    cut = grid._reduction(grid._MOMENTS, THREADS, gpu.multiprocessors, (0,), *view)
    run = gpu_times.launch(gpu, LARGE, "moments")
    assert (run.key, run.blocks) == (cut.source.key, prod(cut.grid))
    with gpu_model.planned(1, dict.fromkeys(grid.ROW_BLOCKS, 1)):
        assert gpu_times.launch(gpu, LARGE, "moments").blocks <= max(256, gpu.multiprocessors)
    assert gpu_times.launch(gpu, LARGE, "moments") == run


def test_the_model_needs_neither_numba_nor_a_library_for_pictures() -> None:
    code = (
        "import sys, gpu_model; gpu_model.docs_tables();"
        "assert not {'numba', 'numba_cuda', 'torch', 'matplotlib', 'rich'} & sys.modules.keys()"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])},
        timeout=60,
    )
