"""Loss scales (none, static, dynamic): interface, pytree properties, and update rule."""

import copy
import doctest
import math
import pickle
import re
import textwrap

import jax
import jax.numpy as jnp
import jmp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax.training import dynamic_scale
from hypothesis import given
from hypothesis import strategies as st

import jaxmp
from arrays import changed
from grids import fast_cases
from jaxmp._gradients import _dynamic_loss_scale, _loss_scale
from jaxmp._gradients._dynamic_loss_scale import DynamicLossScale, as_loss_scale
from jaxmp._gradients._loss_scale import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    LossScale,
    NoLossScale,
    StaticLossScale,
)
from jaxmp.errors import LossScaleError

NAMES = {**vars(jaxmp), "as_loss_scale": as_loss_scale}

# All settings differ from their defaults, so that a lost one is detected.
CUSTOM = {
    "init_scale": 512.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 3,
    "min_scale": 0.25,
    "max_scale": 2.0**20,
    "hysteresis": 2,
    "hysteresis_refill": "clean",
    "first_growth_delay": 1,
}
ALL = [
    pytest.param(NoLossScale, id="none"),
    pytest.param(lambda: StaticLossScale(1024), id="static"),
    pytest.param(DynamicLossScale, id="dynamic"),
    pytest.param(lambda: DynamicLossScale(**CUSTOM), id="custom"),
    pytest.param(lambda: DynamicLossScale.preset("torch", growth_interval=2), id="torch"),
]
SCALED = ALL[1:]
PATTERNS = st.lists(st.booleans(), min_size=1, max_size=30)


def scales(loss_scale, flags):
    out = []
    for flag in flags:
        loss_scale = loss_scale.adjust(flag)
        out.append(float(loss_scale.scale_value))
    return out


# ---------------------------------------------------------------------------
# Pytree and value semantics
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "leaves", "static"),
    [
        (NoLossScale, (), ()),
        (lambda: StaticLossScale(2), ("scale_value",), ()),
        (
            DynamicLossScale,
            ("scale_value", "good_steps", "hysteresis_left", "growth_delay_left"),
            tuple(name for name in CUSTOM if name != "init_scale"),
        ),
    ],
)
def test_every_attribute_is_a_leaf_or_static(make, leaves, static):
    loss_scale = make()
    assert set(vars(loss_scale)) == {*leaves, *static}
    assert (leaves, static) == (type(loss_scale).LEAVES, type(loss_scale).STATIC)
    keyed, treedef = jax.tree_util.tree_flatten_with_path(loss_scale)
    assert [jax.tree_util.keystr(path) for path, _ in keyed] == [f".{name}" for name in leaves]
    assert all(isinstance(leaf, jax.Array) for _, leaf in keyed)
    hash(treedef)


@pytest.mark.parametrize("make", ALL)
def test_copies_are_equal_and_bit_identical(make):
    # With `CUSTOM`, each leaf differs from that of a new scale, too.
    loss_scale = make().adjust(True).adjust(True).adjust(False)
    for got in (
        jax.tree.map(lambda x: x, loss_scale),
        jax.tree.unflatten(*jax.tree.flatten(loss_scale)[::-1]),
        copy.copy(loss_scale),
        copy.deepcopy(loss_scale),
        pickle.loads(pickle.dumps(loss_scale)),
        loss_scale.fresh(),
        jax.jit(lambda x: x)(loss_scale),
    ):
        assert got == loss_scale
        assert got is not loss_scale
        assert not changed(got, loss_scale)


@pytest.mark.parametrize("placeholder", [object(), None, "leaf", jax.ShapeDtypeStruct((3,), int)])
@pytest.mark.parametrize("make", ALL)
def test_unflatten_takes_placeholders(make, placeholder):
    loss_scale = make()
    got = jax.tree.map(lambda _: placeholder, loss_scale)
    assert all(getattr(got, name) is placeholder for name in loss_scale.LEAVES)
    assert type(loss_scale).__name__ in repr(got)


def test_equality_sees_type_leaves_and_settings():
    assert NoLossScale() == NoLossScale()
    assert StaticLossScale(2) == StaticLossScale(2.0)
    assert StaticLossScale(2) != StaticLossScale(4)
    assert StaticLossScale(2) != DynamicLossScale(2)
    assert NoLossScale() != 1
    assert DynamicLossScale() != DynamicLossScale().adjust(True)
    for name, value in CUSTOM.items():
        assert DynamicLossScale() != DynamicLossScale(**{name: value}), name


