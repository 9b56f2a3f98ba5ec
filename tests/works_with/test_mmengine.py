"""mmengine: the program in docs/frameworks.md, the registry, and its converters."""

from pathlib import Path

import pytest
from recipes import blocks, equals_one_process
from torch import nn

from syncbn_torch import SyncBatchNorm, SynchronizedBatchNorm2d, convert_model

pytest.importorskip("mmengine")
HEADING = "mmengine"


@pytest.mark.timeout(280)
def test_a_model_trained_on_two_processes_is_that_of_one(tmp_path: Path) -> None:
    cfg = (
        '    cfg={"model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None}},'
    )
    alone = ('"batch_size": 4', '"batch_size": 8'), ('launcher="pytorch"', 'launcher="none"')
    world = ('dist.init_process_group("gloo")', ""), ("dist.destroy_process_group()", "")
    equals_one_process("mmengine", "mmengine", tmp_path, *alone, *world, (cfg, ""))


def test_the_registry_builds_our_class() -> None:
    exec(compile(blocks(HEADING)[1], "docs/frameworks.md", "exec"), {})


def test_converters_do_what_the_page_says() -> None:
    from mmengine.model import convert_sync_batchnorm, revert_sync_batchnorm

    def model() -> nn.Module:
        layers = nn.BatchNorm2d(3), nn.SyncBatchNorm(3)
        return convert_model(nn.Sequential(*layers))

    kept = revert_sync_batchnorm(model())
    assert [type(m) for m in kept] == [SynchronizedBatchNorm2d, SyncBatchNorm]
    replaced = convert_sync_batchnorm(model())
    assert [type(m) for m in replaced] == [nn.SyncBatchNorm] * 2
    assert [type(m) for m in convert_model(replaced)] == [SyncBatchNorm] * 2
