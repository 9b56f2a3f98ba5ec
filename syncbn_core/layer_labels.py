"""Labels: which layer a member is in, as one number that is sent with the moments.

The last number of each row of moments is a label:

    label = 4 * hash + 2 * later + without_kernels

`without_kernels` is 1 if plain operations compute; `later` is 1 if the member can't look at labels
in the call itself because they are on a device. Then all members look later, in the same call. The
hash covers what must be the same on all members: the version of the messages, the dtype of the
input, and the layer's identity. That is its name in its model, and its number among the layers with
this name, in the order of their first calls. A layer outside of models has the name "".

All members get the same rows, so all notice unlike labels in the same call, and all go on to one
more `all_gather` of what they know about the layer (`_Facts`). With it each of them judges alike:

- Members without kernels beside members with them: right, and reported once.
- Another version or dtype: an error.
- Names that differ because a member has put the model into a larger one: right. Such names agree
  in one of the models that hold the layer, and on some member nothing holds that model.
- A layer without a name on some member: right. It has only a number.
- Other names, and a layer that was in the call of another layer before: an error.

What is found right is remembered, so later calls with the same labels send nothing more. The
environment variable SYNCBN_IDENTITY=warn turns the errors about names into warnings, and
SYNCBN_IDENTITY=off leaves the identity out.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from syncbn_core.comm import CollectiveCall, Communicator
from syncbn_core.comm.message_arrays import HostCopy
from syncbn_core.errors import ArgumentError, DTypeError, ProtocolError

__all__ = [
    "LATER",
    "CallSite",
    "GroupLabels",
    "LayerNames",
    "OwnLabels",
    "is_label",
    "labels_in",
    "not_the_same_layer",
]

Array = Any

VERSION = 3  # of the rows and sums that members send each other
IDENTITY_VARIABLE = "SYNCBN_IDENTITY"
FACTS = 8192  # bytes of the message with the facts of one member
MOST_KEYS = 100
LONGEST_NAME = 300

# The host looks at labels on a device so many calls later, when the device has usually finished.
# All members count alike, so all look in the same call.
CALLS_LATER = 8

_HINT = "over processes SYNCBN_CHECK_ORDER=1 says which rank does what"
_HASH_BITS = 50
_LOWEST = 2 << _HASH_BITS  # of labels, because each hash has its highest bit set
LATER = 2  # a bit of a label
_DTYPES = ("float16", "bfloat16", "float32", "float64")  # others are not compared


class LayerNames(NamedTuple):
    """How a framework names its layers.

    `name(layer)`: its name in its model, "" outside of models. `keys(layer)`: a text for each
    model that holds the layer, the same on all members for the same layer in the same model, and
    whether nothing holds that model; empty for a layer outside of models.
    """

    name: Callable[[Any], str]
    keys: Callable[[Any], Sequence[tuple[str, bool]]]


UNNAMED = LayerNames(lambda layer: "", lambda layer: ())


class CallSite(NamedTuple):
    """Which layers exchange, in one message.

    Attributes:
        name: returns what errors call them; called only when they need it.
        dtypes: those of the inputs, by NumPy's names, one for each part.
        layers: an object for each part, the same in every call of a layer; () for none.
        names: how to name these objects.
    """

    name: Callable[[], str]
    dtypes: tuple[str, ...] = ()
    layers: tuple[Any, ...] = ()
    names: LayerNames = UNNAMED


class _Layer:
    """What a member knows about one of its layers.

    Attributes:
        name: its name in its model.
        number: its number among the layers of this name, from 1.
        identity: a hash of both.
        met: a hash of the identities of all members in its calls; 0 before the first.
        hashes: of its labels, by dtype.
    """

    __slots__ = ("hashes", "identity", "met", "name", "number")

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.identity = _hash(name, number)
        self.met = 0
        self.hashes: dict[str, int] = {}


class OwnLabels(NamedTuple):
    """The labels of a member's parts, its layers (None without), and which of them are new."""

    labels: list[int]
    layers: list[_Layer | None]
    new: list[Any]


class _Facts(NamedTuple):
    """What a member tells the others about its layer; `keys` and `roots` hold hashes."""

    version: int
    mode: str
    dtype: str
    identity: int  # 0 for no layer
    met: int
    keys: list[int]
    roots: list[int]  # those of the models that nothing holds
    text: str

    def to_row(self) -> Array:
        """As float64 numbers, which every communicator can send."""
        return np.frombuffer(bytearray(json.dumps(self).encode().ljust(FACTS)), np.float64)

    @classmethod
    def from_row(cls, row: Array) -> _Facts:
        """Raises `ValueError` if the row holds something else."""
        return cls(*json.loads(row.tobytes()))


