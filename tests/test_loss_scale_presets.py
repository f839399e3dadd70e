"""Presets of loss scales have the settings of their frameworks, and reproduce their sequences.

The models below implement the rules of the frameworks with Python floats, independently of the rule
in jaxmp. Sequences are compared while the scale of the framework is between 2**-126 and 2**126;
outside of this range, jaxmp intentionally limits the scale.
"""

import functools
import inspect
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmp._gradients._dynamic_loss_scale import DynamicLossScale
from jaxmp.errors import LossScaleError
from test_loss_scale import CUSTOM

# ---------------------------------------------------------------------------
# The frameworks' rules
# ---------------------------------------------------------------------------


def deepspeed_model(
    pattern,
    init_scale=2.0**16,
    growth_factor=2.0,
    growth_interval=1000,
    min_scale=1.0,
    hysteresis=2,
    hysteresis_refill="growth",
):
    """deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler, not raising at its minimum."""
    scale, last_overflow, left = init_scale, -1, hysteresis
    for iteration, step in enumerate(pattern):
        if step == "x":
            if hysteresis == 1 or left == 1:
                scale = max(scale / growth_factor, min_scale)
            else:
                left -= 1
            last_overflow = iteration
        else:
            if hysteresis_refill == "clean":  # consecutive_hysteresis
                left = hysteresis
            stable = iteration - last_overflow - 1
            if stable > 0 and stable % growth_interval == 0:
                if hysteresis_refill == "growth":
                    left = hysteresis
                scale *= growth_factor
        yield scale


def megatron_model(
    pattern,
    init_scale=2.0**32,
    growth_factor=2.0,
    backoff_factor=0.5,
    growth_interval=1000,
    min_scale=1.0,
    hysteresis=2,
):
    """megatron.core.optimizer.grad_scaler.DynamicGradScaler."""
    scale, growth_tracker, hysteresis_tracker = init_scale, 0, hysteresis
    for step in pattern:
        if step == "x":
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = max(scale * backoff_factor, min_scale)
        else:
            growth_tracker += 1
            if growth_tracker == growth_interval:
                growth_tracker = 0
                hysteresis_tracker = hysteresis
                scale *= growth_factor
        yield scale


# ---------------------------------------------------------------------------
# Sequences
# ---------------------------------------------------------------------------


def assert_same_sequence(loss_scale, pattern, model, rtol=0.0):
    for step, expected in zip(pattern, model, strict=True):
        if not 2.0**-126 <= expected <= 2.0**126:
            return
        loss_scale = loss_scale.adjust(step == ".")
        assert math.isclose(float(loss_scale.scale_value), expected, rel_tol=rtol)


# Sequences of finite steps and of overflows, including long ones.
PATTERNS = st.lists(
    st.tuples(st.sampled_from(".x"), st.integers(1, 7)), min_size=1, max_size=10
).map(lambda runs: "".join(step * count for step, count in runs)[:40])
INTERVALS = st.integers(1, 5)
SETTINGS = st.fixed_dictionaries(
    {
        "init_scale": st.integers(-126, 126).map(lambda k: 2.0**k),
        "growth_factor": st.sampled_from([2.0, 4.0, 16.0]),
        "growth_interval": INTERVALS,
        "min_scale": st.sampled_from([2.0**-4, 1.0, 2.0**7]),
        "hysteresis": st.integers(1, 4),
    }
).map(lambda made: made | {"init_scale": max(made["init_scale"], made["min_scale"])})


@given(PATTERNS, SETTINGS, st.sampled_from(["growth", "clean"]))
def test_deepspeed(pattern, settings, refill):
    settings["hysteresis_refill"] = refill
    backoff = 1 / settings["growth_factor"]
    ours = DynamicLossScale.preset("deepspeed", backoff_factor=backoff, **settings)
    assert_same_sequence(ours, pattern, deepspeed_model(pattern, **settings))


@given(PATTERNS, SETTINGS, st.sampled_from([0.5, 0.25, 0.125]))
def test_megatron(pattern, settings, backoff):
    settings["backoff_factor"] = backoff
    ours = DynamicLossScale.preset("megatron", **settings)
    assert_same_sequence(ours, pattern, megatron_model(pattern, **settings))


FACTORS = {
    "init_scale": st.floats(1.0, 1e6, width=32),
    "growth_factor": st.sampled_from([1.001, 1.7, 3.0]),
    "backoff_factor": st.sampled_from([0.9, 0.7, 0.1]),
}


@given(PATTERNS, st.fixed_dictionaries(FACTORS), INTERVALS)
def test_megatron_to_the_bit_with_any_factor(pattern, factors, interval):
    """Megatron-LM stores scale, factors and minimum as FP32 tensors."""
    ours = DynamicLossScale.preset("megatron", growth_interval=interval, **factors)
    stored = {name: np.float32(value) for name, value in (factors | {"min_scale": 1}).items()}
    assert_same_sequence(ours, pattern, megatron_model(pattern, growth_interval=interval, **stored))


