"""Gradients of parameters in FP32, on one device and on several.

Each case multiplies its loss by a number for which a gradient, summed over the batch, exceeds the
largest float16. In plain JAX such a gradient is infinite, since it is computed in float16. It must
be finite and equal to that of FP32.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
import sharded_functions
from arrays import assert_close, uniform
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, fast_cases, pairwise
from jaxmp._core import _compat
from jaxmp._core._compat import described_gpus
from jaxmp._core._targets import get_target
from jaxmp._programs._jaxprs import equations
from jaxmp._tools.audit._compile import describe
from models_nnx import pure_gradients
from programs import with_own_gradient, with_own_tangent
from sources import results_of

ROWS, WIDTH = 64, 8


def mesh_of(axis_type=AxisType.Auto):
    return jax.make_mesh((4,), ("data",), axis_types=(axis_type,))


def placed(mesh, params, batch):
    replicated = NamedSharding(mesh, P())
    return jax.device_put(params, replicated), jax.device_put(batch, NamedSharding(mesh, P("data")))


def low(tree, dtype=jnp.float16):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def full(rows):
    return jnp.sum(rows.astype(jnp.float32)) * 4000


MATRIX = {"w": uniform((WIDTH, WIDTH))}
LAYER = {"w": uniform((WIDTH, WIDTH)), "b": uniform(WIDTH, 1)}


# ---------------------------------------------------------------------------
# Uses of a parameter: (params in any dtype, x in FP32, dtype) -> rows, and params
# ---------------------------------------------------------------------------


def dense(params, x, dtype):
    p = low(params, dtype)
    return x.astype(dtype) @ p["w"] + jnp.broadcast_to(p["b"], (len(x), WIDTH))


def bias_of_one_row(params, x, dtype):
    p = low(params, dtype)
    return x.astype(dtype) @ p["w"] + p["b"][None]


def einsum(params, x, dtype):
    return jnp.einsum("bi,io->bo", x.astype(dtype), params["w"].astype(dtype))


def transposed(params, x, dtype):
    return x.astype(dtype) @ params["w"].astype(dtype).reshape(WIDTH, WIDTH).T


def weight_on_the_left(params, x, dtype):
    return params["w"].astype(dtype) @ x.astype(dtype).T


def wide_result(params, x, dtype):
    kernel = params["w"].astype(dtype)
    return jnp.matmul(x.astype(dtype), kernel, preferred_element_type=jnp.float32)


def in_jit(params, x, dtype):
    return jax.jit(dense, static_argnums=2)(params, x, dtype)


def in_traced(params, x, dtype):
    """A `Traced` object, of which JAX 0.12 leaves a call in the program."""
    return jax.jit(dense, static_argnums=2).trace(params, x, dtype)(params, x)


def in_remat(params, x, dtype):
    return jax.checkpoint(functools.partial(dense, dtype=dtype))(params, x)


def in_scan(params, x, dtype):
    def body(carry, layer):
        return carry, dense(layer, x, dtype)

    return jax.lax.scan(body, 0, jax.tree.map(lambda p: jnp.stack([p, p]), params))[1]


def outside_of_scan(params, x, dtype):
    return jax.lax.scan(lambda c, row: (c, dense(params, row[None], dtype)), 0, x)[1]


def in_cond(params, x, dtype):
    return jax.lax.cond(x.sum() > 0, *(functools.partial(dense, dtype=dtype),) * 2, params, x)


def experts_in_scan(params, x, dtype):
    """The scan computes the sizes of the groups of rows."""

    def body(carry, sizes):
        return carry, jax.lax.ragged_dot(x.astype(dtype), params["w"].astype(dtype), sizes + 1)

    return jax.lax.scan(body, 0, jnp.full((2, 2), ROWS // 2 - 1, jnp.int32))[1]


def table(params, x, dtype):
    rows = jnp.where(x[:, 0] > 0, 3, 0)
    return jnp.take(params["w"].astype(dtype), rows, axis=0)


def rows_times_weight(params, x, dtype):
    rows = jnp.where(x[:, 0] > 0, 3, 0)
    w = params["w"].astype(dtype)
    return (jnp.take(w, rows, axis=0) * jnp.asarray(0.5, dtype)) @ w


def rows_in_remat(params, x, dtype):
    rows = jnp.where(x[:, 0] > 0, 3, 0)
    w = params["w"].astype(dtype)
    return jax.checkpoint(jnp.matmul)(jnp.take(w, rows, axis=0), w)


def positions(params, x, dtype):
    rows = jnp.take(params["w"].astype(dtype), jnp.arange(WIDTH), axis=0)
    return x.astype(dtype)[..., None] + rows[None]


def product_of_weights(params, x, dtype):
    w = params["w"].astype(dtype)
    return x.astype(dtype) @ (w @ w)


def diagonal(params, x, dtype):
    """JAX 0.12 computes the diagonal of a square matrix by `lax.platform_dependent`."""
    return x.astype(dtype) * jnp.diagonal(params["w"].astype(dtype))[None]


def parts(params, x, dtype):
    left, right = jnp.split(params["w"].astype(dtype), 2, axis=1)
    return x.astype(dtype) @ jnp.concatenate([right, left], axis=1)


def scaled_weight(params, x, dtype):
    return x.astype(dtype) @ (params["w"].astype(dtype) * jnp.asarray(0.5, dtype))


def repeated(params, x, dtype):
    return x.astype(dtype) @ jnp.repeat(params["w"].astype(dtype), 2, axis=1)


def scalar_gain(params, x, dtype):
    return x.astype(dtype) * params["gain"].astype(dtype)


def convolution(params, x, dtype):
    kernel = params["w"].astype(dtype).reshape(WIDTH, 1, WIDTH)
    signal = x.astype(dtype)[:, :, None]
    return jax.lax.conv_general_dilated(
        signal, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def custom_vjp(params, x, dtype):
    return with_own_gradient(jnp.matmul)(x.astype(dtype), params["w"].astype(dtype))


def custom_jvp(params, x, dtype):
    return with_own_tangent(jnp.matmul)(x.astype(dtype), params["w"].astype(dtype))


def in_shard_map(params, x, dtype):
    run = functools.partial(dense, dtype=dtype)
    mesh = mesh_of()
    return jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))(params, x)


OF_LAYERS = (
    *(dense, bias_of_one_row, in_jit, in_traced, in_remat, in_scan, outside_of_scan, in_cond),
    in_shard_map,
)
OF_MATRICES = (
    *(einsum, transposed, weight_on_the_left, wide_result, table, rows_times_weight),
    *(rows_in_remat, positions, diagonal, parts, scaled_weight, repeated, custom_vjp, custom_jvp),
)
USES = {
    **{fn.__name__: (fn, LAYER) for fn in OF_LAYERS},
    **{fn.__name__: (fn, MATRIX) for fn in OF_MATRICES},
    "experts_in_scan": (experts_in_scan, {"w": uniform((2, WIDTH, WIDTH))}),
    "scalar_gain": (scalar_gain, {"gain": np.float32(1.5)}),
}


def gradients(use, params, x, dtype, **options):
    loss_fn = lambda params, x: full(use(params, x, dtype))
    return jax.jit(jaxmp.value_and_grad(loss_fn, **options))(params, x)[1]


@pytest.mark.parametrize(
    ("name", "stored", "devices"), pairwise(USES, [jnp.float32, jnp.float16], [1, 4])
)
def test_gradients_are_summed_in_fp32(name, stored, devices):
    use, params = USES[name]
    x = uniform((ROWS, WIDTH), 2)
    exact = gradients(use, params, x, jnp.float32)
    assert all(abs(leaf).max() > 65504 for leaf in jax.tree.leaves(exact))
    args = low(params, stored), x
    if devices == 1:
        result = gradients(use, *args, jnp.float16, widen_params=True)
    else:
        result = gradients(use, *placed(mesh_of(), *args), jnp.float16)
    for leaf, reference in zip(jax.tree.leaves(result), jax.tree.leaves(exact), strict=True):
        assert leaf.dtype == jnp.float32
        # Cotangents and operands are rounded to float16: 2**-11 each.
        np.testing.assert_allclose(leaf, reference, rtol=4 * 2**-11)


@pytest.mark.parametrize("name", ["dense", "table", "in_scan", "custom_vjp"])
def test_the_gradients_of_these_cases_overflow_in_float16(name):
    use, params = USES[name]
    x = uniform((ROWS, WIDTH), 2)
    plain = jax.jit(jax.grad(lambda params, x: full(use(params, x, jnp.float16))))(params, x)
    in_16_bits = gradients(use, params, x, jnp.float16, reduce_dtype="float16")
    on_mesh = placed(mesh_of(), params, x)
    summed = gradients(use, *on_mesh, jnp.float16, reduce_dtype="float16")
    stored = gradients(use, low(params), x, jnp.float16)
    for result in (plain, in_16_bits, summed, stored):
        assert not np.isfinite(result["w"]).all()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_convolution_casts_its_gradient_to_fp32_before_the_sum_over_devices(axis_type):
    x, mesh = uniform((ROWS, WIDTH), 2), mesh_of(axis_type)

    loss_fn = lambda dtype: lambda params, x: full(convolution(params, x, dtype)) / 16
    exact = jax.jit(jax.grad(loss_fn(jnp.float32)))(MATRIX, x)["w"]
    # The gradient of each device is within float16.
    assert 65504 < abs(exact).max() < 3 * 65504
    with jax.set_mesh(mesh):
        traced = jax.jit(jaxmp.grad(loss_fn(jnp.float16))).trace(*placed(mesh, MATRIX, x))
        result = traced.lower().compile()(*placed(mesh, MATRIX, x))["w"]
    np.testing.assert_allclose(result, exact, rtol=4 * 2**-11)
    operations = list(equations(traced.jaxpr))
    parts = [e.outvars[0].aval for e in operations if e.primitive.name == "shard_map"]
    convolutions = [e for e in operations if e.primitive.name == "conv_general_dilated"]
    # On explicit axes, the convolution itself has an FP32 result.
    is_auto = axis_type == AxisType.Auto
    assert [(part.shape[0], part.dtype) for part in parts] == [(4, jnp.float32)] * is_auto
    assert is_wide(convolutions[-1]) == (axis_type == AxisType.Explicit)


def test_a_convolution_on_one_device_is_not_computed_in_tf32():
    """XLA converts 16-bit operands of a convolution with an FP32 result to FP32, on a GPU."""
    loss_fn = lambda params, x: full(convolution(params, x, jnp.bfloat16))
    with _compat.context(target="gpu"):
        traced = jax.jit(jaxmp.grad(loss_fn)).trace(MATRIX, uniform((ROWS, WIDTH), 2))
    convolutions = [
        e for e in equations(traced.jaxpr) if e.primitive.name == "conv_general_dilated"
    ]
    assert len(convolutions) >= 2 and not any(map(is_wide, convolutions))


KERNELS = {
    "linear": ("td,df->tf", (ROWS, WIDTH), (WIDTH, 3 * WIDTH)),
    "transposed": ("td,fd->tf", (ROWS, WIDTH), (3 * WIDTH, WIDTH)),
    "heads": ("td,dhk->thk", (ROWS, WIDTH), (WIDTH, 2, 4)),
    "output": ("thk,hkd->td", (ROWS, 2, 4), (2, 4, WIDTH)),
    "experts": ("td,ndf->ntf", (ROWS, WIDTH), (2, WIDTH, 3 * WIDTH)),
    "stacked": ("ntf,nfd->ntd", (2, ROWS, WIDTH), (2, WIDTH, 4)),
}


@pytest.mark.parametrize("equation", KERNELS)
def test_gradients_of_kernels_end_with_the_last_axis_of_the_kernel(equation):
    """Otherwise a GPU writes the FP32 gradient once more, transposed."""
    einsum, of_x, of_kernel = KERNELS[equation]
    x, kernel = uniform(of_x, 1), uniform(of_kernel, 2)

    def loss_fn(kernel, dtype):
        return (
            jnp.einsum(einsum, x.astype(dtype), kernel.astype(dtype)).astype(jnp.float32) ** 2
        ).sum()

    with _compat.context(target="gpu"):
        traced = jax.jit(jaxmp.grad(lambda kernel: loss_fn(kernel, jnp.bfloat16))).trace(kernel)
    flat = list(equations(traced.jaxpr))
    assert sum(e.primitive.name == "dot_general" and is_wide(e) for e in flat) == 1
    moves = [
        e
        for e in flat
        if e.primitive.name == "transpose" and e.outvars[0].aval.dtype == jnp.float32
    ]
    orders = [e.params["permutation"] for e in moves]
    assert all(order[-1] == len(order) - 1 for order in orders)
    result = jaxmp.grad(lambda kernel: loss_fn(kernel, jnp.bfloat16))(kernel)
    exact = jax.grad(lambda kernel: loss_fn(kernel, jnp.float32))(kernel)
    assert_close(result, exact, 2**-6)


@pytest.mark.parametrize("groups", [1, WIDTH])
@pytest.mark.parametrize("rows", [ROWS, ROWS - 2])
def test_convolutions_of_groups_and_of_batches_that_devices_cannot_share(rows, groups):
    kernel, x = uniform((3, WIDTH // groups, WIDTH), 1), uniform((rows, 4, WIDTH), 2)

    def loss_fn(kernel, x, dtype):
        names = ("NWC", "WIO", "NWC")
        out = jax.lax.conv_general_dilated(
            x.astype(dtype),
            kernel.astype(dtype),
            *((1,), "SAME"),
            dimension_numbers=names,
            feature_group_count=groups,
        )
        return (out.astype(jnp.float32) ** 2).mean()

    exact = jax.grad(loss_fn)(kernel, x, jnp.float32)
    rows_of_mesh = NamedSharding(mesh_of(), P("data" if rows % 4 == 0 else None))
    on_mesh = jax.device_put(kernel, NamedSharding(mesh_of(), P())), jax.device_put(x, rows_of_mesh)
    for args in ((kernel, x), on_mesh):
        result = jax.jit(jaxmp.grad(functools.partial(loss_fn, dtype=jnp.bfloat16)))(*args)
        assert_close(result, exact, 4 * 2**-8)


# The sums of the others are rounded to float16 after the sum, as that of a product.
COMPUTED = ["relu", "own_jvp", "straight_through", "scaled_gradient", "cond", "relu_in_checkpoint"]
COMPUTED += ["masked_by_data"]


@fast_cases("relu-False", "scaled_gradient-True", "cond-False", "masked_by_data-True")
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", COMPUTED)
def test_gradients_of_computed_weights_are_summed_in_fp32(name, is_split):
    mesh = mesh_of()
    where = NamedSharding(mesh, P("data") if is_split else P())
    rows = NamedSharding(mesh, P("data"))

    def grads_of(dtype):
        def loss_fn(params, x):
            if is_split:
                params = jax.lax.with_sharding_constraint(params, where)
                x = jax.lax.with_sharding_constraint(x, rows)
            return sharded_functions.loss_of(name, dtype)(params, x)

        return jax.jit(jaxmp.value_and_grad(loss_fn))

    params = jax.device_put({"w": uniform((WIDTH, WIDTH)), "gain": uniform(WIDTH, 1)}, where)
    x = jax.device_put(uniform((ROWS, WIDTH), 2), rows)
    result, exact = (grads_of(dtype)(params, x)[1] for dtype in (jnp.float16, jnp.float32))
    assert abs(exact["w"]).max() > 65504
    for leaf, reference in zip(*map(jax.tree.leaves, (result, exact)), strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=4 * 2**-11)


def test_a_reversed_scan_of_layers_runs_backwards():
    def loss(layers, x):
        body = lambda x, w: (jnp.tanh(x @ w.astype(jnp.bfloat16)), None)
        out, _ = jax.lax.scan(body, x.astype(jnp.bfloat16), layers, reverse=True)
        return out.astype(jnp.float32).sum()

    layers, x = uniform((3, WIDTH, WIDTH)) / WIDTH, uniform((4, WIDTH), 2)
    plain = jax.value_and_grad(loss)(layers, x)
    result = jax.jit(lambda *args: jaxmp.value_and_grad(loss)(*args))(*placed(mesh_of(), layers, x))
    for leaf, reference in zip(result, plain, strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=2**-6, atol=2**-6)


def matmuls_of(name):
    """Returns the matmuls of the gradient of a loss with a computed weight."""
    mesh = mesh_of()
    where, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = {"w": (16, 16), "gain": (16,)}
    params = {k: jax.ShapeDtypeStruct(s, np.float32, sharding=where) for k, s in params.items()}
    x = jax.ShapeDtypeStruct((ROWS, 16), np.float32, sharding=rows)
    step = jax.jit(jaxmp.value_and_grad(sharded_functions.loss_of(name)))
    traced = equations(step.trace(params, x).jaxpr)
    return [equation for equation in traced if equation.primitive.name == "dot_general"]


def is_wide(equation):
    return equation.outvars[0].aval.dtype == jnp.float32


@pytest.mark.parametrize("name", sharded_functions.WEIGHTS)
def test_matmuls_compute_gradients_of_computed_weights_in_fp32(name):
    sums = [
        is_wide(equation)
        for equation in matmuls_of(name)
        if equation.invars[0].aval.shape[equation.params["dimension_numbers"][0][0][0]] == ROWS
    ]
    assert sums == [name not in sharded_functions.REPORTED]


@pytest.mark.parametrize("name", ["product", "orthogonal"])
def test_products_of_weights_are_accumulated_in_fp32(name):
    # XLA may split the contracted axis over devices, in the forward pass, too.
    products = [e for e in matmuls_of(name) if ROWS not in e.invars[0].aval.shape]
    assert len(products) == {"product": 3, "orthogonal": 6}[name]
    assert all(map(is_wide, products))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("scaled_gradient", "FSDP"),
        ("orthogonal", "FSDP"),
        pytest.param("cond", "FSDP", marks=EXPENSIVE),
        pytest.param("scan", "data parallel", marks=EXPENSIVE),
    ],
)
def test_sums_of_computed_weights_in_a_program_for_h200(name, layout):
    row = sharded_functions.measure(name, layout)
    assert row["sums_16_bit"] == 0 and row["sums_fp32"] >= 4 * sharded_functions.WIDTH**2


def test_no_sum_of_the_committed_programs_is_silent():
    rows = results_of("sharded_functions_h200")["rows"]
    assert {row["function"] for row in rows} == set(sharded_functions.WEIGHTS)
    for row in rows:
        is_reported = row["function"] in sharded_functions.REPORTED
        assert bool(row["sums_16_bit"]) == bool(row["reported"]) == is_reported


def test_a_product_of_weights_is_rounded_after_the_sum():
    x = uniform((ROWS, WIDTH), 2) / 64
    exact = gradients(product_of_weights, MATRIX, x, jnp.float32)["w"]
    result = gradients(product_of_weights, *placed(mesh_of(), MATRIX, x), jnp.float16)["w"]
    # Three roundings more: of the product, of its gradient, and of its backward matmuls.
    np.testing.assert_allclose(result, exact, rtol=8 * 2**-11)


@pytest.mark.parametrize("name", ["dense", "in_remat", "in_scan", "einsum", "repeated"])
def test_explicit_axes(name):
    use, params = USES[name]
    mesh, x = mesh_of(AxisType.Explicit), uniform((ROWS, WIDTH), 2)
    exact = gradients(use, params, x, jnp.float32)
    with jax.set_mesh(mesh):
        result = gradients(use, *placed(mesh, params, x), jnp.float16)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=4 * 2**-11), result, exact)


def test_a_weight_gradient_that_the_cpu_compiler_refuses_for_bfloat16():
    """One weight for each of 8 experts, and two axes of rows ("Unsupported element type")."""
    x, w = uniform((8, 16, 4, WIDTH)), uniform((8, WIDTH, WIDTH), 1)
    layer = lambda w, x, dtype: jnp.einsum("ebhi,eio->ebho", x.astype(dtype), w.astype(dtype))
    exact = jax.grad(lambda w: full(layer(w, x, jnp.float32)))(w)
    step = jaxmp.value_and_grad(lambda w, x: full(layer(w, x, jnp.bfloat16)))
    result = jax.jit(step)(*placed(mesh_of(), w, x))[1]
    np.testing.assert_allclose(result, exact, rtol=4 * 2**-8)


MIXED_PRODUCTS = {
    "float32": lambda w, x: jax.nn.gelu(x) @ w,
    "float16": lambda w, x: jax.nn.gelu(x.astype(jnp.float16)) @ w,
    "int32": lambda w, x: jnp.round(3 * x).astype(jnp.int32) @ w,
    "complex": lambda w, x: jnp.abs((x + 2j * jnp.sin(x)) @ w),
    "complex constant": lambda w, x: jnp.abs(jnp.array([[1 + 2j] * WIDTH]) @ w) * jnp.sum(x),
    "groups": lambda w, x: jax.lax.ragged_dot(jax.nn.gelu(x), w[None], jnp.array([ROWS])),
}


@pytest.mark.parametrize("other", MIXED_PRODUCTS)
def test_a_16_bit_weight_multiplies_an_array_of_another_dtype(other):
    """The gradient of the other operand has its dtype, and both parts if it is complex."""

    def loss_fn(params, x):
        weight = params["w"].astype(jnp.bfloat16)
        return jnp.sum(MIXED_PRODUCTS[other](weight, params["b"][None] * x), dtype=jnp.float32)

    x = uniform((ROWS, WIDTH), 2)
    with jax.numpy_dtype_promotion("standard"):
        loss, exact = jax.value_and_grad(loss_fn)(LAYER, x)
        result, grads = jax.jit(jaxmp.value_and_grad(loss_fn))(LAYER, x)
    np.testing.assert_allclose(result, loss, rtol=2**-8)
    np.testing.assert_allclose(grads["b"], exact["b"], rtol=1e-4)
    np.testing.assert_allclose(grads["w"], exact["w"], rtol=2**-7, atol=1e-2)


def test_inside_shard_map():
    use, params = USES["dense"]
    mesh, x = mesh_of(), uniform((ROWS, WIDTH), 2)
    exact = gradients(use, params, x, jnp.float32)
    step = functools.partial(gradients, use, dtype=jnp.float16, axis_name="data")
    step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    result = step(*placed(mesh, params, x))
    # The loss of each device is a sum over its rows, and `axis_name` averages.
    average = lambda a, b: np.testing.assert_allclose(4 * np.asarray(a), b, rtol=4 * 2**-11)
    jax.tree.map(average, result, exact)


def test_the_program_of_a_mesh_with_one_device_is_that_of_one_device():
    use, params = USES["dense"]
    x = uniform((ROWS, WIDTH), 2)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def loss_fn(params, x):
        if not jax.typeof(x).sharding.mesh.empty:
            sharding = NamedSharding(mesh, P("data"))
            x, params = jax.lax.with_sharding_constraint((x, params), sharding)
        return full(use(params, x, jnp.float16))

    def operations(params, x):
        jaxpr = jax.make_jaxpr(jaxmp.value_and_grad(loss_fn))(params, x)
        names = [e.primitive.name for e in equations(jaxpr)]
        # JAX adds `reshard` to constants next to arrays on a mesh.
        return [name for name in names if name not in ("reshard", "sharding_constraint")]

    assert operations(*placed(mesh, params, x)) == operations(params, x)


def test_gradients_under_vmap():
    """XLA's CPU compiler refuses some matmuls of bfloat16 with an FP32 result."""
    w, xs = MATRIX["w"], uniform((4, ROWS, WIDTH), 2)

    def loss_fn(w, x, dtype):
        return full(w.astype(dtype) @ x.astype(dtype).T)

    result = jax.vmap(jaxmp.grad(loss_fn), (None, 0, None))(w, xs, jnp.bfloat16)
    exact = jax.vmap(jax.grad(loss_fn), (None, 0, None))(w, xs, jnp.float32)
    np.testing.assert_allclose(result, exact, rtol=4 * 2**-8)


