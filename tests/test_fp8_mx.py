"""MXFP8: blocks of 32 with E8M0 scales, against NumPy, JAX, and programs for a Blackwell GPU."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmp
from arrays import normal, signal_to_noise
from gpu_compiler import needs_compiler
from jaxmp import PolicyMap, audit, autocast, fp8
from jaxmp._core import _compat
from jaxmp._core._targets import get_target
from jaxmp._tools.audit._compile import describe
from jaxmp.fp8 import _explain
from jaxmp.fp8._dims import make_dims
from jaxmp.fp8._mx import mx_quantized
from test_fp8_dot_general import HYBRID, LINEAR, outputs

UP, DOWN = fp8.MXScaling(), fp8.MXScaling(rounding="down")


# ---------------------------------------------------------------------------
# Against NumPy and ml_dtypes
# ---------------------------------------------------------------------------


def reference(rows, dtype, rounding):
    """Returns FP8 values in blocks of 32 along the last axis, and their scales.

    A scale is the smallest power of two with which no element saturates (`rounding="up"`), or that
    of section 6.3 of the OCP specification. Both are searched among all powers, and cast to E8M0
    and back.
    """
    limit = float(ml_dtypes.finfo(dtype).max)
    powers = 2.0 ** np.arange(-126, 128)
    blocks = np.asarray(rows, np.float64).reshape(*rows.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(-1)
    if rounding == "up":
        index = np.argmax(amax[..., None] <= limit * powers, -1)
    else:
        shared = np.floor(np.log2(np.where(amax > 0, amax, 1))) - np.floor(np.log2(limit))
        index = np.clip(shared, -126, 127).astype(int) + 126
    scale = np.where(amax > 0, powers[index], 1.0)
    kept = scale.astype(ml_dtypes.float8_e8m0fnu)
    np.testing.assert_array_equal(kept.astype(np.float64), scale)
    clipped = np.clip(blocks / scale[..., None], -limit, limit)
    return clipped.astype(dtype).reshape(rows.shape), kept


@pytest.mark.parametrize("rounding", ["up", "down"])
@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_numbers_and_scales_are_those_of_the_format(dtype, rounding):
    """Tests magnitudes over the range of FP32, zeros, exact powers, and the largest value and its
    neighbours.

    For some of these, a rounded quotient would choose the wrong scale.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 96)) * 2.0 ** rng.integers(-116, 120, size=(64, 1))
    limit = float(ml_dtypes.finfo(dtype).max)
    x[0], x[1, :32], x[2, 0], x[3, 0] = 0, 1, limit * 2.0**100, limit * 2.0**-100
    above = np.nextafter(np.float32(limit), np.float32(np.inf))
    x[4, 0], x[5, 0], x[6, 0] = above, np.nextafter(np.float32(limit), np.float32(0)), 512
    x[4:7, 1:32] /= np.abs(x[4:7, 1:32]).max(-1, keepdims=True)
    x[7, 0] = np.finfo(np.float32).max
    x = x.astype(np.float32)
    recipe = fp8.MXScaling(rounding=rounding)
    dims = make_dims(x, np.zeros((96, 32)), LINEAR)
    got = jax.jit(lambda x: mx_quantized(x, recipe, jnp.dtype(dtype), dims, 0))(jnp.asarray(x))
    values, scales = reference(x, dtype, rounding)
    np.testing.assert_array_equal(np.asarray(got.exponents)[0], scales.view(np.uint8))
    np.testing.assert_array_equal(
        np.asarray(got.values).view(np.uint8), np.asarray(values).view(np.uint8)
    )
    # No element saturates by more than half a unit, except with the rule of the specification. With
    # it, elements from 448 to 512 in E4M3 saturate; the units of E5M2 are too large for that.
    wide = values.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, -1)
    unit = 2.0 ** -(ml_dtypes.finfo(dtype).nmant + 1)
    lost = np.abs(wide - x) > unit * np.abs(x)
    inside = np.abs(x) >= np.repeat(scales.astype(np.float64), 32, -1) * 2.0**-5
    assert np.any(lost & inside) == (rounding == "down" and dtype == ml_dtypes.float8_e4m3fn)


