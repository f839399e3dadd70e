"""autocast computes in FP32 what a logarithm, a root or a solver would magnify."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmp
from grids import fast_cases
from jaxmp import autocast

X = jnp.ones((2, 4), jnp.float32)
# The logits are 9.6: a sigmoid in 16 bits is 1, and log(1 - q) is infinite.
W = jnp.full((4, 32), 2.4, jnp.float32)
RECIPES = ("bf16", "fp16")


def likelihood(q):
    """Returns the loss of targets that are 0 and 1 in turns."""
    y = jnp.arange(q.shape[-1]) % 2
    return -jnp.where(y, jnp.log(q), jnp.log(1 - q)).mean()


def direct(w):
    return likelihood(jax.nn.sigmoid(X @ w))


def in_jit(w):
    return likelihood(jax.jit(lambda h: jax.nn.sigmoid(h) * 1)(X @ w))


def in_scan(w):
    _, q = lax.scan(lambda c, row: (c, jax.nn.sigmoid(row @ w)), 0, X)
    return likelihood(q)


def in_cond(w):
    h = X @ w
    return likelihood(lax.cond(h[0, 0] > 0, jax.nn.sigmoid, lambda h: h * 0 + 1, h))


def in_checkpoint(w):
    return likelihood(jax.checkpoint(lambda w: jax.nn.sigmoid(X @ w))(w))


def quotient(w):
    """A root and a quotient that are infinite where the hyperbolic tangent is 1."""
    return (1 / jnp.sqrt(1 - jnp.tanh(X @ w / 2) ** 4)).mean()


@pytest.mark.parametrize("loss", [direct, in_jit, in_scan, in_cond, in_checkpoint, quotient])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_saturated_value_is_not_rounded_to_one(loss, recipe):
    exact, exact_grad = jax.jit(jax.value_and_grad(loss))(W)
    value, grad = jax.jit(jax.value_and_grad(autocast(loss, recipe)))(W)
    # The logits are rounded to 16 bits, by at most 2**-8 relatively, and enter an exponential.
    tolerance = 9.6 * 2**-8
    np.testing.assert_allclose(value, exact, rtol=tolerance)
    np.testing.assert_allclose(grad, exact_grad, rtol=2 * tolerance, atol=1e-6)


def test_a_logarithm_magnifies_without_a_loss():
    fn = autocast(lambda w: jnp.log(1 - jax.nn.sigmoid(X @ w)) @ w.T, "bf16")
    assert np.isfinite(jax.jit(fn)(W)).all()


def primitives(fn, *args):
    """Returns the name and the dtype of the results of all equations."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return {(eqn.primitive.name, str(eqn.outvars[0].aval.dtype)) for eqn in jaxpr.eqns}


def test_other_consumers_of_the_value_compute_in_16_bits():
    def loss(w):
        h = jnp.dot(X, w)
        q = lax.logistic(h)
        return likelihood(q), (q * jnp.dot(X, 2 * w)) @ w.T

    found = primitives(autocast(loss, "bf16"), W)
    assert ("logistic", "float32") in found and ("logistic", "bfloat16") not in found
    assert ("mul", "bfloat16") in found
    gate = primitives(autocast(lambda w: lax.logistic(X @ w) * (X @ w), "bf16"), W)
    assert ("logistic", "bfloat16") in gate, "nothing magnifies a gate"


# ---------------------------------------------------------------------------
# Matrices that are factorized or solved
# ---------------------------------------------------------------------------

POINTS = jnp.linspace(0, 6, 40, dtype=jnp.float32)[:, None]
FEATURES = jnp.asarray(np.random.default_rng(0).normal(size=(1, 32)), jnp.float32)


def features(w):
    """Kernel matrix of features: the entries of `h @ h.T` are close to each other."""
    h = jnp.tanh(POINTS @ w)
    return h @ h.T + 1e-3 * jnp.eye(len(POINTS), dtype=jnp.float32)