def test_the_gradient_of_65536_tokens_has_the_error_of_fp32():
    tokens, width = 65536, 8
    w = low(uniform((width, width)), jnp.bfloat16).astype(jnp.float32)
    x, slope = (low(uniform((tokens, width), n) - 1, jnp.bfloat16) for n in (1, 2))

    def loss_fn(w, x, slope):
        return jnp.sum((x @ w.astype(jnp.bfloat16)).astype(jnp.float32) * slope.astype(jnp.float32))

    exact = np.asarray(x, np.float64).T @ np.asarray(slope, np.float64)
    error = lambda run: abs(jax.jit(run(loss_fn))(w, x, slope) - exact).max()
    assert error(jaxmp.grad) < error(jax.grad) / 10


def test_weights_that_a_scan_returns_are_not_copied():
    """NNX returns all Variables of a module from scans and rematerialized functions."""
    layers, x = {"w": np.tile(MATRIX["w"], (2, 2, 1, 1))}, uniform((ROWS, WIDTH), 2)

    def layer(x, w):
        return jnp.tanh(x @ w.astype(jnp.bfloat16)), w

    def loss_fn(layers, x):
        scan = functools.partial(jax.lax.scan, jax.checkpoint(layer))
        out, returned = jax.lax.scan(scan, x.astype(jnp.bfloat16), layers["w"])
        return full(out), (x, returned)

    run = functools.partial(jaxmp.value_and_grad, loss_fn, mutable_argnum=1)
    # The last two have no gradients in FP32.
    for dtype, reduce in (("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")):
        params = {"w": layers["w"].astype(dtype)}
        jaxpr = jax.make_jaxpr(run(reduce_dtype=reduce))(params, x).jaxpr
        assert jaxpr.outvars[2] in jaxpr.invars
    layers, x = placed(mesh_of(), layers, x)
    (_, (_, returned)), grads = jax.jit(run())(layers, x)
    np.testing.assert_array_equal(returned, layers["w"])
    exact = jax.grad(loss_fn, has_aux=True)(layers, x)[0]["w"]
    assert_close(grads["w"], exact, 2**-7)


