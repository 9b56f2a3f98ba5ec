"""The names by which errors, and the members of a group, tell layers apart."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from syncbn_core.comm import run_in_threads, thread_group
from syncbn_core.errors import ProtocolError
from syncbn_core.exchange import Exchange
from syncbn_core.moments import Moments
from syncbn_torch import SynchronizedBatchNorm2d
from syncbn_torch.module_names import LAYER_NAMES, name_of


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_layer_has_its_path_in_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ModuleDict({"bn": SynchronizedBatchNorm2d(2)}))
    assert name_of(model[1]["bn"]) == "1.bn (SynchronizedBatchNorm2d)"


def test_wrappers_are_left_out() -> None:
    wrapped = Wrapper(nn.Sequential(SynchronizedBatchNorm2d(2)))
    assert name_of(wrapped.module[0]) == "0 (SynchronizedBatchNorm2d)"


def test_a_layer_alone_is_its_class() -> None:
    assert name_of(SynchronizedBatchNorm2d(2)) == "SynchronizedBatchNorm2d"


# ------------------------------------------------- which layers of members belong together


def build(tree: Any, features: int = 2) -> nn.Module:
    """A model from nested tuples: a leaf is a batch norm, or a module without statistics."""
    if isinstance(tree, bool):
        return SynchronizedBatchNorm2d(features) if tree else nn.ReLU()
    return nn.Sequential(*(build(branch) for branch in tree))


def within(model: nn.Module, how: str, place: int) -> Any:
    """What a member does with its model; the result keeps what holds it alive."""
    if how == "owner":
        return nn.ModuleDict({"model": model, "ema": copy.deepcopy(model), "head": nn.Linear(1, 1)})
    if how == "wrapper":
        return Wrapper(Wrapper(model))
    if how == "second holder":
        return nn.ModuleDict({f"long name {i}": m for i, m in enumerate(model.modules()) if i})
    if how == "inner wrapper":
        children = list(model.named_children())
        name, child = children[place % len(children)]
        model.add_module(name, Wrapper(child))
    return model


TREES = st.recursive(
    st.booleans(), lambda inner: st.lists(inner, min_size=1, max_size=2).map(tuple)
)
WAYS = st.sampled_from(["plain", "owner", "wrapper", "second holder", "inner wrapper"])


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    tree=st.lists(TREES, min_size=2, max_size=4).map(tuple),
    ways=st.tuples(WAYS, WAYS, WAYS),
    place=st.integers(0, 3),
    shuffled=st.randoms(use_true_random=False),
)
def test_members_may_hold_a_model_as_they_like_but_not_mix_up_its_layers(
    tree: Any, ways: tuple[str, ...], place: int, shuffled: Any
) -> None:
    group = thread_group(3, timeout=20)
    models = [build(tree) for _ in group]
    layers = [
        [m for m in model.modules() if isinstance(m, SynchronizedBatchNorm2d)] for model in models
    ]
    held = [within(model, way, place) for model, way in zip(models, ways, strict=True)]
    order = list(range(len(layers[0])))
    shuffled.shuffle(order)

    def call(member: int, index: int) -> int:
        layer = layers[member][index]
        own = Exchange(group[member], partial(name_of, layer), "float32", layer, LAYER_NAMES)
        part = Moments.of(member + 1, np.ones(2), np.ones(2))
        total, _ = own.moments(part, own.begin(2))
        return int(total.count)

    def together(indices: Sequence[int]) -> list[int]:
        return run_in_threads([partial(call, i, index) for i, index in enumerate(indices)])

    for index in order:
        assert together([index] * 3) == [6] * 3
    if len(order) > 1:
        with pytest.raises(ProtocolError, match="same layer"):
            together([order[0], order[1], order[0]])
    del held


@settings(max_examples=5, deadline=None)
@given(
    tree=st.lists(TREES, min_size=2, max_size=4).map(tuple),
    ways=st.tuples(WAYS, WAYS),
    place=st.integers(0, 3),
    chosen=st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_layers_mixed_up_in_their_first_call_are_told(
    tree: Any, ways: tuple[str, ...], place: int, chosen: tuple[int, int]
) -> None:
    group = thread_group(2, timeout=20)
    models = [build(tree) for _ in group]
    layers = [
        [m for m in model.modules() if isinstance(m, SynchronizedBatchNorm2d)] for model in models
    ]
    held = [within(model, way, place) for model, way in zip(models, ways, strict=True)]
    if len(layers[0]) < 2:
        return
    first, second = (index % len(layers[0]) for index in chosen)
    if first == second:
        return

    def call(member: int, index: int) -> None:
        layer = layers[member][index]
        own = Exchange(group[member], partial(name_of, layer), "float32", layer, LAYER_NAMES)
        own.moments(Moments.of(1, np.ones(2), np.ones(2)), own.begin(2))

    with pytest.raises(ProtocolError, match="same layer"):
        run_in_threads([partial(call, 0, first), partial(call, 1, second)])
    del held
