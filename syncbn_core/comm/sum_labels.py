"""The number that travels with the message of an `all_reduce` and says of which call it is.

Where members run different branches of a program, sums of one size meet that belong to different
calls. So every member adds a label to its message: for the key k of its call,

    label = k * B + k**2,    B greater than the sum of k**2 over any P members

The total of the labels holds sum(k) and sum(k**2) side by side, and is exact in any order. It is P
times a member's own label only where sum((k_i - mean(k))**2) is zero: where all members have the
same key. So every member sees a mix-up, and no further message is needed.

On a GPU the host does not wait for the total: the device itself puts NaN in place of sums that
don't belong together, and the host looks at the label when it has come.
"""

from __future__ import annotations

__all__ = ["label_of"]

_DIGITS = {8: 53, 4: 24}  # binary digits that a float of so many bytes has


def label_of(key: int, size: int, itemsize: int) -> int:
    """The label of `key` among `size` members, in numbers of `itemsize` bytes; 0 for key 0.

    0 too where so many members are too many for so few digits.
    """
    members = (size - 1).bit_length()
    digits = (_DIGITS.get(itemsize, 0) - 2 * members) // 3
    if key == 0 or digits < 2:
        return 0
    k = 1 + (key - 1) % ((1 << digits) - 1)  # never 0; keys repeat after 2**digits - 1 calls
    return (k << (members + 2 * digits)) + k * k