def dequantized(x, axis, dtype, rounding="up"):
    rows = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    values, scales = reference(rows, dtype, rounding)
    wide = values.astype(np.float64) * np.repeat(scales.astype(np.float64), 32, -1)
    return np.moveaxis(wide, -1, axis)


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("recipe", [UP, slow(DOWN), slow(HYBRID)], ids=["up", "down", "hybrid"])
def test_products_are_those_of_the_rounded_operands(recipe):
    """Each operand has blocks along the axis over which the matmul sums."""
    x, w, g = normal(0, 64, 96), normal(1, 96, 32), normal(2, 64, 32)
    e4m3 = ml_dtypes.float8_e4m3fn
    of_gradient = np.dtype(recipe.formats("dgrad")[0])
    rounded = functools.partial(dequantized, rounding=recipe.rounding)
    want = (
        rounded(x, 1, e4m3) @ rounded(w, 0, e4m3),
        rounded(g, 1, of_gradient) @ rounded(w, 1, e4m3).T,
        rounded(x, 0, e4m3).T @ rounded(g, 0, of_gradient),
    )
    for exact, got in zip(want, outputs(recipe, x, w, g), strict=True):
        # Sums of at most 96 products in FP32: 96 units of 2**-24, of the largest sum.
        np.testing.assert_allclose(got, exact, rtol=0, atol=96 * 2.0**-24 * np.abs(exact).max())


def test_blocks_far_apart_keep_their_bits():
    """A single scale for the tensor would flush the small blocks to zero."""
    sizes = np.repeat(2.0 ** np.arange(0, -100, -25), 32).astype(np.float32)
    x, w = normal(0, 32, 128) * sizes[None], normal(1, 128, 32) / sizes[:, None]
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    y = jax.jit(lambda x, w: fp8.dot_general("mx")(x, w, LINEAR))(x, w)
    assert signal_to_noise(exact, y) > 28
    y = jax.jit(lambda x, w: fp8.dot_general("current")(x, w, LINEAR))(x, w)
    assert signal_to_noise(exact, y) < 10


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_reaches_its_row(bad):
    x = normal(0, 32, 64).at[3, 5].set(bad)
    y = np.asarray(jax.jit(lambda x, w: fp8.dot_general("mx")(x, w, LINEAR))(x, normal(1, 64, 32)))
    finite = np.isfinite(y)
    assert not finite[3].any() and finite[np.arange(32) != 3].all()


def test_jax_multiplies_the_same():
    """`jax.nn.scaled_dot_general` rounds scales up and clips. JAX 0.10 lowers it for GPUs only."""
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    x, w = (normal(i, *s, dtype=jnp.bfloat16) for i, s in enumerate([(64, 96), (96, 32)]))
    theirs = lambda x, w: jax.nn.scaled_dot_general(
        x, w, LINEAR, preferred_element_type=jnp.float32, configs=configs
    )
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        try:
            want = jax.jit(theirs)(x, w)
        except NotImplementedError as error:
            pytest.skip(str(error))
    ours = jax.jit(lambda x, w: fp8.dot_general("mx")(x, w, LINEAR, None, jnp.float32))(x, w)
    # The same sums in another order.
    np.testing.assert_allclose(ours, want, rtol=0, atol=96 * 2.0**-24 * np.abs(want).max())


# ---------------------------------------------------------------------------
# Recipes, layers, transformations
# ---------------------------------------------------------------------------


def test_layers_einsum_and_autocast_take_it():
    policies = PolicyMap("p=f32,c=bf16,o=f32,matmul=fp8", fp8=UP)
    x, w = normal(0, 32, 64), normal(1, 64, 4, 32)
    einsum = lambda x, w: jnp.einsum("td,dnh->tnh", x, w)
    rows = jaxmp.explain(autocast(einsum, policies))(x, w).fp8.rows
    assert [(row.k, row.n, row.exclusion_reason) for row in rows] == [(64, 128, "")]
    ours = jax.jit(autocast(einsum, policies))(x, w)
    half = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    theirs = jax.jit(lambda x, w: fp8.einsum("mx")("td,dnh->tnh", x, w))(*half)
    # Half a unit of BF16, because XLA may return FP32 sums without rounding.
    np.testing.assert_allclose(ours, theirs.astype(jnp.float32), rtol=2.0**-8)
    exclusion = _explain.explain_exclusion
    assert exclusion(48, 64, fp8.MXScaling(), "cpu") == "K = 48 is not a multiple of 32"
    assert exclusion(48, 64, fp8.CurrentScaling(), "cpu") == ""
    assert "too narrow" in exclusion(1024, 4096, fp8.MXScaling(), "gpu")


