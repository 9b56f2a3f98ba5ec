"""`syncbn_torch.lightning`, and the program for Lightning in docs/frameworks.md."""

import pickle
from pathlib import Path

import pytest
from recipes import equals_one_process
from torch import Tensor, nn

from syncbn_torch import SynchronizedBatchNorm2d, register_conversion
from syncbn_torch.lightning import SyncBatchNormPlugin

lightning = pytest.importorskip("lightning")


@pytest.mark.timeout(280)
def test_a_model_trained_on_two_processes_is_that_of_one(tmp_path: Path) -> None:
    changes = ("devices=2", "devices=1"), ("batch_size=4", "batch_size=8")
    equals_one_process("lightning", "Lightning", tmp_path, *changes)


def test_the_flag_without_the_plugin_replaces_our_layers() -> None:
    """As docs/frameworks.md says; on CPU torch's wrapper then refuses them."""
    from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm

    model = TorchSyncBatchNorm().apply(nn.Sequential(SynchronizedBatchNorm2d(3)))
    assert type(model[0]) is nn.SyncBatchNorm


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_trainers_of_both_packages_take_the_plugin(package: str) -> None:
    trainer_class = pytest.importorskip(package).Trainer
    plugin = SyncBatchNormPlugin()
    for flag in (False, True):
        trainer = trainer_class(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            logger=False,
            sync_batchnorm=flag,
            plugins=[plugin],
        )
        assert trainer.strategy._layer_sync is plugin


def test_revert_undoes_what_apply_did_and_no_more() -> None:
    mine, plain = SynchronizedBatchNorm2d(3), nn.BatchNorm2d(3)
    model = nn.Sequential(mine, nn.Sequential(plain))
    plugin = SyncBatchNormPlugin()
    assert [type(m) for m in plugin.apply(model).modules()].count(SynchronizedBatchNorm2d) == 2
    reverted = plugin.revert(model)
    assert reverted[0] is mine
    assert type(reverted[1][0]) is nn.BatchNorm2d
    assert reverted[1][0].weight is plain.weight


def test_revert_undoes_conversions_by_a_function_and_in_plain_lists() -> None:
    class Plain(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    register_conversion(
        Plain, lambda p: SynchronizedBatchNorm2d(p.num_features), lambda _: Plain(3)
    )
    model = nn.Sequential(Plain(3), nn.Identity())
    model[1].layers = [nn.BatchNorm2d(3)]
    plugin = SyncBatchNormPlugin()
    assert type(plugin.apply(model)[0]) is SynchronizedBatchNorm2d
    assert plugin.revert(model) is model
    assert type(model[0]) is Plain
    assert type(model[1].layers[0]) is nn.BatchNorm2d


def test_the_plugin_can_be_pickled_for_spawned_processes() -> None:
    assert isinstance(pickle.loads(pickle.dumps(SyncBatchNormPlugin())), SyncBatchNormPlugin)
