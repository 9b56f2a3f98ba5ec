"""Containers of every kind split and join; what can't be is named with its path."""

import argparse
import copy
import dataclasses
import warnings
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils import _pytree

from syncbn_core.errors import ShapeError
from syncbn_torch import DataParallelWithCallback, Shared, SynchronizedBatchNorm1d


class Calls(nn.Module):
    """Returns what `function` makes of the arguments, and keeps them in the order of replicas."""

    def __init__(self, function: Callable[..., Any] = lambda x: x) -> None:
        super().__init__()
        self.function = function
        self.got: dict[int, Any] = {}
        self.copy_id = 0

    def __data_parallel_replicate__(self, context: Any, copy_id: int) -> None:
        self.copy_id = copy_id

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.got[self.copy_id] = args[0] if args else kwargs
        return self.function(*args, **kwargs)


def halves(tree: Any, **settings: Any) -> tuple[list[Any], Any]:
    """What each of two replicas gets for `tree`, and what joins from it."""
    model = Calls()
    joined = DataParallelWithCallback(model, replicas=2, **settings)(tree)
    return [model.got[i] for i in sorted(model.got)], joined


class Pair(NamedTuple):
    x: Any
    y: Any


class OtherPair(Pair):
    pass


@dataclasses.dataclass
class Batch:
    x: Any
    y: Any = None
    name: str = "set"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenBatch:
    x: Any
    y: Any


@dataclasses.dataclass
class Computed:
    """Its constructor computes a field, and takes something that is no field."""

    x: Any
    factor: dataclasses.InitVar[int]
    y: Any = dataclasses.field(init=False)

    def __post_init__(self, factor: int) -> None:
        self.y = self.x * factor


class Registered:
    def __init__(self, x: Any, y: Any, unit: str) -> None:
        self.x, self.y, self.unit = x, y, unit


_pytree.register_pytree_node(
    Registered, lambda r: ([r.x, r.y], r.unit), lambda values, unit: Registered(*values, unit)
)


class OtherList(list[Any]):
    pass


x, y = torch.randn(5, 2), torch.randn(5, 3)

TREES: list[tuple[Any, Callable[[Any], Any]]] = [
    ((x, y), lambda t: t),
    ([x, [y]], lambda t: (t[0], t[1][0])),
    ({"x": x, 3: y}, lambda t: (t["x"], t[3])),
    (Pair(x, y), lambda t: t),
    (OtherPair(x, y), lambda t: t),
    (Batch(x, y, "own"), lambda t: (t.x, t.y) if t.name == "own" else None),
    (FrozenBatch(x, y), lambda t: (t.x, t.y)),
    (Computed(x, 2), lambda t: (t.x, t.y)),
    (Registered(x, y, "m"), lambda t: (t.x, t.y) if t.unit == "m" else None),
    (UserDict(x=x, y=y), lambda t: (t["x"], t["y"])),
    (OrderedDict(x=x, y=y), lambda t: (t["x"], t["y"])),
    (defaultdict(list, x=x, y=y), lambda t: (t["x"], t["y"]) if t["z"] == [] else None),
    (MappingProxyType({"x": x, "y": y}), lambda t: (t["x"], t["y"])),
    (deque([x, y], maxlen=2), lambda t: tuple(t) if t.maxlen == 2 else None),
    (OtherList([x, y]), tuple),
    (torch.max(torch.randn(5, 2, 3), 2), lambda t: (t.values, t.indices)),
    (Batch(Pair(x, UserDict(y=[y]))), lambda t: (t.x.x, t.x.y["y"][0])),
]


@pytest.mark.parametrize(("tree", "tensors"), TREES, ids=[type(tree).__name__ for tree, _ in TREES])
def test_every_kind_of_container_splits_and_joins(tree: Any, tensors: Any) -> None:
    first, second = tensors(tree)
    before = copy.deepcopy((first, second))
    (a, b), joined = halves(tree)
    for made, part in ((a, slice(3)), (b, slice(3, 5)), (joined, slice(5))):
        assert type(made) is type(tree)
        for value, whole in zip(tensors(made), (first, second), strict=True):
            assert torch.equal(value, whole[part])
    assert all(map(torch.equal, tensors(tree), before))  # the caller's own is as it was


