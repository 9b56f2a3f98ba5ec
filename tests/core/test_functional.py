"""`syncbn_core.functional`: parts of a batch, in threads, against the undivided batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncbn_core import BatchNorm, batch_norm_backward, batch_norm_eval, batch_norm_forward
from syncbn_core.comm import Communicator

Array = np.ndarray
Layouts = dict[str, Callable[[Array], Array]]
Function = Callable[..., Any]

MODES = pytest.mark.parametrize("eps_mode", ["plus", "clamp"])

shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4).flatmap(
    lambda rest: st.integers(0, 12).map(lambda n: (n, *rest))
)
seeds = st.integers(0, 2**32 - 1)


def random_batch(shape: tuple[int, ...], dtype: str = "f8", seed: int = 0) -> tuple[Array, ...]:
    """`x, dy, weight, bias`: channels of different mean and deviation, a random cotangent."""
    rng = np.random.default_rng(seed)
    column = (shape[1], *[1] * (len(shape) - 2))
    x = rng.normal(size=shape) * rng.uniform(0.5, 2, column) + 3 * rng.normal(size=column)
    weight, bias = rng.uniform(-2, 2, (2, shape[1])).astype("f8" if dtype == "f8" else "f4")
    return x.astype(dtype), rng.normal(size=shape).astype(dtype), weight, bias


def cut(array: Array, cuts: list[int]) -> list[Array]:
    return np.split(array, sorted(min(at, len(array)) for at in cuts))


def running(channels: int, dtype: str = "f8") -> dict[str, Array]:
    """Running statistics that are not those of a fresh layer."""
    return {
        "running_mean": np.linspace(-1, 1, channels).astype(dtype),
        "running_var": np.linspace(1, 2, channels).astype(dtype),
        "num_batches_tracked": np.array(0, np.int64),
    }


# ------------------------------------------------- parts of a batch equal the undivided batch


@settings(max_examples=200)
@given(
    data=st.data(),
    shape=shapes,
    dtype=st.sampled_from(["f2", "f4", "f8"]),
    cuts=st.lists(st.integers(0, 12), max_size=4),
    affine=st.booleans(),
    eps=st.sampled_from([1e-5, 0.1, 1.0]),
    eps_mode=st.sampled_from(["plus", "clamp"]),
    seed=seeds,
)
def test_parts_give_what_the_undivided_batch_gives(
    data: st.DataObject,
    shape: tuple[int, ...],
    dtype: str,
    cuts: list[int],
    affine: bool,
    eps: float,
    eps_mode: str,
    seed: int,
    layouts: Layouts,
    in_group: Function,
    batch_norm: Function,
    close: Function,
) -> None:
    x, dy, weight, bias = random_batch(shape, dtype, seed)
    if x.size == shape[1] != 0:
        return  # one value per channel, which is refused
    if not affine:
        weight = bias = None  # type: ignore[assignment]
    names = st.sampled_from(sorted(set(layouts) - {"repeated"}))
    xs, dys = (
        [layouts[data.draw(names, label)](part) for part in cut(array, cuts)]
        for label, array in (("x", x), ("dy", dy))
    )

    def member(rank: int, communicator: Communicator) -> tuple[Any, ...]:
        settings = {"eps": eps, "eps_mode": eps_mode, "communicator": communicator}
        y, saved = batch_norm_forward(xs[rank], weight, bias, **settings)
        return y, saved, batch_norm_backward(dys[rank], saved, communicator=communicator)

    results = in_group(len(xs), member)
    expected = batch_norm(x, weight, bias, dy=dy, eps=eps, eps_mode=eps_mode)
    arithmetic = "f8" if dtype == "f8" else "f4"
    y, dx = (
        np.concatenate(parts) for parts in zip(*((r[0], r[2].x) for r in results), strict=True)
    )
    close(y.astype(dtype), expected.y, scale=3)
    close(dx.astype(dtype), expected.dx, scale=4 * expected.slope)
    for name in ("weight", "bias"):
        total = sum(getattr(gradients, name).astype("f8") for *_, gradients in results)
        scale = max(expected.count, 1)
        close(total, getattr(expected, f"d{name}"), scale, arithmetic if affine else dtype)
    for rank, (y, saved, gradients) in enumerate(results):
        assert y.dtype == gradients.x.dtype == xs[rank].dtype
        assert y.shape == gradients.x.shape == xs[rank].shape
        assert saved.count == expected.count
        np.testing.assert_array_equal(saved.mean, results[0][1].mean)  # the same bits
        np.testing.assert_array_equal(saved.invstd, results[0][1].invstd)
        if affine:
            assert gradients.weight.dtype == gradients.bias.dtype == weight.dtype


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("shape", [(13, 6, 70, 90), (9000, 20)])
def test_large_parts_give_what_the_undivided_batch_gives(
    shape: tuple[int, ...],
    parallel: bool,
    dtype: str,
    in_group: Function,
    batch_norm: Function,
    close: Function,
) -> None:
    x, dy, weight, bias = random_batch(shape, dtype)
    cuts = [len(x) // 5, len(x) // 5, len(x) // 2]
    xs, dys = cut(x, cuts), cut(dy, cuts)

    def member(rank: int, communicator: Communicator) -> tuple[Array, Array]:
        where = {"communicator": communicator, "parallel": parallel}
        y, saved = batch_norm_forward(xs[rank], weight, bias, **where)
        return y, batch_norm_backward(dys[rank], saved, **where).x

    y, dx = (np.concatenate(parts) for parts in zip(*in_group(4, member), strict=True))
    expected = batch_norm(x, weight, bias, dy=dy)
    close(y, expected.y, scale=3)
    close(dx, expected.dx, scale=4 * expected.slope)


def test_results_are_bitwise_the_same_from_run_to_run(in_group: Function) -> None:
    """Statistics are merged in the order of ranks, not of arrival."""
    x, dy, weight, bias = random_batch((64, 3, 40, 40), "f4")
    xs, dys = cut(x, [3, 20, 41]), cut(dy, [3, 20, 41])

    def member(rank: int, communicator: Communicator) -> bytes:
        y, saved = batch_norm_forward(xs[rank], weight, bias, communicator=communicator)
        gradients = batch_norm_backward(dys[rank], saved, communicator=communicator)
        return b"".join(array.tobytes() for array in (y, saved.mean, saved.invstd, *gradients))

    first = in_group(4, member)
    for _ in range(5):
        assert in_group(4, member) == first


def test_forward_keeps_x_and_nothing_of_its_size() -> None:
    x, _, weight, bias = random_batch((6, 4, 7))
    _, saved = batch_norm_forward(x, weight, bias)
    assert saved.x is x
    assert all(kept.size < x.size for kept in arrays_in(saved.known))
    _, saved = batch_norm_forward(x)
    assert all(kept.size < x.size for kept in arrays_in(saved.known))


def arrays_in(thing: Any) -> list[np.ndarray[Any, Any]]:
    if isinstance(thing, np.ndarray):
        return [thing, *arrays_in(thing.base)]
    if not isinstance(thing, dict | tuple | list):
        return []
    parts = thing.values() if isinstance(thing, dict) else thing
    return [array for part in parts for array in arrays_in(part)]


# -------------------------------------------------------------------------------- gradients


def numerical_gradient(loss: Callable[[], float], at: Array, step: float = 1e-5) -> Array:
    """Central differences, one element of `at` after the other."""
    gradient = np.empty_like(at)
    for index in np.ndindex(at.shape):
        value = at[index]
        at[index] = value + step
        above = loss()
        at[index] = value - step
        gradient[index] = (above - loss()) / (2 * step)
        at[index] = value
    return gradient


@MODES
@pytest.mark.parametrize("members", [1, 3])
def test_gradient_equals_finite_differences(
    eps_mode: str, members: int, in_group: Function
) -> None:
    eps = 0.5
    x, dy, weight, bias = random_batch((5, 4, 3), seed=3)
    x[:, 1] *= 0.1  # below eps: clamped in that mode
    x[:, 2] *= 3
    var = x.var((0, 2))
    assert var[1] < eps / 4
    assert (var[[0, 2, 3]] > 1.2 * eps).all()
    setting = {"eps": eps, "eps_mode": eps_mode}

    def loss() -> float:
        return float((dy * batch_norm_forward(x, weight, bias, **setting)[0]).sum())

    xs, dys = (cut(array, [1, 1][: members - 1]) for array in (x, dy))

    def member(rank: int, communicator: Communicator) -> Any:
        where = {"communicator": communicator}
        _, saved = batch_norm_forward(xs[rank], weight, bias, **setting, **where)
        if eps_mode == "clamp":
            clamped = saved.known.norms[0].rule.clamped(saved.statistics.m2 / saved.count)
            np.testing.assert_array_equal(clamped, [False, True, False, False])
        return batch_norm_backward(dys[rank], saved, **where)

    parts = in_group(members, member)
    dx = np.concatenate([part.x for part in parts])
    np.testing.assert_allclose(dx, numerical_gradient(loss, x), rtol=1e-6, atol=1e-8)
    for name, parameter in (("weight", weight), ("bias", bias)):
        total = sum(getattr(part, name) for part in parts)
        np.testing.assert_allclose(total, numerical_gradient(loss, parameter), rtol=1e-6, atol=1e-8)


# ----------------------------------------------------------------------- running statistics


@pytest.mark.parametrize("momentum", [0.1, 0.75, 0.0, 1.0, None])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("counted", [True, False])
def test_running_statistics_follow_the_undivided_batches(
    momentum: float | None,
    dtype: str,
    counted: bool,
    in_group: Function,
    batch_norm: Function,
    close: Function,
) -> None:
    if momentum is None and not counted:
        pytest.skip("refused: see the errors")
    batches = [random_batch((n, 3, 5), seed=n)[0] for n in (2, 9, 4)]
    states = [running(3, dtype) for _ in range(3)]

    def member(rank: int, communicator: Communicator) -> None:
        state = states[rank] if counted else {**states[rank], "num_batches_tracked": None}
        for x in batches:
            part = cut(x, [1, 1])[rank]
            batch_norm_forward(part, momentum=momentum, communicator=communicator, **state)

    in_group(3, member)
    mean, var = (running(3)[name] for name in ("running_mean", "running_var"))
    for tracked, x in enumerate(batches, start=1):
        new = batch_norm(x)
        share = 1 / tracked if momentum is None else momentum
        mean = (1 - share) * mean + share * new.mean
        var = (1 - share) * var + share * new.unbiased
    for state in states:
        close(state["running_mean"], mean)
        close(state["running_var"], var, scale=5)
        assert state["num_batches_tracked"] == (3 if counted else 0)
        assert state["num_batches_tracked"].dtype == np.int64
        for name, array in state.items():
            np.testing.assert_array_equal(array, states[0][name])  # the same bits


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_that_is_empty_everywhere_only_counts(
    members: int, momentum: float | None, in_group: Function
) -> None:
    states = [running(3) for _ in range(members)]
    x = np.empty((0, 3, 4), np.float32)

    def member(rank: int, communicator: Communicator) -> Any:
        where = {"communicator": communicator}
        y, saved = batch_norm_forward(x, momentum=momentum, **states[rank], **where)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        return batch_norm_backward(x, saved, **where)

    for gradients in in_group(members, member):
        assert gradients.x.shape == x.shape
        np.testing.assert_array_equal([gradients.weight, gradients.bias], np.zeros((2, 3)))
    for state in states:
        assert state["num_batches_tracked"] == 1
        for name in ("running_mean", "running_var"):
            np.testing.assert_array_equal(state[name], running(3)[name])


# --------------------------------------------------------------------------- NaN, infinity


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@MODES
def test_nan_and_infinity_reach_their_channel_only_and_raise_no_warning(
    odd: float, dtype: str, eps_mode: str, in_group: Function
) -> None:
    x, dy, weight, bias = random_batch((6, 3, 5), dtype)
    x[4, 1, 2] = odd
    states = [running(3, "f4") for _ in range(2)]

    def member(rank: int, communicator: Communicator) -> tuple[Array, Array]:
        part = slice(3 * rank, 3 * rank + 3)
        where = {"communicator": communicator}
        y, saved = batch_norm_forward(
            x[part], weight, bias, eps_mode=eps_mode, **states[rank], **where
        )
        return y, batch_norm_backward(dy[part], saved, **where).x

    bad = [False, True, False]
    for arrays in zip(*in_group(2, member), strict=True):
        np.testing.assert_array_equal(np.isnan(np.concatenate(arrays)).all((0, 2)), bad)
        np.testing.assert_array_equal(np.isnan(np.concatenate(arrays)).any((0, 2)), bad)
    for state in states:
        np.testing.assert_array_equal(np.isnan(state["running_mean"]), bad)
        np.testing.assert_array_equal(np.isnan(state["running_var"]), bad)


def test_results_that_overflow_float16_become_infinite_without_a_warning() -> None:
    """As with a loss scale that is too large."""
    x, dy, _, _ = random_batch((20, 2, 30, 30), "f2")
    _, saved = batch_norm_forward(x)
    gradients = batch_norm_backward(np.full_like(dy, 1000), saved)
    assert np.isinf(gradients.bias).all()
    y, saved = batch_norm_forward(x, np.full(2, 1e6, np.float32))
    assert np.isinf(y).any()
    assert np.isinf(batch_norm_backward(dy, saved).x).any()


# ------------------------------------------------------------------------------------- eval


@settings(max_examples=100)
@given(
    data=st.data(),
    shape=shapes,
    dtype=st.sampled_from(["f2", "f4", "f8"]),
    eps_mode=st.sampled_from(["plus", "clamp"]),
    seed=seeds,
)
def test_eval_normalizes_by_running_statistics_and_leaves_them(
    data: st.DataObject,
    shape: tuple[int, ...],
    dtype: str,
    eps_mode: str,
    seed: int,
    layouts: Layouts,
    close: Function,
) -> None:
    x, dy, weight, bias = random_batch(shape, dtype, seed)
    mean, var = (running(shape[1], "f4")[name] for name in ("running_mean", "running_var"))
    mean.flags.writeable = var.flags.writeable = False  # eval must not want to write
    x = layouts[data.draw(st.sampled_from(sorted(layouts)))](x)
    y, saved = batch_norm_eval(x, mean, var, weight, bias, eps=1.5, eps_mode=eps_mode)
    invstd = 1 / np.sqrt(
        np.maximum(var.astype("f8"), 1.5) if eps_mode == "clamp" else var.astype("f8") + 1.5
    )

    def column(values: Array) -> Array:
        return values.astype("f8").reshape(1, -1, *[1] * (x.ndim - 2))

    xhat = (x.astype("f8") - column(mean)) * column(invstd)
    close(y, xhat * column(weight) + column(bias), scale=3)
    assert y.dtype == x.dtype
    gradients = batch_norm_backward(dy, saved)
    close(gradients.x, dy.astype("f8") * column(weight * invstd), scale=1)
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    wide, scale = dy.astype("f8"), max(x.size, 1)
    close(gradients.weight, (wide * xhat).sum(axes), scale)
    close(gradients.bias, wide.sum(axes), scale)


# -------------------------------------------------------------------------------------- out


def one_ahead(x: Array) -> tuple[Array, Array]:
    """A copy of x, and an array that begins with its second element."""
    memory = np.append(x, x.dtype.type(0))
    return memory[:-1].reshape(x.shape), memory[1:].reshape(x.shape)


def test_forward_and_eval_write_to_out_and_to_x_itself() -> None:
    x, _, weight, bias = random_batch((4, 3, 5), "f4")
    mean, var = np.full(3, 0.5), np.full(3, 2.0)
    for function in (
        lambda x, out: batch_norm_forward(x, weight, bias, out=out)[0],
        lambda x, out: batch_norm_eval(x, mean, var, weight, bias, out=out)[0],
    ):
        expected = function(x, None)
        for out in (np.empty_like(x), np.empty((4, 5, 3), "f4").transpose(0, 2, 1)):
            assert function(x, out) is out
            np.testing.assert_array_equal(out, expected)
        own = x.copy()
        assert function(own, own) is own
        np.testing.assert_array_equal(own, expected)
        own, out = one_ahead(x)
        assert function(own, out) is out
        np.testing.assert_array_equal(out, expected)


def test_backward_writes_to_out_and_to_dy_itself() -> None:
    x, dy, weight, _ = random_batch((4, 3, 5), "f4")
    _, saved = batch_norm_forward(x, weight)
    expected = batch_norm_backward(dy, saved)
    for own, out in ((dy, np.empty_like(x)), one_ahead(dy), (dy, dy)):
        gradients = batch_norm_backward(own, saved, out=out)
        assert gradients.x is out
        for a, b in zip(gradients, expected, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["f4", "f2"])  # by the kernel, and by array operations
@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_interrupt_leaves_running_statistics_all_old_or_all_new(
    momentum: float | None, dtype: str, interrupt: Function
) -> None:
    x = random_batch((4, 3, 5), dtype)[0]

    def layer() -> BatchNorm:
        made = BatchNorm(3, momentum=momentum)
        made.running_mean, made.running_var = np.zeros(3, dtype), np.ones(3, dtype)
        return made

    def state(of: BatchNorm) -> list[bytes]:
        return [
            of.running_mean.tobytes(),
            of.running_var.tobytes(),
            of.num_batches_tracked.tobytes(),
        ]

    reference = layer()
    states = [state(reference)]
    for _ in range(2):
        reference(x)
        states.append(state(reference))
    seen, step = [], 0
    while True:
        interrupted = layer()
        if not interrupt(lambda: interrupted(x), step, "syncbn_core"):  # noqa: B023
            break
        seen.append(states.index(state(interrupted)))
        interrupted(x)
        assert state(interrupted) == states[seen[-1] + 1]
        step += 1
    assert sorted(set(seen)) == [0, 1]
    assert seen == sorted(seen)