@pytest.mark.parametrize("make", ALL)
def test_immutable_and_unhashable(make):
    loss_scale = make()
    with pytest.raises(AttributeError, match=r"immutable, so scale_value cannot be set.*adjust"):
        loss_scale.scale_value = 3.0
    with pytest.raises(AttributeError, match="immutable, so good_steps cannot be deleted"):
        del loss_scale.good_steps
    with pytest.raises(TypeError, match="unhashable"):
        hash(loss_scale)


def test_repr_shows_state_and_settings():
    assert repr(NoLossScale()) == "NoLossScale()"
    assert repr(StaticLossScale(8)) == "StaticLossScale(loss_scale=8.0)"
    assert repr(DynamicLossScale(8).adjust(True)) == (
        "DynamicLossScale(scale_value=8.0, good_steps=1, hysteresis_left=1, growth_delay_left=0, "
        "growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, min_scale=6.103515625e-05, "
        "max_scale=16777216.0, hysteresis=1, hysteresis_refill='growth', first_growth_delay=0)"
    )


def test_hyperparameters_are_plain_python_numbers():
    loss_scale = DynamicLossScale(
        np.float16(512),
        growth_factor=np.float32(2),
        backoff_factor=np.float64(0.5),
        growth_interval=np.int64(7),
        min_scale=jnp.float32(1),
        max_scale=np.int32(1024),
    )
    for name in loss_scale.STATIC:
        assert type(getattr(loss_scale, name)) in (int, float, str)
    assert loss_scale == DynamicLossScale(512, growth_interval=7, min_scale=1, max_scale=1024)


@pytest.mark.parametrize("make", ALL)
def test_fresh_survives_donation_of_the_original(make):
    original = make()
    kept = original.fresh()
    jax.jit(lambda x: x.adjust(True), donate_argnums=0)(original)
    assert kept == make()
    jax.block_until_ready(kept.adjust(False))


# ---------------------------------------------------------------------------
# One interface
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", ALL)
def test_types_do_not_drift_and_steps_are_traced_once(make):
    step = jax.jit(lambda loss_scale, finite: loss_scale.adjust(finite))

    def types(loss_scale):
        return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(loss_scale)]

    first = loss_scale = make()
    value = loss_scale.scale_value
    assert (value.shape, value.dtype, value.weak_type) == ((), jnp.float32, False)
    for flag in (True, False, True, True, False, False):
        loss_scale = step(loss_scale, flag)
        assert types(loss_scale) == types(first)
        assert types(loss_scale.adjust(flag)) == types(first)
        assert jax.tree.structure(loss_scale) == jax.tree.structure(first)
    assert step._cache_size() <= 1
    assert {(d.name, weak) for _, d, weak in types(first)} <= {("float32", False), ("int32", False)}


def test_static_values_share_one_trace():
    scaled, x = jax.jit(lambda loss_scale, x: loss_scale.scale(x)), jnp.float32(3)
    assert [float(scaled(StaticLossScale(v), x)) for v in (1, 2.0, np.float16(4))] == [3, 6, 12]
    assert scaled._cache_size() <= 1


def test_at_floor():
    assert not NoLossScale().at_floor
    assert not StaticLossScale(SMALLEST_SCALE).at_floor
    loss_scale = DynamicLossScale(4, min_scale=2)
    assert not loss_scale.at_floor
    assert loss_scale.adjust(False).at_floor
    assert jax.jit(lambda x: x.adjust(False).at_floor)(loss_scale).dtype == jnp.bool_
    assert DynamicLossScale.preset("torch", init_scale=SMALLEST_SCALE).at_floor


def test_none_is_the_null_object():
    loss_scale, loss = NoLossScale(), {"loss": jnp.float16(1), "n": 3}
    assert loss_scale.scale(loss) is loss and loss_scale.scale_value == 1
    assert loss_scale.adjust(True) is loss_scale
    assert loss_scale.adjust(False) is loss_scale
    grads = {"half": jnp.ones(2, jnp.bfloat16), "full": jnp.ones(2), "n": jnp.arange(2)}
    unscaled = loss_scale.unscale(grads)
    assert unscaled["half"].dtype == jnp.float32
    assert unscaled["full"] is grads["full"]
    assert unscaled["n"] is grads["n"]


# ---------------------------------------------------------------------------
# scale and unscale
# ---------------------------------------------------------------------------