def test_a_loss_that_reads_values_is_not_traced_and_warns():
    w = jnp.ones((4, 4), jnp.float32)

    def loss_fn(w):
        total = (w.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32).sum()
        return total if total > 0 else -total

    with pytest.warns(jaxmp.errors.RecipeWarning, match="reads the values of arrays"):
        result = jaxmp.grad(loss_fn)(w)
    np.testing.assert_array_equal(result, jax.grad(loss_fn)(w))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(jaxmp.grad(loss_fn))(w)


def test_auxiliary_data_and_values_that_are_no_arrays_are_returned():
    def loss_fn(params, x):
        return full(dense(params, x, jnp.bfloat16)), {"rows": len(x), "name": "x", "mean": x.mean()}

    x = uniform((ROWS, WIDTH), 2)
    run = jaxmp.value_and_grad(loss_fn, has_aux=True)
    (_, aux), _ = run(*placed(mesh_of(), LAYER, x))
    assert aux["rows"] == ROWS and aux["name"] == "x"
    np.testing.assert_allclose(aux["mean"], x.mean(), rtol=1e-6)


# ---------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------


class Model(nn.Module):
    """Embedding, norm, scanned layers and a head with a wide result."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, 16, name="embed")(tokens)
        x = x + nn.Embed(8, 16, name="positions")(jnp.arange(8))[None]
        axes = {"params": 0, "_overwrite_with_gradient": 0}
        scan = nn.scan(Layer, variable_axes=axes, split_rngs={"params": True}, length=2)
        x, _ = scan(name="layers")(x, None)
        return nn.Dense(32, name="lm_head")(nn.LayerNorm(name="norm")(x))


class Layer(nn.Module):
    """Residual layer for a scan."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(16)(nn.gelu(nn.Dense(16)(x))), None


