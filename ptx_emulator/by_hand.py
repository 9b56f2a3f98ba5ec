"""Kernels of PTX written by hand, for tests."""

THREADS = 64


def module(body, parameters="", shared=None):
    """A kernel: in %t, %b, %n and %i are thread, block, number of blocks, thread of the grid; in
    %a0, %a1, ... the parameters, a letter each: "q" for an integer or pointer, "d" for a float64.
    """
    kinds = {"q": "u64", "d": "f64"}
    given = [f".param .{kinds[letter]} k_param_{n}" for n, letter in enumerate(parameters)]
    arrays = [
        f".visible .shared .align 8 .b8 {name}[{size}];" for name, size in (shared or {}).items()
    ]
    lines = [
        "// by hand",
        ".version 8.0",
        ".target sm_90",
        ".address_size 64",
        *arrays,
        f".visible .entry k({', '.join(given)})",
        f".maxntid {THREADS}, 1, 1",
        "{",
        ".reg .pred %p<10>;",
        ".reg .b16 %rs<10>;",
        ".reg .b32 %r<20>;",
        ".reg .b32 %t, %b, %n, %i;",
        ".reg .f32 %f<10>;",
        ".reg .b64 %rd<20>;",
        ".reg .b64 %a<10>;",
        ".reg .f64 %fd<10>;",
        *(f"ld.param.u64 %a{n}, [k_param_{n}];" for n in range(len(parameters))),
        "mov.u32 %t, %tid.x;",
        "mov.u32 %b, %ctaid.x;",
        "mov.u32 %n, %nctaid.x;",
        "mov.u32 %i, %ntid.x;",
        "mad.lo.s32 %i, %b, %i, %t;",
        *body.splitlines(),
        "ret;",
        "}",
    ]
    return "\n".join(lines)


def element(to, base, index, size=4):
    """The address of a number in an array, into `to`."""
    return f"mul.wide.s32 {to}, {index}, {size};\nadd.s64 {to}, {base}, {to};"
