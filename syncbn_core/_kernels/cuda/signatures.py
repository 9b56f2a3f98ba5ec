"""The arguments of each CUDA kernel, in their order; those in parentheses are one tuple.

Backends launch and compile kernels by this table, and a test compares it with the kernels. A launch
gives all arguments in a row, and a kernel that is compiled takes each in a parameter. Names
of pointers: `x`, `y`, `dy`, `dx`, `weight`, `bias`, `parts`, `statistics`, `moments`, `sums`,
`running_mean`, `running_var`, `tracked`, `grad_weight`, `grad_bias`, `partials`, `alarm`,
`block_counters`; of a dtype's code (`constants.CODES`): those that end with `_code`. All others are
sizes and settings. A pointer is 0 where an optional array is missing.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["SIGNATURES", "codes_of", "signature_of"]

_FLOATS: Final = (
    "eps",
    "factor",
    "label",
    "place",
    "negative_slope",
)  # float64; all other arguments are int64

_PLANES_REDUCTION = "(skew outer channels inner slots splits) (partials block_counters)"
_ROWS_REDUCTION = "(rows channels width splits group) (partials block_counters)"
_PLANES_ELEMENTWISE = "(total channels inner)"
_ROWS_ELEMENTWISE = "(rows channels width piece)"
_NORMALIZE = (
    "(weight weight_code bias bias_code) (parts num_parts) (eps clamp) "
    "(running_mean running_var running_code tracked factor) (label alarm place) statistics"
)
_BACKWARD_REDUCE = (
    "statistics (weight weight_code gradient_code) (label sums grad_weight grad_bias)"
)
_BACKWARD_INPUT = "statistics (weight weight_code) sums (label alarm place) (eps clamp)"

SIGNATURES: Final = {
    "planes_moments": f"x {_PLANES_REDUCTION} label moments",
    "planes_normalize": f"x y {_PLANES_ELEMENTWISE} {_NORMALIZE}",
    "planes_backward_reduce": f"x dy {_PLANES_REDUCTION} {_BACKWARD_REDUCE}",
    "planes_backward_input": f"x dy dx {_PLANES_ELEMENTWISE} {_BACKWARD_INPUT}",
    "rows_moments": f"x {_ROWS_REDUCTION} label moments",
    "rows_normalize": f"x y {_ROWS_ELEMENTWISE} {_NORMALIZE}",
    "rows_backward_reduce": f"x dy {_ROWS_REDUCTION} {_BACKWARD_REDUCE}",
    "rows_backward_input": f"x dy dx {_ROWS_ELEMENTWISE} {_BACKWARD_INPUT}",
    "merge_parts": "(parts num_parts) channels (label alarm place) moments",
}


# What stands in the tuple that is the last argument, where the kernel has an activation.
EXTRAS: Final = {
    "normalize": "negative_slope",
    "backward_reduce": "bias bias_code negative_slope",
    "backward_input": "bias bias_code negative_slope",
}


def signature_of(kernel: str) -> str:
    """That of a kernel, such as "rows_normalize" or "rows_normalize+silu"."""
    base, _, activation = kernel.partition("+")
    step = base.partition("_")[2]
    last = f" ({EXTRAS[step] if activation else ''})" if step in EXTRAS else ""
    return SIGNATURES[base] + last


def codes_of(signature: str) -> str:
    """A letter per argument: "q" for an int64 (pointers, sizes, codes), "d" for a float64."""
    found = re.sub(r"\w+", lambda name: "d" if name[0] in _FLOATS else "q", signature)
    return found.replace(" ", "")
