"""Labels that detect an `all_reduce` whose members are in different calls.

If members run different branches of a program, arrays of the same size that belong to different
calls may be added up. To detect this, every member appends a label to its message. For P members,
and k the key of the member's call,

    label = k * B + k**2,    B greater than the sum of k**2 over any P members

The total of the labels therefore holds both sum(k) and sum(k**2), and it is exact in any order of
addition. It equals P times a member's own label only if sum((k_i - mean(k))**2) is zero, which
means that all members have the same key. So every member detects the mistake without a further
message.

On a GPU the host does not wait for the total. The device replaces wrong sums by NaN, and the host
checks the label once it has been copied.
"""

from __future__ import annotations

from typing import Any

__all__ = ["label_of"]

_DIGITS = 53  # significant bits of a float64


def label_of(key: Any, size: int) -> Any:
    """The label of `key` for `size` members, exact in float64.

    `key`: an int; or an array of float64, and so is the label.

    Returns 0, which detects nothing, for key 0, and for so many members that no digits are left.
    """
    members = (size - 1).bit_length()
    digits = (_DIGITS - 2 * members) // 3
    if digits < 2 or (isinstance(key, int) and key == 0):
        return 0 * key  # of an array: an array
    k = 1 + (key - 1) % ((1 << digits) - 1)  # never 0; keys repeat after 2**digits - 1 calls
    return k * (1 << (members + 2 * digits)) + k * k
