"""Functions that only compiled code calls: linked into it, without machine code of their own.

Numba makes machine code of each function that it compiles, and links the function into its callers,
where it is optimized again. Python calls none of the functions here, so this leaves out their
machine code. That takes private parts of Numba (0.62 to 0.68). Where one is missing, `linked` and
`kernel` change nothing: all works, and compiles longer.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler

_USED = "optimize_functions optimize_final_module finalize_final_module finalize_dynamic_globals"
_KNOWN = all(hasattr(JITCodeLibrary, f"_{name}") for name in _USED.split())


class _WithoutEnvironments:
    """A code generator that does not look for the constants of a function in machine code."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def set_env(self, env_name: str, env: Any) -> None:
        """Do nothing."""


class _Linked(JITCodeLibrary):
    """The code of a function that only others call."""

    @property
    def codegen(self) -> Any:
        return _WithoutEnvironments(self._codegen)

    def _optimize_functions(self, ll_module: Any) -> None:
        ll_module.data_layout = self._codegen._data_layout

    def _optimize_final_module(self) -> None:
        """Do nothing: it is optimized where it is linked."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0


class _Vectorized(_Linked):
    """The same with loops, which are vectorized before, so that all callers share them."""

    _optimize_final_module = JITCodeLibrary._optimize_final_module


class _Kernel(JITCodeLibrary):
    """The code of a kernel, whose loops are vectorized already."""

    _optimize_functions = _Linked._optimize_functions

    def _optimize_final_module(self) -> None:
        for options in ({"opt": 0, "cost": "cheap"}, {"opt": 2}):
            passes, builder = self._codegen._module_pass_manager(
                loop_vectorize=False, slp_vectorize=False, **options
            )
            passes.run(self._final_module, builder)


def _by(library: type[JITCodeLibrary]) -> dict[str, Any]:
    """Options of `numba.njit` by which the code of a function is held in `library`."""

    class Linking(Compiler):
        def compile_extra(self, func: Any) -> Any:
            if self.state.library is None:
                self.state.library = library(self.state.targetctx.codegen(), func.__qualname__)
                if library is _Kernel:
                    self.state.library.enable_object_caching()
            return super().compile_extra(func)

    return {"pipeline_class": Linking} if _KNOWN else {}


def linked(vectorized: bool = False) -> dict[str, Any]:
    """Options of `numba.njit` for a function that only compiled code calls."""
    return {"no_cpython_wrapper": True, **_by(_Vectorized if vectorized else _Linked)}


def kernel() -> dict[str, Any]:
    """Options of `numba.njit` for a kernel, which calls such functions for all its loops."""
    return _by(_Kernel)
