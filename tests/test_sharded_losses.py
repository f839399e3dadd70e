"""Losses and bytes of sharded training, on eight devices and in two processes."""

import json

import numpy as np
import pytest

from processes import ROOT, free_port, results, start


def start_runs(*arguments, devices=8):
    script = ROOT / "tests/sharded_runs.py"
    return start([script, *arguments], XLA_FLAGS="", JAX_NUM_CPU_DEVICES=str(devices))


def rms(array):
    return np.sqrt(np.mean(np.square(array)))


@pytest.fixture(scope="module")
def reference():
    """Returns the mean losses of the groupings on one device, and their RMS spread.

    The gradients of a whole batch are rounded to bfloat16 once on one device, those of a grouping
    once per group before they are added in FP32, as on several devices. A run without groups
    therefore differs more from both (1.1 to 2.9 times the spread) than they do from each other.
    """
    losses = json.loads(results([start_runs("reference", devices=1)])[0])
    one_device = np.array(losses.pop("one device"))
    groupings = np.array(list(losses.values()))
    assert groupings.shape == (8, 200)
    mean, spread = groupings.mean(0), rms(groupings - groupings.mean(0))
    assert one_device[-20:].mean() < one_device[:20].mean() - 1
    assert 0 < rms(one_device - mean) < 5 * spread
    return mean, spread


def assert_equal_up_to_the_grouping(losses, reference):
    mean, spread = reference
    for name, run in losses.items():
        assert len(run) == 200
        assert 0 < rms(np.array(run) - mean) <= 2 * spread, (name, spread)


@pytest.mark.slow
def test_losses_of_eight_devices(reference):
    losses = json.loads(results([start_runs("layouts")])[0])
    assert list(losses) == ["DP", "FSDP", "FSDP x TP"]
    assert_equal_up_to_the_grouping(losses, reference)


@pytest.mark.slow
def test_losses_of_two_processes(reference):
    port = free_port()
    first, second = results([start_runs(port, index, devices=4) for index in range(2)])
    assert first == second
    assert_equal_up_to_the_grouping(json.loads(first), reference)


@pytest.mark.slow
def test_bytes_of_eight_devices():
    sizes = json.loads(results([start_runs("bytes")])[0])
    assert list(sizes) == ["1", "2", "4", "8"]
    for devices, kinds in sizes.items():
        assert {kind: size * int(devices) for kind, size in kinds.items()} == sizes["1"]
    assert sizes["1"]["masters"] == 2 * sizes["1"]["parameters"]
