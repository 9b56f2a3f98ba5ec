"""Several parts of one process in one compiled call: bitwise what the parts give one by one."""

from typing import Any

import numpy as np
import pytest

from syncbn_core.backends.base import Affine, Operations, RunningStatistics
from syncbn_core.backends.cpu import operations
from syncbn_core.backends.cpu.numpy import OPERATIONS
from syncbn_core.moments import Moments, NormRule, merge_moments

Array = np.ndarray[Any, Any]
# The sizes of the batches, and whether kernels take all parts in one call.
CASES = {
    "planes": ([(4, 3, 8, 8), (1, 3, 8, 8), (4, 3, 5, 7)], True),
    "rows": ([(40, 6), (7, 6), (1, 6)], True),
    "planes and rows": ([(300, 4, 2, 1), (2, 4, 90, 90)], False),
    "one part is empty": ([(4, 3, 8, 8), (0, 3, 8, 8)], False),
    "one part": ([(4, 3, 8, 8)], True),
}


def run(do: Operations, one_by_one: bool, case: list[tuple[int, ...]], kinds: list[str]) -> Any:
    """All results of both directions."""
    rng = np.random.default_rng(0)
    rule = NormRule(0.5, "clamp")
    xs, dys = ([rng.normal(size=n).astype(k) for n, k in zip(case, kinds)] for _ in "xy")  # noqa: B905
    affines = [Affine(*rng.normal(size=(2, n[1]))) for n in case]
    running = [
        RunningStatistics(np.zeros(n[1]), np.ones(n[1]), np.array(index), momentum=None)
        for index, n in enumerate(case)
    ]
    of_parts: Any = Operations if one_by_one else type(do)
    parts = of_parts.moments_of_parts(do, xs)
    known = [do.statistics(do.merge(parts), rule)] * len(xs)
    done = of_parts.forward_of_parts(do, xs, known, affines, running, rule)
    sums = of_parts.backward_reduce_of_parts(do, xs, dys, known, affines, rule)
    total = [np.sum([one.exchange for one in sums], 0)] * len(xs)
    dxs = of_parts.backward_input_of_parts(do, xs, dys, known, affines, total, rule)
    return parts, [one.y for one in done], running, sums, dxs


def flat(results: Any) -> list[Any]:
    if isinstance(results, (list, tuple)):
        return [one for result in results for one in flat(result)]
    return [np.asarray(results)]


@pytest.mark.parametrize("kinds", [["f4"] * 3, ["f8"] * 3, ["f4", "f8", "f4"]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_bitwise_as_one_by_one(
    name: str, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, together = CASES[name]
    expected = flat(run(OPERATIONS, True, case, kinds))
    calls: list[int] = []
    original = operations.launch

    def launch(step: str, code: int, of_parts: Array, *arguments: Any) -> None:
        calls.append(len(of_parts))
        original(step, code, of_parts, *arguments)

    monkeypatch.setattr(operations, "launch", launch)
    for do in (OPERATIONS, OPERATIONS.serial):
        calls.clear()
        for ours, theirs in zip(flat(run(do, False, case, kinds)), expected, strict=True):
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
        alike = together and (len(case) == 1 or len(set(kinds)) == 1)
        assert (calls == [len(case)] * 4) == alike, calls


def test_parts_may_have_running_statistics_of_different_momentum() -> None:
    xs = [np.arange(8.0).reshape(4, 2)] * 2
    momenta = (0.1, 1.0)
    running = [RunningStatistics(np.zeros(2), np.ones(2), None, momentum) for momentum in momenta]
    known = OPERATIONS.statistics(OPERATIONS.moments(xs[0]), NormRule())
    OPERATIONS.forward_of_parts(xs, [known] * 2, [Affine()] * 2, running, NormRule())
    for momentum, of_part in zip(momenta, running, strict=True):
        np.testing.assert_allclose(of_part.mean, momentum * known.mean)


def test_moments_are_merged_as_by_numpy() -> None:
    rng = np.random.default_rng(0)
    odd = np.array([np.nan, np.inf, -np.inf, 1e300])
    parts = [Moments(n, rng.normal(1e3, 1, 40), rng.random(40)) for n in (7, 1, 30, 2**40)]
    parts.insert(1, Moments.empty(40))
    parts[0].mean[:4], parts[3].mean[4:8], parts[3].m2[8:12] = odd, odd, odd
    for some in (parts, parts[1:2] * 3):
        ours, theirs = OPERATIONS.merge(some), merge_moments(some)
        assert ours.count == theirs.count
        np.testing.assert_array_equal(ours.mean, theirs.mean)
        np.testing.assert_array_equal(ours.m2, theirs.m2)
