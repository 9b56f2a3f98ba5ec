"""ONNX: a converted model in eval becomes the same graph as the model with torch's layers."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from syncbn_torch import convert_model

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.mark.filterwarnings(
    "default"
)  # the old exporter traces, and warns of every check of a shape
@pytest.mark.parametrize("dynamo", [True, False])
def test_a_converted_model_in_eval_exports_like_the_models_own(
    dynamo: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    own = nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten()
    )
    x = torch.randn(4, 3, 8, 8)
    own(x)
    own.eval()
    kinds = []
    for name, model in (("own", own), ("converted", convert_model(copy.deepcopy(own)))):
        path = tmp_path / f"{name}.onnx"
        torch.onnx.export(model, (x,), path, dynamo=dynamo)
        session = onnxruntime.InferenceSession(path)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(y), own(x))
        kinds.append(Counter(node.op_type for node in onnx.load(path).graph.node))
    assert kinds[0] == kinds[1]
