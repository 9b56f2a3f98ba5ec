"""Train a small Flax network on eight devices of one host, with and without synchronization.

    python examples/jax_training.py

With `convert_model(net, axis_name="batch")` eight devices with three samples each follow one
device with all of them; without, they go their own way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from syncbn_jax.nnx import convert_model

DEVICES, STEPS = 8, 10


class Net(nnx.Module):
    """A convolution, batch norm and the mean over space."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(step)
    x = rng.normal(rng.normal(0, 2, (24, 1, 1, 1)), 1, (24, 8, 8, 3))
    return tuple(each.astype(np.float32) for each in (x, x.std((1, 2)).mean(1, keepdims=True)))


def train(net: Net, devices: int) -> Any:
    """The parameters and running statistics after `STEPS` steps."""
    graph, params, stats = nnx.split(net, nnx.Param, nnx.BatchStat)

    def step(params: Any, stats: Any, x: Any, target: Any) -> Any:
        def loss(params: Any) -> Any:
            copy = nnx.merge(graph, params, stats, copy=True)
            errors = (copy(x) - target) ** 2
            total = errors.sum() / 24
            if devices > 1:
                total = lax.psum(total, "batch")  # so JAX adds up the gradients too
            return total, nnx.state(copy, nnx.BatchStat)

        gradients, stats = jax.grad(loss, has_aux=True)(params)
        if devices > 1:  # no change where they are synchronized: they are alike
            stats = lax.pmean(stats, "batch")
        return jax.tree.map(lambda own, by: own - 0.1 * by, params, gradients), stats

    place = jnp.asarray
    if devices > 1:
        part, whole = P("batch"), P()
        mesh = jax.make_mesh((devices,), ("batch",))
        specs = {"in_specs": (whole, whole, part, part), "out_specs": (whole, whole)}
        step = jax.shard_map(step, mesh=mesh, **specs)
        place = partial(jax.device_put, device=NamedSharding(mesh, part))
    step = jax.jit(step)
    for number in range(STEPS):
        params, stats = step(params, stats, *map(place, batch(number)))
    return params, stats


def difference(left: Any, right: Any) -> float:
    leaves = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return max(float(jnp.abs(a - b).max()) for a, b in leaves)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    one = train(convert_model(Net()), 1)
    far = partial(difference, one)
    synchronized = far(train(convert_model(Net(), axis_name="batch"), DEVICES))
    alone = far(train(Net(), DEVICES))
    print(f"{STEPS} steps of {DEVICES} devices, largest difference from one device:")
    print(f"  synchronized {synchronized:.1e}, each device by itself {alone:.1e}")
    assert synchronized < 1e-5 < 0.01 < alone
    print("synchronized, eight devices follow one")


if __name__ == "__main__":
    main()
