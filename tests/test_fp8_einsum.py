"""FP8 einsums against those of JAX, and the layers to which a recipe applies FP8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import JaxmpError, fp8
from jaxmp.fp8 import _explain

EQUATIONS = [
    ("ab,bc->ac", (4, 6), (6, 5)),
    ("ab,bc", (4, 6), (6, 5)),
    ("ba,bc", (6, 4), (6, 5)),
    ("btd,dnh->btnh", (2, 3, 4), (4, 5, 6)),
    ("btd, dnh -> bnth", (2, 3, 4), (4, 5, 6)),
    ("btnh,nhd->btd", (2, 3, 5, 6), (5, 6, 4)),
    ("bthn,nhd->dtb", (2, 3, 6, 5), (5, 6, 4)),
    ("ecd,edf->ecf", (3, 4, 5), (3, 5, 6)),
    ("ced,efd->fec", (4, 3, 5), (3, 6, 5)),
    ("...d,df->...f", (2, 3, 4), (4, 5)),
    ("...d,df", (2, 3, 4), (4, 5)),
    ("...d,...df->...f", (2, 3, 4), (2, 3, 4, 5)),
    ("d...,df->...f", (4, 2, 3), (4, 5)),
    ("...,f->...f", (2, 3), (5,)),
    ("a,b->ba", (4,), (5,)),
    ("a,a", (4,), (4,)),
    ("a,a->a", (4,), (4,)),
]


def test_equations_are_those_of_einsum():
    """Integers up to 7 and power-of-two scales are exact, so only the layout is tested."""
    product = fp8.einsum(fp8.CurrentScaling())
    rng = np.random.default_rng(0)
    integers = lambda shape: rng.integers(-7, 8, size=shape).astype(np.float32)
    pairs = [(integers(x), integers(w)) for _, x, w in EQUATIONS]

    @jax.jit
    def run(pairs):
        return [product(eq, x, w) for (eq, *_), (x, w) in zip(EQUATIONS, pairs, strict=True)]

    for (equation, *_), (x, w), got in zip(EQUATIONS, pairs, run(pairs), strict=True):
        np.testing.assert_array_equal(got, np.einsum(equation, x, w), err_msg=equation)


def test_gradients_and_state():
    recipe = fp8.DelayedScaling(amax_history_len=2)
    x, w = jnp.full((2, 3, 4), 3.0), jnp.full((4, 5, 6), 2.0)
    product = fp8.einsum(recipe)

    @jax.jit
    @lambda fn: jax.grad(fn, argnums=(0, 1, 2))
    def grads(x, w, state):
        return jnp.sum(product("btd,dnh->bnth", x, w, state=state))

    dx, dw, state = grads(x, w, fp8.init_state(recipe))
    np.testing.assert_array_equal(dx, jnp.full_like(x, 2 * 5 * 6))
    np.testing.assert_array_equal(dw, jnp.full_like(w, 3 * 2 * 3))
    amaxes = {name: float(leaf[0]) for name, leaf in state.items() if name.endswith("history")}
    assert amaxes == {
        "input_amax_history": 3,
        "kernel_amax_history": 2,
        "output_grad_amax_history": 1,
    }


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("ab,bc,cd->ad", "equal to the number of operands, 2"),
        ("ab->ba", "equal to the number of operands, 2"),
        ("aa,ab->b", "'aa' has a label twice"),
        ("ab,bc->acc", "'c' appeared more than once in the output"),
        ("ab,bc->ad", "'d' did not appear in the input"),
        ("...abc,bc->a", "Ellipses lengths do not match"),
        ("ab,bc->c", "an operand alone is summed over"),
        ("abc,bc->a", "'abc' does not name the axes of an array of rank 2"),
        ("a,bc->abc", "'a' does not name the axes of an array of rank 2"),
        ("a1,1c->ac", "'a1' does not name"),
    ],
)
def test_equations_that_are_no_product(equation, message):
    with pytest.raises(JaxmpError, match=message):
        fp8.einsum()(equation, jnp.ones((2, 2)), jnp.ones((2, 2)))


# ---------------------------------------------------------------------------
# Eligible layers
# ---------------------------------------------------------------------------

ROWWISE = fp8.RowwiseScaling()


FEW_TOKENS, TURNED = (
    f"K = {k} and N = {5120 - k} are too narrow for 2048 tokens" for k in (1024, 4096)
)
MANY_TOKENS = fp8.CurrentScaling(tokens=2**40)
WIDTH_512 = fp8.CurrentScaling(min_width=512)


@pytest.mark.parametrize(
    ("k", "n", "recipe", "target", "reason"),
    [
        (64, 32, None, "cpu", ""),
        (64, 31, None, "cpu", "N = 31 is not a multiple of 16"),
        (8, 24, "rowwise", "gpu", "K = 8 and N = 24 are not multiples of 16"),
        # The rule of tokens, K and N is symmetric.
        (1024, 1024, None, "gpu", "K = 1024 and N = 1024 are too narrow for 8192 tokens"),
        (1024, 1024, fp8.CurrentScaling(tokens=32768), "gpu", ""),
        (1024, 4096, fp8.CurrentScaling(tokens=2048), "gpu", FEW_TOKENS),
        (4096, 1024, fp8.DelayedScaling(tokens=2048), "gpu", TURNED),
        (1024, 4096, "delayed", "gpu", ""),
        (4096, 1024, None, "tpu", ""),
        (
            64,
            4096,
            MANY_TOKENS,
            "gpu",
            "K = 64 and N = 4096 are too narrow for 1099511627776 tokens",
        ),
        # torchao's limits.
        (8192, 2048, ROWWISE, "gpu", "N = 2048 <= 2048: too narrow to gain"),
        (1024, 8192, ROWWISE, "gpu", "K = 1024 <= 1024: too narrow to gain"),
        (2048, 4096, ROWWISE, "gpu", "K = 2048 <= 2048 and N = 4096 <= 4096: too narrow to gain"),
        (2064, 4096, ROWWISE, "gpu", ""),
        (2048, 4112, ROWWISE, "gpu", ""),
        # Limits set by the user.
        (512, 512, WIDTH_512, "gpu", ""),
        (512, 496, WIDTH_512, "gpu", "K = 512 or N = 496 is below min_width = 512"),
        (16, 16, fp8.CurrentScaling(min_width=0), "tpu", ""),
    ],
)
def test_eligible_layers(k, n, recipe, target, reason):
    assert _explain.explain_exclusion(k, n, fp8._scaling.as_scaling(recipe), target) == reason