TOKENS = np.random.default_rng(0).integers(0, 32, (16, 8)).astype(np.int32)
RECIPES = ["bf16", "fp16", "bf16_params", "fp16_params", "fp8", "fp8_delayed"]


def token_loss(logits, tokens):
    return jaxmp.losses.softmax_cross_entropy(logits, tokens).mean()


def rounded_sums(jaxpr):
    """Returns the operations with 16-bit results that become FP32 gradients of parameters.

    Follows each result of the jaxpr back through operations that move or convert elements.
    """
    producers = {var: eqn for eqn in equations(jaxpr) for var in eqn.outvars}
    moves = {"convert_element_type", "transpose", "reshape", "select_n", "mul", "div"}
    sums = {"dot_general", "reduce_sum", "scatter-add", "scan", "conv_general_dilated"}
    result = []
    for out in jaxpr.jaxpr.outvars:
        pending = [out]
        while pending:
            var = pending.pop()
            equation = producers.get(var)
            if equation is None:
                continue
            name, aval = equation.primitive.name, var.aval
            if name in sums and aval.ndim and aval.dtype in (jnp.bfloat16, jnp.float16):
                result.append((name, aval.shape))
            if name in moves:
                pending += [v for v in equation.invars if not hasattr(v, "val")]
    return result