def test_a_wrong_preset_is_noticed():
    """The comparison fails for the rule of another framework."""
    pattern = "..x.x..xx...."
    ours = DynamicLossScale.preset("megatron", init_scale=256.0, growth_interval=2)
    with pytest.raises(AssertionError):
        assert_same_sequence(ours, pattern, deepspeed_model(pattern, 256.0, growth_interval=2))


# Patterns that were worked by hand from the published rules.
TRACE, ALTERNATING = "..x.x..xx....", "x." * 4
CLEAN = {"hysteresis_refill": "clean"}
APEX = {"hysteresis": 2, **CLEAN}
WORKED = {
    "torch": ("torch", {}, TRACE, "256 512 256 256 128 128 256 128 64 64 128 128 256"),
    "megatron": ("megatron", {}, TRACE, "256 512 512 512 256 256 512 512 256 256 512 512 1024"),
    "apex kernel": ("torch", APEX, TRACE, "256 " + "512 " * 5 + "1024 1024 512 512 1024 1024 2048"),
    "deepspeed": ("deepspeed", {}, TRACE, "256 256 256 256 128 128 128 64 32 32 32 64 64"),
    "deepspeed consecutive": ("deepspeed", CLEAN, TRACE, "256 " * 8 + "128 128 128 256 256"),
    "deepspeed, alternating": ("deepspeed", {}, ALTERNATING, "256 256 128 128 64 64 32 32"),
    "megatron, alternating": ("megatron", {}, ALTERNATING, "256 256 128 128 64 64 32 32"),
    "deepspeed consecutive, alternating": ("deepspeed", CLEAN, ALTERNATING, "256 " * 8),
    "apex kernel, alternating": ("torch", APEX, ALTERNATING, "256 " * 8),
}


@pytest.mark.parametrize("name", WORKED)
def test_worked_traces(name):
    preset, options, pattern, expected = WORKED[name]
    settings = {"init_scale": 256, "growth_interval": 2, "min_scale": 1, **options}
    loss_scale = DynamicLossScale.preset(preset, **settings)
    assert_same_sequence(loss_scale, pattern, map(float, expected.split()))


# ---------------------------------------------------------------------------
# Defaults and overrides
# ---------------------------------------------------------------------------

# init, growth interval, minimum, hysteresis, delay; all presets double, halve, and have no maximum.
DEFAULTS = {
    "torch": (2.0**16, 2000, None, 1, 0),
    "deepspeed": (2.0**16, 1000, 1.0, 2, 1),
    "megatron": (2.0**32, 1000, 1.0, 2, 0),
    "keras": (2.0**15, 2000, None, 1, 0),
    "tensorflow": (2.0**15, 2000, 1.0, 1, 0),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    got = DynamicLossScale.preset(name)
    init, interval, floor, hysteresis, delay = DEFAULTS[name]
    assert float(got.scale_value) == init
    assert got == DynamicLossScale(
        init,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=interval,
        min_scale=floor,
        max_scale=None,
        hysteresis=hysteresis,
        hysteresis_refill="growth",
        first_growth_delay=delay,
    )


# No preset has one of these settings, or an initial scale above the maximum.
OVERRIDES = {**CUSTOM, "max_scale": 2.0**33, "hysteresis": 3, "first_growth_delay": 5}


def test_every_constructor_argument_is_overridden():
    assert set(OVERRIDES) == set(inspect.signature(DynamicLossScale).parameters)


@pytest.mark.parametrize("name", DEFAULTS)
def test_overrides(name):
    preset = functools.partial(DynamicLossScale.preset, name)
    assert preset(**OVERRIDES) == DynamicLossScale(**OVERRIDES)
    for argument, value in OVERRIDES.items():
        one = preset(**{argument: value})
        if argument == "init_scale":
            assert float(one.scale_value) == value
        else:
            assert getattr(one, argument) == value
        assert one != preset()


@pytest.mark.parametrize("name", DEFAULTS)
def test_bad_overrides_are_refused(name):
    preset = functools.partial(DynamicLossScale.preset, name)
    with pytest.raises(LossScaleError, match=r"growth_interval=0\): growth_interval must be"):
        preset(growth_interval=0)
    with pytest.raises(TypeError, match="window"):
        preset(window=3)


def test_other_frameworks_are_refused():
    with pytest.raises(LossScaleError, match=r"'megatorn'\. Did you mean 'megatron'"):
        DynamicLossScale.preset("megatorn")
    with pytest.raises(LossScaleError, match="Unknown framework 2"):
        DynamicLossScale.preset(2)
