"""autocast: the dtype of each operation, under all transformations, and with the test networks."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
from arrays import floats
from grids import EXPENSIVE, REST, fast_cases
from jaxmp import PolicyMap, Rule, autocast, full_precision
from jaxmp.errors import OpError, PolicyError, RecipeWarning, RuleError
from jaxmp.losses import linear_cross_entropy
from models import BUILDS, BY_NAME, MIXED, NORM, SECOND, NNXBuild, fill
from programs import (
    dtypes,
    equations,
    module_path,
    named,
    operands,
    products,
    relative_error,
    trace,
)

BF16, F32 = "bfloat16", "float32"


W, X = floats(8, 8) / 3, floats(4, 8, seed=1)


# ---------------------------------------------------------------------------
# One operation
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "operand"),
    [
        (lambda w, x, bias: jnp.tanh(x @ w + bias[None]) @ w, W[0]),
        (lambda w, x, scalar: (x @ w * scalar * jnp.float32(2.0)) @ w, jnp.float32(3)),
        (lambda w, x, m: ((x @ w) * (m > 0).astype(jnp.float32)[None]) @ w, jnp.arange(8)),
    ],
    ids=["a bias", "a scalar", "a mask made of integers"],
)
def test_an_operand_that_nothing_computed_does_not_turn_its_layer_into_fp32(fn, operand):
    traced = named(trace(autocast(fn, MIXED), W, X, operand), "add", "mul", "tanh")
    assert {dtypes(equation)[0] for equation in traced} == {BF16}


def test_what_was_summed_in_fp32_stays_so():
    fn = autocast(lambda w, x: (x @ w) - (x @ w).mean(-1, keepdims=True), MIXED)
    assert dtypes(named(trace(fn, W, X), "sub")[0]) == (F32, F32, F32)


def test_a_product_that_only_fp32_operations_read_is_not_rounded():
    def wide(w, x):
        return jnp.exp(x @ w)

    def both(w, x):
        y = x @ w
        return jnp.exp(y) @ w, jnp.tanh(y @ w) @ w

    assert dtypes(products(trace(autocast(wide, MIXED), W, X))[0]) == (BF16, BF16, F32)
    assert dtypes(products(trace(autocast(both, MIXED), W, X))[0]) == (BF16, BF16, BF16)
    grad = jax.grad(lambda w, x: autocast(wide, MIXED)(w, x).sum())
    assert set(operands(grad, W, X)) == {(BF16, BF16)}


def test_the_call_of_a_traced_object_is_entered():
    traced = jax.jit(lambda w, x: jnp.tanh(x @ w)).trace(W, X)
    assert operands(autocast(lambda w, x: traced(w, x).sum(), MIXED), W, X) == [(BF16, BF16)]


def test_a_float16_product_on_the_way_to_a_mean_does_not_overflow():
    fn = lambda w, x: ((x @ w) / 64).mean(0)  # no loss
    args = jnp.full((64, 64), 64.0), jnp.full((4, 64), 64.0)
    assert set(autocast(fn, "p=f32,c=f16,o=f32")(*args).tolist()) == {4096.0}


def test_a_softmax_is_in_fp32_throughout():
    """Not only the exponentials are in FP32: `x - max(x)` is not rounded before them."""

    def fn(w, x):
        return jax.nn.softmax(x @ w) @ w + jax.nn.log_softmax(x @ w) @ w

    traced = trace(autocast(fn, MIXED), W, X)
    for primitive, count in {"sub": 3, "exp": 2, "reduce_sum": 2, "div": 1, "log": 1}.items():
        found = named(traced, primitive)
        assert len(found) == count
        assert {dtypes(equation)[0] for equation in found} == {F32}, primitive


def test_arithmetic_is_wide_only_on_the_way_to_fp32():
    def fn(w, x):
        y = x @ w
        error = (y - x) * 2
        return jnp.square(error.reshape(-1)), jnp.exp(jnp.tanh(y + x)) @ w, (y * 3) @ w

    traced = trace(autocast(fn, MIXED), W, X)
    assert dtypes(named(traced, "sub")[0]) == (F32, F32, F32)
    assert [dtypes(equation)[2] for equation in named(traced, "mul")] == [F32, BF16]
    # Operations of category "follow" that round have 16-bit results.
    assert dtypes(named(traced, "tanh")[0])[0] == dtypes(named(traced, "add")[0])[2] == BF16


def test_a_square_written_as_a_product_is_one():
    x = jnp.full((4, 8), 300.0)
    for square in (lambda y: y * y, lambda y: y**2):
        fn = autocast(lambda w, x, of=square: of(x @ w).mean(), "p=f32,c=f16,o=f32")
        np.testing.assert_allclose(fn(jnp.eye(8), x), 300.0**2)
    twice = autocast(lambda w, x: ((y := x @ w) * y) @ w, MIXED, ops={"square": "follow"})
    assert dtypes(named(trace(twice, W, X), "mul")[0])[0] == BF16


def test_a_norm_parts_no_gradient_in_two():
    """RMSNorm computes `x - 0`, next to a square in FP32.

    In 16 bits, both parts of the gradient of x would be rounded before they are added.
    """

    def fn(w, x):
        y = x @ w
        return ((y - jnp.zeros((4, 1))) * lax.rsqrt(jnp.square(y).mean(-1, keepdims=True))) @ w

    assert dtypes(named(trace(autocast(fn, MIXED), W, X), "sub")[0])[0] == F32
    gradient = jax.grad(lambda w, x: autocast(fn, MIXED)(w, x).sum(), argnums=1)
    sums = named(trace(gradient, W, X), "add_any")
    assert sums and {dtypes(equation)[0] for equation in sums} == {F32}


def test_constants_cost_no_operations():
    """Constants are cast while tracing, also inside jitted functions."""

    def fn(w, x, m):
        minimum = jnp.finfo(jnp.float32).min
        return jnp.where(m > 0, x @ w / jnp.sqrt(jnp.float32(8.0)), minimum).astype(jnp.bfloat16)

    traced = trace(autocast(fn, MIXED), W, X, jnp.arange(8)[None])
    assert not named(traced, "clamp", "is_finite")
    (chosen,) = (e for e in named(traced, "select_n") if e.outvars[0].aval.shape == (4, 8))
    assert str(chosen.outvars[0].aval.dtype) == BF16
    out = autocast(fn, MIXED)(W, X, jnp.arange(8)[None])
    assert (
        np.isfinite(out).all() and relative_error(out[:, 1:], fn(W, X, jnp.ones(8))[:, 1:]) < 0.01
    )


def test_highest_precision_and_a_wider_accumulator_are_respected():
    highest = autocast(lambda w, x: jnp.dot(x, w, precision="highest"), MIXED)
    assert operands(highest, W, X) == [(F32, F32)]
    half = W.astype(jnp.bfloat16)
    wide = autocast(lambda w, x: jnp.dot(x, w, preferred_element_type=jnp.float32), MIXED)
    assert dtypes(products(trace(wide, half, half))[0]) == (BF16, BF16, F32)


@pytest.mark.parametrize(
    "angles", [lambda x, f: jnp.einsum("i,j->ij", x, f), lambda x, f: x[:, None] @ f[None]]
)
def test_an_outer_product_keeps_positions(angles):
    positions = jnp.arange(1000.0)
    out = autocast(angles, MIXED)(positions, jnp.ones(4))
    np.testing.assert_array_equal(out[:, 0], positions)
    waves = lambda frequencies: jnp.sin(autocast(angles, MIXED)(positions, frequencies)).sum()
    assert jaxmp.audit(jax.grad(waves), jnp.ones(4), recipe="bf16").ok


def test_an_outer_product_at_the_line_of_a_matmul_is_right():
    """The first layer of a network of one coordinate, in a loop over its layers."""

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x.sum()

    weights = [jnp.ones((1, 8)), jnp.ones((8, 8))]
    report = jaxmp.audit(jax.grad(autocast(loss, MIXED)), weights, jnp.ones((99, 1)), recipe="bf16")
    assert report.findings == (), str(report)


def scatter_dtypes(traced):
    """Returns the dtypes of every scatter: operand, updates, result, and inner sum."""
    found = named(traced, *(f"scatter-{kind}" for kind in ("add", "sub", "mul", "min", "max")))
    variables = (
        (e.invars[0], e.invars[2], e.outvars[0], e.params["update_jaxpr"].invars[0]) for e in found
    )
    return [tuple(str(var.aval.dtype) for var in row) for row in variables]


def test_the_gradient_of_an_embedding_is_summed_in_fp32():
    tokens = jnp.zeros(2048, jnp.int32)

    def loss(table):
        return table.astype(BF16)[tokens].astype(jnp.float32).sum()

    gradient = jax.grad(loss)
    table = jnp.ones((4, 8))
    assert scatter_dtypes(trace(gradient, table)) == [(BF16,) * 4]
    assert gradient(table)[0, 0] == 256  # a running sum of ones stalls there in bfloat16
    assert scatter_dtypes(trace(autocast(gradient, MIXED), table)) == [(F32,) * 4]
    assert autocast(gradient, MIXED)(table)[0, 0] == 2048


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("add", F32), ("subtract", F32), ("multiply", F32), ("min", BF16), ("max", BF16)],
)
@fast_cases("add-float32", "max-bfloat16")
def test_scatters_run_in_the_dtype_of_their_row(method, dtype):
    """Scatters that add or multiply run in FP32; those that select values keep 16 bits."""
    index = jnp.array([1, 3, 0, 2])

    def fn(w, x):
        change = getattr((x @ w).at[index], method)
        return change(x @ w, unique_indices=True) @ w

    traced = trace(autocast(fn, MIXED), W, X)
    assert scatter_dtypes(traced) == [(dtype,) * 4]
    assert {dtypes(e)[:2] for e in products(traced)} == {(BF16, BF16)}
    # Its derivatives, which bind the jaxpr of the scatter again, are also correct. The error is
    # 2**-8 per matmul for two successive ones, except where min and max select other values for
    # rounded operands; equal values share a gradient.
    ours, plain = (
        jax.grad(lambda w, f=f: (f(w, X) ** 2.0).sum())(W) for f in (autocast(fn, MIXED), fn)
    )
    assert relative_error(ours, plain) < 0.05
    assert jax.jit(autocast(fn, MIXED))(W, X).dtype == F32


def test_a_function_that_is_applied_by_index_runs_as_it_was_traced():
    def fn(w, x):
        overwritten = (x @ w).at[0].set(x[0])
        return (overwritten @ w).at[1].apply(lambda value: jnp.exp(value) + jnp.float32(1))

    first, second = named(trace(autocast(fn, MIXED), W, X), "scatter")
    assert first.outvars[0].aval.dtype == BF16 and second.outvars[0].aval.dtype == F32
    assert relative_error(autocast(fn, MIXED)(W, X), fn(W, X)) < 0.02


def test_one_cast_per_value():
    fn = autocast(lambda w, x: x @ w + jnp.tanh(x @ w) @ w, MIXED)
    down = [e for e in named(trace(fn, W, X), "convert_element_type") if dtypes(e)[-1] == BF16]
    assert len(down) == 2


def test_integers_keys_float64_and_complex_are_left_alone():
    def fn(n, key, z):
        return n * 2, jax.random.split(key), z * z

    n, key, z = autocast(fn, MIXED)(jnp.arange(3), jax.random.key(0), jnp.ones(2, jnp.complex64))
    assert (n.dtype, z.dtype) == (jnp.int32, jnp.complex64) and key.shape == (2,)


@pytest.mark.parametrize("recipe", ["bf16", "fp8"])
def test_a_matmul_of_complex_and_real_numbers_is_not_cast(recipe):
    w, x = W.astype(jnp.complex64) * (1 + 2j), X
    fn = jax.numpy_dtype_promotion("standard")(lambda w, x: jnp.abs((x @ w) @ x.T).sum())
    reason, warns = "a complex operand is never cast", contextlib.nullcontext()
    if recipe == "fp8":
        warns = pytest.warns(RecipeWarning, match=f"'\\(root\\)': {reason}")
    with warns:
        ours = jax.value_and_grad(autocast(fn, recipe), argnums=(0, 1))(w, x)
    jax.tree.map(np.testing.assert_array_equal, ours, jax.value_and_grad(fn, (0, 1))(w, x))
    for row in jaxmp.explain(fn, "bf16")(w, x).autocast.rows:
        assert set(row.dtype.split(" x ")) == {"float32", "complex64"} and row.reason == reason


# ---------------------------------------------------------------------------
# Policies, rules, edits, regions
# ---------------------------------------------------------------------------


def test_rules_match_name_scopes_in_forward_and_backward():
    def loss(w, x):
        with jax.named_scope("Net"):
            with jax.named_scope("router"):
                x = jnp.tanh(x @ w)
            with jax.named_scope("block"):
                return (x @ w).sum()

    policies = PolicyMap(MIXED, [Rule("router", "c=f32")])
    for fn in (jax.grad(autocast(loss, policies)), autocast(jax.grad(loss), policies)):
        for equation in products(trace(fn, W, X)):
            expected = F32 if "router" in module_path(equation) else BF16
            assert dtypes(equation)[:2] == (expected, expected)


def test_a_rule_that_names_a_wider_output_gets_it():
    def fn(w, x):
        with jax.named_scope("Net/lm_head"):
            return (x @ w) * 2

    policies = PolicyMap(MIXED, [Rule("lm_head", "o=f32")])
    assert dtypes(products(trace(autocast(fn, policies), W, X))[0]) == (BF16, BF16, F32)


def test_results_keep_their_dtypes_unless_a_rule_for_the_root_names_one():
    fn = lambda w, x: {"a": x @ w, "n": 3, "s": "text"}
    out = autocast(fn, MIXED)(W, X)
    assert out["a"].dtype == F32 and (out["n"], out["s"]) == (3, "text")
    half = autocast(fn, PolicyMap(MIXED, [Rule("", "o=bf16")]))
    assert half(W, X)["a"].dtype == BF16


def test_the_table_can_be_edited_also_by_a_recipe(write):
    fn = lambda x: jnp.exp(x)
    half = X.astype(jnp.bfloat16)
    assert dtypes(named(trace(autocast(fn, MIXED), half), "exp")[0])[0] == F32
    recipe = jaxmp.load_recipe(write('extends = "bf16"\n[ops]\nexp = "low"\n'))
    for edited in (autocast(fn, MIXED, ops={"exp": "low"}), autocast(fn, recipe)):
        assert dtypes(named(trace(edited, half), "exp")[0])[0] == BF16
    with pytest.raises(OpError, match="expp"):
        autocast(fn, MIXED, ops={"expp": "low"})


def test_full_precision_holds_in_both_passes():
    def loss(w, x):
        with full_precision():
            x = jnp.tanh(x @ w)
        return (x @ w).sum()

    forward = operands(autocast(loss, MIXED), W, X)
    assert forward == [(F32, F32), (BF16, BF16)]
    for fn in (jax.grad(autocast(loss, MIXED)), autocast(jax.grad(loss), MIXED)):
        inside = [e for e in products(trace(fn, W, X)) if "full_precision" in module_path(e)]
        assert len(inside) == 2 and {dtypes(e)[:2] for e in inside} == {(F32, F32)}


@pytest.mark.parametrize("fn", ["bf16", 3, None])
def test_what_is_no_function_is_refused(fn):
    with pytest.raises(PolicyError, match=r"autocast\(loss_fn, 'bf16'\)"):
        autocast(fn, MIXED)


def test_required_rules_by_type_are_refused():
    with pytest.raises(RuleError, match="required=False"):
        autocast(lambda x: x, PolicyMap(MIXED, [Rule(module_type="Dense", compute_dtype="f32")]))
    optional = Rule(module_type="Dense", compute_dtype="f32", required=False)
    _ = autocast(lambda x: x, PolicyMap(MIXED, [optional]))


def test_fp32_policies_change_no_number():
    fn = lambda w, x: jax.nn.gelu(x @ w).sum()
    assert autocast(fn, "f32")(W, X) == fn(W, X)


# ---------------------------------------------------------------------------
# Transformations, in any order
# ---------------------------------------------------------------------------


def network(w, x):
    """Function with every control-flow primitive, around matmuls in the compute dtype."""
    x = jax.nn.relu(x @ w)
    x = jax.checkpoint(
        lambda x: jnp.sin(x @ w), policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    )(x)
    x, rows = lax.scan(lambda c, _: (jax.nn.silu(c @ w), c.sum()), x, None, length=2)
    x = lax.cond(rows[0] > -1e9, lambda x: x @ w, lambda x: -x, x)
    x = jax.jit(lambda x: jax.nn.gelu(x @ w))(x)
    return (x * x).mean() + rows.mean()


TRANSFORMED = {
    "grad of autocast": lambda fn, cast: jax.grad(cast(fn)),
    "autocast of grad": lambda fn, cast: cast(jax.grad(fn)),
    "jit": lambda fn, cast: jax.jit(jax.grad(cast(jax.jit(fn)))),
    "checkpoint": lambda fn, cast: jax.grad(jax.checkpoint(cast(fn))),
    "autocast of checkpoint": lambda fn, cast: jax.grad(cast(jax.checkpoint(fn))),
    "forward mode": lambda fn, cast: jax.jacfwd(cast(lambda s, w, x: fn(s * w, x))),
    "hessian-vector": lambda fn, cast: (
        lambda w, x: jax.jvp(jax.grad(cast(fn)), (w, x), (jnp.ones_like(w), x))[1]
    ),
    "reverse over reverse": lambda fn, cast: (
        lambda w, x: jax.grad(lambda w: cast(jax.grad(fn))(w, x).sum())(w)
    ),
    "vmap": lambda fn, cast: jax.grad(
        lambda w, x: jax.vmap(cast(fn), (None, 0))(w, x[:, None]).mean()
    ),
    "autocast of vmap": lambda fn, cast: jax.grad(
        lambda w, x: cast(jax.vmap(fn, (None, 0)))(w, x[:, None]).mean()
    ),
}


@pytest.mark.parametrize("name", list(TRANSFORMED))
@fast_cases("grad of autocast", "autocast of checkpoint")
def test_transformations(name):
    make = TRANSFORMED[name]
    arguments = (jnp.float32(1), W, X) if name == "forward mode" else (W, X)
    plain = jax.jit(make(network, lambda fn: fn))(*arguments)
    fn = make(network, lambda fn: autocast(fn, MIXED))
    # Operation by operation, more programs are compiled; one order of transformations suffices.
    out = (fn if name == "autocast of grad" else jax.jit(fn))(*arguments)
    assert out.dtype == F32
    # 2**-8 for each of ten successive matmuls; a second derivative doubles the number.
    assert 0 < relative_error(out, plain) < 0.05
    assert set(operands(fn, *arguments)) == {(BF16, BF16)}


def test_while_loops_keep_the_dtypes_of_their_state():
    def fn(w, x):
        return lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0] @ w, s[1] + 1), (x, 0))[0]

    assert operands(autocast(fn, MIXED), W, X) == [(BF16, BF16)]
    assert autocast(fn, MIXED)(W, X).dtype == F32


def test_kernels_with_a_batch_axis_in_a_scan_multiply_in_16_bits():
    """XLA's CPU compiler converts their operands, of which the kernel is the same in each step."""

    def loss(w, x):
        step = lambda h, row: (jnp.einsum("bki,kio->bko", h + row, w.astype(h.dtype)), None)
        return jnp.mean(lax.scan(step, jnp.zeros((2, 4, 8)), x)[0] ** 2)

    grad = jax.grad(jaxmp.autocast(loss, "bf16"))
    assert jaxmp.audit(grad, jnp.ones((4, 8, 8)), jnp.ones((3, 2, 4, 8))).low_precision_share == 1


