"""For compiled functions: memory at addresses, and the C functions that describe arrays.

`ask` and `struct_of` run code of Python's: callers hold the interpreter lock.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["add_one", "ask", "peek", "pointer", "poke", "struct_of"]


def _pointer(typing_context, address):
    """An address as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


pointer: Any = intrinsic(_pointer)


def _peek(typing_context, address, like):
    """What is at an address, of the type of `like`."""

    def generate(context, builder, signature, arguments):
        kind = context.get_value_type(like)
        return builder.load(builder.inttoptr(arguments[0], kind.as_pointer()))

    return like(types.int64, like), generate


peek: Any = intrinsic(_peek)


def _poke(typing_context, address, value):
    """Write a value to an address."""

    def generate(context, builder, signature, arguments):
        place = builder.inttoptr(arguments[0], arguments[1].type.as_pointer())
        builder.store(arguments[1], place)
        return context.get_dummy_value()

    return types.void(types.int64, value), generate


poke: Any = intrinsic(_poke)


def _add_one(typing_context, value):
    """An integer plus 1, in its type."""

    def generate(context, builder, signature, arguments):
        return builder.add(arguments[0], ir.Constant(arguments[0].type, 1))

    return value(value), generate


add_one: Any = intrinsic(_add_one)


def _ask(typing_context, function, of, into):
    """Call `dltensor_from_py_object_no_sync(of, into)`; whether it succeeded, without an error."""

    def generate(context, builder, signature, arguments):
        byte = cgutils.voidptr_t
        kind = ir.FunctionType(ir.IntType(32), [byte, byte])
        address, *operands = arguments
        call = builder.inttoptr(address, kind.as_pointer())
        status = builder.call(call, [builder.inttoptr(operand, byte) for operand in operands])
        failed = builder.icmp_signed("!=", status, ir.Constant(ir.IntType(32), 0))
        with builder.if_then(failed, likely=False):
            clear = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, clear, "PyErr_Clear"), [])
        return builder.not_(failed)

    return types.boolean(types.int64, types.int64, types.int64), generate


ask: Any = intrinsic(_ask)


def _struct_of(typing_context, capsule):
    """The address that the capsule `array.__array_struct__` holds."""

    def generate(context, builder, signature, arguments):
        byte = cgutils.voidptr_t
        kind = ir.FunctionType(byte, [byte, byte])
        get = cgutils.get_or_insert_function(builder.module, kind, "PyCapsule_GetPointer")
        operands = [builder.inttoptr(arguments[0], byte), ir.Constant(byte, None)]
        return builder.ptrtoint(builder.call(get, operands), ir.IntType(64))

    return types.int64(types.int64), generate


struct_of: Any = intrinsic(_struct_of)