def test_results_and_gradients_through_dataclasses_are_those_of_the_whole_batch() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = SynchronizedBatchNorm1d(2)

        def forward(self, batch: Batch) -> Batch:
            z = self.bn(batch.x)
            return Batch(z, z.square().sum(), batch.name)

    model, leaf, twin = Model(), x.clone().requires_grad_(), x.clone().requires_grad_()
    out = DataParallelWithCallback(model, replicas=3)(Batch(leaf, name="own"))
    expected = nn.BatchNorm1d(2)(twin)
    torch.testing.assert_close(out.x, expected)
    assert out.name == "own"
    assert out.y.shape == (3,)  # a scalar of each replica, as nn.DataParallel
    (out.x.pow(3).sum() + out.y.sum()).backward()
    (expected.pow(3).sum() + expected.square().sum()).backward()
    torch.testing.assert_close(leaf.grad, twin.grad)


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


UNSPLITTABLE: list[tuple[Any, str]] = [
    (Holder(x), r"a Holder at args\[1\] with a tensor at args\[1\]\.value; .*Shared"),
    ({"boxes": [Holder(x)]}, r"args\[1\]\['boxes'\]\[0\]\.value"),
    (Holder({"a": x, "b": 1}), r"args\[1\]\.value"),
    (Holder([Holder(x)]), r"args\[1\]\.value"),  # as a DynamicCache of transformers
    (argparse.Namespace(x=x), r"args\[1\]\.x"),
    ({x}, r"a set at args\[1\]"),
    (Batch(iter([])), r"a list_iterator at args\[1\]\['x'\], an iterator"),
    ((value for value in [x]), r"a generator at args\[1\], an iterator.*pass a list"),
    (zip([x], [x], strict=True), r"a zip at args\[1\]"),
    (pack_sequence([x, y[:, :2]]), r"a PackedSequence at args\[1\] with a tensor at .*\.data"),
    (x.to_sparse(), r"args\[1\] of layout torch.sparse_coo"),
]


@pytest.mark.parametrize(("thing", "text"), UNSPLITTABLE)
def test_an_argument_that_cannot_be_split_is_named_with_its_path(thing: Any, text: str) -> None:
    model = Calls(lambda x, thing: x)
    with pytest.raises(ShapeError, match=text):
        DataParallelWithCallback(model, replicas=2)(x, thing)
    assert not model.got
    DataParallelWithCallback(Calls(lambda x, thing: x), replicas=1)(x, thing)  # nothing to split


def test_shared_arguments_go_to_every_replica_whole() -> None:
    weights = torch.randn(7, requires_grad=True)
    model = Calls(lambda x, w, batch: x[:, :1] * w.sum() + batch["w"][0].value.sum())
    expected = x[:, :1] * weights.sum() + weights.sum()
    for arguments in ({"replicas": 2}, {"replicas": 1}, {"device_ids": ["cpu"] * 5}):
        batch = {"w": Shared([Holder(weights)])}
        wrapper = DataParallelWithCallback(model, **arguments)
        torch.testing.assert_close(wrapper(x, Shared(weights), batch=batch), expected)
        torch.testing.assert_close(wrapper(x, w=Shared(weights), batch=batch), expected)
    torch.autograd.grad(wrapper(x, Shared(weights), batch=batch).sum(), weights)


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        (lambda i, x: Batch(x, i), r"same int .* output\['y'\] 0 from replica 0, 1 from replica 1"),
        (lambda i, x: Registered(x, [0, Batch(i, x)], "m"), r"at output\[1\]\[1\]\['x'\] 0 from"),
        (lambda i, x: Batch(None if i else x), r"at output\['x'\] Tensor from replica 0, NoneType"),
        (lambda i, x: {"a": [x, x[:, i:]]}, r"output\['a'\]\[1\] shape \(3, 2\) from replica 0"),
        (lambda i, x: (x, Holder(x)), r"a Holder with tensors at output\[1\] from each"),
        (lambda i, x: (x, shared), r"a Holder with tensors at output\[1\] from each"),
        (lambda i, x: (x, Holder(i)), r"the same Holder from all replicas, got at output\[1\]"),
        (lambda i, x: Registered(x, 1, "mk"[i]), r"others from replica 1 .* mismatch .*Registered"),
        (
            lambda i, x: Pair(x, [0] * i),
            r"the same list .* output\.y \[\] from replica 0",
        ),
        (lambda i, x: UserDict({str(i): x}), r"others from replica 1 .* missing key\(s\): {'0'}"),
        (lambda i, x: (x, x[0, 0] if i else x), r"output\[1\] shape \(3, 2\) from replica 0"),
    ],
)
def test_a_result_that_cannot_be_joined_is_named_with_its_path(outputs: Any, text: str) -> None:
    class Model(Calls):
        def forward(self, x: Tensor) -> Any:
            return outputs(self.copy_id, x)

    with pytest.raises(ShapeError, match=text):
        DataParallelWithCallback(Model(), replicas=2)(x)


