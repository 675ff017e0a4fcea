# mypy: allow-untyped-calls, allow-subclassing-any
"""How device functions are compiled: with the kernels that they are part of, and not by themselves.

numba optimises every function that it compiles and makes machine code of it, also of one that is only ever inlined. For
device functions that was half of the time that a first process took to compile its kernels. Here a device function
ends as LLVM code, which the kernel that calls it links and optimises as a whole.

This replaces one pass of numba's pipeline (`pipeline_class`, numba's developer manual, "Customizing the Compiler"), and
what a library of code does at its end. In a numba where these are no more what they were, device functions are compiled
as it does it: slower, with the same results.
"""

from __future__ import annotations

from typing import Any

from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompilerBase, DefaultPassBuilder, _LowerResult
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering


class _Refusal(str):
    """Its `format` is what kernels find a device function by, which has to be a builtin of its own; and an error where
    the interpreter calls it."""


class _PartOfKernels(JITCodeLibrary):
    """LLVM code that is neither optimised nor made machine code of."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _LowerPart(NativeLowering):
    """Lowers a device function to a library of such code."""

    _name = "tieredemb_lower_part"

    def run_pass(self, state: Any) -> bool:
        flags = state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        state.library = _PartOfKernels(state.targetctx.codegen(), state.func_id.func_qualname)
        super().run_pass(state)
        lowered = state["cr"]
        key = _Refusal(f"a device function, inside kernels only: {{0.{state.func_id.func_name}}}").format
        state.targetctx.insert_user_function(key, lowered.fndesc, [state.library])
        state["cr"] = lowered._replace(cfunc=key)
        return True


class PartCompiler(Compiler):
    """numba's own, that ends with LLVM code."""

    def define_pipelines(self) -> list[Any]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.passes = [(_LowerPart if each is NativeLowering else each, name) for each, name in passes.passes]
        passes.finalize()
        return [passes]


def device_compiler() -> type[CompilerBase]:
    """What compiles device functions."""
    ends = all(hasattr(JITCodeLibrary, name) for name in ("_optimize_final_module", "_finalize_final_module"))
    return PartCompiler if ends and {"fndesc", "cfunc"} <= {*_LowerResult._fields} else Compiler
