"""FP8 matmuls: results, residuals, and the compiled programs."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from arrays import f64, normal, shape, signal_to_noise
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, REST, each_value, fast_cases
from jaxmp import audit, fp8
from jaxmp._core import _compat
from jaxmp._programs._jaxprs import equations
from jaxmp._tools.audit._compile import compile_for
from jaxmp._tools.audit._hlo import Program
from jaxmp._tools.audit._trace import trace
from jaxmp.errors import CompositionError, JaxmpError, RecipeError
from programs import operands

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*without that of its states:jaxmp.errors.RecipeWarning"
)

LINEAR = (((1,), (0,)), ((), ()))
RECIPES = {
    "current": fp8.CurrentScaling(),
    "current-e4m3": fp8.CurrentScaling(dgrad="e4m3fn", wgrad="e4m3fn"),
    "current-amax": fp8.CurrentScaling(power_of_two=False),
    "delayed": fp8.DelayedScaling(amax_history_len=4),
    "rowwise": fp8.RowwiseScaling(),
}
# MXFP8 with gradients in E5M2.
HYBRID = fp8.MXScaling(dgrad=("e5m2", "e4m3fn"), wgrad=("e4m3fn", "e5m2"))
# Variants of tested cases take as long to compile, so they are slow tests.
_FIRST = ("current", "delayed", "rowwise")
each_recipe = pytest.mark.parametrize(
    "recipe",
    [
        recipe if name in _FIRST else pytest.param(recipe, marks=REST)
        for name, recipe in RECIPES.items()
    ],
    ids=RECIPES,
)


def state_of(recipe):
    return fp8.init_state(recipe) if recipe.is_stateful else None


def linear(recipe, x, w, dims=LINEAR, **options):
    return fp8.dot_general(recipe)(x, w, dims, state=state_of(recipe), **options)


@functools.partial(jax.jit, static_argnums=(0, 4))
def outputs(recipe, x, w, g, dims=LINEAR):
    """Returns the result, and the gradients of both operands for the output gradient `g`."""
    y, backward = jax.vjp(lambda x, w: linear(recipe, x, w, dims), x, w)
    return (y, *backward(g.astype(y.dtype)))


# ---------------------------------------------------------------------------
# Accuracy
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        *((recipe, "float32") for recipe in RECIPES.values()),
        (RECIPES["current"], "bfloat16"),
        pytest.param(RECIPES["current"], "float16", marks=pytest.mark.slow),
        (fp8.MXScaling(), "bfloat16"),
        (fp8.MXScaling(rounding="down"), "float32"),
        pytest.param(HYBRID, "float16", marks=pytest.mark.slow),
    ],
    ids=[*RECIPES, "current-bf16", "current-f16", "mx", "mx-down", "mx-hybrid"],
)
@fast_cases("current", "delayed", "rowwise", "mx", "mx-down")
def test_signal_to_noise_of_normal_data(recipe, dtype):
    """One operand rounded to E4M3 has 31.5 dB (half a unit of 4 bits, uniform), to E5M2 25.5 dB.

    In a matmul the noise of both operands adds: 28.5 and 24.5 dB.
    """
    x, w, g = (
        normal(i, *shape, dtype=dtype) for i, shape in enumerate([(96, 128), (128, 64), (96, 64)])
    )
    x64, w64, g64 = map(f64, (x, w, g))
    high, low = 28.0, 28.0 if recipe.dgrad == ("e4m3fn", "e4m3fn") else 23.5
    if recipe == fp8.MXScaling(rounding="down"):
        # Elements from 448 to 512 times the scale saturate, which costs 1 dB for normal data.
        high = low = 27.0
    limits = [(x64 @ w64, high), (g64 @ w64.T, low), (x64.T @ g64, low)]
    for (exact, least), got in zip(limits, outputs(recipe, x, w, g), strict=True):
        assert got.dtype == x.dtype
        # No more than 30 dB either, or nothing was rounded.
        assert least <= signal_to_noise(exact, got) <= 30.0


_HARD = {
    # Student's t with 2.5 degrees of freedom: some elements are a hundred times the median.
    "heavy-tailed": lambda: np.random.default_rng(0).standard_t(2.5, size=(256, 128)),
    # Two of 128 input channels are 100 times as large as the rest.
    "outlier-channels": lambda: (
        np.random.default_rng(0).normal(size=(256, 128)) * np.where(np.arange(128) % 64, 1, 100)
    ),
}


@pytest.mark.parametrize("data", _HARD)
@pytest.mark.parametrize("name", ["current", "rowwise"])
def test_data_that_per_tensor_scales_are_said_to_suffer_from(data, name):
    """In E4M3, elements of 2**-14 times the largest keep all mantissa bits."""
    x = jnp.asarray(_HARD[data](), jnp.float32)
    w = normal(1, 128, 64)
    y = linear(RECIPES[name], x, w)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    assert signal_to_noise(exact, y) >= 27.0


def rounded(a, dtype, power_of_two=True):
    """Returns the values of an array after quantization, in FP64."""
    a = np.asarray(a, np.float32)
    scale = np.float32(ml_dtypes.finfo(dtype).max) / np.abs(a).max()
    if power_of_two:
        scale = np.exp2(np.floor(np.log2(scale)))
    return (a * scale).astype(dtype).astype(np.float64) / np.float64(scale)


@pytest.mark.parametrize(
    "recipe", [*map(RECIPES.get, ("current", "delayed", "rowwise")), fp8.MXScaling()]
)
def test_second_derivatives_are_refused(recipe):
    x, w = normal(0, 32, 32), normal(1, 32, 16)
    squares = lambda x: (linear(recipe, x, w) ** 2).sum()
    slope = jax.grad(squares)
    # The gradient of the result is constant, and so can be the scales; only the kernel varies.
    of_kernel = lambda w: jax.grad(lambda x: linear(recipe, x, w).sum())(x).sum()
    for derive in (
        lambda: jax.jvp(slope, (x,), (x,)),
        lambda: jax.jit(jax.grad(lambda x: (slope(x) ** 2).sum()))(x),
        lambda: jax.hessian(squares)(x),
        lambda: jax.grad(of_kernel)(w),
    ):
        with pytest.raises(CompositionError, match=r"no second derivative.*bf16"):
            derive()


def test_forward_mode_is_refused():
    x, w = normal(0, 32, 32), normal(1, 32, 16)
    for derive in (jax.jacfwd, lambda f: lambda w: jax.jvp(f, (w,), (w,))):
        with pytest.raises(CompositionError, match=r"no derivative in forward mode.*jax\.grad"):
            derive(lambda w: linear(fp8.CurrentScaling(), x, w).sum())(w)


def test_a_high_precision_wgrad_is_exact():
    recipe = fp8.CurrentScaling(wgrad="high")
    x, w, g = normal(0, 64, 32), normal(1, 32, 48), normal(2, 64, 48)
    _, dx, dw = outputs(recipe, x, w, g)
    np.testing.assert_allclose(dw, x.T @ g, rtol=1e-5, atol=1e-4)
    assert signal_to_noise(np.asarray(g) @ np.asarray(w).T, dx) < 30


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_each_product_has_its_own_formats(gemm):
    recipe = fp8.CurrentScaling(
        **{**dict.fromkeys(["fprop", "dgrad", "wgrad"], "high"), gemm: ("e4m3fn", "e5m2")}
    )
    found = operands(lambda *args: outputs(recipe, *args), *[normal(0, 32, 32)] * 3)
    high = ("float32", "float32")
    assert sorted(found) == [high, high, ("float8_e4m3fn", "float8_e5m2")]


# ---------------------------------------------------------------------------
# Any dimension numbers
# ---------------------------------------------------------------------------

SHAPES = {
    "linear": ((6, 8), (8, 4), LINEAR),
    "tokens": ((2, 3, 8), (8, 4), (((2,), (0,)), ((), ()))),
    "heads": ((2, 3, 8), (8, 2, 4), (((2,), (0,)), ((), ()))),
    "from heads": ((2, 3, 2, 4), (2, 4, 5), (((2, 3), (0, 1)), ((), ()))),
    "crossed": ((2, 4, 3, 2), (2, 4, 5), (((1, 3), (1, 0)), ((), ()))),
    "contracted last": ((6, 8), (4, 8), (((1,), (1,)), ((), ()))),
    "contracted first": ((8, 6), (8, 4), (((0,), (0,)), ((), ()))),
    "vector": ((8,), (8, 4), (((0,), (0,)), ((), ()))),
    "experts": ((3, 6, 8), (3, 8, 4), (((2,), (1,)), ((0,), (0,)))),
    "batch inside": ((6, 3, 8), (8, 4, 3), (((2,), (0,)), ((1,), (2,)))),
    "negative": ((6, 8), (8, 4), (((-1,), (0,)), ((), ()))),
    "two batches": ((2, 3, 6, 8), (3, 2, 8, 4), (((3,), (2,)), ((0, 1), (1, 0)))),
    "outer": ((6,), (4,), (((), ()), ((), ()))),
    # Blocks of 32 of MXFP8 do not divide K.
    "tokens, K of 40": ((2, 3, 40), (40, 4), (((2,), (0,)), ((), ()))),
}
EXACT = {
    "current": fp8.CurrentScaling(),
    "delayed": fp8.DelayedScaling(amax_history_len=2),
    "rowwise": fp8.RowwiseScaling(dgrad=("e5m2", "e4m3fn")),
    "mx": fp8.MXScaling(),
}


@pytest.mark.parametrize("name", ["current", "current-amax", "delayed"])
@fast_cases("current-amax")
def test_results_are_matmuls_of_rounded_operands_that_are_rounded_once(name):
    """Compares with FP64 matmuls of operands that `ml_dtypes` rounded.

    A factor of the scales that is rounded to bfloat16 is wrong by up to 0.2 % for all elements.

    Over the sizes of x, factors are at different distances from numbers of bfloat16.
    """
    x, w, g = normal(0, 48, 32), normal(1, 32, 64), normal(2, 48, 64)
    for size, dtype in [(1.0, "float32"), *((size, "bfloat16") for size in (1.0, 1.1, 1.2, 1.3))]:
        arrays = [a.astype(dtype) for a in (size * x, w, g)]
        power_of_two = RECIPES[name].power_of_two
        x8, w8 = (rounded(a, ml_dtypes.float8_e4m3fn, power_of_two) for a in arrays[:2])
        g8 = rounded(arrays[2], ml_dtypes.float8_e5m2, power_of_two)
        results = outputs(RECIPES[name], *arrays)
        for want, got in zip((x8 @ w8, g8 @ w8.T, x8.T @ g8), results, strict=True):
            assert got.dtype == dtype
            got = np.asarray(got, np.float64)
            # Half a unit of the dtype, and the error of the sums in FP32.
            bits = jnp.finfo(dtype).nmant + 1
            half = np.exp2(np.floor(np.log2(np.abs(want))) - bits)
            assert (np.abs(got - want) <= half + 2.0**-18 * np.abs(want).max()).all()
            # Errors of 1,500 and more independent roundings cancel.
            assert abs(np.sum(got * want) / np.sum(want**2) - 1) < 2e-4


@pytest.mark.parametrize(
    ("element", "result"), [(0.0, 0.0), (1e30, 3.2e31), (np.inf, np.nan), (np.nan, np.nan)]
)
def test_bfloat16_results_of_special_elements(element, result):
    """Zeros have scale 1, large elements do not overflow, and others that are not finite show."""
    x = jnp.full((16, 32), element, jnp.bfloat16)
    recipe = RECIPES["current-amax"]
    y = jax.jit(functools.partial(linear, recipe))(x, jnp.ones((32, 16), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    want = jnp.full((16, 16), result, jnp.bfloat16)
    np.testing.assert_array_equal(y.astype(jnp.float32), want.astype(jnp.float32))


@pytest.mark.parametrize(
    "shape",
    [
        shape
        if shape in ("tokens", "from heads", "crossed", "experts", "tokens, K of 40")
        else pytest.param(shape, marks=REST)
        for shape in SHAPES
    ],
)
@fast_cases("experts", "tokens, K of 40")
def test_small_integers_are_multiplied_exactly(shape):
    """Integers up to 7 fit both formats and power-of-two scales are exact, so only the layout is
    tested.
    """
    lhs_shape, rhs_shape, dims = SHAPES[shape]
    rng = np.random.default_rng(0)
    integers = lambda shape: jnp.asarray(rng.integers(-7, 8, size=shape), jnp.float32)
    x, w = integers(lhs_shape), integers(rhs_shape)
    positive = tuple(
        tuple(tuple(a % n for a in axes) for axes, n in zip(pair, (x.ndim, w.ndim), strict=True))
        for pair in dims
    )
    exact = lambda x, w: lax.dot_general(x, w, positive)
    g = integers(jax.eval_shape(exact, x, w).shape)
    # Delayed scaling shares its layouts with current scaling.
    names = EXACT if shape in ("crossed", "batch inside") else ("current", "rowwise", "mx")

    @jax.jit
    def run(x, w, g):
        fns = [exact, *(functools.partial(linear, EXACT[name], dims=dims) for name in names)]
        results = [jax.vjp(fn, x, w) for fn in fns]
        return [(y, *backward(g)) for y, backward in results]

    want, *found = run(x, w, g)
    for got in found:
        for array, right in zip(got, want, strict=True):
            np.testing.assert_array_equal(array, right)


def test_the_kernel_may_stand_on_the_left():
    recipe = EXACT["current"]
    x, w = normal(0, 32, 16), normal(1, 16, 48)
    left = fp8.dot_general(recipe, kernel="lhs")(
        w, x, (((0,), (1,)), ((), ())), state=state_of(recipe)
    )
    np.testing.assert_array_equal(left.T, linear(recipe, x, w))


@pytest.mark.parametrize(
    "dims",
    [
        LINEAR[0],
        (((1,), (2,)), ((), ())),
        (((0,), (0,)), ((), ())),
        None,
        (((1, 1), (0, 0)), ((), ())),
    ],
)
def test_dimension_numbers_that_do_not_fit(dims):
    with pytest.raises(JaxmpError, match=r"do not fit operands of shapes \(4, 8\) and \(8, 2\)"):
        linear(RECIPES["current"], jnp.ones((4, 8)), jnp.ones((8, 2)), dims)


def test_wide_results():
    """16-bit operands with an FP32 result: the gradient is quantized without a rounding before."""
    x, w = normal(0, 64, 32, dtype=jnp.bfloat16), normal(1, 32, 48, dtype=jnp.bfloat16)

    @jax.jit
    def run(x, w):
        wide = functools.partial(linear, RECIPES["current"], preferred_element_type=jnp.float32)
        y, backward = jax.vjp(wide, x, w)
        return y, *backward(y)

    y, dx, dw = run(x, w)
    assert y.dtype == jnp.float32
    assert dx.dtype == dw.dtype == jnp.bfloat16
    assert jnp.unique(y).size > 2 * jnp.unique(y.astype(jnp.bfloat16)).size


def test_float16_does_not_overflow_on_the_way():
    """400 * 256 overflows float16, but the result does not."""
    x, w = jnp.full((16, 64), 104.0, jnp.float16), jnp.full((64, 16), 0.5, jnp.float16)
    assert float(linear(RECIPES["current"], x, w)[0, 0]) == 3328.0


# ---------------------------------------------------------------------------
# Non-finite values are preserved
# ---------------------------------------------------------------------------


@each_recipe
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_what_is_not_finite_reaches_the_gradients(recipe, bad, where):
    arrays = [normal(0, 32, 16), normal(1, 16, 32), normal(2, 32, 32)]
    arrays[where] = arrays[where].at[3, 5].set(bad)
    y, dx, dw = (bool(jnp.isfinite(a).all()) for a in outputs(recipe, *arrays))
    assert (y, dx, dw) == {
        0: (False, True, False),
        1: (False, False, True),
        2: (True, False, False),
    }[where]


@each_recipe
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-37, 1e-30, 1e30])
def test_tiny_and_huge_tensors(recipe, size):
    """Scales stay finite: results are correct if FP32 can represent them, otherwise zero."""
    x, w = normal(0, 32, 16) * np.float32(size), normal(1, 16, 32)
    g = normal(2, 32, 32)
    y, dx, dw = outputs(recipe, x, w, g)
    assert all(bool(jnp.isfinite(a).all()) for a in (y, dx, dw))
    if size >= 1e-30:
        exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
        assert signal_to_noise(exact / size, np.asarray(y, np.float64) / size) > 26


# ---------------------------------------------------------------------------
# Transformations
# ---------------------------------------------------------------------------


def casts(fn, *args):
    """Returns the number of casts to FP8 in a program."""
    return sum(
        eqn.primitive.name == "convert_element_type"
        and str(eqn.params["new_dtype"]).startswith("float8")
        for eqn in equations(jax.make_jaxpr(fn)(*args))
    )


@pytest.mark.parametrize("name", ["current", "delayed", "rowwise"])
def test_three_products_all_in_fp8(name):
    recipe = RECIPES[name]
    found = operands(
        lambda *args: outputs(recipe, *args), *[normal(0, 32, 32, dtype="bfloat16")] * 3
    )
    gradient = recipe.dgrad[0]
    assert found == [
        ("float8_e4m3fn", "float8_e4m3fn"),
        (f"float8_{gradient}", "float8_e4m3fn"),
        ("float8_e4m3fn", f"float8_{gradient}"),
    ]


@pytest.mark.parametrize("name", ["current", "current-e4m3", "delayed", "rowwise"])
def test_what_is_kept_for_the_backward_pass_is_fp8(name):
    x, w = normal(0, 64, 32, dtype=jnp.bfloat16), normal(1, 32, 48, dtype=jnp.bfloat16)
    _, backward = jax.vjp(functools.partial(linear, RECIPES[name]), x, w)
    kept = {}
    for leaf in jax.tree.leaves(backward):
        kept[str(leaf.dtype)] = kept.get(str(leaf.dtype), 0) + leaf.size
    assert kept["float8_e4m3fn"] == x.size + w.size
    # Factors (of rowwise scaling one for each of 32 + 32) and the state of delayed scaling.
    assert set(kept) == {"float8_e4m3fn", "float32"} and kept["float32"] < 100


POLICIES = {
    "all again": None,
    "quantized operands": jax.checkpoint_policies.save_only_these_names(
        fp8._checkpoint.CHECKPOINT_NAME
    ),
    "products": jax.checkpoint_policies.dots_saveable,
    "all": jax.checkpoint_policies.everything_saveable,
}


@pytest.mark.parametrize(
    "recipe",
    [
        RECIPES["current"],
        pytest.param(RECIPES["delayed"], marks=EXPENSIVE),
        pytest.param(fp8.MXScaling(), marks=EXPENSIVE),
    ],
    ids=["current", "delayed", "mx"],
)
def test_scan_and_remat_change_nothing(recipe):
    """Compares layers in sequence, in a scan, and recomputed with every checkpoint policy."""
    x, w = normal(0, 32, 16), normal(1, 3, 16, 16)
    layer = lambda x, w: jnp.maximum(linear(recipe, x, w), 0)

    def unrolled(x, w):
        for index in range(3):
            x = layer(x, w[index])
        return x

    def scanned(policy, x, w):
        step = jax.checkpoint(layer, policy=policy)
        return lax.scan(lambda x, w: (step(x, w), None), x, w)[0]

    fns = [unrolled, *(functools.partial(scanned, policy) for policy in POLICIES.values())]
    want, *rest = jax.jit(
        lambda: [jax.value_and_grad(lambda *a, fn=fn: fn(*a).sum(), (0, 1))(x, w) for fn in fns]
    )()
    for got in rest:
        for leaf, exact in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            # Sums of 16 terms in another order; one FP8 number off would be 1e-3 of the largest.
            np.testing.assert_allclose(leaf, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(want))


@pytest.mark.parametrize(
    ("policy", "count"),
    [
        # Input, kernel and gradient, and the first two again where they are recomputed.
        ("all again", 5),
        ("quantized operands", 3),
    ],
)
def test_no_quantization_twice_under_remat(policy, count):
    layer = jax.checkpoint(functools.partial(linear, RECIPES["current"]), policy=POLICIES[policy])
    gradient = jax.grad(lambda x, w: jnp.sum(layer(x, w) ** 2), argnums=(0, 1))
    assert casts(gradient, normal(0, 32, 16), normal(1, 16, 48)) == count


@pytest.mark.parametrize("name", EXACT)
@fast_cases("current")
def test_vmap_is_a_loop_over_examples(name):
    recipe = EXACT[name]
    x, w, g = normal(0, 3, 32, 16), normal(1, 16, 48), normal(2, 3, 32, 48)
    mapped = jax.jit(jax.vmap(functools.partial(outputs, recipe), in_axes=(0, None, 0)))(x, w, g)
    for index in range(3):
        for got, want in zip(mapped, outputs(recipe, x[index], w, g[index]), strict=True):
            np.testing.assert_allclose(got[index], want, rtol=1e-5, atol=1e-5)


def test_equal_recipes_share_a_trace():
    assert fp8.dot_general(fp8.CurrentScaling()) is fp8.dot_general("current")
    assert fp8.dot_general() is fp8.dot_general("current")
    assert fp8.dot_general(RECIPES["current-amax"]) is not fp8.dot_general()
    run = jax.jit(lambda recipe, x: linear(recipe, x, x), static_argnums=0)
    for recipe in (fp8.CurrentScaling(), fp8.CurrentScaling(fprop="e4m3fn")):
        run(recipe, jnp.ones((16, 16)))
    assert run._cache_size() <= 1


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fp8.CurrentScaling(fprop="e5m2"), r"fprop='e5m2'.*not both 'e5m2'"),
        (lambda: fp8.CurrentScaling(wgrad=("e5m2", "e5m2")), "not both 'e5m2'"),
        (
            lambda: fp8.CurrentScaling(dgrad="bf16"),
            "dgrad must be the formats of output_grad and kernel",
        ),
        (lambda: fp8.CurrentScaling(dgrad=("e4m3fn",) * 3), "dgrad must be"),
        (lambda: fp8.CurrentScaling(dgrad=None), "dgrad must be"),
        (lambda: fp8.CurrentScaling(margin=-1), "margin must be an integer from 0 to 64"),
        (lambda: fp8.CurrentScaling(power_of_two="yes"), "power_of_two must be True or False"),
        (lambda: fp8.CurrentScaling(fast_accumulation="all"), "among fprop, dgrad, wgrad"),
        (lambda: fp8.CurrentScaling(fast_accumulation=[["fprop"]]), "among fprop, dgrad, wgrad"),
        (lambda: fp8.DelayedScaling(amax_history_len=0), "amax_history_len must be"),
        (lambda: fp8.DelayedScaling(amax_compute="mean"), "'max' or 'most_recent'"),
        (lambda: fp8.DelayedScaling(calibrate=1), "calibrate must be"),
        (lambda: fp8.RowwiseScaling(min_width="wide"), "min_width must be 'auto' or an integer"),
        (lambda: fp8.MXScaling(rounding="even"), "rounding must be 'up' or 'down'"),
        (lambda: fp8.MXScaling(margin=1), r"margin must be an integer from 0 to 0; .*\(margin=0\)"),
        (lambda: fp8.MXScaling(power_of_two=False), "must be True: scales are in E8M0"),
        (lambda: fp8.MXScaling(fprop="e5m2"), "not both 'e5m2'"),
        (lambda: fp8.dot_general("curent"), "Did you mean 'current'?"),
        (lambda: fp8.dot_general(fp8.CurrentScaling), r"Make an instance: fp8.CurrentScaling\(\)"),
        (lambda: fp8.dot_general(3), "3 is not an FP8 scaling"),
    ],
)
def test_bad_settings(build, message):
    with pytest.raises(RecipeError, match=message):
        build()


def delayed(x, **options):
    return fp8.dot_general("delayed")(x, x, LINEAR, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, x: f(x.astype(jnp.int32), x, LINEAR), "lhs is int32"),
        (
            lambda f, x: f(x, x.astype(jnp.float8_e5m2), LINEAR),
            "rhs is float8_e5m2.*quantizes by itself",
        ),
        (
            lambda f, x: f(None, x, LINEAR),
            r"fp8.dot_general: lhs is NoneType \(None\), not an array",
        ),
        (lambda f, x: f(x, x, LINEAR, x), r"precision is ArrayImpl.*takes two\s+operands"),
        (lambda f, x: f(x, x, LINEAR, None, "nope"), "Unknown dtype 'nope'"),
        (
            lambda f, x: f(x, x, LINEAR, preferred_element_type="e4m3fn"),
            "preferred_element_type is float8_e4m3fn.*convert the result",
        ),
        (lambda f, x: fp8.einsum()(0, x, x), r"fp8.einsum\(0, ...\): it is not a string"),
        (lambda f, x: fp8.einsum()("ab,bc", x, "x"), r"fp8.einsum: kernel is str \(x\)"),
        (lambda f, x: f(x, x, LINEAR, state={}), "CurrentScaling has no state"),
        (lambda f, x: delayed(x), "DelayedScaling needs its state"),
        (lambda f, x: fp8.dot_general(kernel="left"), "kernel='left' must be 'rhs' or 'lhs'"),
        (lambda f, x: fp8.init_state("current"), "CurrentScaling has no state"),
        (
            lambda f, x: delayed(x, state=fp8.init_state(fp8.DelayedScaling(amax_history_len=3))),
            r"has shape \(3,\) and dtype float32; with amax_history_len=1024",
        ),
        (
            lambda f, x: delayed(x, state=dict.fromkeys(fp8.init_state())),
            r"state\['age'\] has shape \(\) and dtype NoneType",
        ),
        (lambda f, x: delayed(x, state={"age": x}), r"The state of .* the keys .*, not \['age'\]"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(JaxmpError, match=message):
        call(fp8.dot_general(), jnp.ones((16, 16)))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    each_value(["current", "rowwise", "mx"], [(0, 32, 16), (4, 0, 16), (4, 32, 0)]),
)
def test_operands_of_no_size(kind, sizes):
    m, k, n = sizes
    product = fp8.dot_general(kind)
    loss = lambda x, w: product(x, w, LINEAR).sum()
    x, w = jnp.ones((m, k)), jnp.ones((k, n))
    grads = jax.grad(loss, (0, 1))(x, w)
    assert [grad.shape for grad in grads] == [x.shape, w.shape]
    np.testing.assert_array_equal(product(x, w, LINEAR), jnp.dot(x, w))


# ---------------------------------------------------------------------------
# Compiled for a GPU
# ---------------------------------------------------------------------------


def training_step(recipe, dims):
    def loss(x, w, state):
        with jax.named_scope("layer"):
            y = fp8.dot_general(recipe)(x, w.astype(x.dtype), dims, state=state)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1, 2) if recipe.is_stateful else (0, 1))


def compiled(recipe, x, w, dims, target="h200"):
    state = jax.eval_shape(lambda: state_of(recipe))
    with jax.numpy_dtype_promotion("standard"):
        return audit(training_step(recipe, dims), x, w, state, target=target)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "x", "w", "dims"),
    [
        ("current", (4, 128, 256), (256, 384), (((2,), (0,)), ((), ()))),
        ("delayed", (4, 128, 256), (256, 384), (((2,), (0,)), ((), ()))),
        ("rowwise", (4, 128, 256), (256, 384), (((2,), (0,)), ((), ()))),
        ("current", (4, 128, 256), (256, 4, 64), (((2,), (0,)), ((), ()))),
        ("rowwise", (4, 128, 4, 64), (4, 64, 256), (((2, 3), (0, 1)), ((), ()))),
        # A batch dimension, as for experts, becomes a batched matmul of cuBLAS.
        ("current-amax", (4, 128, 256), (4, 256, 384), (((2,), (1,)), ((0,), (0,)))),
    ],
)
@fast_cases("current-x0-w0-dims0", "rowwise-x4-w4-dims4")
def test_three_real_fp8_products(name, x, w, dims):
    recipe = RECIPES[name]
    report = compiled(recipe, shape(*x), shape(*w), dims)
    gradient = f"float8_{recipe.dgrad[0]}"
    found = [
        (row.phase, *sorted([row.lhs, row.rhs]), row.kernel, row.module)
        for row in report.gemms
        for _ in range(row.count)
    ]
    rest = gradient, "cublas fp8", "layer"
    assert sorted(found) == [
        ("backward", "float8_e4m3fn", *rest),
        ("backward", "float8_e4m3fn", *rest),
        ("forward", "float8_e4m3fn", "float8_e4m3fn", *rest[1:]),
    ]
    assert "fp8_fallback" not in {finding.check for finding in report.findings}


def program_for_h200(step, args):
    with _compat.context(target="gpu", capability=(9, 0)):
        traced = trace(jax.jit(step), args, {})
    return Program(compile_for("h200", traced).text)


@needs_compiler
@EXPENSIVE
def test_layers_with_one_input_have_factors_in_fp32():
    """XLA would merge the matmuls of query and key, and round the factors to bfloat16."""
    product = functools.partial(linear, RECIPES["current"])

    def loss(x, query, key):
        scores = product(x, query).astype(jnp.float32) * product(x, key).astype(jnp.float32)
        return jnp.sum(jnp.sin(scores))

    step, args = jax.grad(loss), (shape(512, 256), shape(256, 384), shape(256, 384))
    matmuls, results = 0, []
    for each in program_for_h200(step, args).steps():
        kernel, instructions = each.instruction, each.computation.instructions
        results += [shape for shape in kernel.shapes if shape.type == "bf16"]
        if "$f8" in kernel.attribute("custom_call_target"):
            matmuls += 1
            # cuBLAS multiplies by both; the other one is 1.
            factors = [instructions[name] for name in kernel.operands[-2:]]
            assert [shape.type for factor in factors for shape in factor.shapes] == ["f32", "f32"]
            assert sum(factor.opcode != "constant" for factor in factors) == 1
    # Forward, and the gradient of the input.
    assert matmuls == 4
    assert all(shape.sizes for shape in results)


@needs_compiler
def test_zeros_of_a_program_are_not_read_to_quantize():
    """XLA would merge zeros that make NaN of infinities with those in which a loop sums."""

    def step(x, weights, rows):
        add = lambda row, total: total + rows[row]
        total = lax.fori_loop(0, rows.shape[0], add, jnp.zeros(x.shape, jnp.float32))
        return linear(RECIPES["current"], x, weights), total

    args = shape(512, 256), shape(256, 384), jax.ShapeDtypeStruct((4, 512, 256), jnp.float32)
    read = []
    for each in program_for_h200(step, args).steps():
        kernel, instructions = each.instruction, each.computation.instructions
        is_named = "quantize_input" in kernel.op_name and kernel.opcode == "fusion"
        if is_named and "f8" in str(kernel.shapes):
            operands = [instructions[name].shapes[0] for name in kernel.operands]
            read.append([operand.type for operand in operands if operand.sizes])
    assert read == [["bf16"]]


@needs_compiler
def test_an_a100_falls_back_and_the_audit_says_so():
    report = compiled(RECIPES["current"], shape(512, 256), shape(256, 384), LINEAR, "a100")
    assert {row.lhs for row in report.gemms} == {"bfloat16"}
    fallbacks = [finding for finding in report.errors if finding.check == "fp8_fallback"]
    assert sum(finding.count for finding in fallbacks) == 3


@needs_compiler
@pytest.mark.parametrize(
    ("name", "spec"), [("current", ("data", None)), ("delayed", (None, "data"))]
)
@fast_cases("delayed-spec1")
def test_sharded_kernels_are_gathered_in_fp8(name, spec):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharding = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    x = shape(16, 128, 256, sharding=sharding("data"))
    w = shape(256, 1024, dtype=jnp.float32, sharding=sharding(*spec))
    dims = (((2,), (0,)), ((), ()))
    state = jax.eval_shape(lambda: state_of(RECIPES[name]))

    def step(x, w, state):
        loss, (dx, dw, *rest) = training_step(RECIPES[name], dims)(x, w, state)
        return loss, dx, lax.with_sharding_constraint(dw, sharding(*spec)), rest

    with jax.numpy_dtype_promotion("standard"):
        report = audit(step, x, w, state, target="h200")
    gathered = [
        (row.dtype, row.bytes) for row in report.collectives if row.operation == "all-gather"
    ]
    # Once for both passes, with one byte per element.
    assert gathered == [("float8_e4m3fn", 256 * 1024)]
    maxima = [row.bytes for row in report.collectives if row.operation == "all-reduce"]
    assert sum(maxima) < 100
    assert {row.kernel for row in report.gemms} == {"cublas fp8"}