def linen_gradients(recipe):
    recipe = jaxmp.load_recipe(recipe)
    model = recipe.wrap(Model())
    params = model.init(jax.random.key(0), TOKENS)
    tx = recipe.optimizer(optax.sgd(0.1))
    state = jaxmp.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    loss_fn = lambda params, tokens: token_loss(model.apply(params, tokens), tokens)
    return lambda state, tokens: state.value_and_grad(loss_fn)(tokens)[1], state


def nnx_gradients(recipe):
    recipe = jaxmp.load_recipe(recipe)
    own = {"rngs": nnx.Rngs(0)}
    layers = nnx.Embed(32, 16, **own), nnx.LayerNorm(16, **own), nnx.Linear(16, 32, **own)
    model = recipe.wrap(nnx.Sequential(*layers))
    optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.sgd(0.1)))
    return pure_gradients(model, optimizer, lambda m, tokens: token_loss(m(tokens), tokens))


def autocast_gradients(recipe):
    model = Model()
    params = model.init(jax.random.key(0), TOKENS)
    loss_fn = lambda params, tokens: token_loss(model.apply(params, tokens), tokens)
    return lambda p, t: jaxmp.value_and_grad(jaxmp.autocast(loss_fn, recipe))(p, t)[1], params


MODELS = {"linen": linen_gradients, "nnx": nnx_gradients, "autocast": autocast_gradients}
CASES = [
    (framework, recipe)
    for framework in MODELS
    for recipe in (RECIPES if framework != "autocast" else ("bf16", "fp16", "fp8"))
]