NORMAL = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


@given(x=NORMAL, exponent=st.integers(-126, 126))
def test_powers_of_two_are_exact(x, exponent):
    scale, x = 2.0**exponent, np.float32(x)
    inside = lambda y: y == 0 or SMALLEST_SCALE <= abs(y) <= float(np.finfo(np.float32).max)
    loss_scale = StaticLossScale(scale)
    if inside(float(x) * scale):
        scaled = loss_scale.scale(x)
        assert float(scaled) == float(x) * scale
        assert not changed(loss_scale.unscale(scaled), x)
    if inside(float(x) / scale):
        assert float(loss_scale.unscale(x)) == float(x) / scale


@given(x=NORMAL, scale=st.floats(2.0**-14, 2.0**24, width=32))
def test_unscale_divides(x, scale):
    """Outside of compiled code, the result is rounded once; a reciprocal would round twice."""
    x, scale = np.float32(x), np.float32(scale)
    with np.errstate(over="ignore", under="ignore"):
        expected = x / scale
    if expected == 0 or abs(expected) >= SMALLEST_SCALE:
        assert not changed(StaticLossScale(scale).unscale(x), expected)


@pytest.mark.parametrize("scale", [2.0**-14, 3.0, 1000.0, 2.0**24, 2.0**126])
@fast_cases("6.103515625e-05", "3.0", "8.507059173023462e+37")
def test_compiled_unscale_divides_by_every_scale(scale):
    """Exact for powers of two; for others within the error of XLA's reciprocal, 2 * 2**-24."""
    grads = np.random.default_rng(0).uniform(0.1, 1.0, 4096).astype(np.float32)
    grads = np.concatenate([grads * np.float32(scale), -grads * np.float32(scale)])
    expected = grads / np.float32(scale)
    loss_scale = StaticLossScale(scale)
    rtol = 0 if math.frexp(scale)[0] == 0.5 else 2.0**-23
    for unscale in (
        lambda _, x: loss_scale.unscale(x),
        jax.jit(lambda s, x: s.unscale(x)),
        jax.jit(lambda _, x: loss_scale.unscale(x)),
    ):
        np.testing.assert_allclose(unscale(loss_scale, grads), expected, rtol=rtol, atol=0)
        assert not jnp.isfinite(unscale(loss_scale, np.array([np.inf, np.nan], np.float32))).any()


@pytest.mark.parametrize(("value", "scale"), [(1e-3, 2.0**15), (2.0**-24, 2.0**24)])
def test_float16_gradients_are_unscaled_in_fp32(value, scale):
    """1e-3 / 2**15 is 3.05e-8 in FP32; the nearest float16 value is 5.96e-8, 95 % larger.

    The second value is the smallest subnormal of float16.
    """
    grad = jnp.float16(value)
    for loss_scale in (StaticLossScale(scale), DynamicLossScale(scale)):
        unscaled = loss_scale.unscale(grad)
        assert unscaled.dtype == jnp.float32
        assert float(unscaled) == float(grad) / scale > 0


def test_only_floating_and_complex_leaves_are_touched():
    untouched = {
        "int": jnp.arange(3),
        "bool": jnp.array([True]),
        "key": jax.random.key(0),
        "float0": np.zeros(2, jax.dtypes.float0),
        "fp8": jnp.ones(2, ml_dtypes.float8_e4m3fn),
        "numpy_int": np.arange(2),
        "python_int": 3,
        "python_bool": True,
        "string": "adam",
        "none": None,
        "struct": object(),
    }
    tree = {"touched": jnp.float32(2), "nested": [untouched]}
    for loss_scale in (StaticLossScale(4), DynamicLossScale(4), NoLossScale()):
        for op, expected in ((loss_scale.scale, 8), (loss_scale.unscale, 0.5)):
            got = op(tree)
            if not isinstance(loss_scale, NoLossScale):
                assert float(got["touched"]) == expected
            for name, leaf in untouched.items():
                assert got["nested"][0][name] is leaf, name


def test_complex_leaves_keep_their_dtype():
    z = jnp.array([1 + 2j, 1e30 + 1e30j], jnp.complex64)
    loss_scale = StaticLossScale(4)
    scaled, unscaled = loss_scale.scale(z), loss_scale.unscale(z)
    assert scaled.dtype == unscaled.dtype == jnp.complex64
    # Real and imaginary part each: |z|**2 of the second would overflow FP32.
    np.testing.assert_array_equal(scaled, np.asarray(z) * np.float32(4))
    np.testing.assert_array_equal(unscaled, np.asarray(z) / np.float32(4))


