"""FP8 matmuls under autocast: which matmuls use FP8, their results, and exclusions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxmp
from arrays import floats
from byte_gpt import GPT
from findings import the_only
from gpu_compiler import needs_compiler
from jaxmp import PolicyMap, Rule, autocast, fp8, full_precision
from jaxmp._programs._jaxprs import equations
from programs import operands, with_own_gradient, with_own_tangent
from test_fp8_dot_general import casts

E4M3, E5M2, BF16, F32 = "float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"
POLICY = "p=f32,c=bf16,o=f32,matmul=fp8"
OF_ANY_WIDTH = PolicyMap(POLICY, fp8=fp8.CurrentScaling(min_width=0))
FORWARD, DGRAD, WGRAD = (E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)
LINEAR = (((1,), (0,)), ((), ()))


W1, W2, X = floats(32, 64) / 6, floats(64, 32, seed=1) / 8, floats(48, 32, seed=2)


def reasons(fn, *args, **options):
    return [row.exclusion_reason for row in jaxmp.explain(fn, **options)(*args).fp8.rows]


def loss(w1, w2, x):
    return jnp.square(jax.nn.gelu(x @ w1) @ w2).mean()


# ---------------------------------------------------------------------------
# Matmuls in FP8
# ---------------------------------------------------------------------------


def test_every_product_becomes_three():
    fn = autocast(loss, POLICY)
    assert operands(fn, W1, W2, X) == [FORWARD] * 2
    found = operands(jax.grad(fn, (0, 1, 2)), W1, W2, X)
    assert sorted(found) == sorted([FORWARD, DGRAD, WGRAD] * 2)
    assert reasons(fn, W1, W2, X) == ["", ""]


def test_it_is_the_product_that_stands_for_dot_general():
    """Results are bit-identical, and sums that only FP32 operations read stay FP32."""
    product = fp8.dot_general("current")

    def by_hand(w, x):
        y = product(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), LINEAR, None, jnp.float32)
        return jnp.sinh(y).sum()

    fn = autocast(lambda w, x: jnp.sinh(x @ w).sum(), POLICY)
    run = lambda fn: jax.jit(jax.value_and_grad(fn, (0, 1)))(W1, X)
    jax.tree.map(np.testing.assert_array_equal, run(fn), run(by_hand))


def test_einsum_and_tensordot_are_products_too():
    def fn(w, x):
        heads = jnp.einsum("td,dnh->tnh", x, w.reshape(32, 4, 16))
        return jnp.tensordot(heads, w.reshape(32, 4, 16), ((1, 2), (1, 2)))

    assert operands(autocast(fn, POLICY), W1, X) == [FORWARD] * 2


def test_the_scaling_is_that_of_the_policies():
    scaling = fp8.RowwiseScaling()
    fn = lambda x, w: x @ w
    ours = jax.jit(autocast(fn, PolicyMap(POLICY, fp8=scaling)))(X, W1)
    x, w = X.astype(jnp.bfloat16), W1.astype(jnp.bfloat16)
    theirs = jax.jit(lambda x, w: fp8.dot_general(scaling)(x, w, LINEAR))(x, w)
    # Half a unit of BF16, because XLA may return FP32 sums without rounding.
    np.testing.assert_allclose(ours, theirs.astype(jnp.float32), rtol=2.0**-8)


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_the_kernel_is_what_nothing_has_computed(side):
    """With `wgrad="high"`, the 16-bit matmul identifies the gradient of the kernel."""
    policies = PolicyMap(POLICY, fp8=fp8.CurrentScaling(wgrad="high"))

    def fn(w, x):
        hidden = jax.nn.softmax(x)  # computed, unlike an argument
        product = w.T @ hidden.T if side == "lhs" else hidden @ w
        return jnp.square(product).sum()

    (row,) = jaxmp.explain(autocast(fn, policies))(W1, X).fp8.rows
    assert (row.k, row.n) == W1.shape
    gradients = jax.make_jaxpr(jax.grad(autocast(fn, policies), (0, 1)))(W1, X)
    products = [e for e in equations(gradients) if e.primitive.name == "dot_general"]
    (high,) = (e for e in products if e.invars[0].aval.dtype == jnp.bfloat16)
    assert sorted(high.outvars[0].aval.shape) == sorted(W1.shape)
    assert len(products) == 3


# ---------------------------------------------------------------------------
# Transformations
# ---------------------------------------------------------------------------


def stacked(ws, x, wrap=lambda step: step):
    return jnp.square(jax.lax.scan(wrap(lambda x, w: (jnp.tanh(x @ w), None)), x, ws)[0]).sum()


STACK = floats(3, 32, 32, seed=3) / 6


@pytest.mark.parametrize(
    ("wrap", "forward"),
    [
        (lambda step: step, 1),
        (jax.jit, 1),
        (lambda step: jax.checkpoint(jax.jit(step)), 2),
    ],
    ids=["plain", "jit", "remat"],
)
def test_under_scan_and_inside_functions(wrap, forward):
    fn = functools.partial(stacked, wrap=wrap)
    grad = jax.grad(autocast(fn, POLICY))
    assert sorted(operands(grad, STACK, X)) == sorted([FORWARD] * forward + [DGRAD, WGRAD])
    if forward == 1:
        return
    want = jax.jit(jax.grad(autocast(stacked, POLICY)))(STACK, X)
    got = jax.jit(grad)(STACK, X)
    # Recomputed values may be rounded to BF16 at other points.
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)
    assert np.isfinite(got).all() and np.any(got)


def test_remat_keeps_the_rounded_operands():
    policy = jax.checkpoint_policies.save_only_these_names(fp8._checkpoint.CHECKPOINT_NAME)
    counts = {}
    for name, wrap in {
        "again": jax.checkpoint,
        "kept": functools.partial(jax.checkpoint, policy=policy),
    }.items():
        grad = jax.grad(autocast(wrap(loss), POLICY), (0, 1))
        counts[name] = casts(grad, W1, W2, X)
    # Four operands and two gradients; recomputed, the operands again.
    assert counts == {"again": 10, "kept": 6}


def test_vmap_outside_scales_each_example_and_inside_all_of_them():
    x = jnp.stack([X, 1000 * X])
    outside = jax.vmap(autocast(jnp.matmul, POLICY), (0, None))
    inside = autocast(jax.vmap(jnp.matmul, (0, None)), POLICY)
    assert operands(outside, x, W1) == operands(inside, x, W1) == [FORWARD]
    one = jax.jit(autocast(jnp.matmul, POLICY))
    got = jax.jit(outside)(x, W1)
    np.testing.assert_allclose(got[0], one(X, W1), rtol=1e-2, atol=1e-2)
    # Of both together the maximum is 1000 times the first one's: E4M3 has 2**17 between its largest
    # number and its smallest, so the first loses bits, and keeps some.
    together = jax.jit(inside)(x, W1)[0]
    noise = np.linalg.norm(together - X @ W1) / np.linalg.norm(X @ W1)
    assert 0.005 < noise < 0.5


def test_under_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    for fn in (shard(autocast(jnp.matmul, POLICY)), autocast(shard(jnp.matmul), POLICY)):
        square = lambda x, w, fn=fn: jnp.square(fn(x, w)).sum()
        grads = jax.jit(jax.grad(square, (0, 1)))(X, W1)
        exact = jax.grad(lambda x, w: jnp.square(x @ w).sum(), (0, 1))(X, W1)
        for got, want in zip(grads, exact, strict=True):
            # E5M2 gradients: 2 bits of mantissa, 6 % of a number's size in the mean.
            assert 0.01 < np.linalg.norm(got - want) / np.linalg.norm(want) < 0.1
        assert sorted(operands(jax.grad(square, (0, 1)), X, W1)) == sorted([FORWARD, DGRAD, WGRAD])


# ---------------------------------------------------------------------------
# Matmuls in 16 bits, and their reasons
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.checkpoint])
def test_products_of_a_backward_pass_inside_stay_in_16_bits(wrap):
    """The trace does not show which operand is the gradient, which would be rounded to E4M3."""
    grad = autocast(jax.grad(wrap(loss), (0, 1)), OF_ANY_WIDTH)
    again = 2 if wrap is jax.checkpoint else 0
    with jaxmp.default_target("h100"):  # A CPU would multiply a transposed operand in FP32.
        found = operands(grad, W1, W2, X)
    assert found.count((BF16, BF16)) == 3 and set(found) == {FORWARD, (BF16, BF16)}
    # A recomputation is a forward pass, whose last matmul is not used here.
    why = reasons(grad, W1, W2, X)
    assert why.count("") == found.count(FORWARD) and 2 <= found.count(FORWARD) <= 2 + again
    assert sum("write jax.grad(autocast(f))" in reason for reason in why) == 3


def test_nested_functions_of_a_backward_pass_stay_in_16_bits_too():
    grad = autocast(jax.grad(stacked), OF_ANY_WIDTH)
    with jaxmp.default_target("h100"):
        assert operands(grad, STACK, X) == [FORWARD, (BF16, BF16), (BF16, BF16)]


def in_full_precision(x, w):
    with full_precision():
        return x @ w


def batched(x, w):
    return jnp.einsum("btd,bsd->bts", x.reshape(3, 16, 32), x.reshape(3, 16, 32)) + w.sum()


@pytest.mark.parametrize(
    ("fn", "dtype", "why"),
    [
        (with_own_gradient(jnp.matmul), F32, "inside a custom_vjp"),
        (with_own_tangent(jnp.matmul), BF16, "inside a custom_jvp, whose rule must stay linear"),
        (functools.partial(jnp.matmul, precision="highest"), F32, "asked for precision=HIGHEST"),
        (lambda x, w: x @ w[:, :10], BF16, "N = 10 is not a multiple of 16"),
        (batched, BF16, "batch dimensions"),
        (in_full_precision, F32, None),
    ],
    ids=["custom_vjp", "custom_jvp", "highest", "odd", "batched", "full_precision"],
)
@pytest.mark.filterwarnings("ignore:The policies of autocast:jaxmp.errors.RecipeWarning")
@pytest.mark.filterwarnings("ignore:No matmul of autocast:jaxmp.errors.RecipeWarning")
def test_what_is_left_out_says_why(fn, dtype, why):
    fn = autocast(fn, POLICY)
    square = lambda x, w: jnp.square(fn(x, w)).sum()
    assert set(operands(square, X, W1)) == {(dtype, dtype)}
    found = reasons(fn, X, W1)
    assert [why in reason for reason in found] == [True] if why else not found
    # It is also differentiable.
    assert set(operands(jax.grad(square, (0, 1)), X, W1)) == {(dtype, dtype)}


def test_outer_products_and_integers_are_no_layers():
    def fn(x, n):
        return jax.lax.dot_general(x, x, (((), ()), ((), ()))), n @ n

    n = jnp.ones((16, 16), jnp.int32)
    assert (F32, F32) in operands(autocast(fn, POLICY), X[0], n)
    assert jaxmp.explain(autocast(fn, POLICY))(X[0], n).fp8.rows == ()


def test_a_product_that_is_fp8_already_is_left_alone():
    product = fp8.dot_general("rowwise")
    fn = autocast(lambda x, w: product(x, w, LINEAR), POLICY)
    np.testing.assert_array_equal(jax.jit(fn)(X, W1), jax.jit(lambda: product(X, W1, LINEAR))())
    assert jaxmp.explain(fn)(X, W1).fp8.rows == ()


def test_rules_keep_scopes_out_and_put_scopes_in():
    def fn(w1, w2, x):
        with jax.named_scope("body"):
            x = jax.nn.gelu(x @ w1)
        with jax.named_scope("head"):
            return jnp.square(x @ w2).mean()

    out = PolicyMap(POLICY, [Rule("head", "matmul=default", why="the last layer")])
    island = PolicyMap(POLICY, [Rule("head", "c=f32")])
    only = PolicyMap("p=f32,c=bf16,o=f32", [Rule("body", "matmul=fp8")])
    for policies, dtype in [(out, BF16), (only, BF16), (island, F32)]:
        found = operands(jax.grad(autocast(fn, policies), (0, 1)), W1, W2, X)
        assert found.count((dtype, dtype)) == 3
        assert sorted(row for row in found if E4M3 in row) == sorted([FORWARD, DGRAD, WGRAD])
        (row,) = jaxmp.explain(autocast(fn, policies))(W1, W2, X).fp8.rows
        assert (row.path, row.exclusion_reason) == ("body", "")


def test_each_call_of_a_shared_function_has_its_row():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def fn(w, x):
        for index in range(3):
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, w)
        return x

    rows = jaxmp.explain(autocast(fn, POLICY))(STACK[0], X).fp8.rows
    assert [row.path for row in rows] == ["layer_0", "layer_1", "layer_2"]


def test_narrow_products_stay_in_16_bits_on_a_gpu():
    fn = autocast(loss, "fp8")
    assert all("too narrow for 8192 tokens" in why for why in reasons(fn, W1, W2, X, target="gpu"))
    wide = autocast(loss, PolicyMap(POLICY, fp8=fp8.CurrentScaling(min_width=32)))
    assert reasons(wide, W1, W2, X, target="gpu") == ["", ""]


MODEL = GPT(layers=2, width=32, heads=2, max_length=16)
TOKENS = np.arange(32, dtype=np.int32).reshape(2, 16)


def test_a_model_has_the_same_fp8_layers_as_under_module_policies():
    """The shipped recipe excludes the head; the matmuls of attention are listed too."""
    params = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS)
    ours, theirs = autocast(MODEL.apply, "fp8"), jaxmp.load_recipe("fp8").wrap(MODEL).apply
    by_modules = {row.path: row for row in jaxmp.explain(theirs)(params, TOKENS).fp8.rows}
    rows = {row.path: row for row in jaxmp.explain(ours)(params, TOKENS).fp8.rows}
    left_out = [path for path, row in rows.items() if row.exclusion_reason]
    assert left_out == ["GPT/block_0/attention", "GPT/block_1/attention"]
    assert {path.removeprefix("GPT/") for path in rows} - set(by_modules) == {
        "block_0/attention",
        "block_1/attention",
    }
    for path, row in by_modules.items():
        assert dataclasses.replace(rows[f"GPT/{path}"], path=path) == row
    gradients = lambda apply: jax.grad(lambda params: apply(params, TOKENS).sum())
    in_fp8 = lambda apply: sorted(
        row for row in operands(gradients(apply), params) if row[0].startswith("float8")
    )
    assert in_fp8(ours) == in_fp8(theirs)
    assert len(in_fp8(ours)) == 36


def test_an_audit_names_what_stays_in_16_bits():
    fn = autocast(lambda w, x: jnp.square(x @ w[:, :10] + (x @ w).sum()).sum(), POLICY)
    report = jaxmp.audit(jax.grad(fn), W1, X, recipe=POLICY)
    finding = the_only(report.findings, "not_fp8")
    assert "N = 10 is not a multiple of 16" in finding.message
    # A rule for the root would exclude all matmuls of a function without scopes.
    scope, _, rule = finding.fix.splitlines()[1:]
    assert "with jax.named_scope('excluded')" in scope and "jaxmp.Rule('excluded'," in rule
    head = autocast(lambda w, x: jax.nn.log_softmax(x @ w @ w).sum(), POLICY)
    assert (
        jaxmp.audit(jax.grad(head), W1[: len(X[0]), : len(X[0])], X, recipe=POLICY).findings == ()
    )


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


def test_scaling_with_a_state_is_refused():
    for policies in (PolicyMap(POLICY, fp8=fp8.DelayedScaling()), jaxmp.load_recipe("fp8")):
        if isinstance(policies, jaxmp.Recipe):
            policies = policies.replace(fp8="delayed")
        with pytest.raises(jaxmp.errors.CompositionError, match=r"recipe.replace\(fp8='current'\)"):
            autocast(jnp.matmul, policies)
    # Without FP8 matmuls there is no error.
    _ = autocast(jnp.matmul, PolicyMap("bf16", fp8=fp8.DelayedScaling()))


def test_a_card_without_fp8_is_refused(card):
    card("8.0")
    with pytest.raises(jaxmp.errors.CompositionError, match=r"(?s)A100.*8\.0.*emulate = true"):
        jax.eval_shape(autocast(loss, POLICY), W1, W2, X)
    emulated = PolicyMap(POLICY, fp8=fp8.CurrentScaling(emulate=True))
    assert reasons(autocast(loss, emulated), W1, W2, X) == ["", ""]


# ---------------------------------------------------------------------------
# Compiled for a GPU
# ---------------------------------------------------------------------------


@needs_compiler
def test_three_real_fp8_products_at_default_flags():
    def step(w, head, x):
        with jax.named_scope("layer"):
            hidden = jax.nn.gelu(x @ w)
        with jax.named_scope("head"):
            return jnp.square(hidden @ head).mean()

    policies = PolicyMap(
        POLICY, [Rule("head", "matmul=default")], fp8=fp8.CurrentScaling(min_width=0)
    )
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    args = shape(256, 384), shape(384, 128), shape(4, 128, 256)
    gradients = jax.value_and_grad(autocast(step, policies), (0, 1, 2))
    with jax.numpy_dtype_promotion("standard"):
        report = jaxmp.audit(gradients, *args, recipe=policies, target="h200")
    found = {}
    for row in report.gemms:
        found.setdefault((row.module, row.kernel.startswith("cublas fp8")), []).extend(
            [(row.phase, *sorted([row.lhs, row.rhs]))] * row.count
        )
    assert sorted(found.pop(("layer", True))) == [
        ("backward", E4M3, E5M2),
        ("backward", E4M3, E5M2),
        ("forward", E4M3, E4M3),
    ]
    ((place, rows),) = found.items()
    assert place == ("head", False) and {row[1:] for row in rows} == {(BF16, BF16)}
    assert "fp8_fallback" not in {finding.check for finding in report.findings}