def test_the_carry_of_a_scan_is_not_weakly_typed():
    def outside(w, x):
        total, _ = lax.scan(lambda c, row: (c + row.sum(), None), jnp.zeros(()), x)
        return (jnp.broadcast_to(total, (4, 8)) * 2 + x @ w) @ w

    def inside(w, x):
        step = lambda c, _: (c + 1, c * 2 + x @ w)
        return lax.scan(step, jnp.zeros((4, 8)), None, length=2)[1] @ w

    for fn in (outside, inside):
        (add,) = named(trace(autocast(fn, MIXED), W, X), "add")[-1:]
        assert add.outvars[0].aval.dtype == F32


def test_a_running_sum_stays_in_fp32():
    def fn(w, x):
        step = lambda total, row: (total + (row @ w).sum(), None)
        return lax.scan(step, jnp.float32(0), x)[0]

    x = jnp.full((4096, 8), 0.125)
    np.testing.assert_allclose(autocast(fn, MIXED)(jnp.eye(8), x), 4096.0, rtol=1e-3)


def test_shard_map():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def fn(w, b, x):
        # The rule of relu compares values that vary over devices.
        body = lambda w, b, x: lax.psum(jnp.tanh(jax.nn.relu(x @ w + b[None])).sum(), "d")
        specs = (spec(), spec(), spec("d"))
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=spec())(w, b, x)

    for transformed in (autocast(fn, MIXED), jax.grad(autocast(fn, MIXED))):
        assert set(operands(transformed, W, W[0], X)) == {(BF16, BF16)}
    traced = trace(autocast(fn, MIXED), W, W[0], X)
    assert {dtypes(e)[0] for e in named(traced, "tanh")} == {F32}  # the sum is a loss
    np.testing.assert_allclose(autocast(fn, MIXED)(W, W[0], X), fn(W, W[0], X), rtol=0.02)


