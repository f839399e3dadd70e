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
    """Returns the losses of one device, and those of eight groupings of its batches."""
    losses = json.loads(results([start_runs("reference", devices=1)])[0])
    one_device = np.array(losses.pop("one device"))
    groupings = np.array(list(losses.values()))
    assert groupings.shape == (8, 200)
    assert one_device[-20:].mean() < one_device[:20].mean() - 1
    return one_device, groupings


def assert_equal_up_to_the_grouping(losses, reference):
    """Checks that losses differ from those of one device as those of groupings of its batches do.

    The gradients of a whole batch are rounded to bfloat16 once on one device, those of a grouping
    once per group before they are added in FP32, as on several devices. The RMS difference to the
    run on one device must be within twice the RMS difference of the eight groupings to it.

    Groupings differ less from each other than from the run without groups (1.1 to 2.9 times their
    RMS distance to their mean). So the second limit is the stricter one: the RMS distance to the
    mean of the groupings must be within twice that of the groupings. With tensor parallelism, it is
    three times, because sums of activations over devices are rounded to bfloat16 as well.
    """
    one_device, groupings = reference
    mean = groupings.mean(0)
    for name, run in losses.items():
        assert len(run) == 200
        for center in (one_device, mean):
            difference, spread = rms(np.array(run) - center), rms(groupings - center)
            print(f"{name}: difference {difference:.2e}, spread {spread:.2e}")
            assert 0 < difference <= (3 if "TP" in name else 2) * spread, name


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
