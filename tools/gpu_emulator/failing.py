"""Kernels that fail in one of the ways of `WAYS`, and what their check makes of it."""

from __future__ import annotations

import sys
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
from emulated_device import Refused

from syncbn_core.backends.cuda import kernels, usable
from syncbn_core.errors import BackendError

WAYS = ["wrong", "does not compile", "does not load"]


def computes_wrongly(kernel):
    """Results are not stored; partial sums of blocks are."""
    stores = [item for item in kernel.instructions if item.opcode.startswith("st.global")]
    if "moments" in kernel.name or "reduce" in kernel.name:
        stores = [item for item in stores if item.opcode == "st.global.f64"][-1:]
    return replace(kernel, body=tuple(item for item in kernel.body if item not in stores))


@contextmanager
def failing(way, name, device):
    """Kernels are checked, and those with `name` in their names fail; gives the warnings."""
    compile_source = kernels.compile_source

    def compiled(source, capability):
        if way == "does not compile" and name in source.key:
            raise BackendError("words of the compiler")
        return compile_source(source, capability)

    def before(kernel):
        if name not in kernel.name:
            return kernel
        if way == "does not load":
            raise Refused("words of the loader")
        return computes_wrongly(kernel)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        patch.setenv("SYNCBN_KERNELS", "checked")
        patch.setattr(kernels, "compile_source", compiled)
        if way != "does not compile":
            patch.setattr(device, "before", before)
        forget()
        try:
            yield warned
        finally:
            forget()


def forget():
    """As in a new process."""
    kernels._machine.launches.clear()
    kernels._machine.loaded.clear()
    usable._found.clear()
    adapter = sys.modules.get("syncbn_torch.backends.cuda")
    if adapter is not None:
        adapter._ready.cache_clear()