def distances(w):
    """Kernel matrix of distances, which are differences of large numbers."""
    z = POINTS * w[0, 0]
    squares = (z**2).sum(1)
    distance = jnp.maximum(squares[:, None] - 2 * z @ z.T + squares[None], 0)
    return jnp.exp(-distance / 2) + 1e-3 * jnp.eye(len(POINTS), dtype=jnp.float32)


def log_determinant(matrix, w):
    return jnp.log(jnp.diag(jnp.linalg.cholesky(matrix(w)))).sum()


@pytest.mark.parametrize("matrix", [features, distances])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gram_matrix_is_computed_in_fp32(matrix, recipe):
    loss = functools.partial(log_determinant, matrix)
    value, grad = jax.jit(jax.value_and_grad(autocast(loss, recipe)))(FEATURES)
    assert np.isfinite(grad).all()
    # Rounded features change the determinant; a rounded Gram matrix has none.
    np.testing.assert_allclose(value, loss(FEATURES), rtol=0.05)


def solve(matrix):
    return jnp.linalg.solve(matrix + jnp.eye(6), jnp.ones(6))


@pytest.mark.parametrize(
    "factorize", [solve, jnp.linalg.inv, jnp.linalg.eigvalsh, jnp.linalg.slogdet]
)
@fast_cases("solve")
def test_the_explanation_names_a_factorization_as_the_reason(factorize):
    def fn(w):
        h = jnp.ones((6, 4)) @ w
        return factorize(h @ h.T)

    layer, gram = jaxmp.explain(fn, "bf16")(W).autocast.rows[:2]
    assert (layer.dtype, layer.shapes) == ("bfloat16", ((6, 4), (4, 32)))
    assert (gram.dtype, gram.shapes) == ("float32", ((6, 32), (32, 6)))
    assert gram.reason == "a factorization or a solve reads the value"


# ---------------------------------------------------------------------------
# Distances
# ---------------------------------------------------------------------------


def as_product(z):
    return 2 * z @ z.T


def as_einsum(z):
    return jax.jit(lambda z: jnp.einsum("id,jd->ij", z, z) * 2)(z)


@pytest.mark.parametrize("product", [as_product, as_einsum])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_matmul_of_distances_and_its_gradients_are_fp32(product, recipe):
    def loss(z, w):
        norms = jnp.maximum(jnp.linalg.norm(z, axis=1), 1e-6)
        distance = norms[:, None] ** 2 + jnp.square(norms)[None] - product(z)
        return jnp.exp(-20 * distance).mean() + jnp.mean((z @ w) ** 2)

    z, w = POINTS + jnp.ones((40, 4)), jnp.ones((4, 8))
    step = jax.value_and_grad(lambda z: loss(z, w))
    for fn in (autocast(step, recipe), jax.value_and_grad(autocast(lambda z: loss(z, w), recipe))):
        for result, exact in zip(jax.jit(fn)(z), step(z), strict=True):
            np.testing.assert_allclose(result, exact, rtol=0.02)
    matmuls = jaxmp.audit(autocast(step, recipe), z, recipe=recipe).matmuls
    assert sorted(row.lhs for row in matmuls if row.phase == "forward") == [
        jaxmp.load_recipe(recipe).policies.default.compute_dtype.name,
        "float32",
    ]
    # The matmul that a layer computes from the same rows may be 16-bit; that of distances may not.
    assert [f.text for f in jaxmp.audit(step, z, recipe=recipe).errors] == [
        "return jnp.exp(-20 * distance).mean() + jnp.mean((z @ w) ** 2)"
    ]


def norms_without_zeros(z):
    squares = optax.safe_norm(z, 1e-6, axis=1) ** 2
    return jnp.exp(40 * z @ z.T - 20 * (squares[:, None] + squares[None])).mean()


def diagonal(z):
    gram = z @ z.T
    squares = jnp.diag(gram)
    return jnp.exp(40 * gram - 20 * (squares[:, None] + squares[None])).mean()


def volume(z):
    # The cotangent of an inner product is a number, not a variable.
    return jnp.linalg.slogdet(z @ z.T + 1e-2 * jnp.eye(len(z)))[1] + z[0] @ z[1]


