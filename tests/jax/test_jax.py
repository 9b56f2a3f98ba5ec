"""The adapter for JAX and Flax: members of every kind against the undivided batch in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from syncbn_core import batch_norm_forward
from syncbn_core.errors import ArgumentError, BackendError, DTypeError, ShapeError
from syncbn_jax import Running, batch_norm
from syncbn_jax.nnx import BatchNorm, convert_model, revert_model

jax.config.update("jax_num_cpu_devices", 8)

ROOT = Path(__file__).parents[2]
SHAPE = (16, 5, 6, 4)
AXES = (0, 1, 2)
RNG = np.random.default_rng(0)
DY = RNG.normal(size=SHAPE).astype(np.float32)
WEIGHT, BIAS = RNG.normal(1, 0.3, 4).astype(np.float32), RNG.normal(size=4).astype(np.float32)
RUNNING = Running(jnp.zeros(4), jnp.ones(4))
UNEVEN = np.zeros((16, 1, 1, 1), bool)
UNEVEN[[2, 3, 4, 9, 10]] = True  # of eight members four are empty
PER_CHANNEL = RNG.random(SHAPE) < 0.7
PER_CHANNEL[:2] = False


def batch(mean: float = 3.0, dtype: Any = np.float32) -> np.ndarray:
    return (np.random.default_rng(1).normal(0, 2, SHAPE) + mean).astype(dtype)


def formula(x: Any, mask: Any = True, dy: Any = DY) -> tuple[np.ndarray, ...]:
    """y, dx, dweight, dbias, mean and variance in float64."""
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    valid = np.broadcast_to(mask, x.shape)
    n, mean = valid.sum(AXES), x.mean(AXES, where=valid)
    var = x.var(AXES, where=valid)
    invstd = 1 / np.sqrt(var + 1e-5)
    xhat, dxhat = (x - mean) * invstd, dy * WEIGHT
    means = dxhat.sum(AXES) / n + xhat * (dxhat * xhat).sum(AXES) / n
    dx = invstd * (dxhat - valid * means)
    return xhat * WEIGHT + BIAS, dx, (dy * xhat).sum(AXES), dy.sum(AXES), mean, var


def step(
    x: Any, weight: Any, bias: Any, running: Any, dy: Any, mask: Any = None, **how: Any
) -> Any:
    def forward(x: Any, weight: Any, bias: Any) -> Any:
        return batch_norm(x, weight, bias, running, mask=mask, momentum=0.9, **how)

    y, back, new = jax.vjp(forward, x, weight, bias, has_aux=True)
    return y, back(dy), new


def compare(outputs: Any, wanted: tuple[np.ndarray, ...], atol: float = 4e-6) -> None:
    y, (dx, dweight, dbias), new = outputs
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted[0], rtol=0, atol=atol)
    np.testing.assert_allclose(np.asarray(dx, np.float64), wanted[1], rtol=0, atol=atol)
    for own, right in ((dweight, wanted[2]), (dbias, wanted[3])):
        np.testing.assert_allclose(np.asarray(own), right, rtol=1e-5, atol=200 * atol)
    np.testing.assert_allclose(new.mean, 0.1 * wanted[4], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(new.var, 0.9 + 0.1 * wanted[5], rtol=1e-6)


def mesh(kind: AxisType = AxisType.Auto, **axes: int) -> Any:
    axes = axes or {"d": 8}
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def eager(args: list[Any]) -> Any:
    return step(*args)


def jitted(args: list[Any]) -> Any:
    return jax.jit(step)(*args)


def sharded(args: list[Any], check_vma: bool = True, **axes: int) -> Any:
    names = tuple(axes) or ("d",)
    part, whole = P(names), P()
    specs = (part, whole, whole, whole, part, part)[: len(args)]
    function = partial(step, axis_name=names if axes else "d")
    if not check_vma:  # nobody adds up the gradients of what all members share

        def function(*args: Any) -> Any:
            y, (dx, *of_affine), new = step(*args, axis_name="d")
            return y, (dx, *lax.psum(of_affine, "d")), new

    out = (part, (part, whole, whole), whole)
    mapped = jax.shard_map(
        function, mesh=mesh(**axes), in_specs=specs, out_specs=out, check_vma=check_vma
    )
    return jax.jit(mapped)(*args)


def same(function: Any) -> Any:
    return function


def in_a_scan(function: Any) -> Any:
    return lambda *args: lax.scan(lambda _, __: (None, function(*args)), None, length=1)[1]


def mapped(args: list[Any], by: str, within: Any = same, around: Any = same, **axes: int) -> Any:
    names, sizes = (tuple(axes), tuple(axes.values())) if axes else ("d", (8,))
    x, weight, bias, running, *others = args
    x, *others = (each.reshape(*sizes, 2, *each.shape[1:]) for each in (x, *others))
    over = (0, None, None, None, *(0,) * len(others))
    function = within(partial(step, axis_name=names))
    for name in reversed(names):
        function = getattr(jax, by)(function, axis_name=name, in_axes=over)
    outputs = around(function)(x, weight, bias, running, *others)
    every = [each.reshape(8, -1) for each in jax.tree.leaves(outputs)]
    y, dx, dweight, dbias, mean, var = every
    for each in (mean, var):  # the same bits on all members
        assert (np.asarray(each) == np.asarray(each)[:1]).all()
    affine = dweight.sum(0), dbias.sum(0)
    return y.reshape(SHAPE), (dx.reshape(SHAPE), *affine), Running(mean[0], var[0])


def whole_arrays(args: list[Any], kind: AxisType) -> Any:
    here = mesh(kind)
    specs = (P("d"), P(), P(), P(), P("d"), P("d"))
    put = [
        jax.tree.map(lambda each, spec=spec: jax.device_put(each, NamedSharding(here, spec)), arg)
        for arg, spec in zip(args, specs, strict=False)
    ]
    with jax.set_mesh(here):
        return jax.jit(step)(*put)


WAYS: dict[str, Callable[[list[Any]], Any]] = {
    "eager": eager,
    "jit": jitted,
    "shard_map": sharded,
    "shard_map without checks": partial(sharded, check_vma=False),
    "shard_map over two axes": partial(sharded, a=2, b=4),
    "pmap": partial(mapped, by="pmap"),
    "vmap": partial(mapped, by="vmap"),
    "vmap within jit": partial(mapped, by="vmap", around=jax.jit),
    "jit within vmap": partial(mapped, by="vmap", within=jax.jit),
    "scan within vmap": partial(mapped, by="vmap", within=in_a_scan),
    "vmap over two axes": partial(mapped, by="vmap", a=2, b=4),
    "two of them within jit": partial(mapped, by="vmap", around=jax.jit, a=2, b=4),
    "sharded arrays": partial(whole_arrays, kind=AxisType.Auto),
    "explicit sharding": partial(whole_arrays, kind=AxisType.Explicit),
}


@pytest.mark.parametrize("mean", [0, 1e4])
@pytest.mark.parametrize("mask", [None, UNEVEN, PER_CHANNEL], ids=["all", "uneven", "channels"])
@pytest.mark.parametrize("way", WAYS)
def test_members_equal_the_undivided_batch(way: str, mask: Any, mean: float) -> None:
    x = batch(mean)
    args = [x, WEIGHT, BIAS, RUNNING, DY, *([] if mask is None else [mask])]
    compare(WAYS[way](args), formula(x, True if mask is None else mask))


@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 3e-2), ("float16", 4e-3)])
def test_16_bits_have_statistics_of_32(dtype: str, atol: float) -> None:
    x, dy = jnp.asarray(batch(), dtype), jnp.asarray(DY, dtype)
    y, (dx, dweight, _), new = outputs = sharded([x, WEIGHT, BIAS, RUNNING, dy])
    assert y.dtype == dx.dtype == dtype
    assert dweight.dtype == new.mean.dtype == jnp.float32
    compare(outputs, formula(x, dy=dy), atol)


def test_float64_with_channels_first() -> None:
    x = batch(1e6, np.float64)
    first = [np.moveaxis(each, -1, 1) for each in (x, DY.astype(np.float64))]
    with jax.enable_x64(True):
        y, (dx, *of_affine), new = jax.jit(partial(step, axis=1))(
            first[0], WEIGHT, BIAS, RUNNING, first[1]
        )
    outputs = np.moveaxis(y, 1, -1), (np.moveaxis(dx, 1, -1), *of_affine), new
    compare(outputs, formula(x), 1e-8)


def test_running_variance_without_bias() -> None:
    _, new = batch_norm(batch(), running=RUNNING, momentum=0, unbiased=True)
    np.testing.assert_allclose(new.var, batch().var(AXES, ddof=1), rtol=1e-5)
    y, same = batch_norm(batch(), WEIGHT, BIAS, new, training=False)
    assert same is new
    xhat = (batch() - new.mean) / np.sqrt(new.var + 1e-5)
    np.testing.assert_allclose(y, xhat * WEIGHT + BIAS, atol=1e-5)


def test_nothing_valid_changes_no_running_statistics() -> None:
    y, (dx, *_), new = sharded([batch(), WEIGHT, BIAS, RUNNING, DY, UNEVEN & False])
    for each in (y, dx):
        assert np.isfinite(each).all()
    assert (new.mean == 0).all()
    assert (new.var == 1).all()


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_space_may_be_sharded_too(kind: AxisType) -> None:
    here = jax.make_mesh((2, 3), ("a", "b"), devices=jax.devices()[:6], axis_types=(kind, kind))
    with jax.set_mesh(here):
        x = jax.device_put(np.moveaxis(batch(), 2, 1), NamedSharding(here, P("a", "b")))
        y, _ = jax.jit(partial(batch_norm, weight=WEIGHT, bias=BIAS))(x)
    np.testing.assert_allclose(np.moveaxis(y, 1, 2), formula(batch())[0], atol=4e-6)


def test_groups_of_members_are_batches_of_their_own() -> None:
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]
    how = {"axis_name": "d", "axis_index_groups": groups}
    x = batch().reshape(8, 2, *SHAPE[1:])
    y = jax.pmap(lambda x: batch_norm(x, WEIGHT, BIAS, **how)[0], axis_name="d")(x)
    own = formula(batch()[:8], dy=DY[:8])[0]
    np.testing.assert_allclose(np.asarray(y).reshape(SHAPE)[:8], own, atol=4e-6)


def plain(x: Any, weight: Any, bias: Any, mask: Any = True) -> Any:
    valid = jnp.broadcast_to(mask, x.shape)
    mean, var = x.mean(AXES, where=valid), x.var(AXES, where=valid)
    return (x - mean) / jnp.sqrt(var + 1e-5) * weight + bias


@pytest.mark.parametrize("mask", [True, UNEVEN], ids=["all", "uneven"])
def test_second_derivatives_and_forward_mode_over_members(mask: Any) -> None:
    mask = np.broadcast_to(mask, (16, 1, 1, 1))
    specs = P("d"), P(), P(), P("d")

    def ours(*args: Any) -> Any:
        own = partial(batch_norm, axis_name="d")
        function = jax.shard_map(
            lambda *args: own(*args[:3], mask=args[3])[0],
            mesh=mesh(),
            in_specs=specs,
            out_specs=P("d"),
        )
        return function(*args, mask)

    with jax.enable_x64(True):
        x, dx, *affine = (jnp.asarray(each, float) for each in (batch(), DY, WEIGHT, BIAS))
        args, tangents = (x, *affine), (dx, affine[1], affine[0])
        results = []
        for function in (ours, partial(plain, mask=mask)):
            gradient = jax.grad(lambda *args, f=function: (f(*args) ** 3).sum(), (0, 1, 2))
            results.append(
                (
                    jax.jit(partial(jax.jvp, function))(args, tangents)[1],
                    *jax.jit(partial(jax.jvp, gradient))(args, tangents)[
                        1
                    ],  # forward over backward
                    *jax.jit(jax.grad(lambda *args, g=gradient: (g(*args)[0] * dx).sum(), (0, 1)))(
                        *args
                    ),
                )
            )
    for own, right in zip(*results, strict=True):
        np.testing.assert_allclose(own, right, rtol=1e-7, atol=1e-7)


def test_scan_checkpoint_and_vmap_of_weights() -> None:
    x = jnp.asarray(batch())

    def body(running: Running, x: Any) -> Any:
        y, new = jax.checkpoint(partial(batch_norm, weight=WEIGHT, bias=BIAS, running=running))(x)
        return new, y

    _, ys = jax.jit(lambda xs: lax.scan(body, RUNNING, xs))(jnp.stack([x, x + 1]))
    np.testing.assert_allclose(ys[1], ys[0], atol=1e-5)
    weights = jnp.stack([WEIGHT, WEIGHT + 1])
    members = jax.shard_map(
        jax.vmap(lambda x, w: batch_norm(x, w, BIAS, axis_name="d")[0], in_axes=(None, 0)),
        mesh=mesh(),
        in_specs=(P("d"), P()),
        out_specs=P(None, "d"),
    )
    np.testing.assert_allclose(members(x, weights)[0], formula(x)[0], atol=1e-5)


def test_one_message_per_direction_and_one_array_kept() -> None:
    arrays = jnp.asarray(batch()), WEIGHT, BIAS
    specs = P("d"), P(), P()
    normalized = jax.shard_map(
        lambda *args: batch_norm(*args, axis_name="d")[0],
        mesh=mesh(),
        in_specs=specs,
        out_specs=P("d"),
    )
    y, back = jax.vjp(jax.jit(normalized), arrays[0].astype(jnp.bfloat16), *arrays[1:])
    kept = [each for each in jax.tree.leaves(back) if getattr(each, "size", 0) >= y.size]
    assert [each.dtype for each in kept] == [jnp.bfloat16]

    def of_x(x: Any, dy: Any) -> Any:
        return jax.vjp(lambda x: normalized(x, WEIGHT, BIAS), x)[1](dy)

    text = jax.jit(of_x).lower(arrays[0], DY).compile().as_text()
    sent = re.findall(r" (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\(", text)
    assert sorted(sent) == ["all-gather", "all-reduce"]


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.others = nnx.List([nnx.BatchNorm(8, momentum=0.9, use_bias=False, rngs=rngs)])

    def __call__(self, x: Any) -> Any:
        return self.others[0](jax.nn.relu(self.norm(self.conv(x))))


def test_converted_flax_model_trains_as_before_and_converts_back() -> None:
    x = jnp.asarray(RNG.normal(size=(8, 6, 6, 3)), jnp.float32)
    own, flax = convert_model(Net()), Net()
    assert type(own.norm) is type(own.others[0]) is BatchNorm
    train = nnx.jit(lambda net, x: nnx.value_and_grad(lambda net: (net(x) ** 3).mean())(net))
    for _ in range(3):
        for left, right in zip(
            *(jax.tree.leaves(train(net, x)) for net in (own, flax)), strict=True
        ):
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    states = [nnx.state(net) for net in (own, flax)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    for left, right in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
    own.eval()
    y = own(x)
    assert type(revert_model(own).norm) is nnx.BatchNorm
    np.testing.assert_array_equal(own(x), y)


def test_a_model_without_batch_norm_is_said() -> None:
    with pytest.warns(UserWarning, match="convert_model found no BatchNorm in Linear"):
        convert_model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))


def test_a_flag_of_numpy_means_training_too() -> None:
    x = batch(1e4)
    y = BatchNorm(4, rngs=nnx.Rngs(0))(x, use_running_average=np.False_)
    np.testing.assert_allclose(y * WEIGHT + BIAS, formula(x)[0], atol=4e-6)


def test_layer_follows_flax_dtypes() -> None:
    for dtype in (None, jnp.bfloat16):
        for given in (jnp.float32, jnp.bfloat16):
            layers = [each(4, dtype=dtype, rngs=nnx.Rngs(0)) for each in (BatchNorm, nnx.BatchNorm)]
            y, other = (layer(jnp.asarray(batch(), given)) for layer in layers)
            assert y.dtype == other.dtype
            assert layers[0].var[...].dtype == layers[1].var[...].dtype
            np.testing.assert_allclose(y.astype(float), other.astype(float), atol=3e-2)


@pytest.mark.parametrize("mask", ["uneven", "empty"])
def test_uneven_masks_are_right_where_flax_is_not(mask: str) -> None:
    valid = np.ones((16, 1, 1, 1), bool)
    valid[1::8] = valid[2] = False
    valid = UNEVEN if mask == "empty" else valid
    off = {}
    for kind in (nnx.BatchNorm, BatchNorm):
        graph, state = nnx.split(kind(4, axis_name="d", rngs=nnx.Rngs(0)))

        def forward(state: Any, x: Any, mask: Any, graph: Any = graph) -> Any:
            layer = nnx.merge(graph, state, copy=True)
            return layer(x, mask=mask), nnx.state(layer)

        specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": (P("d"), P())}
        y, new = jax.jit(jax.shard_map(forward, mesh=mesh(), **specs))(state, batch(), valid)
        *_, mean, var = formula(batch(), valid)
        off[kind] = np.abs(y - (batch() - mean) / np.sqrt(var + 1e-5)).max()
        if kind is BatchNorm:
            np.testing.assert_allclose(new["mean"][...], 0.01 * mean, rtol=1e-5)
    assert off[BatchNorm] < 1e-5
    assert not off[nnx.BatchNorm] < 0.01


def test_subclasses_are_named() -> None:
    class Own(nnx.BatchNorm):
        pass

    net = Net()
    net.norm = Own(8, rngs=nnx.Rngs(0))
    with pytest.warns(UserWarning, match="norm stays as it is: Own is a subclass"):
        convert_model(net, "d")
    assert type(net.norm) is Own
    assert net.others[0].axis_name == "d"


@pytest.mark.parametrize(
    ("error", "text", "change"),
    [
        (ShapeError, r"weight of shape \(4,\).*got \(3,\)", {"weight": np.ones(3)}),
        (ShapeError, r"running mean of shape", {"running": Running(1.0, np.ones(4))}),
        (ShapeError, r"mask that broadcasts to x.*\(2, 4\)", {"mask": np.ones((2, 4), bool)}),
        (DTypeError, "mask of bool, got float32", {"mask": np.ones((16, 1, 1, 1), np.float32)}),
        (DTypeError, "got int32", {"x": np.ones((4, 4), np.int32)}),
        (ShapeError, "two or more axes", {"x": np.ones(4, np.float32)}),
        (ArgumentError, "eps", {"eps": 0}),
        (ArgumentError, "momentum", {"momentum": 1.5}),
        (ArgumentError, "running statistics with training=False", {"training": False}),
        (ArgumentError, "under jit alone arrays are whole", {"axis_name": "nope"}),
    ],
)
def test_errors_say_what_is_wrong(error: type[Exception], text: str, change: Any) -> None:
    with pytest.raises(error, match=text):
        batch_norm(**{"x": batch(), **change})


def test_the_core_sends_traced_arrays_to_this_adapter() -> None:
    with pytest.raises(BackendError, match=r"inside jit, grad or vmap.*syncbn_jax\.batch_norm"):
        jax.jit(lambda x: batch_norm_forward(x)[0])(batch())


def test_two_processes_equal_the_undivided_batch(run_program: Callable[..., str]) -> None:
    assert run_program("tests/jax/two_processes.py").count("right in process") == 2


def test_the_example_follows_one_device(run_program: Callable[..., str]) -> None:
    assert "eight devices follow one" in run_program("examples/jax_training.py")


@pytest.mark.parametrize("library", ["haiku", "equinox", "flax"])
def test_programs_of_the_docs_run(library: str, run_program: Callable[..., str]) -> None:
    pytest.importorskip(library)
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs/jax.md").read_text(), re.S)
    (program,) = (
        each for each in programs if f"import {library}" in each or f"from {library}" in each
    )
    run_program("-W", "ignore", "-c", program)