class _Waiting(NamedTuple):
    """A call on a device whose labels, for each part, are judged in call number `turn`."""

    turn: int
    copies: Sequence[HostCopy]
    own: OwnLabels
    site: CallSite
    call: CollectiveCall


class GroupLabels:
    """The labels of one member of a group, and which labels of all members go together."""

    def __init__(self) -> None:
        self.mode = _mode()
        self._layers: WeakKeyDictionary[Any, _Layer] = WeakKeyDictionary()
        self._numbers: Counter[str] = Counter()
        self._hashes_without_layer: dict[str, int] = {}
        self._accepted: set[tuple[float, ...]] = set()
        self._calls = 0
        self._later: deque[_Waiting] = deque()

    def own(self, site: CallSite, parts: int) -> OwnLabels:
        """The labels of this member's parts; numbers its layers in their first calls."""
        labels, layers, new = [], [], []
        for index in range(parts):
            dtype = site.dtypes[index] if index < len(site.dtypes) else ""
            known = None
            if site.layers and self.mode != "off":
                layer = site.layers[index]
                known = self._layers.get(layer)
                if known is None:
                    known = self._layers[layer] = self._numbered(site.names.name(layer))
                    new.append(layer)
            layers.append(known)
            hashes = self._hashes_without_layer if known is None else known.hashes
            found = hashes.get(dtype)
            if found is None:
                identity = 0 if known is None else known.identity
                found = hashes[dtype] = _hash(VERSION, dtype, identity)
            labels.append(4 * found)
        return OwnLabels(labels, layers, new)

    def _numbered(self, name: str) -> _Layer:
        self._numbers[name] += 1
        return _Layer(name, self._numbers[name])

    def position(self, site: CallSite) -> str:
        """Which of the layers without a name this is, as text; "" for layers with a name."""
        known = self._layers.get(site.layers[0]) if site.layers else None
        return "" if known is None or known.name else f"layer {known.number}"

    def forget(self, own: OwnLabels) -> None:
        """Take back the numbers of new layers: members may have called different ones, or none."""
        for layer in own.new:
            self._numbers[self._layers.pop(layer).name] -= 1

    def are_alike(self, labels: list[float]) -> bool:
        """Whether the labels of all members are alike, or were found right before."""
        return labels.count(labels[0]) == len(labels) or tuple(labels) in self._accepted

    def judge_now_or_later(
        self,
        communicator: Communicator,
        of_parts: Sequence[list[float]],
        own: OwnLabels,
        site: CallSite,
        call: CollectiveCall,
    ) -> None:
        """`judge`, at the same time as members whose labels are on a device."""
        if any(int(label) & LATER for labels in of_parts for label in labels):
            copies = [HostCopy(partial(np.asarray, labels)) for labels in of_parts]
            self.judge_later(communicator, copies, own, site, call)
        else:
            self.judge(communicator, of_parts, own, site, call)

    def judge(
        self,
        communicator: Communicator,
        of_parts: Sequence[list[float]],
        own: OwnLabels,
        site: CallSite,
        call: CollectiveCall,
    ) -> None:
        """Raise if the labels of the members, for each part, do not go together.

        Every member calls it with the same labels, and all raise the same kind of error:
        `ProtocolError` for unlike layers or versions, `DTypeError` for unlike dtypes.
        """
        for index, labels in enumerate(of_parts):
            if not self.are_alike(labels):
                if len({int(label) >> 2 for label in labels}) > 1:
                    self._compare(communicator, index, own.layers[index], site, call)
                self._accepted.add(tuple(labels))
        for known in own.layers:
            if known is not None and not known.met:
                known.met = known.identity

    def judge_later(
        self,
        communicator: Communicator,
        copies: Sequence[HostCopy],
        own: OwnLabels,
        site: CallSite,
        call: CollectiveCall,
    ) -> None:
        """`judge` labels that come from a device, some calls later."""
        self._later.append(_Waiting(self._calls + CALLS_LATER, copies, own, site, call))

    def begin(self, communicator: Communicator) -> None:
        """Count a call of the group, after judging the earlier calls whose turn has come."""
        self._calls += 1
        while self._later and self._later[0].turn <= self._calls:
            if not self._later[0].copies[-1].may_wait():
                return
            self._judge_waiting(communicator, self._later.popleft())

    def _judge_waiting(self, communicator: Communicator, waiting: _Waiting) -> None:
        _, copies, own, site, call = waiting
        wait_until = getattr(communicator, "wait_until", None)  # with a deadline
        if wait_until is not None:
            wait_until(copies[-1].done)
        of_parts = [copy.values().tolist() for copy in copies]
        if not all(map(is_label, chain.from_iterable(of_parts))):
            raise ProtocolError(not_the_same_layer(call))
        self.judge(communicator, of_parts, own, site, call)

    def _compare(
        self,
        communicator: Communicator,
        index: int,
        known: _Layer | None,
        site: CallSite,
        call: CollectiveCall,
    ) -> None:
        """Gather the facts of all members about their layers, and raise if these are unlike."""
        keys = () if known is None else site.names.keys(site.layers[index])[:MOST_KEYS]
        own = _Facts(
            VERSION,
            self.mode,
            site.dtypes[index] if index < len(site.dtypes) else "",
            0 if known is None else known.identity,
            0 if known is None else known.met,
            [_hash(key) for key, _ in keys],
            [_hash(key) for key, is_root in keys if is_root],
            ", ".join(filter(None, (site.name()[:LONGEST_NAME], self.position(site)))),
        )
        what = CollectiveCall(lambda: f"comparison of layers after {call}", remedy=call.remedy)
        rows = communicator.all_gather(own.to_row(), what)
        try:
            facts = [_Facts.from_row(np.asarray(row)) for row in rows]
        except (ValueError, TypeError) as error:  # of a member that is in another call
            raise ProtocolError(not_the_same_layer(call)) from error
        _require_alike(facts, call)
        met = self._require_same_layer(facts, call)
        if known is not None:
            known.met = met

    def _require_same_layer(self, facts: Sequence[_Facts], call: CollectiveCall) -> int:
        """A hash of the identities of all members; raises if these can't be the same layer."""
        with_layer = [one for one in facts if one.identity]
        identities = [one.identity for one in with_layer]
        if len(set(identities)) < 2:
            return identities[0] if identities else 0
        met = _hash(*identities)
        if all(one.met in (0, met) for one in with_layer) and _may_be_same_layer(with_layer):
            return met
        names = "; ".join(f"rank {rank}: {one.text}" for rank, one in enumerate(facts))
        text = not_the_same_layer(call, names)
        if any(one.mode == "error" for one in facts):
            raise ProtocolError(
                f"{text}; if they are the same, set {IDENTITY_VARIABLE}=warn on all members"
            )
        warnings.warn(f"{text}; their statistics are mixed", stacklevel=2)
        return met


