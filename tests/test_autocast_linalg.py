"""autocast of linear algebra, transforms, sorts and scans: values and gradients close to FP32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import linear_call
from jax.scipy import linalg

import jaxmp
from arrays import floats
from grids import EXPENSIVE
from jaxmp import autocast

B, V, X = floats(6, 6, seed=1), floats(6, seed=2), floats(2, 16, seed=5)
EYE = jnp.asarray(np.eye(6, dtype=np.float32))


def general(w):
    """Returns a matrix with singular values from 1 to 4."""
    return w @ B / 5 + 2 * EYE


def positive(w):
    return w @ w.T / 6 + jnp.diag(jnp.arange(1.0, 7.0))


def lower(w):
    return jnp.tril(general(w))


def svd(w):
    u, s, v = jnp.linalg.svd(general(w), full_matrices=False)
    return ((u * (s**2)[None]) @ v).sum()


def eigh(w):
    values, vectors = jnp.linalg.eigh(positive(w))
    return (values * jnp.arange(6.0)).sum() + (vectors**4).sum()


def custom_solve(w):
    matrix = lax.stop_gradient(general(w))
    return lax.custom_linear_solve(
        lambda v: general(w) @ v,
        V,
        lambda _, b: jnp.linalg.solve(matrix, b),
        lambda _, b: jnp.linalg.solve(matrix.T, b),
    ).sum()


def affine(first, second):
    return first[0] * second[0], second[0] * first[1] + second[1]


TERMS = {
    "cholesky": lambda w: jnp.linalg.cholesky(positive(w)).sum(),
    "solve": lambda w: jnp.linalg.solve(general(w), V).sum(),
    "inv": lambda w: (jnp.linalg.inv(general(w)) * B).sum(),
    "slogdet": lambda w: jnp.linalg.slogdet(general(w))[1],
    "eigh": eigh,
    "svd": svd,
    "qr": lambda w: (jnp.linalg.qr(general(w))[1] ** 2 * B).sum(),
    "lu": lambda w: (lax.linalg.lu(general(w))[0] * B).sum(),
    "triangular_solve": lambda w: linalg.solve_triangular(lower(w), V, lower=True).sum(),
    "lstsq": lambda w: jnp.linalg.lstsq(general(w), V)[0].sum(),
    "fft": lambda w: (jnp.abs(jnp.fft.fft(w @ B)) ** 2).sum(),
    "sort": lambda w: (jnp.sort(w, axis=-1) @ V).sum(),
    "top_k": lambda w: (lax.top_k(w, 3)[0] @ V[:3]).sum(),
    "cumsum": lambda w: (jnp.cumsum(w @ B, axis=-1) * B).sum(),
    "associative_scan": lambda w: lax.associative_scan(affine, (jax.nn.sigmoid(w @ B), w @ B))[
        1
    ].sum(),
    "custom_linear_solve": custom_solve,
    "linear_call": lambda w: linear_call(lambda m, v: m @ v, lambda m, v: m.T @ v, B, w @ V).sum(),
    "jacobian": lambda w: (jax.jacobian(lambda v: jnp.tanh(w @ v))(V) * B).sum(),
    "while_loop": lambda w: lax.fori_loop(0, 5, lambda _, y: jnp.tanh(w @ y / 4) + V, V).sum(),
}


def losses(ws):
    """Returns the loss terms; each has its separate matrices and gradient."""
    terms = jnp.stack([term(w) for term, w in zip(TERMS.values(), ws, strict=True)])
    return terms.sum(), terms


WS = tuple(floats(6, 6, seed=10 + number) for number in range(len(TERMS)))
gradient = jax.grad(losses, has_aux=True)


@functools.cache
def exact():
    return jax.jit(gradient)(WS)


@pytest.mark.parametrize(
    ("policy", "tolerance", "order"),
    [
        ("bf16", 0.05, "grad(autocast)"),
        pytest.param("fp16", 0.01, "autocast(grad)", marks=EXPENSIVE),
    ],
)
def test_values_and_gradients(policy, tolerance, order):
    """The matmuls that create the matrices round by 2**-9 (2**-12); condition numbers are at most
    10.
    """
    outside = order == "grad(autocast)"
    fn = jax.grad(autocast(losses, policy), has_aux=True) if outside else autocast(gradient, policy)
    gradients, terms = jax.jit(fn)(WS)
    size = lambda x: float(jnp.linalg.norm(x))
    for name, *args in zip(TERMS, gradients, terms, *exact(), strict=True):
        low, term, reference, value = args
        assert size(low - reference) <= tolerance * size(reference), name
        assert abs(term - value) <= tolerance * max(abs(value), 1.0), name


def test_a_filter_computes_its_covariance_in_fp32():
    """The carry of a Kalman filter reaches a Cholesky factor through matmuls and sums alone."""
    observe, rows = floats(2, 4, seed=3), floats(8, 2, seed=4)

    def update(carry, y):
        x, p = carry
        covariance = observe @ p @ observe.T + 1e-3 * jnp.eye(2)
        factor = linalg.cho_factor(covariance)
        gain = linalg.cho_solve(factor, observe @ p).T
        error = y - observe @ x
        nll = error @ linalg.cho_solve(factor, error)
        return (x + gain @ error, p - gain @ observe @ p + 0.1 * jnp.eye(4)), nll

    def loss(transition, net):
        predict = lambda x, p: (transition @ x, transition @ p @ transition.T)
        step = lambda carry, y: update(predict(*carry), y)
        ys = jax.nn.relu(rows @ net) @ net
        return lax.scan(step, (jnp.ones(4), jnp.eye(4)), ys)[1].sum()

    args = jnp.eye(4) * 0.9 + 0.01 * B[:4, :4], B[:2, :2]
    low, exact = jax.jit(jax.grad(autocast(loss, "bf16")))(*args), jax.jit(jax.grad(loss))(*args)
    np.testing.assert_allclose(low, exact, rtol=0.05, atol=0.05 * float(jnp.abs(exact).max()))
    # A nonlinear function ends the chain: a network in front of the filter stays in 16 bits.
    lowered = str(jax.make_jaxpr(autocast(loss, "bf16"))(*args))
    assert "bf16[8,2]" in lowered and "bf16[4,4]" not in lowered


def error_of_means(scale):
    """Returns the errors of a Gaussian process, small differences of products with solutions."""
    x, t = jnp.linspace(0, 6, 40)[:, None], jnp.linspace(0, 5.9, 17)[:, None]
    kernel = lambda a, b: jnp.exp(-0.5 * ((a - b.T) / scale) ** 2)
    root = jnp.linalg.cholesky(kernel(x, x) + 1e-4 * jnp.eye(40))
    solution, weights = (
        linalg.solve_triangular(root, values, lower=True) for values in (kernel(x, t), jnp.sin(x))
    )
    mean = jax.jit(lambda a, b: a.T @ b)
    means = mean(solution, weights), mean(kernel(x, t), linalg.cho_solve((root, True), jnp.sin(x)))
    design = jnp.concatenate([jnp.sin(x), jnp.cos(x)], axis=1) * scale
    fitted = jnp.linalg.inv(design.T @ design) @ (design.T @ jnp.sin(x)) * scale - EYE[:2, :1]
    return sum(jnp.square(each - jnp.sin(t)).mean() for each in means) + jnp.abs(fitted).sum()


def test_a_product_with_a_solution_is_fp32():
    step = jax.value_and_grad(autocast(error_of_means, "bf16"))
    np.testing.assert_allclose(step(1.0), jax.value_and_grad(error_of_means)(1.0), 1e-3)
    assert not jaxmp.audit(step, 1.0, recipe="bf16").errors


def test_the_layer_in_front_of_a_product_with_a_solution_is_fp32():
    def layer(w, bias, x):
        return jax.nn.softmax(2.0 * jax.nn.relu(x @ w + bias[None]), axis=-1) @ jnp.linalg.inv(w)

    args = EYE + B / 9, V, floats(2, 6, seed=6)
    rows = jaxmp.explain(layer, "bf16")(*args).autocast.rows
    assert {row.dtype for row in rows} == {"float32"}
    np.testing.assert_allclose(autocast(layer, "bf16")(*args), layer(*args), rtol=1e-5)


def test_what_follows_a_product_with_a_solution_runs_in_16_bits():
    def layers(w, x, make):
        return jax.nn.relu(x @ w + x @ make(w)) @ w

    makes = {
        jnp.linalg.inv: 1,
        lambda w: jnp.float32(jnp.bfloat16(jnp.linalg.inv(w))): 0,
        lambda w: jnp.linalg.qr(w)[0]: 0,
        lambda w: jnp.linalg.qr(w)[1]: 1,
    }
    for make, fp32 in makes.items():
        rows = jaxmp.explain(layers, "bf16")(jnp.eye(16), X, make).autocast.rows
        data = [row for row in rows if (2, 16) in row.shapes]
        assert sum(row.count for row in data if row.dtype == "float32") == fp32
    fn = autocast(functools.partial(layers, make=jnp.linalg.inv), "bf16")
    assert "bf16[2,16] = add" in str(jax.make_jaxpr(fn)(jnp.eye(16), X))


def test_an_operation_without_a_16_bit_form_names_the_cast_of_the_parameters():
    def loss_fn(params):
        return jnp.abs(jnp.fft.rfft(params["w"])).sum()

    with pytest.raises(ValueError, match="RFFT") as caught:
        autocast(loss_fn, "bf16_params")({"w": B.astype(jnp.bfloat16)})
    (note,) = (note for note in caught.value.__notes__ if note.startswith("jaxmp: "))
    fix = note[note.index("params =") :]

    def fixed(params):
        names = {"params": params, "jaxmp": jaxmp}
        exec(fix, names)
        return loss_fn(names["params"])

    loss = autocast(fixed, "bf16_params")({"w": B.astype(jnp.bfloat16)})
    np.testing.assert_allclose(loss, loss_fn({"w": B}), rtol=0.05)
    with pytest.raises(TypeError) as caught:
        autocast(lambda x: jnp.zeros(3)[x], "bf16")(1.5)
    assert not any("jaxmp" in note for note in getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("read", [lambda x: x if x.any() else 0, lambda x: x[x > 0], float])
def test_a_function_that_reads_values_has_a_note(read):
    with pytest.raises((TypeError, IndexError)) as caught:
        autocast(lambda x: read((x @ x).sum()), "bf16")(B)
    assert "jax.lax.cond instead of `if`" in "".join(caught.value.__notes__)
