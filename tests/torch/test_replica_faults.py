"""Random faults in models of replicas: the error itself arrives, and the next step is right.

A run is a random model, batch and number of replicas; one replica goes wrong at one layer, forward
or backward. SYNCBN_REPLICA_FAULT_RUNS sets how many: a handful by default, thousands by
`dev.py soak`.
"""

import dataclasses
import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from syncbn_core.comm import set_default_timeout
from syncbn_core.errors import CommAborted, CommTimeout, ProtocolError, ShapeError
from syncbn_torch import DataParallelWithCallback, SynchronizedBatchNorm2d

RUNS = int(os.environ.get("SYNCBN_REPLICA_FAULT_RUNS", "60"))
LONG = 30.0  # seconds; nobody may wait so long
CHANNELS = 3
FAULTS = ("none", "raise", "bad text", "frozen", "exit", "skip", "again", "return", "shape", "hook")


class BadText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


@dataclasses.dataclass
class Plan:
    fault: str
    replica: int
    layer: int
    error: BaseException | None = dataclasses.field(repr=False)  # it may have no text

    @classmethod
    def random(cls, rng: random.Random, replicas: int, layers: int) -> "Plan":
        fault = rng.choice(FAULTS)
        errors = {"raise": ValueError("on purpose"), "bad text": BadText(), "frozen": Frozen(3)}
        errors |= {"exit": SystemExit(3), "hook": ZeroDivisionError("backward, on purpose")}
        return cls(fault, rng.randrange(replicas), rng.randrange(layers), errors.get(fault))


class Model(nn.Module):
    """Layers one after the other; replica `plan.replica` goes wrong at layer `plan.layer`."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SynchronizedBatchNorm2d(CHANNELS) for _ in range(layers))
        self.scales = nn.Parameter(torch.rand(layers, CHANNELS, 1, 1) + 0.5)
        self.plan: Plan | None = None
        self.number = 0

    def __data_parallel_replicate__(self, context: Any, copy_id: int) -> None:
        self.number = copy_id

    def forward(self, x: Tensor) -> Tensor:
        plan = self.plan if self.plan is not None and self.plan.replica == self.number else None
        for index, layer in enumerate(self.layers):
            fault = plan.fault if plan is not None and plan.layer == index else "none"
            if fault == "hook" and x.requires_grad:
                x.register_hook(self._raise)
            elif fault in ("raise", "bad text", "frozen", "exit"):
                self._raise(None)
            elif fault == "return":
                return x
            elif fault == "shape":
                x = x[:, :2]
            elif fault == "skip":
                continue
            elif fault == "again":
                x = layer(x)
            x = (layer(x) * self.scales[index]).tanh()
        return x

    def _raise(self, gradient: Any) -> None:
        assert self.plan is not None
        assert self.plan.error is not None
        raise self.plan.error


def step(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y and all gradients, and the buffers as they are afterwards."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(dy)
    gradients = [x.grad, *[p.grad for p in model.parameters()]]
    return [y.detach(), *[g for g in gradients if g is not None], *model.buffers()]


def one_run(seed: int) -> str:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    replicas, layers = rng.randint(2, 4), rng.randint(1, 4)
    shape = (rng.randint(replicas, 9), CHANNELS, rng.randint(1, 3), rng.randint(2, 3))
    x, dy = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(2))
    model = DataParallelWithCallback(Model(layers).double(), replicas=replicas)
    twin = Model(layers).double()
    used = len(x.chunk(replicas))
    plan = model.module.plan = Plan.random(rng, used, layers)
    told = f"seed {seed}: {plan}"
    if plan.fault == "none":
        twin.load_state_dict(model.module.state_dict())
        expected = step(twin, x, dy)
        torch.testing.assert_close(step(model, x, dy), expected, msg=lambda m: f"{told}: {m}")
    else:
        # who skips a layer, or comes twice, and the others wait for each other in unlike layers
        crossed = plan.fault in ("again", "skip") and plan.layer + 1 < layers
        set_default_timeout(0.5 if crossed else LONG)
        with pytest.raises(BaseException) as caught:  # noqa: PT011  (which one is seen below)
            step(model, x, dy)
        set_default_timeout(LONG)
        error = caught.value
        assert crossed or not isinstance(error, CommTimeout), told
        if plan.error is not None:
            assert error is plan.error, f"{told}: {type(error)}"
        elif plan.fault == "shape":
            assert isinstance(error, ShapeError), told
        else:
            assert isinstance(error, (CommAborted, CommTimeout, ProtocolError)), (
                f"{told}: {error!r}"
            )
    counts = [int(layer.num_batches_tracked) for layer in model.module.layers]
    moved = [not torch.equal(one.running_mean, torch.zeros_like(one.running_mean))
             for one in model.module.layers]  # fmt: skip
    assert [count > 0 for count in counts] == moved, f"{told}: torn, {counts} {moved}"
    model.module.plan = None
    twin.load_state_dict(model.module.state_dict())
    expected = step(twin, x, dy)
    torch.testing.assert_close(step(model, x, dy), expected, msg=lambda m: f"{told}: {m}")
    return plan.fault


@pytest.mark.timeout(100 + RUNS)
def test_a_random_fault_is_told_as_it_is_and_the_next_step_is_right() -> None:
    try:
        seen = {one_run(seed) for seed in range(RUNS)}
    finally:
        set_default_timeout(None)
    assert seen == set(FAULTS) or RUNS < 60
