"""Three processes, of which one is killed; run by test_paddle.py."""

from __future__ import annotations

import os
import signal

import paddle
import paddle.distributed as dist

from syncbn_core.errors import CommAborted
from syncbn_paddle import SyncBatchNorm


def main() -> None:
    dist.init_parallel_env()
    layer, x = SyncBatchNorm(4), paddle.ones([2, 4, 3])
    layer(x)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        layer(x)
    except CommAborted as error:
        print(error, flush=True)
        os._exit(0)


if __name__ == "__main__":
    ranks = dist.spawn(main, nprocs=3, backend="gloo", join=False)
    for process in ranks.processes:
        process.join()