def test_double_precision_stays_double():
    with jax.enable_x64(True):
        for dtype in (jnp.float64, jnp.complex128):
            x = jnp.asarray(1 + 2.0**-40, dtype)
            for loss_scale in (StaticLossScale(8), DynamicLossScale(8)):
                assert loss_scale.scale_value.dtype == jnp.float32
                for got, expected in ((loss_scale.scale(x), x * 8), (loss_scale.unscale(x), x / 8)):
                    assert got.dtype == dtype
                    assert got == expected
                stepped = loss_scale.adjust(False).adjust(True)
                assert {x.dtype.name for x in jax.tree.leaves(stepped)} <= {"float32", "int32"}


@pytest.mark.parametrize("make", [np.float32, np.float16, ml_dtypes.bfloat16, jnp.float16, float])
def test_floats_of_every_kind_are_scaled_in_fp32(make):
    """In float16, 1.5 times a scale of 2**16 would overflow."""
    loss_scale, leaf = DynamicLossScale(2.0**16), make(1.5)
    scaled = loss_scale.scale(leaf)
    assert isinstance(scaled, jax.Array)
    assert (scaled.dtype, scaled.weak_type, float(scaled)) == (jnp.float32, False, 1.5 * 2**16)
    assert float(loss_scale.unscale(leaf)) == 1.5 / 2**16


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_non_finite_stays_non_finite(bad):
    for loss_scale in (NoLossScale(), StaticLossScale(2**20), DynamicLossScale(2.0**24)):
        assert not jnp.isfinite(loss_scale.unscale(jnp.float16(bad)))
        assert not jnp.isfinite(loss_scale.scale(jnp.float32(bad)))


# ---------------------------------------------------------------------------
# adjust
# ---------------------------------------------------------------------------


def documented_step():
    """Returns the plain-Python step of the docstring, as code."""
    after = DynamicLossScale.__doc__.partition("::\n\n")[2]
    algorithm = after.partition("The scale is never 0")[0]
    step = compile(textwrap.dedent(algorithm).strip(), "docstring", "exec")
    assert len(step.co_names) > 8  # Otherwise the tests that run it would test nothing.
    return step


FACTORS = {
    "growth_factor": st.sampled_from([2.0, 4.0, 1.5, 1.001, 1e20]),
    "backoff_factor": st.sampled_from([0.5, 0.25, 0.7, 0.999, 1e-20]),
}
SETTINGS = st.fixed_dictionaries(
    {
        "init_scale": st.floats(1.0, 64.0, width=32),
        "growth_interval": st.integers(1, 4),
        "min_scale": st.sampled_from([None, 2.0**-14, 1.0]),
        "max_scale": st.sampled_from([None, 2.0**24, 64.0]),
        "hysteresis": st.integers(1, 3),
        "hysteresis_refill": st.sampled_from(["growth", "clean"]),
        "first_growth_delay": st.integers(0, 2),
        **FACTORS,
    }
)


@given(settings=SETTINGS, flags=PATTERNS)
def test_the_traced_step_is_the_documented_one_bit_for_bit(settings, flags):
    loss_scale = DynamicLossScale(**settings)
    step = documented_step()
    state = {
        **settings,
        "isfinite": np.isfinite,
        "scale": np.float32(settings["init_scale"]),
        "growth_factor": np.float32(settings["growth_factor"]),
        "backoff_factor": np.float32(settings["backoff_factor"]),
        "min_scale": np.float32(settings["min_scale"] or SMALLEST_SCALE),
        "max_scale": np.float32(settings["max_scale"] or LARGEST_SCALE),
        "good_steps": 0,
        "hysteresis_left": settings["hysteresis"],
        "growth_delay_left": settings["first_growth_delay"],
    }
    for flag in flags:
        state["grads_finite"] = flag
        with np.errstate(over="ignore", under="ignore"):
            exec(step, state)
        loss_scale = loss_scale.adjust(flag)
        assert not changed(loss_scale.scale_value, state["scale"])
        assert int(loss_scale.good_steps) == state["good_steps"]
        assert int(loss_scale.growth_delay_left) == state["growth_delay_left"]
        if settings["hysteresis"] > 1:
            assert int(loss_scale.hysteresis_left) == state["hysteresis_left"]
        assert SMALLEST_SCALE <= float(loss_scale.scale_value) <= LARGEST_SCALE