# By communicator, each of which is one member of one group.
_groups: WeakKeyDictionary[Communicator, GroupLabels] = WeakKeyDictionary()


def labels_in(communicator: Communicator) -> GroupLabels:
    """The labels of this member; new ones if the communicator takes no weak references."""
    try:
        labels = _groups.get(communicator)
        if labels is None:
            labels = _groups[communicator] = GroupLabels()
    except TypeError:  # a class of the user's that has no hash, or takes no weak references
        return GroupLabels()
    return labels


def is_label(number: float) -> bool:
    """Whether this number can be a label: other numbers of the same message can't."""
    return _LOWEST <= number < 2 * _LOWEST and number == int(number)


def not_the_same_layer(call: CollectiveCall, names: str = "") -> str:
    """The text of the error for members in different layers or calls."""
    text = f"expected all members in the same layer, they are in different ones in {call}"
    return f"{text}: {names}; {call.remedy}" if names else f"{text}; {call.remedy}: {_HINT}"


def _require_alike(facts: Sequence[_Facts], call: CollectiveCall) -> None:
    """Raise if versions or dtypes differ."""
    versions = {rank: one.version for rank, one in enumerate(facts)}
    if len(set(versions.values())) > 1:
        raise ProtocolError(
            f"expected the same version of syncbn's messages on all members, got {versions} in "
            f"{call}; install the same syncbn everywhere"
        )
    if len({one.dtype for one in facts} & set(_DTYPES)) > 1:
        dtypes = {rank: one.dtype for rank, one in enumerate(facts)}
        raise DTypeError(
            f"expected input of one dtype on all members, got {dtypes} in {call}; check autocast "
            "and the dtype of the data there"
        )


def _may_be_same_layer(facts: Sequence[_Facts]) -> bool:
    """Whether members with unlike names may be in the same layer."""
    if not all(one.keys for one in facts):
        return True  # outside of models a layer has only a number
    common = set.intersection(*(set(one.keys) for one in facts))
    return any(key in common for one in facts for key in one.roots)


def _hash(*values: Any) -> int:
    """50 bits, of which the highest is set."""
    digest = blake2b(repr(values).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (65 - _HASH_BITS) | 1 << (_HASH_BITS - 1)


def _mode() -> str:
    """The setting of SYNCBN_IDENTITY: "error", the default, "warn" or "off"."""
    mode = os.environ.get(IDENTITY_VARIABLE, "").strip().lower() or "error"
    if mode not in ("error", "warn", "off"):
        raise ArgumentError(
            f"expected the environment variable {IDENTITY_VARIABLE} to be error, warn or off, got "
            f"{mode!r}; set it to one of these or unset it"
        )
    return mode