@pytest.mark.parametrize(("framework", "recipe"), CASES)
@fast_cases("linen-fp8", "nnx-fp16_params", "autocast-bf16")
def test_no_gradient_of_a_model_is_summed_in_16_bits(framework, recipe):
    run, state = MODELS[framework](recipe)
    is_stored = recipe.endswith("_params")
    assert bool(rounded_sums(jax.make_jaxpr(run)(state, TOKENS))) == is_stored
    assert not rounded_sums(jax.make_jaxpr(run)(*placed(mesh_of(), state, TOKENS)))
    if framework != "autocast":
        for changes, rounds in (({"widen_params": True}, False), ({"reduce_dtype": "bf16"}, True)):
            changed = jaxmp.load_recipe(recipe).replace(**changes)
            run, state = MODELS[framework](changed)
            assert bool(rounded_sums(jax.make_jaxpr(run)(state, TOKENS))) == rounds


@pytest.mark.parametrize("framework", MODELS)
def test_kernel_gradients_are_no_bfloat16_numbers(framework):
    run, state = MODELS[framework]("bf16")
    leaves = jax.tree.leaves_with_path(jax.jit(run)(state, TOKENS))
    kernels = [leaf for path, leaf in leaves if "kernel" in jax.tree_util.keystr(path)]
    assert len(kernels) == (1 if framework == "nnx" else 3)
    for leaf in kernels:
        elements = leaf[leaf != 0]
        rounded = elements.astype(jnp.bfloat16).astype(jnp.float32)
        assert (elements != rounded).mean() >= 0.99


@pytest.mark.parametrize("framework", ["linen", "nnx"])
@EXPENSIVE
def test_losses_and_gradients_equal_those_of_one_device(framework):
    run, state = MODELS[framework]("bf16")
    run = jax.jit(run)
    one, several = run(state, TOKENS), run(*placed(mesh_of(), state, TOKENS))
    # Activations are rounded to bfloat16, 2**-9.
    assert_close(one, several, 2**-5)


@needs_compiler
@EXPENSIVE
def test_reductions_of_a_program_for_h200():
    mesh = jax.sharding.Mesh(np.array(described_gpus(describe(get_target("h200")), 4)), ("data",))
    run, state = linen_gradients("bf16_params")
    shapes = jax.eval_shape(lambda: (state, TOKENS))
    specs = jax.tree.map(lambda _: P(), state), P("data")
    shaped = jax.tree.map(
        lambda s, spec: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec)),
        *(shapes, specs),
    )
    lowered = jax.jit(run).trace(*shaped).lower(lowering_platforms=("cuda",))
    text = lowered.compile(compiler_options={"xla_gpu_autotune_level": "0"}).as_text()
    reductions = [line for line in text.splitlines() if " all-reduce" in line and "bf16[" in line]
    assert " all-reduce" in text and not reductions