LENGTH = 24
BATCH = 5


@pytest.mark.parametrize(
    "make",
    [
        *SCALED,
        pytest.param(
            lambda s=4.0: DynamicLossScale(
                s, growth_factor=1.7, backoff_factor=0.3, growth_interval=1
            ),
            id="odd",
        ),
    ],
)
def test_eager_jit_scan_and_vmap_agree_bit_for_bit(make):
    flags = np.random.default_rng(0).random((BATCH, LENGTH)) < 0.6
    jitted = jax.jit(lambda loss_scale, flag: loss_scale.adjust(flag))
    stacked = lambda trees: jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)

    def loop(adjust, row):
        loss_scale, out = make(), []
        for flag in row:
            loss_scale = adjust(loss_scale, flag)
            out.append(loss_scale)
        return stacked(out)

    def scan(row):
        def body(loss_scale, flag):
            loss_scale = loss_scale.adjust(flag)
            return loss_scale, loss_scale

        return jax.lax.scan(body, make(), row)[1]

    eager = stacked([loop(lambda s, f: s.adjust(f), row) for row in flags])
    assert not changed(eager, stacked([loop(jitted, row) for row in flags]))
    assert not changed(eager, stacked(map(jax.jit(scan), flags)))
    assert not changed(eager, jax.vmap(scan)(jnp.asarray(flags)))


@pytest.mark.usefixtures("check_leaks")
def test_no_tracer_leaks():
    flags = jnp.ones((2, 3), bool)
    step = lambda loss_scale, flag: (loss_scale.adjust(flag), loss_scale.scale(1.0))
    run = lambda row: jax.lax.scan(step, DynamicLossScale(**CUSTOM), row)[0]
    assert jax.jit(jax.vmap(run))(flags).scale_value.shape == (2,)


@pytest.mark.parametrize("flag", [True, np.bool_(True), np.array(True), jnp.array(True)])
def test_flags_of_every_kind(flag):
    loss_scale = DynamicLossScale(8, growth_interval=1)
    assert not changed(loss_scale.adjust(flag), loss_scale.adjust(jnp.array(True)))
    assert float(loss_scale.adjust(flag).scale_value) == 16
    falls = False if isinstance(flag, bool) else ~flag
    assert float(loss_scale.adjust(falls).scale_value) == 4


def test_never_zero():
    """Without a minimum, 2**15 is halved to 0 in FP32 after 165 overflows."""
    got = scales(DynamicLossScale.preset("torch"), [False] * 170)
    assert min(got) == got[-1] == 2.0**-126
    smallest = DynamicLossScale.preset("torch", init_scale=2.0**-126, growth_interval=1)
    assert scales(smallest, [False, True]) == [2.0**-126, 2.0**-125]


def test_never_infinite():
    loss_scale = DynamicLossScale.preset("torch", init_scale=2.0**125, growth_interval=1)
    assert scales(loss_scale, [True] * 4 + [False]) == [2.0**126] * 4 + [2.0**125]
    # Also if the product overflows.
    loss_scale = DynamicLossScale(
        2.0**100, max_scale=None, growth_factor=2.0**100, growth_interval=1
    )
    assert scales(loss_scale, [True]) == [2.0**126]


def test_a_count_beyond_a_shorter_interval_grows_at_once():
    long = DynamicLossScale(8, growth_interval=10)
    for _ in range(5):
        long = long.adjust(True)
    short = jax.tree.unflatten(
        jax.tree.structure(DynamicLossScale(8, growth_interval=3)), jax.tree.leaves(long)
    )
    assert scales(short, [True]) == [16]


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------