shared = Holder(x)


# Lists of samples


class Detector(nn.Module):
    """Samples of their own sizes in, losses (training) or one result for each (eval) out."""

    def __init__(self) -> None:
        super().__init__()
        self.bn = SynchronizedBatchNorm1d(3)

    def forward(self, images: list[Tensor], targets: list[Any] | None = None) -> Any:
        features = self.bn(torch.stack([image.flatten(1).mean(1) for image in images]))
        if targets is not None:
            wanted = torch.stack([target["boxes"].sum() for target in targets])
            return {"loss": (features.sum(1) * wanted).sum()}
        return [
            {"boxes": torch.ones(i.shape[1], 4), "f": f}
            for i, f in zip(images, features, strict=True)
        ]


def samples(count: int = 5) -> tuple[list[Tensor], list[Any]]:
    return (
        [torch.randn(3, 4 + i, 5).double() for i in range(count)],
        [{"boxes": torch.randn(i, 4).double(), "meta": Holder(x)} for i in range(count)],
    )


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ("even", [3, 2]),
        ([1, 4], [1, 4]),
        (lambda n: [n - 2, 2], [3, 2]),
        ([5], [5]),
        (np.array([1, 4]), [1, 4]),
        ([np.int64(1), 4], [1, 4]),
        (lambda n: np.array([n]), [5]),
    ],
)
def test_lists_of_samples_split_by_sample(sizes: Any, expected: list[int]) -> None:
    model = Detector().double()
    twin = copy.deepcopy(model)
    wrapper = DataParallelWithCallback(model, replicas=2, batch_sizes=sizes)
    seen: list[int] = []
    model.register_forward_pre_hook(lambda m, args: seen.append(len(args[0])))
    images, targets = samples()
    losses = wrapper(images, targets=targets)
    assert sorted(seen) == sorted(expected)
    assert losses["loss"].shape == (len(expected),)
    torch.testing.assert_close(losses["loss"].sum(), twin(images, targets)["loss"])
    torch.testing.assert_close(model.bn.running_var, twin.bn.running_var)
    results = wrapper.eval()(images)
    torch.testing.assert_close(results, twin.eval()(images))


@pytest.mark.parametrize(
    ("sizes", "arguments", "text"),
    [
        ("even", ([x, x], y), r"one number of samples.* got 2 at args\[0\], 5 at args\[1\]"),
        ([2, 2], (x, y), r"batch of 5 and at most 2 replicas, got \[2, 2\], 4 in all"),
        ([2, 2, 1], (x, y), "at most 2 replicas"),
        (lambda n: [n, 0], (x, y), r"positive sizes from batch_sizes\(5\), got \[5, 0\]"),
        (lambda n: n, (x, y), "positive sizes"),
    ],
)
def test_sizes_that_do_not_fit_are_named(sizes: Any, arguments: Any, text: str) -> None:
    wrapper = DataParallelWithCallback(Calls(), replicas=2, batch_sizes=sizes)
    with pytest.raises(ValueError, match=text):
        wrapper(*arguments)


# Several GPUs, with stand-ins for what copies to and from them


class Echo(nn.Module):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x


@pytest.mark.parametrize("lengths", [[5, 3, 2, 1], (5, 3, 2, 1), ["a", "b", "c", None]])
def test_a_list_with_an_entry_per_sample_beside_a_tensor_is_named_once(lengths: Any) -> None:
    model = DataParallelWithCallback(Echo(), replicas=2)
    text = r"^args\[1\]\['n'\] has as many entries as .* set batch_sizes=\"even\""
    with pytest.warns(UserWarning, match=text) as caught:
        model(torch.ones(4, 2), {"n": lengths})
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(4, 2), {"n": lengths})
