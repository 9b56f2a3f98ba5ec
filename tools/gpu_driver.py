"""Kernels that NVIDIA's `cuda.core` starts in the place of our `Driver`: bits, and time.

    python tools/gpu_driver.py --json FILE

Layers alone give bitwise the same by both; `tests/device`, captured graphs among them, pass with
`cuda.core`; the time of a launch is measured for both in turns.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from cuda.core import (
    LEGACY_DEFAULT_STREAM,
    PER_THREAD_DEFAULT_STREAM,
    Kernel,
    LaunchConfig,
    Stream,
    launch,
)

from syncbn_core._kernels.cuda.constants import THREADS
from syncbn_core.backends.cuda import grid, kernels
from syncbn_core.backends.cuda.driver import Driver, DriverError, Launch
from syncbn_torch import SyncBatchNorm
from syncbn_torch.forward import always_ours

TURNS, LAUNCHES = 9, 2000
SHAPES = ((8, 64, 56, 56), (4, 30, 7, 7), (2, 512, 1, 1))


class CudaCore(Driver):
    """`Driver` that starts kernels by `cuda.core`, with streams and settings kept."""

    def launcher(self, handle: int, device: int, threads: int, codes: str) -> Launch:
        kernel = Kernel.from_handle(handle)
        kinds = [{"q": int, "d": float}[code] for code in codes]  # else a double may be an integer
        configs: dict[tuple[int, int], Any] = {}
        streams = {0: LEGACY_DEFAULT_STREAM, 1: LEGACY_DEFAULT_STREAM, 2: PER_THREAD_DEFAULT_STREAM}

        def start(shape: tuple[int, int], stream: int, *arguments: int | float) -> None:
            if len(arguments) != len(kinds):
                raise struct.error(f"expected {len(kinds)} arguments, got {len(arguments)}")
            config, on = configs.get(shape), streams.get(stream)
            if config is None:
                config = configs[shape] = LaunchConfig(grid=shape, block=threads)
            if on is None:
                on = streams[stream] = Stream.from_handle(stream)
            given = [kind(each) for kind, each in zip(kinds, arguments, strict=True)]
            try:
                launch(on, config, kernel, *given)
            except Exception as error:  # of several classes
                if not ("INVALID_CONTEXT" in str(error) and self._adopt(device)):
                    raise DriverError(str(error), 0) from error
                launch(on, config, kernel, *given)

        return start


def use(driver: Driver) -> None:
    """Load and start all kernels by this driver from now on."""
    machine: Any = kernels.Machine()
    machine.driver = driver
    kernels._machine = machine


def bits() -> list[bytes]:
    """Of results and gradients of layers alone."""
    found = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for layout in (torch.contiguous_format, torch.channels_last):
                torch.manual_seed(0)
                layer = SyncBatchNorm(shape[1]).to("cuda")
                x = torch.randn(shape, device="cuda").to(dtype=dtype, memory_format=layout)
                with always_ours():
                    y = layer(x.requires_grad_())
                y.backward(torch.randn_like(y))
                every = (y, x.grad, layer.weight.grad, layer.bias.grad, layer.running_var)
                wide = (each.detach().cpu().double().numpy() for each in every)  # exact
                found += [each.tobytes() for each in wide]
    return found


def seconds_of_a_launch() -> float:
    parts, into = (torch.zeros(8, dtype=torch.float64, device="cuda") for _ in range(2))
    start = kernels.launch_of(grid.source("merge_parts", "float64", 1, False, THREADS), 0)
    arguments = parts.data_ptr(), 1, 3, 0.0, 0, 0.0, into.data_ptr()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(LAUNCHES):
        start((1, 1), torch.cuda.current_stream().cuda_stream, *arguments)
    took = time.perf_counter() - begin
    torch.cuda.synchronize()
    return took / LAUNCHES


def main() -> int:
    parser = argparse.ArgumentParser(description="Kernels started by cuda.core and by ctypes.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    drivers, found = {"ctypes": Driver(), "cuda.core": CudaCore()}, {}
    times: dict[str, list[float]] = {name: [] for name in drivers}
    for name, driver in drivers.items():
        use(driver)
        found[name] = bits()
    for _ in range(TURNS):
        for name, driver in drivers.items():
            use(driver)
            seconds_of_a_launch()  # loads the kernel
            times[name].append(seconds_of_a_launch())
    same = found["ctypes"] == found["cuda.core"]
    shown = {name: round(1e6 * median(each), 2) for name, each in times.items()}
    plain = ["addopts=--import-mode=importlib", "minversion=7", "filterwarnings=default"]
    options_of_pytest = [word for setting in plain for word in ("-o", setting)]
    failed = pytest.main(["tests/device", "-q", "-p", "no:cacheprovider", *options_of_pytest])
    result = {"same_bits": same, "microseconds_of_a_launch": shown, "tests": int(failed)}
    if options.json:
        options.json.write_text(json.dumps(result), encoding="utf-8")
    print(f"{'the same bits' if same else 'OTHER BITS'}, a launch {shown} us, tests: {failed}")
    return int(not same or bool(failed))


if __name__ == "__main__":
    sys.exit(main())
