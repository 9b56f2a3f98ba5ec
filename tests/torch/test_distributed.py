"""Several processes, each with a part of the batch: gloo on CPU. What they do: `members.py`."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo"
)

CASES = {
    "parts": 3,
    "shapes": 3,
    "half": 3,
    "groups": 4,
    "one_value": 3,
    "wrappers": 3,
    "order": 3,
    "together": 3,
    "unlike_layers": 3,
    "again": 3,
    "compiled": 3,
    "same_graph": 3,
    "one_replica": 3,
    "recomputed": 2,
    "transforms": 2,
}


@pytest.mark.parametrize("case", CASES)
def test_processes(case: str, run_world: Callable[[str, int], None]) -> None:
    run_world(case, CASES[case])


@pytest.mark.parametrize("size", [2, 3])
def test_backward_never_takes_the_sums_of_another_layer(
    size: int, run_world: Callable[[str, int], None]
) -> None:
    run_world("branches", size)
