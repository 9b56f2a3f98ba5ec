"""Labels: numbers at the end of messages, by which members notice that they are in other calls.

A label of moments, and of sums that a host adds up, is

    label = ((extra * 2**19 + number) * 8 + kind) * 4 + dtype

`number`: of the layer, by its first call in this group; a call without a layer (a graph on a device
does not know its own) sends 0 and is never compared.
`kind`: see `KINDS`. `extra`: in backward the number of the call in which the forward was; in
forward 12 bits of a hash of the layer's settings, and above them, in its first call, a hash of its
name, because two members may take their layers in another order from the first call on.

Sums on a device are added up by an `all_reduce`, with a label behind them. For P members, and k the
key of a member's call, it is

    label = k * B + k**2,    B greater than the sum of k**2 over any P members

So the total of the labels holds both sum(k) and sum(k**2), exactly, in any order of addition. It is
P times a member's own label only if sum((k_i - mean(k))**2) is zero: all members have one key.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

__all__ = [
    "BACKWARD",
    "DTYPES",
    "FORWARD",
    "FORWARD_IN_GRAPH",
    "KINDS",
    "NAMED",
    "NAME_UNIT",
    "OF_MOMENTS",
    "OF_SUMS",
    "SETTINGS",
    "WITH_GRAPH",
    "Labels",
    "differ",
    "label_of",
    "label_of_sum",
    "may_be_one_layer",
    "modulus_of",
    "place_of",
    "same_settings",
    "what_is_at",
]

Array = Any

FORWARD, BACKWARD, WITH_GRAPH, OF_MOMENTS, OF_SUMS, FORWARD_IN_GRAPH = range(6)
KINDS = (
    "forward",
    "backward",
    "backward with create_graph=True",
    "second derivative, by moments,",
    "second derivative, by sums,",
    "forward, compiled within DistributedDataParallel,",
)
DTYPES = ("float32", "float64", "float16", "bfloat16")
SETTINGS, NAMED = 1 << 12, 1 << 15
_NUMBERS, _EXTRA_LIMIT, _CALLS = 1 << 19, 1 << 28, 1 << 30
_DIGITS = 53  # significant bits of a float64
# by digits, up to those of 65 members; not 3, of which layers are multiples apart
_PRIMES = (1, 1, 2, 7, 13, 31, 61, 127, 251, 509, 1021, 2039, 4093, 8191)
_EXTRA_UNIT = 32 * _NUMBERS  # what 1 of the extra adds to a label,
NAME_UNIT = _EXTRA_UNIT * SETTINGS  # and 1 of the hash of a name: labels without one are less


class Labels(NamedTuple):
    """The label of a message on a device, where kernels write and compare it.

    Attributes:
        own: what this member's message ends with.
        expected: what has to stand in the place of a label in the message of all members: behind
            sums exactly this, behind the moments of each member one that does not `differ`.
        alarm: the `Alarm` of the group.
        place: what to write there if labels are wrong, see `place_of`.
        rows: in forward, memory for the moments of all members `(P, 2 C + 2)`; `row`: this member's
            part of it, `(1, 2 C + 2)`.
    """

    own: float
    expected: float
    alarm: Any
    place: float
    rows: Array = None
    row: Array = None

    def check_rows(self, rows: Array) -> None:
        """Compare the labels of moments, `(P, 2 C + 2)`, by operations of their library."""
        self.alarm.sound(differ(rows[:, -1], self.expected).any().reshape(1), self.place)

    def check_total(self, total: Array) -> Array:
        """Compare the label of sums `(2 C + 1,)`: whether it is wrong, a bool `(1,)`."""
        wrong = total[-1:] != self.expected
        self.alarm.sound(wrong, self.place)
        return wrong


def label_of(kind: int, number: int, extra: int, dtype: str) -> float:
    """The label of moments, or of sums that a host adds up."""
    code = DTYPES.index(dtype) if dtype in DTYPES else 0
    numbers = extra % _EXTRA_LIMIT * _NUMBERS + 1 + number % (_NUMBERS - 1)
    return float((numbers * 8 + kind) * 4 + code)


def label_of_sum(key: Any, size: int) -> Any:
    """The label of a sum on a device, with this `key` of the call for `size` members; exact.

    `key`: an int; or an array of float64, and so is the label.

    Returns 0, which detects nothing, for key 0, and for so many members that no digits are left.
    """
    members = (size - 1).bit_length()
    digits = _digits_of(size)
    if digits < 2 or (isinstance(key, int) and key == 0):
        return 0 * key  # of an array: an array
    k = 1 + (key - 1) % modulus_of(size)  # never 0
    return k * (1 << (members + 2 * digits)) + k * k


@cache
def _digits_of(size: int) -> int:
    """The digits of k in the labels of sums."""
    return (_DIGITS - 2 * (size - 1).bit_length()) // 3


@cache
def modulus_of(size: int) -> int:
    """After how many keys those of sums repeat: a prime, so that no two layers do so in each step.

    Composite ones have factors in common with what is between the labels of two layers.
    """
    digits = _digits_of(size)
    return _PRIMES[digits] if digits < len(_PRIMES) else (1 << digits) - 1


def differ(labels: Array, own: float) -> Array:
    """Whether labels of forwards, an array or a number, can't be of the layer whose label is `own`.

    `differ` in `_kernels/cuda/statistics.py` does the same.
    """
    layers, layer = labels // 32 % (_NUMBERS * SETTINGS), own // 32 % (_NUMBERS * SETTINGS)
    known = (layers % _NUMBERS != 1) & (layer % _NUMBERS != 1)
    of_something_else = (labels < 32) | (labels >= 2.0**53)
    return of_something_else | (labels % 32 != own % 32) | ((layers != layer) & known)


def may_be_one_layer(labels: Sequence[float]) -> bool:
    """Whether kinds and layers agree, in backward the calls too; 0 matches every layer."""
    kinds = {label // 4 % 8 for label in labels}
    numbers = {label // 32 % _NUMBERS for label in labels} - {1.0}
    calls = {label // _EXTRA_UNIT for label in labels}
    of_one_call = kinds <= {FORWARD, FORWARD_IN_GRAPH} or len(calls) == 1
    return len(kinds) == 1 and len(numbers) < 2 and of_one_call


def same_settings(labels: Sequence[float]) -> bool:
    """Whether the settings in labels of forwards agree, but for calls without a layer."""
    own = {label // _EXTRA_UNIT % SETTINGS for label in labels if label // 32 % _NUMBERS != 1}
    return len(own) < 2


def place_of(call: int, kind: int, number: int) -> float:
    """A float64, not 0, that says in which call of a member labels were wrong."""
    return float(((1 + call % (_CALLS - 1)) * 8 + kind) * _NUMBERS + number % _NUMBERS)


def what_is_at(place: float) -> tuple[int, int, int]:
    """`(call, kind, number)`, as `place_of` took them."""
    rest, number = divmod(int(place), _NUMBERS)
    return rest // 8 - 1, rest % 8, number