BAD_SCALES = [0, -1, np.nan, np.inf, 1e39, 10**400, 2.0**-127, True, np.True_, "2**16", None]
BAD_SCALES += [1j, [1.0], np.ones(1), jnp.ones(2), jax.ShapeDtypeStruct((), jnp.float32)]
BAD_COUNTS = [-1, 2.0, True, "2", None, 2**31, np.nan, np.arange(2)]
BAD = {
    "init_scale": BAD_SCALES,
    "min_scale": [bad for bad in BAD_SCALES if bad is not None],
    "max_scale": [bad for bad in BAD_SCALES if bad is not None],
    # 1 + 1e-9 is 1 in FP32.
    "growth_factor": [1, 0.5, 0, -2, np.nan, np.inf, 1 + 1e-9, 1e39, True, "2", None, np.ones(2)],
    "backoff_factor": [1, 2, 0, -0.5, np.nan, 1 - 1e-9, 1e-60, True, "0.5", None],
    "growth_interval": [0, *BAD_COUNTS],
    "hysteresis": [0, *BAD_COUNTS],
    "hysteresis_refill": ["", "never", None, True, 1, ["clean"], np.array(["clean", "growth"])],
    "first_growth_delay": BAD_COUNTS,
}
CASES = [(DynamicLossScale, name, value) for name, values in BAD.items() for value in values]
CASES += [(StaticLossScale, "loss_scale", value) for value in BAD_SCALES]


def fix_in(error):
    """Evaluates the fix that a message contains."""
    return eval(re.search(r"for example (.*)\.$", str(error.value)).group(1), NAMES)


@pytest.mark.parametrize(("cls", "name", "value"), CASES, ids=lambda x: repr(x)[:20])
def test_bad_arguments_are_refused_with_a_fix_that_works(cls, name, value):
    with pytest.raises(LossScaleError) as error:
        cls(**{name: value})
    assert f"{cls.__name__}({name}={value!r}): {name} must be" in str(error.value)
    fixed = fix_in(error)
    assert isinstance(fixed, cls) and (cls is DynamicLossScale or fixed == StaticLossScale(65536))


def test_every_argument_is_in_the_list_of_bad_ones():
    assert set(BAD) == set(CUSTOM)


@pytest.mark.parametrize(
    "bounds",
    [
        {"init_scale": 2.0**32},
        {"init_scale": 0.5, "min_scale": 1},
        {"init_scale": 4, "min_scale": 8, "max_scale": 2},
        {"init_scale": 2, "min_scale": None, "max_scale": 1},
        {"init_scale": 2, "min_scale": 4, "max_scale": None},
    ],
)
def test_bounds_out_of_order_are_refused_with_a_fix_that_works(bounds):
    with pytest.raises(LossScaleError, match="min_scale <= init_scale <= max_scale") as error:
        DynamicLossScale(**bounds)
    fixed = fix_in(error)
    assert float(fixed.scale_value) == bounds["init_scale"]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize(
    "flag",
    [1, 0.0, None, "yes", jnp.float32(1), jnp.array([True]), [True], np.ones((2, 2), bool)],
    ids=lambda x: repr(x)[:20],
)
def test_flags_that_are_not_one_bool_are_refused(make, flag):
    with pytest.raises(LossScaleError) as error:
        make().adjust(flag)
    assert f"adjust(grads_finite={flag!r})" in str(error.value)


def test_the_fixes_for_flags_work():
    with pytest.raises(LossScaleError) as error:
        DynamicLossScale().adjust(jnp.array([True, False]))
    names = {
        "jnp": jnp,
        "loss_scale": DynamicLossScale(8),
        "flags": jnp.array([True, False]),
        "number": jnp.int32(0),
    }
    fixes = re.findall(r"loss_scale\.adjust\((?:[^()]|\([^()]*\))*\)", str(error.value))
    assert [float(eval(fix, names).scale_value) for fix in fixes] == [4.0, 4.0]


def test_a_traced_scale_is_taken_unchecked():
    @jax.jit
    def fall(scale):
        loss_scale = DynamicLossScale(scale)
        return loss_scale.adjust(False), StaticLossScale(scale)

    for dtype in (jnp.float32, jnp.float16, jnp.int32):
        dynamic, static = fall(jnp.asarray(256, dtype))
        assert dynamic == DynamicLossScale(256).adjust(False)
        assert static == StaticLossScale(256)


@pytest.mark.parametrize("name", ["growth_factor", "growth_interval", "min_scale", "hysteresis"])
def test_a_traced_setting_is_refused(name):
    with pytest.raises(LossScaleError, match=f"{name} must be"):
        jax.jit(lambda x: DynamicLossScale(**{name: x}))(2)


def test_traced_scales_of_a_wrong_kind_are_refused():
    for bad in (jnp.array(True), jnp.ones(2), jnp.complex64(1)):
        with pytest.raises(LossScaleError, match="init_scale must be"):
            jax.jit(DynamicLossScale)(bad)


# ---------------------------------------------------------------------------
# as_loss_scale
# ---------------------------------------------------------------------------