@pytest.mark.parametrize("native", [False, True])
def test_what_is_kept_for_the_backward_pass_is_a_byte_a_number(native):
    x, w = normal(0, 64, 128, dtype=jnp.bfloat16), normal(1, 128, 96, dtype=jnp.bfloat16)

    def kept(x, w):
        return jax.tree.leaves(jax.vjp(lambda x, w: fp8.dot_general("mx")(x, w, LINEAR), x, w)[1])

    with _compat.context(target="gpu" if native else "cpu"):
        leaves = jax.eval_shape(kept, x, w)
    sizes = {str(leaf.dtype): 0 for leaf in leaves}
    for leaf in leaves:
        sizes[str(leaf.dtype)] += leaf.size
    assert sizes == {"float8_e4m3fn": x.size + w.size, "uint8": (x.size + w.size) // 32}


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "found"),
    [
        ({"target": "gpu", "capability": (9, 0)}, r"the target GPU \(compute capability 9\.0\)"),
        ({"target": "tpu"}, "a TPU"),
    ],
)
def test_devices_without_such_products_are_refused(context, found):
    x = jnp.ones((32, 32))
    run = lambda recipe: jax.eval_shape(lambda: fp8.dot_general(recipe)(x, x, LINEAR))
    with _compat.context(**context):
        with pytest.raises(jaxmp.errors.CompositionError, match=rf"10\.0 .* compiled for {found}"):
            run(UP)
        run(fp8.MXScaling(emulate=True))
    with _compat.context(target="gpu", capability=(10, 0)):
        run(UP)


# ---------------------------------------------------------------------------
# Compiled for a Blackwell
# ---------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("x", "w", "dims", "batched"),
    [
        ((4, 128, 256), (256, 384), (((2,), (0,)), ((), ())), False),
        ((2, 128, 256), (256, 4, 64), (((1,), (0,)), ((), ())), True),
    ],
    ids=["linear", "vmap"],
)
def test_three_real_products_of_blocks(x, w, dims, batched):
    """The program contains three block-scaled matmuls of cuDNN, at default flags, and no other
    matmul.
    """
    (device,) = _compat.described_gpus(describe(get_target("b200")), 1)
    placed = jax.sharding.SingleDeviceSharding(device)
    args = [jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=placed) for size in (x, w)]

    def loss(x, w):
        product = functools.partial(fp8.dot_general(UP), dimension_numbers=dims)
        product = jax.vmap(product, (0, None)) if batched else product
        return jnp.sum(product(x, w).astype(jnp.float32) ** 2)

    with (
        _compat.context(target="gpu", capability=(10, 0)),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).compile().as_text()
    calls = [
        line
        for line in text.splitlines()
        if re.search(r'custom_call_target="__cudnn\$blockScaledDot"', line)
    ]
    assert len(calls) == 3
    assert not re.findall(r"\bdot\(|__cublas", text)


def mx_step(x, w):
    loss = lambda x, w: fp8.dot_general(UP)(x, w, LINEAR).astype(jnp.float32).sum()
    return jax.value_and_grad(loss, (0, 1))(x, w)


# cuDNN's kernel multiplies rows of whole 128.
MX_ARGS = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((128, 256), (256, 384))]
MX_FLOPS = 2 * 128 * 256 * 384


def test_an_audit_counts_products_of_blocks():
    with _compat.context(target="gpu", capability=(10, 0)):
        report = audit(mx_step, *MX_ARGS)
    assert {(row.phase, row.lhs, row.rhs, row.flops) for row in report.matmuls} == {
        ("forward", *["float8_e4m3fn"] * 2, MX_FLOPS),
        ("backward", *["float8_e4m3fn"] * 2, 2 * MX_FLOPS),
    }
    assert report.ok and not report.notes


@needs_compiler
def test_an_audit_for_a_blackwell_names_their_kernels():
    report = audit(mx_step, *MX_ARGS, target="b200")
    found = {(row.phase, row.lhs, row.rhs, row.out, row.kernel, row.count) for row in report.gemms}
    formats = "float8_e4m3fn", "float8_e4m3fn", "bfloat16", "cudnn mx"
    assert found == {("forward", *formats, 1), ("backward", *formats, 2)}
    assert sum(row.flops for row in report.gemms) == 3 * MX_FLOPS
    assert report.ok and "fp8_fallback" not in {finding.check for finding in report.findings}
