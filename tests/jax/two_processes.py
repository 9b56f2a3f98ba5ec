"""Two processes of `jax.distributed`, two devices each, against the undivided batch."""

from __future__ import annotations

import socket
import subprocess
import sys

import numpy as np


def work(rank: int, address: str) -> None:
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from syncbn_jax import Running, batch_norm

    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    mesh = jax.make_mesh((4,), ("d",))
    rng = np.random.default_rng(0)
    x = rng.normal(1e4, 1, (8, 6, 6, 16)).astype(np.float32)
    dy = rng.normal(size=x.shape).astype(np.float32)
    valid = np.zeros((8, 1, 1, 1), bool)
    valid[[0, 1, 3, 6]] = True  # the third of four devices has nothing

    def place(array: np.ndarray, spec: P) -> jax.Array:
        here = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(array.shape, here, lambda index: array[index])

    def step(x: jax.Array, dy: jax.Array, valid: jax.Array, mean: jax.Array) -> tuple:
        def forward(x: jax.Array) -> tuple:
            running = Running(mean, mean)
            return batch_norm(x, running=running, axis_name="d", mask=valid, momentum=0)

        y, back, new = jax.vjp(forward, x, has_aux=True)
        return y, back(dy)[0], new

    part = P("d")
    specs = {"in_specs": (part, part, part, P()), "out_specs": (part, part, P())}
    arrays = (place(each, part) for each in (x, dy, valid))
    zeros = place(np.zeros(16, np.float32), P())
    y, dx, new = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(*arrays, zeros)

    wide, where = x.astype(float), np.broadcast_to(valid, x.shape)
    axes = (0, 1, 2)
    mean, var = wide.mean(axes, where=where), wide.var(axes, where=where)
    invstd = 1 / np.sqrt(var + 1e-5)
    xhat = (wide - mean) * invstd
    means = (dy.sum(axes) + xhat * (dy * xhat).sum(axes)) / where[..., 0].sum()
    right = {"y": (y, xhat), "dx": (dx, invstd * (dy - where * means))}
    for name, (own, wanted) in right.items():
        for shard in own.addressable_shards:
            np.testing.assert_allclose(shard.data, wanted[shard.index], atol=4e-6, err_msg=name)
    np.testing.assert_allclose(new.mean.addressable_data(0), mean, rtol=1e-6)
    np.testing.assert_allclose(new.var.addressable_data(1), var, rtol=1e-5)
    print("right in process", rank, flush=True)
    jax.distributed.shutdown()


def main() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    command = [sys.executable, __file__]
    ranks = [subprocess.Popen([*command, str(rank), address]) for rank in range(2)]
    sys.exit(max(rank.wait(100) for rank in ranks))


if __name__ == "__main__":
    work(int(sys.argv[1]), sys.argv[2]) if len(sys.argv) > 1 else main()