def angle(z):
    unit = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    return jnp.arccos(jnp.clip(unit @ unit[::-1].T, -0.999, 0.999)).mean()


def hyperbolic(z):
    time = jnp.sqrt(1 + jnp.sum(z * z, -1))
    return jnp.arccosh(jnp.maximum(jnp.outer(time, time) - z @ z.T, 1.001)).mean()


def generated(z):
    return jax.scipy.linalg.expm(z.T @ z / 1000).mean()


def stacked(z):
    add = lambda total, scale: (total, scale * z @ z.T + jnp.eye(len(z)))
    return jnp.linalg.slogdet(lax.scan(add, 0, jnp.arange(1.0, 4))[1])[1].sum()


LOSSES = norms_without_zeros, diagonal, volume, angle, hyperbolic, generated, stacked


@pytest.mark.parametrize("loss", LOSSES)
def test_ill_conditioned_matmuls_and_their_gradients_are_fp32(loss):
    z = POINTS + jnp.ones((40, 4))
    step = jax.value_and_grad(loss)
    for result, exact in zip(jax.jit(autocast(step, "bf16"))(z), step(z), strict=True):
        assert np.abs(result - exact).max() <= 1e-3 * np.abs(exact).max()
    assert jaxmp.audit(step, z, recipe="bf16").ok


def test_only_the_matmul_of_a_distance_is_fp32():
    matmul = lambda a, b: a @ b

    def loss(z, w):
        squares = jnp.sum(z * z, -1)
        distance = squares[:, None] + squares[None] - 2 * matmul(z, z.T)
        return distance.sum() + matmul(z, w).sum()

    z = POINTS + jnp.ones((40, 4))
    report = jaxmp.audit(jax.grad(autocast(loss, "bf16")), z, jnp.ones((4, 8)))
    assert {row.lhs for row in report.matmuls} == {"bfloat16", "float32"}


def frequencies(x, w):
    z = x @ (20 * w) * jnp.float32(2 * np.pi)
    return jnp.concatenate([jnp.sin(z), jnp.cos(z)], 1)


def crystal(x, w):
    # Bessel functions of the distances between periodic images, in a strained cell.
    cell = w[:, :3] + w[:, :3] @ jnp.zeros((3, 3))
    distance = jnp.sqrt(jnp.sum((x + jnp.round(9 * x) @ cell) ** 2, 1, keepdims=True) + 1)
    return jnp.sin(distance * jnp.arange(1, 9.0)[None]) / distance


@pytest.mark.parametrize("features", [frequencies, crystal])
@pytest.mark.parametrize("recipe", RECIPES)
def test_coordinates_are_not_rounded_before_a_sine(recipe, features):
    x, w = POINTS[:, [0, 0, 0]], FEATURES.repeat(3, 0)
    assert np.abs(autocast(features, recipe)(x, w) - features(x, w)).max() < 1e-4
    loss = lambda w: jaxmp.StaticLossScale(8.0).scale(autocast(features, recipe)(x, w).sum())
    assert jaxmp.audit(jax.grad(loss), w, recipe=recipe).ok


@pytest.mark.parametrize("widths", [(16, 8), (4, 15, 8)])
def test_hidden_layers_before_a_sine_run_in_16_bits(widths):
    def layers(x):
        for shape in itertools.pairwise(widths):
            x = jnp.tanh(x) @ jnp.ones(shape)
        return jnp.sin(x)

    rows = jaxmp.explain(layers, "bf16")(jnp.ones((2, widths[0]))).autocast.rows
    assert {row.dtype for row in rows} == {"bfloat16"}


# ---------------------------------------------------------------------------
# Range of float16
# ---------------------------------------------------------------------------


def test_a_large_matmul_is_not_rounded_before_it_is_divided():
    def mean(a):
        return ((a @ a.T) / 64).mean()

    a = jnp.full((8, 8192), 4.0, jnp.float32)
    # 4 * 4 * 8192 is beyond the largest float16, 65504.
    assert autocast(mean, "fp16")(a) == mean(a) == 2048
