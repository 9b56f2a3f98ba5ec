"""`syncbn_core.moments`: merging, variance, the update of running statistics, settings."""

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncbn_core.errors import SyncBNError
from syncbn_core.moments import (
    Moments,
    NormRule,
    averaging_factor,
    blend,
    require_more_than_one_value,
)
from syncbn_core.numpy_steps import OPERATIONS

Close = Callable[..., None]


def moments_of(x: np.ndarray) -> Moments:
    """Of `x` (n, C), by the definition."""
    if len(x) == 0:
        return Moments.of(0, *np.zeros((2, x.shape[1])))
    mean = x.mean(0)
    return Moments.of(len(x), mean, ((x - mean) ** 2).sum(0))


def var_of(moments: Moments) -> np.ndarray:
    return np.asarray(moments.m2 / max(moments.count, 1))


def exact_merge(parts: list[Moments]) -> tuple[int, Fraction, Fraction]:
    """`(count, mean, m2)` of one channel in rational arithmetic, from sums and sums of squares."""
    count = sum(part.count for part in parts)
    total = sum((part.count * Fraction(part.mean[0]) for part in parts), Fraction(0))
    squares = sum(
        (Fraction(part.m2[0]) + part.count * Fraction(part.mean[0]) ** 2 for part in parts),
        Fraction(0),
    )
    mean = total / count if count else Fraction(0)
    return count, mean, squares - count * mean**2


def assert_same_bits(a: Moments, b: Moments) -> None:
    assert a.count == b.count
    np.testing.assert_array_equal(a.mean, b.mean)
    np.testing.assert_array_equal(a.m2, b.m2)


sizes = st.lists(st.integers(0, 40), min_size=1, max_size=5)
seeds = st.integers(0, 2**32 - 1)


def some_parts(sizes: list[int], seed: int, mean: float = 0.0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [mean + rng.normal(rng.normal(), 1, size=(n, 3)) for n in sizes]


@given(sizes=sizes, seed=seeds, mean=st.sampled_from([0.0, 1e3, 1e6]))
def test_merged_parts_equal_numpy_over_the_concatenation(
    sizes: list[int], seed: int, mean: float, close: Close
) -> None:
    parts = some_parts(sizes, seed, mean)
    total = OPERATIONS.merge([moments_of(part) for part in parts])
    whole = np.concatenate(parts)
    assert total.count == len(whole)
    if total.count:
        close(total.mean, whole.mean(0))
        close(var_of(total), whole.var(0), scale=1 + mean * 1e-3)


@given(
    parts=st.lists(
        st.tuples(st.integers(0, 10**6), st.floats(-1e9, 1e9), st.floats(0, 1e12)),
        min_size=1,
        max_size=5,
    )
)
def test_merge_equals_exact_rational_arithmetic(
    parts: list[tuple[int, float, float]], close: Close
) -> None:
    moments = [
        Moments.of(n, np.array([mean]), np.array([m2])) if n else Moments.of(0, *np.zeros((2, 1)))
        for n, mean, m2 in parts
    ]
    total = OPERATIONS.merge(moments)
    count, mean, m2 = exact_merge(moments)
    assert total.count == count
    largest = max(abs(float(part.mean[0])) for part in moments)
    close(total.mean, [float(mean)], scale=largest + 1e-300)
    # The spread of the means is known to the rounding of the means, not better.
    close(total.m2, [float(m2)], scale=1e-3 * count * largest**2 + 1e-300)


def test_variance_survives_a_mean_a_billion_times_larger() -> None:
    rng = np.random.default_rng(0)
    parts = [1e9 + rng.normal(size=(n, 3)) for n in (1000, 1, 500, 37)]
    exact = (np.concatenate(parts) - 1e9).var(0)  # the subtraction is exact
    var = var_of(OPERATIONS.merge([moments_of(part) for part in parts]))
    assert np.abs(var / exact - 1).max() < 1e-7


@given(sizes=sizes, seed=seeds, mean=st.sampled_from([0.0, 1e6, 1e100]), place=st.integers(0, 5))
def test_empty_part_merges_like_any_other(
    sizes: list[int], seed: int, mean: float, place: int
) -> None:
    parts = [moments_of(part) for part in some_parts(sizes, seed, mean)]
    with_empty = [*parts[:place], Moments.of(0, *np.zeros((2, 3))), *parts[place:]]
    assert_same_bits(OPERATIONS.merge(with_empty), OPERATIONS.merge(parts))


def test_huge_counts_do_not_overflow(close: Close) -> None:
    part = Moments.of(2**40, np.array([1.0]), np.array([2.0**40]))
    other = Moments.of(2**40, np.array([3.0]), np.array([2.0**40]))
    total = OPERATIONS.merge([part, other])
    assert total.count == 2**41
    close(total.mean, [2.0])
    close(var_of(total), [2.0])


def test_not_a_number_and_infinity_pass_through_without_a_warning() -> None:
    nan, inf = np.nan, np.inf
    odd = Moments.of(4, np.array([nan, inf, -inf, 1.0]), np.array([nan, nan, nan, 2.0]))
    plain = Moments.of(4, np.array([1.0, inf, inf, 3.0]), np.array([1.0, nan, nan, 2.0]))
    for total in (OPERATIONS.merge([odd, plain]), OPERATIONS.merge([plain, odd])):
        assert np.isnan(var_of(total)[:3]).all()
        assert total.mean[3] == 2.0
        assert total.m2[3] == 2.0 + 2.0 + 4.0 * 2
        for mode in ("plus", "clamp"):
            invstd = OPERATIONS.statistics(total, NormRule(1e-5, mode)).invstd
            np.testing.assert_array_equal(np.isnan(invstd), [True, True, True, False])


def test_invstd_adds_eps_or_clamps_at_it(close: Close) -> None:
    moments = Moments.of(10, np.zeros(3), np.array([0.0, 0.4, 40.0]))  # var 0, 0.04, 4
    close(OPERATIONS.statistics(moments, NormRule(0.25)).invstd, 1 / np.sqrt([0.25, 0.29, 4.25]))
    clamp = NormRule(0.25, "clamp")
    close(OPERATIONS.statistics(moments, clamp).invstd, 1 / np.sqrt([0.25, 0.25, 4.0]))


def test_only_a_count_of_one_is_refused() -> None:
    for count in (0, 2, 10**12):
        require_more_than_one_value(count, (count, 3))
    with pytest.raises(ValueError, match=r"more than 1 value per channel.*\[1, 3\]") as caught:
        require_more_than_one_value(1, (1, 3))
    assert isinstance(caught.value, SyncBNError)


def test_momentum_is_the_share_of_the_new_batch(close: Close) -> None:
    assert averaging_factor(0.1, 7) == 0.1
    assert averaging_factor(0.0, 7) == 0.0
    close(blend(np.array([2.0]), np.array([12.0]), 0.1), [3.0])
    np.testing.assert_array_equal(blend(np.array([2.0]), np.array([12.0]), 0.0), [2.0])
    np.testing.assert_array_equal(blend(np.array([2.0]), np.array([12.0]), 1.0), [12.0])


@given(values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20))
def test_momentum_none_is_the_plain_average(values: list[float], close: Close) -> None:
    running = np.array([55.0])  # forgotten by the first batch
    for tracked, value in enumerate(values):
        running = blend(running, np.array([value]), averaging_factor(None, tracked))
    close(running, [np.mean(values)], scale=1e3)
