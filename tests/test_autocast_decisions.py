"""autocast rounds no value that a softmax, a choice or a loss reads."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmp
from arrays import normal
from grids import fast_cases
from jaxmp import autocast
from jaxmp._programs._uses import DECISIONS, Use, uses
from programs import named, relative_error, trace, with_own_gradient

BF16, F32 = "bfloat16", "float32"


X, W, LABELS = normal(0, 8, 32), normal(1, 32, 64) / 4, jnp.arange(8)
POSITIVE = W[0] > 0


def cross_entropy(z):
    return optax.softmax_cross_entropy_with_integer_labels(z, LABELS).mean()


def log_probs(z):
    return jnp.take_along_axis(jax.nn.log_softmax(z), LABELS[:, None], 1)[:, 0]


def in_chunks(x, w):
    def add(total, chunk):
        x, label = chunk
        z = jax.nn.logsumexp(x @ w, -1) - (x @ w)[jnp.arange(2), label]
        return total + z.sum(), None

    return lax.scan(add, 0.0, (x.reshape(4, 2, 32), LABELS.reshape(4, 2)))[0]


def over_devices(x, w):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    body = lambda x, w: cross_entropy(lax.psum(x @ w, "d"))
    return jax.shard_map(body, mesh=mesh, in_specs=(P(None, "d"), P("d")), out_specs=P())(x, w)


# Functions of the operands of a matmul whose result decides.
DECIDES = {
    "cross_entropy": lambda x, w: cross_entropy(x @ w),
    "soft_cap": lambda x, w: cross_entropy(30 * jnp.tanh((x @ w + w[:1]) / 30)),
    "mask": lambda x, w: cross_entropy(jnp.where(POSITIVE[None], x @ w, -1e30)[:, :32]),
    "tied": lambda x, w: cross_entropy(jnp.einsum("bd,vd->bv", x, w.T)),
    "top_k": lambda x, w: lax.top_k(jax.nn.softmax(x @ w), 2),
    "sigmoid_router": lambda x, w: lax.top_k(jax.nn.sigmoid(x @ w) + w[:1], 2)[1],
    "sample": lambda x, w: jax.random.categorical(jax.random.key(0), x @ w),
    "value_distribution": lambda x, w: (jax.nn.softmax(x @ w) @ jnp.linspace(0, 1, 64)).argmax(),
    "contrastive": lambda x, w: cross_entropy(x @ (w[:, :8] * 2) / 0.07),
    "ppo": lambda x, w: jnp.clip(jnp.exp(log_probs(x @ w) + 5), 0.8, 1.2).mean(),
    "binary": lambda x, w: optax.sigmoid_binary_cross_entropy(x @ w, POSITIVE[None]).mean(),
    "squared_error": lambda x, w: jnp.mean((x @ w - 1) ** 2),
    "two_terms": lambda x, w: jnp.mean((x @ w - 1) ** 2) + jnp.mean(w**2),
    "masked_mean": lambda x, w: jnp.sum(w[:8] * (x @ w - 1) ** 2) / w.sum(),
    "returned": lambda x, w: x @ w + w[:1],
    "one_hot": lambda x, w: -jnp.vdot(jnp.eye(64)[:8], jax.nn.log_softmax(x @ w)) / 8,
    "values_of_actions": lambda x, w: jnp.mean(
        (jnp.einsum("ba,ba->b", x @ w, jnp.eye(64)[:8]) - 1) ** 2
    ),
    "custom_vjp": lambda x, w: with_own_gradient(cross_entropy)(x @ w),
    "checkpoint": lambda x, w: cross_entropy(jax.checkpoint(jnp.matmul)(x, w)),
    "cond": lambda x, w: cross_entropy(lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: -(x @ w))),
    "vmap": lambda x, w: jax.vmap(lambda x: jax.nn.log_softmax(x @ w))(x),
    "chunks": in_chunks,
    "over_devices": over_devices,
    "experts": lambda x, w: cross_entropy(lax.ragged_dot(x, w[None], jnp.array([8]))),
}


def attention(x, w):
    z = jnp.where(jnp.tril(jnp.ones((8, 8), bool)), (x @ w) @ (x @ w).T / 8, -1e30)
    return jax.nn.softmax(z) @ x


# Functions with a matmul whose rounding decides nothing.
HEALTHY = {
    "attention": attention,
    "gate": lambda x, w: jax.nn.sigmoid(x @ w) * (x @ w),
    "activation": lambda x, w: jax.nn.softplus(x @ w),
    "argmax_of_tokens": lambda x, w: jnp.tanh(x @ w)[(LABELS > 2).argmax()][None],
    "max_pool": lambda x, w: (x @ w).max(0, keepdims=True),
}


def results(fn, *args):
    """Returns the dtypes of operands and result of each matmul, on a GPU."""
    with jaxmp._core._compat.context(target="gpu", capability=(9, 0)):
        traced = named(trace(fn, *args), "dot_general", "ragged_dot_general")
    return [(str(e.invars[0].aval.dtype), str(e.outvars[0].aval.dtype)) for e in traced]


@pytest.mark.parametrize("fn", DECIDES.values(), ids=DECIDES)
@fast_cases("cross_entropy", "soft_cap", "top_k", "two_terms", "chunks", "cond", "experts")
def test_a_matmul_that_decides_returns_its_sums(fn):
    assert results(autocast(fn, "bf16"), X, W)[0] == (BF16, F32)
    used = uses(jax.make_jaxpr(fn)(X, W))
    dots = named(trace(fn, X, W), "dot_general", "ragged_dot_general")
    assert used[dots[0].outvars[0]] & (DECISIONS | Use.RESULT)


@pytest.mark.parametrize("fn", HEALTHY.values(), ids=HEALTHY)
def test_its_healthy_neighbours_stay_in_16_bits(fn):
    inner = lambda x, w, v: jnp.tanh(fn(x, w) @ v) @ v.T @ v
    *hidden, last = results(autocast(inner, "bf16"), X, W, normal(2, fn(X, W).shape[-1], 32))
    assert set(hidden) <= {(BF16, BF16)} and last == (BF16, F32)


def test_a_decision_in_the_next_iteration():
    def fn(x, w):
        def step(carry, _):
            x, z = carry
            return (x + jax.nn.softmax(z)[:, :32], x @ w), None

        return jnp.tanh(lax.scan(step, (x, x @ w), length=3)[0][0] @ w) @ w.T

    assert results(autocast(fn, "bf16"), X, W)[:2] == [(BF16, F32)] * 2


def test_the_gradient_of_attention_reads_no_decision():
    loss = lambda x, w: cross_entropy(jax.checkpoint(attention)(x, w) @ w)
    program = autocast(jax.grad(loss, 1), "bf16")
    assert sorted(results(program, X, W)).count((BF16, F32)) <= 3  # the head, and the result


def test_logits_are_as_those_in_fp32():
    w = normal(1, 32, 2000)
    half = lambda w: jnp.dot(X.astype(BF16), w.astype(BF16), preferred_element_type=F32)
    teacher = half(w) + 0.05 * normal(3, 8, 2000)

    def distill(z):
        target = jax.nn.log_softmax(teacher)
        return (jnp.exp(target) * (target - jax.nn.log_softmax(z))).sum(-1).mean()

    np.testing.assert_allclose(
        jax.jit(autocast(lambda w: log_probs(X @ w), "bf16"))(w), log_probs(half(w)), atol=2e-6
    )
    exact = jax.jit(jax.grad(lambda w: distill(half(w))))(w)
    for grad in (
        jax.grad(autocast(lambda w: distill(X @ w), "bf16")),
        autocast(jax.grad(lambda w: distill(X @ w)), "bf16"),
    ):
        assert relative_error(jax.jit(grad)(w), exact) < 3e-3  # the cotangent is rounded once


def test_the_head_of_a_model_needs_no_name():
    model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(64)])
    params = jax.jit(model.init)(jax.random.key(0), X)
    assert results(autocast(model.apply, "bf16"), params, X) == [(BF16, BF16), (BF16, F32)]
    rows = jaxmp.explain(lambda p, x: cross_entropy(model.apply(p, x)), "bf16")(params, X)
    assert [r.reason.partition("; ")[2] for r in rows.autocast.rows] == [
        "",
        "FP32 result: a softmax or another sum of exponentials reads the value",
    ]


def test_a_softmax_and_a_router_stay_out_of_fp8():
    fn = lambda x, w: jax.nn.log_softmax(jnp.tanh(x @ w @ w.T) @ w)
    policies = jaxmp.PolicyMap("p=f32,c=bf16,o=f32,matmul=fp8")
    rows = jaxmp.explain(fn, policies)(jnp.tile(X, (2, 1)), W)
    assert [row.exclusion_reason for row in rows.fp8.rows] == [
        "",
        "",
        "a softmax or another sum of exponentials reads the value",
    ]


# ---------------------------------------------------------------------------
# Values that the program itself rounds
# ---------------------------------------------------------------------------


def test_differences_of_probabilities_are_not_rounded():
    t = (3 * normal(4, 8, 500)).astype(BF16)
    s = (t.astype(F32) + 0.02 * normal(5, 8, 500)).astype(BF16)

    def distance(s, t):
        return jnp.square(jax.nn.softmax(s) - jax.nn.softmax(t)).sum(-1).mean()

    def rounded(s, t):
        s, t = (jax.nn.softmax(z.astype(F32)).astype(BF16) for z in (s, t))
        return jnp.square(s - t).sum(-1).mean()

    exact = jax.jit(jax.grad(lambda s: distance(s.astype(F32), t.astype(F32))))(s)
    for fn in (distance, rounded):
        assert relative_error(jax.jit(jax.grad(autocast(fn, "bf16")))(s, t), exact) < 2**-8


def test_a_variance_that_the_program_rounds_is_in_fp32():
    def normalized(x):
        variance = (x * x).mean(0, keepdims=True) - x.mean(0, keepdims=True) ** 2
        return x * lax.rsqrt(variance.astype(F32) + 1e-5).astype(x.dtype)

    x = (normal(6, 500, 4) + 20).astype(BF16)
    exact = normalized(x.astype(F32))
    assert relative_error(jax.jit(autocast(normalized, "bf16"))(x), exact) < 2**-7
    assert relative_error(normalized(x), exact) > 0.05


def test_the_gradient_of_a_gather_is_a_sum_in_fp32():
    index = jnp.zeros(600, jnp.int32)
    fn = autocast(lambda h, w: ((h @ w)[index] @ w.T).sum(), "bf16")
    grad = jax.jit(jax.grad(fn, 1))(jnp.ones((4, 8)), jnp.ones((8, 16)))
    np.testing.assert_array_equal(grad, np.full((8, 16), 9600.0))  # 256 in 16 bits


def test_results_stay_weakly_typed():
    for value in (jnp.asarray(3), jnp.asarray(3.0)):
        assert value.weak_type and autocast(lambda x: x + 1, "bf16")(value).weak_type


@pytest.mark.parametrize("order", ["program", "transposed"])
def test_xla_compiles_wide_results_on_a_cpu(order):
    def net(w, v, x):
        return (jnp.tanh(x[None] @ w) @ v)[0]

    def loss(w, v):
        z = jax.vmap(net, (None, None, 0))(w, v, X)
        return jnp.mean((z.T if order == "transposed" else z) ** 2)

    args = W, normal(7, 64, 4)
    grads = jax.jit(autocast(jax.grad(loss, (0, 1)), "bf16"))(*args)
    assert relative_error(grads, jax.grad(loss, (0, 1))(*args)) < 0.02
    vectors = autocast(lambda w, v: jax.vmap(lambda x: jnp.exp(v @ (w.T @ x)))(X), "bf16")
    assert jax.jit(vectors)(W, W).shape == (8, 32)
    transposed = autocast(lambda x, w: jax.nn.log_softmax((x @ w).T, 0), "bf16")
    assert jax.jit(transposed)(X, W).shape == (64, 8)
    left = autocast(lambda w, z: jnp.exp(jnp.matmul(w.T, z)), "bf16")
    assert jax.jit(left)(W, normal(8, 2, 32, 3)).shape == (2, 64, 3)
    heads = autocast(lambda z, w: jax.nn.softmax(jnp.einsum("bhts,hg->bgts", z, w)), "bf16")
    assert jax.jit(heads)(normal(8, 2, 4, 3, 3), normal(9, 4, 4)).shape == (2, 4, 3, 3)


def test_a_loss_selects_values_in_fp32():
    """A matmul with one-hot rows rounds nothing, and its operand in 16 bits would."""
    rows = lambda: jax.nn.one_hot(LABELS, 64)
    select = lambda values: jnp.einsum("bk,nk->bn", values, rows())
    loss = lambda z: -select(jax.nn.log_softmax(z)).mean()
    logits = 8 * normal(3, 8, 64)
    assert autocast(loss, "bf16")(logits) == loss(logits)
    # An embedding and a dispatch to experts are no losses.
    hidden = lambda x, w: jnp.tanh(select((x @ w) / jnp.linalg.norm(x @ w)) @ w.T[:8])
    fn = lambda x, w: hidden(x, w) @ w
    assert (F32, F32) not in results(autocast(fn, "bf16"), X, W)


def test_an_inner_product_is_a_sum_in_fp32():
    fn = lambda z: -jnp.einsum("bc,bc->b", jnp.eye(64)[:8], jax.nn.log_softmax(z))
    logits = 8 * normal(3, 8, 64)
    assert (autocast(fn, "bf16")(logits) == fn(logits)).all()