def test_as_loss_scale_takes_what_stands_for_one():
    assert as_loss_scale(None) == NoLossScale()
    for value in (4, 4.0, np.float16(4), jnp.float32(4)):
        assert as_loss_scale(value) == StaticLossScale(4)
    for param in ALL:
        loss_scale = param.values[0]()
        assert as_loss_scale(loss_scale) is loss_scale
        assert isinstance(loss_scale, LossScale)


@pytest.mark.parametrize(
    "value",
    ["dynamic", True, DynamicLossScale, jnp.ones(2), {}, object(), 1j],
    ids=lambda value: repr(value).partition(" at 0x")[0],  # the same in every process
)
def test_as_loss_scale_refuses_the_rest_with_a_fix_that_works(value):
    with pytest.raises(LossScaleError) as error:
        as_loss_scale(value)
    assert str(error.value).startswith(f"{value!r} is not a loss scale")
    assert fix_in(error) == DynamicLossScale()


def jmp_scale(**settings):
    return jmp.DynamicLossScale(jnp.float32(2**10), jnp.int32(2), **settings)


def flax_scale(**settings):
    return dynamic_scale.DynamicScale(scale=2.0**10, fin_steps=2, **settings)


def jmp_adjust(scale, finite):
    with jax.numpy_dtype_promotion("standard"):  # jmp counts with a bool
        scale = scale.adjust(jnp.array(finite))
    return scale, scale.loss_scale, scale.counter


def flax_adjust(scale, finite):
    scale = scale.value_and_grad(lambda p: p * jnp.where(finite, 1, jnp.inf))(1.0).dynamic_scale
    return scale, scale.scale, scale.fin_steps


@pytest.mark.parametrize(
    ("theirs", "adjust"),
    [
        (jmp_scale(period=4, factor=4), jmp_adjust),
        (jmp_scale(period=3, min_loss_scale=jnp.float32(2**9)), jmp_adjust),
        (flax_scale(growth_interval=3, growth_factor=4.0), flax_adjust),
        (flax_scale(growth_interval=2, minimum_scale=2.0**9), flax_adjust),
    ],
)
def test_a_scale_of_jmp_or_flax_continues_with_the_same_values(theirs, adjust):
    ours = as_loss_scale(theirs)
    for finite in [True] * 9 + [False] * 3 + [True] * 3 + [False, True]:
        ours = ours.adjust(finite)
        theirs, scale, count = adjust(theirs, finite)
        assert (ours.scale_value, ours.good_steps) == (scale, count)


def test_scales_of_other_libraries_are_taken_wherever_ours_are():
    theirs = jmp_scale()
    loss = lambda w: jnp.sum(w * w)
    grads = jax.jit(lambda s, w: jaxmp.grad(loss, loss_scale=s)(w))(theirs, jnp.ones(2))
    assert grads.tolist() == [2.0, 2.0]
    recipe = jaxmp.load_recipe("fp16").replace(loss_scale=theirs)
    assert (
        jaxmp.get_loss_scale(recipe.optimizer(optax.sgd(0.1)).init(jnp.ones(2))).scale_value
        == 2**10
    )
    assert as_loss_scale(jmp.StaticLossScale(jnp.float32(8))) == StaticLossScale(8)
    assert as_loss_scale(jmp.NoOpLossScale()) == NoLossScale()


def test_a_state_with_a_loss_scale_is_refused_with_the_call_that_reads_it():
    opt_state = jaxmp.load_recipe("fp16").optimizer(optax.sgd(0.1)).init({"w": jnp.ones(2)})
    with pytest.raises(LossScaleError, match=r"Write loss_scale=jaxmp.get_loss_scale\(opt_state\)"):
        as_loss_scale(opt_state)


def test_foreign_classes_of_the_same_name_and_wrong_numbers_are_refused():
    foreign = type("DynamicLossScale", (), {"loss_scale": 8.0})()
    for value, message in [
        (foreign, r"is not a loss scale.* DynamicLossScale\(init_scale"),
        (-1, r"loss_scale=-1\): loss_scale must be"),
    ]:
        with pytest.raises(LossScaleError, match=message):
            as_loss_scale(value)


def test_the_examples_run():
    files = (_loss_scale, _dynamic_loss_scale)
    results = [doctest.testmod(file, extraglobs=NAMES) for file in files]
    assert sum(result.attempted for result in results) >= 6
    assert not any(result.failed for result in results)
