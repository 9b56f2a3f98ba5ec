"""Layers whose steps are kernels, with plans of their calls; see `tests/torch/test_plans.py`."""

import re
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from emulated_device import emulated  # noqa: E402
from test_torch_on_cuda import on_kernels  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))

import test_plans as plans  # noqa: E402

from syncbn_core._kernels.cuda.signatures import signature_of  # noqa: E402
from syncbn_core.arrays import arrays_of  # noqa: E402
from syncbn_core.comm import ProcessCommunicator  # noqa: E402
from syncbn_core.exchange import Exchange  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ADDRESSES = {
    *("x", "y", "dy", "dx", "weight", "bias", "parts", "statistics", "moments", "sums"),
    *("running_mean", "running_var", "tracked", "grad_weight", "grad_bias", "partials"),
    *("block_counters", "alarm"),
}
IN_PLACE = ("nothing", "data, strided", "data, negative", "no parameters", "x, channels_last")


class TwiceOnDevice(plans.Twice):
    """A transport for a rank beside which another one has the same batch, without the host."""

    on_device = True

    def gather_in_place(self, rows, row, call):
        self.labels.append(float(row[0, -1]))
        rows[...] = row


@pytest.fixture(autouse=True)
def gpu(arch, monkeypatch):
    monkeypatch.setattr(plans, "group", lambda: ProcessCommunicator(TwiceOnDevice()))
    # tensors of the CPU are those of a device
    monkeypatch.setattr(Exchange, "_on_its_device", lambda _, own: (arrays_of(own), -1))
    with emulated(arch) as device, on_kernels(device) as gpu:
        yield gpu


@pytest.mark.parametrize(
    ("name", "where"),
    [*((name, "ranks") for name in plans.CHANGES), *((name, "in place") for name in IN_PLACE)],
)
def test_a_plan_gives_what_a_new_decision_gives(name, where, gpu, monkeypatch):
    if "shortened" in name or "unaligned" in name:
        pytest.skip("torch's own kernels do not check that either")
    by_plan, launched = plans.outcome(name, where), noted(gpu)
    plans.decided_anew(monkeypatch)
    assert by_plan == plans.outcome(name, where)
    assert launched == noted(gpu)


def noted(gpu):
    """The launches since the last call, with their arguments; of addresses the offset."""
    found = []
    for key, launch in zip(gpu.keys, gpu.device.launches, strict=True):
        names = re.findall(r"\w+", signature_of(key.partition("-")[0]))
        own = [
            (number % 16, number > 0) if name in ADDRESSES else number
            for name, number in zip(names, launch.arguments, strict=True)
        ]
        found.append((key, launch.grid, launch.stream, own))
    gpu.keys.clear()
    gpu.device.launches.clear()
    return found


def test_a_plan_keeps_no_tensor_and_no_address(gpu):
    layer = plans.a_layer()
    for _ in range(2):
        layer(plans.an_x())
    (plan,) = layer._plans
    held = repr(vars(plan.steps.kind))
    assert "tensor(" not in held
    for tensor in layer.state_dict().values():
        assert str(tensor.data_ptr()) not in held


def test_a_plan_runs_on_the_stream_of_each_call(gpu):
    layer, x = plans.a_layer(), torch.randn(8, plans.C, 32, 32)
    layer.momentum = 0.0
    expected, streams = layer(x), []
    for stream, captures in ((0, False), (5, False), (5, True), (6, False)):
        gpu.here.stream, gpu.here.captures = stream, captures
        gpu.device.launches.clear()
        assert torch.equal(layer(x), expected)
        moments, _ = gpu.device.launches
        assert moments.grid[1] > 1
        held = gpu.operations.scratch.get((0, stream))
        assert (held is None or held.partials not in moments.stored_bytes) == captures
        streams += [launch.stream for launch in gpu.device.launches]
    assert streams == [0, 0, 5, 5, 5, 5, 6, 6]
    assert len(layer._plans) == 1


def test_threads_share_a_plan_on_one_stream(gpu):
    layer, xs = plans.a_layer(), [torch.randn(8, plans.C, 32, 32) for _ in range(2)]
    layer.momentum = 0.0
    expected, found = [layer(x) for x in xs], [[], []]

    def run(number):
        gpu.here.stream = 0
        for _ in range(5):
            found[number].append(torch.equal(layer(xs[number]), expected[number]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[True] * 5] * 2


# what a new call must notice on a device, by the element of the key, see `plans.NOTICED_BY`
NOTICED_BY = {
    own: name
    for own, name in plans.NOTICED_BY.items()
    if own in ("backward_task() != -1", "is_watched()", "kind,", "not _holds_its_tensors(kind)")
}


@pytest.mark.parametrize("left_out", NOTICED_BY)
def test_without_an_element_of_the_key_a_change_goes_wrong(left_out, gpu, monkeypatch):
    plans.test_without_an_element_of_the_key_a_change_goes_wrong(left_out, monkeypatch)


def test_what_the_tensors_of_a_plan_are_like_is_compared(gpu, monkeypatch):
    monkeypatch.setattr(plans.plan, "like", lambda tensors: lambda *others: True)
    mutated = plans.outcome("data, strided")
    plans.decided_anew(monkeypatch)
    assert mutated != plans.outcome("data, strided")