def test_named_axes_of_vmap():
    fn = lambda x: lax.psum(x @ W, "batch")
    out = jax.vmap(autocast(fn, MIXED), axis_name="batch")(X)
    assert relative_error(out, jax.vmap(fn, axis_name="batch")(X)) < 0.02


def test_custom_derivatives_are_kept():
    @jax.custom_jvp
    def seven(x):
        return jnp.sin(x)

    seven.defjvp(lambda primals, tangents: (seven(*primals), 7 * tangents[0]))

    @jax.custom_vjp
    def eleven(x):
        return jnp.sin(x)

    eleven.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (11 * g,))
    for rule, factor in ((seven, 7), (eleven, 11)):
        for fn in (
            jax.grad(autocast(lambda x, rule=rule: rule(x @ W).sum(), MIXED)),
            autocast(jax.grad(lambda x, rule=rule: rule(x @ W).sum()), MIXED),
        ):
            expected = factor * jax.grad(lambda x: (x @ W).sum())(X)
            assert relative_error(fn(X), expected) < 0.01


def test_custom_derivatives_on_explicit_mesh_axes():
    """The rule of `relu` selects between a gradient and zeros, which must have its sharding."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))
    loss_fn = lambda w, x: jax.nn.relu(x @ w).sum()
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(autocast(loss_fn, MIXED)))(W, x)
    assert relative_error(jax.device_get(gradient), jax.grad(loss_fn)(W, X)) < 0.01


TOLERANCE = 1e-4


def newton_step(w, x):
    """Returns a step of the chord method for `y = tanh(x @ w)`, and the residual before it."""
    residual = jnp.tanh(x @ w) - x * 0.5
    return x + residual, jnp.linalg.norm(residual)


def solve(w, x):
    return lax.while_loop(
        lambda state: state[1] > TOLERANCE, lambda state: newton_step(w, state[0]), (x, jnp.inf)
    )[0]


def replayed(w, x):
    """Backward pass of an implicit solver: repeats the steps, and uses those that converged."""

    def step(x, _):
        new, size = newton_step(w, x)
        return jnp.where(size <= TOLERANCE, new, lax.stop_gradient(new)), None

    return lax.scan(step, x, None, length=4)[0]


implicit = jax.custom_vjp(solve)
implicit.defvjp(
    lambda w, x: (y := solve(w, x), (w, y)),
    lambda saved, cotangent: jax.vjp(replayed, *saved)[1](cotangent),
)

CUSTOM_VJP_CALLS = {
    "plain": implicit,
    "jit": jax.jit(implicit),
    "checkpoint": jax.checkpoint(implicit),
    "scan": lambda w, x: lax.scan(lambda c, _: (implicit(w, c), None), x, None, length=2)[0],
    "cond": lambda w, x: lax.cond(x[0, 0] < 9, implicit, lambda w, x: x, w, x),
    "vmap": lambda w, x: jax.vmap(implicit, (None, 0))(w, x[:, None]),
}


@pytest.mark.parametrize("around", CUSTOM_VJP_CALLS)
@fast_cases("plain", "scan")
@pytest.mark.filterwarnings("ignore:No matmul of autocast:jaxmp.errors.RecipeWarning")
def test_the_rules_of_a_custom_vjp_run_as_its_author_wrote_them(around):
    """Differentiation does not change the equations of the rules, so a tolerance for FP32 is
    reached.

    Otherwise the backward pass would run in 16 bits although the forward pass runs in FP32. It
    would discard every step, and the gradient would be zero.
    """
    w = W / 4
    loss = lambda w: (CUSTOM_VJP_CALLS[around](w, X) ** 2).sum()
    exact = jax.jit(jax.grad(loss))(w)
    assert np.linalg.norm(exact) > 0
    for policy in (MIXED, "p=f32,c=f16,o=f32"):
        for fn in (autocast(jax.grad(loss), policy), jax.grad(autocast(loss, policy))):
            assert relative_error(jax.jit(fn)(w), exact) < 1e-3, (around, policy)


def test_a_function_with_all_matmuls_in_a_custom_vjp_warns():
    loss = lambda w, x: (implicit(w / 4, x) ** 2).sum()
    with pytest.warns(RecipeWarning, match="inside a custom_vjp") as caught:
        jax.eval_shape(jax.grad(autocast(loss, MIXED)), W, X)
    (warning,) = caught
    assert "No matmul of autocast(<lambda>, ...) runs in 16 bits" in str(warning.message)
    assert "test_autocast.py, line" in str(warning.message)
    head = lambda w, x: linear_cross_entropy(x, w, jnp.zeros(len(x), jnp.int32)).mean()
    with pytest.warns(RecipeWarning, match=r"Cast the arguments .* x\.astype\('bfloat16'\)"):
        jax.eval_shape(autocast(head, MIXED), W, X)
    jax.eval_shape(autocast(lambda w, x: head(w, x.astype("bfloat16")), MIXED), W, X)
    # No warning if another matmul is cast, and in FP32.
    jax.eval_shape(autocast(lambda w, x: implicit(w / 4, x @ w), MIXED), W, X)
    jax.eval_shape(autocast(loss, "fp32"), W, X)


def test_autocast_inside_the_rules_of_a_custom_vjp():
    low = autocast(jnp.matmul, MIXED)

    @jax.custom_vjp
    def product(w, x):
        return low(x, w)

    product.defvjp(lambda w, x: (low(x, w), (w, x)), lambda saved, g: (low(saved[1].T, g), g))
    assert (
        operands(lambda w, x: jax.grad(lambda w: product(w, x).sum())(w), W, X)
        == [(BF16, BF16)] * 2
    )


@pytest.mark.parametrize("policy", [MIXED, "fp32"])
def test_symbolic_zeros_of_a_custom_jvp_are_kept(policy):
    seen = set()

    @jax.custom_jvp
    def scaled(w, x, count):
        return jnp.tanh(x @ w) * count, x

    def rule(primals, tangents):
        w, x, count = primals
        seen.add(tuple(isinstance(tangent, SymbolicZero) for tangent in tangents))
        out = scaled(w, x, count)
        d_out = (1 - (out[0] / count) ** 2) * (x @ tangents[0]) * count
        return out, (d_out, tangents[1])

    scaled.defjvp(rule, symbolic_zeros=True)

    def loss(w, x):
        out, same = scaled(w, x, jnp.float32(3))
        return out.sum() + same.sum()

    for fn in (jax.grad(autocast(loss, policy)), jax.jit(autocast(jax.grad(loss), policy))):
        assert relative_error(fn(W, X), jax.grad(loss)(W, X)) < 0.02
    # `x` and `count` are not differentiated.
    assert seen == {(False, True, True)}


def test_constants_have_the_types_that_the_function_returns():
    def fn(w):
        return w @ w, jnp.asarray(1), jnp.float32(2), jnp.arange(2), np.arange(2), np.array(["a"])

    w = jnp.ones((2, 2))
    described = [
        [(type(x), x.dtype, getattr(x, "weak_type", None)) for x in run(w)]
        for run in (fn, autocast(fn, "bf16"))
    ]
    assert described[0] == described[1]


def test_numpy_arrays_in_float64_are_what_jit_makes_of_them():
    w, x = np.asarray(W, np.float64), np.asarray(X, np.float64)
    closed_over = autocast(lambda x: x @ w, MIXED)
    for fn, args in ((autocast(jnp.matmul, MIXED), (x, w)), (closed_over, (x,))):
        # Eager calls trace no arguments: the operands are concrete arrays.
        assert operands(lambda fn=fn, args=args: fn(*args)) == [(BF16, BF16)]
        eager, jitted = fn(*args), jax.jit(fn)(*args)
        assert eager.dtype == jitted.dtype == F32
        assert relative_error(eager, jitted) < 2**-8


def test_refs_and_callbacks():
    seen = []

    def fn(w, x):
        ref = jax.new_ref(jnp.zeros_like(x))
        ref[...] = x @ w
        jax.debug.callback(lambda value: seen.append(value.dtype), ref[...])
        return ref[...] * 2

    out = jax.jit(autocast(fn, MIXED))(W, X)
    jax.effects_barrier()
    assert out.dtype == F32 and seen == [np.dtype(F32)]
    assert relative_error(out, 2 * X @ W) < 0.01


def test_a_reference_of_the_caller_receives_fp32_sums_in_a_loop():
    def fn(w, x, ref):
        def body(carry, _):
            ref[...] = x @ w
            return carry, ref[...] * 2

        return lax.scan(body, 0, None, length=2)[1]

    ref = jax.new_ref(jnp.zeros_like(X @ W))
    for call in (autocast(fn, MIXED), jax.jit(autocast(fn, MIXED))):
        out = call(W, X, ref)
        assert out.dtype == F32 and relative_error(out[1], 2 * ref[...]) == 0
        assert 2**-13 < relative_error(ref[...], X @ W) < 2**-7
        assert np.any(ref[...] != ref[...].astype(BF16).astype(F32))


@pytest.mark.parametrize("order", [1, -1])
def test_a_shared_function_runs_for_the_priorities_of_its_operands(order):
    product = jax.jit(lambda a, b: a * b, inline=False)

    def fn(w, x, y):
        low, narrow = (x @ w)[:, :4], x @ w[:, :4]
        # A matmul reads the products, because results of a program stay in FP32.
        return [product(each, low) @ low for each in (jnp.exp(y), narrow)[::order]]

    shapes = [jnp.ones((8, 32)), jnp.ones((4, 8)), jnp.ones((4, 4))]
    jaxpr = jax.make_jaxpr(autocast(fn, "bf16"))(*shapes)
    dtypes = [each.outvars[0].aval.dtype for each in named(list(equations(jaxpr)), "mul")]
    assert dtypes == [F32, BF16][::order]


@jax.jit
def layer(w, x):
    with jax.named_scope("up"):
        x = jnp.tanh(x @ w)
    with jax.named_scope("down"):
        return x @ w


def layers(w, x):
    x = x @ w
    for name in "abcd":
        with jax.named_scope(name):
            x = layer(w, x)
        x = x @ w  # in 16 bits, so that all layers have equal inputs
    return x


@pytest.mark.parametrize(
    ("path", "wide", "traces"),
    [
        # If one rule applies to all layers, they share one function.
        ("*/down", [F32] * 4, 1),
        ("*/up", [BF16] * 4, 1),
        ("c/**", [BF16, BF16, F32, BF16], 2),
        # The scopes of the last layer are known although it shares the jaxpr of the others.
        ("d/down", [BF16, BF16, BF16, F32], 2),
    ],
)
def test_inner_jits_are_shared_where_rules_say_the_same(path, wide, traces):
    jaxpr = jax.make_jaxpr(autocast(layers, PolicyMap(MIXED, [Rule(path, "c=f32")])))(W, X).jaxpr
    calls = named(jaxpr.eqns, "jit")
    assert len({id(call.params["jaxpr"]) for call in calls}) == traces
    down = [e for e in products(list(equations(jaxpr))) if module_path(e).endswith("down")]
    assert [dtypes(e)[0] for e in down] == wide


def test_required_rules_know_the_scopes_of_shared_jits():
    # The rule has the same effect as the default, so all four layers share one jaxpr.
    autocast(layers, PolicyMap(MIXED, [Rule("d/down", "c=bf16")]))(W, X)
    with pytest.raises(RuleError, match="d/dawn"):
        autocast(layers, PolicyMap(MIXED, [Rule("d/dawn", "c=bf16")]))(W, X)


def test_inner_donation_and_names_are_kept():
    inner = jax.jit(lambda x: x @ W, inline=False)
    jaxpr = jax.make_jaxpr(autocast(lambda x: inner(x), MIXED))(X)
    (call,) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "jit"]
    (plain,) = [e for e in jax.make_jaxpr(inner)(X).jaxpr.eqns if e.primitive.name == "jit"]
    for key in ("name", "donated_invars", "in_shardings", "out_shardings", "inline"):
        assert call.params[key] == plain.params[key]


def test_name_scopes_and_source_lines_survive():
    def fn(w, x):
        with jax.named_scope("outer"):
            return jax.jit(lambda x: jax.named_scope("inner")(jnp.dot)(x, w))(x)

    (plain,) = products(trace(fn, W, X))
    (cast,) = products(trace(autocast(fn, MIXED), W, X))
    assert module_path(cast) == module_path(plain)


# ---------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------


# Compile without changes of rounding: XLA for CPU may omit roundings to bfloat16 between fused
# operations, and its YNN kernels (since JAX 0.11) round inside of a matmul.
AS_WRITTEN: dict[str, bool | str] = {"xla_allow_excess_precision": False}
if jax.__version_info__ >= (0, 11):
    AS_WRITTEN["xla_cpu_experimental_ynn_fusion_type"] = ""


def plain(build):
    """Returns the policies of a network before autocast: none, or those that change no dtype.

    Rules match name scopes. NNX modules create none unless jaxmp wraps them.
    """
    return "f32" if isinstance(build, NNXBuild) and build.case.rules else None


def under_autocast(build):
    """Traces `Build.gradient`; returns its equations, and those of the forward pass."""
    function, params = build.function(plain(build))
    forward = autocast(function, build.case.policies())

    def loss(params):
        out, state = forward(params)
        return jnp.square(out.astype(jnp.float32)).mean(), (out, state)

    with build.case.promotion():
        traced = jax.jit(jax.grad(loss, has_aux=True)).trace(params)
        return traced, list(equations(traced.jaxpr.jaxpr)), trace(forward, params)


def is_outer(equation):
    """Returns True for an outer product, which gains nothing from 16-bit operands."""
    axes, shape = equation.params["dimension_numbers"][0][0], equation.invars[0].aval.shape
    return equation.primitive.name == "dot_general" and all(shape[axis] == 1 for axis in axes)


@pytest.mark.parametrize(
    "build",
    [pytest.param(build, marks=REST if str(build) in SECOND else ()) for build in BUILDS],
    ids=str,
)
@fast_cases(
    "mlp-nnx",
    "mlp_wide_head-linen",
    "einsum-nnx",
    "tied-linen",
    "cnn-linen",
    "fast_lstm-linen",
    "simple_cell-nnx",
    "mgu-linen",
    "attention-linen",
    "qk_norm-nnx",
    "shared-linen",
    "hard_coded-nnx",
    "raw_param-linen",
    "nested_params-nnx",
    "moe-nnx",
    "lora-nnx",
)
def test_models(build):
    """Checks the operand dtypes of all matmuls, norms and softmaxes."""
    _, program, forward = under_autocast(build)
    kept = [rule.path.strip("*/") for rule in build.case.rules if rule.compute_dtype == F32]
    matmuls = [equation for equation in products(program) if not is_outer(equation)]
    assert len(matmuls) >= 3
    for equation in matmuls:
        in_fp32 = any(f"/{name}" in module_path(equation) for name in kept)
        expected = F32 if in_fp32 else BF16
        assert dtypes(equation)[:2] == (expected, expected), module_path(equation)

    wide = named(program, "exp", "rsqrt", "log") + named(forward, "reduce_sum", "square")
    wide += [e for e in named(forward, "add", "sub", "mul", "div") if NORM.search(module_path(e))]
    # In these networks, only a softmax contains differences that are not between layers.
    wide += [e for e in named(forward, "sub") if "ttention" in module_path(e)]
    for equation in wide:
        assert dtypes(equation)[0] == F32, (equation.primitive.name, module_path(equation))


FEWEST_SETS, MOST_SETS = 128, 2048


def standard_error(logs):
    return np.std(logs, axis=0) / len(logs) ** 0.5


def log_error_ratios(build, traced):
    """Returns log(error of autocast / error of module-level policies) for `(output, gradients)`.

    The shape is `[sets of parameters, 2]`; each error is |bf16 - fp32| / |fp32| in the 2-norm. For
    one set, the ratio compares two sums of a few hundred rounding errors. If it depends on the
    rounding of one unit before a relu, it can be anything from a half to two. The number of sets
    therefore determines the mean of the logarithm to 3 %.
    """
    compiled = [
        program.lower().compile(AS_WRITTEN)
        for program in (traced, build.gradient(MIXED), build.gradient(None))
    ]
    like, random, logs = build.function(None)[1], np.random.default_rng(2), []
    while len(logs) < FEWEST_SETS or (standard_error(logs) > 0.03).any():
        assert len(logs) < MOST_SETS
        params = jax.tree.map(lambda leaf: fill(leaf, "params", random), like)
        runs = [(out, gradients) for gradients, (out, _) in (run(params) for run in compiled)]
        ours, level = (list(map(relative_error, run, runs[2])) for run in runs[:2])
        if not min(ours):
            continue  # no unit is active, and the bias of the last layer is not rounded
        logs.append(np.log(ours) - np.log(level))
    return logs


# Networks of each kind of layer, alternately of the two frameworks.
FEW = ("mlp-linen", "cnn-nnx", "attention-linen")


@pytest.mark.parametrize(
    "builds",
    [
        pytest.param([BY_NAME[FEW[0]]], id="one"),
        pytest.param([BY_NAME[name] for name in FEW], marks=EXPENSIVE, id="few"),
        pytest.param(
            [build for build in BUILDS if str(build) not in SECOND],
            marks=[EXPENSIVE, pytest.mark.slow],
            id="one of each pair of twins",
        ),
        pytest.param(BUILDS, marks=REST, id="all"),
    ],
)
def test_models_are_as_close_to_fp32_as_at_module_level(builds):
    """Neither a network nor the geometric mean over the networks has a larger error."""
    ratios = {}
    for build in builds:
        logs = log_error_ratios(build, under_autocast(build)[0])
        ratios[str(build)] = np.exp(np.mean(logs, axis=0))
        # The tolerance is twice the standard error, at most 6 %.
        limit = 1.1 * np.exp(2 * standard_error(logs))
        assert (ratios[str(build)] < limit).all(), (build, ratios[str(build)])
    if len(builds) > len(FEW):
        assert np.exp(np.mean(np.log(list(ratios.values())))) < 1.0


def test_a_mask_of_the_fp32_minimum_stays_finite():
    def fn(w, x, lengths):
        mask = (jnp.arange(8)[None] < lengths[:, None])[:, None]
        bias = jnp.where(mask, 0.0, jnp.finfo(jnp.float32).min)
        first = jnp.where(mask, (x @ w)[:, None], jnp.finfo(jnp.float32).min)
        return jax.nn.softmax(first) + jax.nn.softmax((x @ w)[:, None] + bias)

    lengths = jnp.array([8, 3, 0, 1])
    for policy in (MIXED, "p=f32,c=f16,o=f32"):
        out = autocast(fn, policy)(W, X, lengths)
        assert np.isfinite(out).all()
        assert relative_error(out[:2], fn(W, X, lengths)[:2]) < 0.02


@jax.custom_batching.custom_vmap
def multiplied(x, w):
    return x @ w


@multiplied.def_vmap
def multiply_rows(size, is_batched, x, w):
    x, w = (v if is_one else v[None] for v, is_one in zip((x, w), is_batched, strict=True))
    return jnp.einsum("bij,bjk->bik", x, jnp.broadcast_to(w, (size, *w.shape[1:]))), True


@pytest.mark.parametrize("order", ["inside", "outside", "jitted"])
def test_functions_with_their_own_vmap_and_their_rules_are_cast(order):
    def layer(x, w):
        return jnp.tanh(multiplied(x, w)) @ w

    x, w = jnp.linspace(-1, 1, 512).reshape(2, 16, 16), jnp.linspace(-1, 1, 256).reshape(16, 16)
    cast = {
        "inside": lambda x, w: jaxmp.autocast(jax.vmap(layer, (0, None)), "bf16")(x, w),
        "outside": jax.vmap(jaxmp.autocast(layer, "bf16"), (0, None)),
        "jitted": jax.vmap(jax.jit(jaxmp.autocast(layer, "bf16")), (0, None)),
    }[order]
    traced = equations(jax.make_jaxpr(cast)(x, w).jaxpr)
    operands = [v.aval.dtype for e in traced if e.primitive.name == "dot_general" for v in e.invars]
    assert len(operands) == 4 and set(operands) == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_allclose(cast(x, w), jax.vmap(layer, (0, None))(x, w), atol=0.1)
    tangents = jax.jvp(lambda w: cast(x, w), (w,), (w,))
    expected = jax.jvp(lambda w: jax.vmap(layer, (0, None))(x, w), (w,), (w,))
    np.testing.assert_allclose(tangents, expected, atol=0.3)
