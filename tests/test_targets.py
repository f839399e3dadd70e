"""The table of chips, and the target of a program."""

import pytest

import jaxmp
from jaxmp._core._capability import BFLOAT16_MATMULS, FP8_MATMULS, TF32_MATMULS
from jaxmp._targets import TARGETS, get_target

# ---------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_chip_has_numbers_with_a_source(target):
    assert target.source.startswith("https://")
    assert target.memory > 2**30 and target.bandwidth > 1e11
    # Matmuls of narrower formats are not slower.
    fastest = [target.peak.get(dtype, 0) for dtype in ("float32", "bfloat16", "float8_e4m3fn")]
    present = [peak for peak in fastest if peak]
    assert present == sorted(present)
    assert (target.link > 0) == (target.platform != "cpu")


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_the_formats_of_gpus_are_those_of_their_compute_capability(target):
    if target.platform != "gpu":
        assert target.capability is None and "tf32" not in target.peak
        return
    assert ("tf32" in target.peak) == (target.capability >= TF32_MATMULS)
    assert ("bfloat16" in target.native) == (target.capability >= BFLOAT16_MATMULS)
    assert ("float8_e5m2" in target.native) == (target.capability >= FP8_MATMULS)
    assert "tf32" not in target.native and "float32" in target.native


def test_peaks_are_dense_and_of_one_device():
    # The data sheet of the H100 prints 1,979 and 3,958 TFLOP/s with sparsity.
    h100, v6e, tpu7x = map(get_target, ("h100", "v6e", "tpu7x"))
    assert h100.peak["bfloat16"] == 989.4e12 and h100.peak["float8_e4m3fn"] == 1978.9e12
    # Only the TPU7x multiplies FP8 faster than bfloat16; a chip is two devices.
    assert "float8_e4m3fn" not in v6e.native
    assert 2 * tpu7x.peak["float8_e4m3fn"] == 4614e12 and 2 * tpu7x.memory == 192 * 2**30


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h20", "Did you mean 'h200'"),
        ("H200", "in lower case: target='h200'"),
        (["h200"], "Allowed: 'v100', 't4', 'a100-40', 'a100', 'rtx3090', 'l4', 'l40s'"),
    ],
)
def test_an_unknown_chip_is_refused(name, message):
    with pytest.raises(jaxmp.errors.TargetError, match=message):
        get_target(name)


@pytest.mark.parametrize("name", ["v100", "cpu"])
def test_the_audit_says_why_it_cannot_compile(name):
    with pytest.raises(jaxmp.errors.TargetError, match=get_target(name).uncompiled):
        jaxmp.audit(lambda x: pytest.fail("traced"), 1.0, target=name)
