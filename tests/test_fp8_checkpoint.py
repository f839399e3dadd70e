"""Rematerialization policies for FP8 dots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grids import fast_cases
from jaxmp import JaxmpError, fp8
from jaxmp._programs._jaxprs import equations

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*without that of its states:jaxmp.errors.RecipeWarning"
)

DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
MATRICES = (((1,), (0,)), ((), ()))
BATCHES = (((2,), (1,)), ((0,), (0,)))
SCALINGS = {
    "current": fp8.CurrentScaling(),
    "rowwise": fp8.RowwiseScaling(),
    "delayed": fp8.DelayedScaling(),
}


def layers(scaling, dimension_numbers):
    """Returns a product in BF16 with an activation, and its arguments."""
    product = fp8.dot_general(scaling)
    state = {}
    if isinstance(scaling, fp8.DelayedScaling):
        state = {"state": fp8.init_state(scaling)}

    def layer(x, w):
        return jnp.tanh(product(x, w, dimension_numbers, **state))

    batch = dimension_numbers[1][0]
    x = jax.random.normal(jax.random.key(0), (*[2 for _ in batch], 32, 16), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (*[2 for _ in batch], 16, 48), jnp.bfloat16)
    return layer, x, w


def gradient(layer, policy):
    layer = jax.checkpoint(layer, policy=policy)
    loss = lambda x, w: jnp.sum(jnp.square(layer(x, w)), dtype=jnp.float32)
    return jax.value_and_grad(loss, (0, 1))


def operations(fn, *args):
    """Returns the names of the operations of a program, and of those whose result is [32, 48]."""
    operations = list(equations(jax.make_jaxpr(fn)(*args)))
    of_result = [e for e in operations if any(v.aval.shape == (32, 48) for v in e.outvars)]
    return tuple([e.primitive.name for e in group] for group in (operations, of_result))


@pytest.mark.parametrize("name", SCALINGS)
@fast_cases("current")
def test_the_scaled_product_is_saved(name):
    layer, x, w = layers(SCALINGS[name], MATRICES)
    plain, ours = (gradient(layer, p) for p in (DOTS, fp8.checkpoint_policy(DOTS)))
    (_, before), (names, after) = (operations(fn, x, w) for fn in (plain, ours))
    assert names.count("dot_general") == 3
    # The backward pass does not apply the scale of the tensors, or both scales of their rows.
    assert before.count("mul") - after.count("mul") == (2 if name == "rowwise" else 1)
    for policy in (None, DOTS):
        expected = jax.jit(gradient(layer, policy))(x, w)
        jax.tree.map(np.testing.assert_array_equal, jax.jit(ours)(x, w), expected)


@pytest.mark.parametrize(
    ("policy", "dots"),
    [(DOTS, 4), (jax.checkpoint_policies.dots_saveable, 3)],
    ids=["without batches", "all"],
)
def test_batched_products_are_saved_as_those_of_16_bits(policy, dots):
    layer, x, w = layers(SCALINGS["current"], BATCHES)
    wide = lambda x, w: jnp.tanh(jax.lax.dot_general(x, w, BATCHES))
    for each in (layer, wide):
        names, _ = operations(gradient(each, fp8.checkpoint_policy(policy)), x, w)
        assert names.count("dot_general") == dots


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "names", "dots"])
def test_other_policies_and_programs_do_not_change(policy):
    policies = {
        "names": jax.checkpoint_policies.save_only_these_names(fp8._checkpoint.CHECKPOINT_NAME)
    }
    policy = policies.get(policy, getattr(jax.checkpoint_policies, policy, DOTS))
    layer, x, w = layers(SCALINGS["rowwise"], MATRICES)
    if policy is DOTS:
        layer = lambda x, w: jnp.tanh(x @ w)
    plain, ours = (gradient(layer, p) for p in (policy, fp8.checkpoint_policy(policy)))
    assert operations(plain, x, w) == operations(ours, x, w)


def test_amaxes_are_saved():
    """With current scaling, the backward pass measures only the gradient."""
    layer, x, w = layers(SCALINGS["current"], MATRICES)
    policy = jax.checkpoint_policies.nothing_saveable
    plain, ours = (gradient(layer, p) for p in (policy, fp8.checkpoint_policy(policy)))
    (before, _), (after, _) = (operations(fn, x, w) for fn in (plain, ours))
    # Those of input, kernel and gradient; `jax.checkpoint` repeats the first two.
    assert (before.count("reduce_max"), after.count("reduce_max")) == (5, 3)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(plain)(x, w), jax.jit(ours)(x, w))


@pytest.mark.parametrize("name", ["current", "delayed"])
@fast_cases("current")
def test_kernels_are_quantized_once_if_they_are_saved(name):
    layer, x, w = layers(SCALINGS[name], MATRICES)
    policies = [fp8.checkpoint_policy(DOTS, kernels=kernels) for kernels in (False, True)]
    again, once = (gradient(layer, policy) for policy in policies)
    kernels = lambda fn: [
        each
        for each in equations(jax.make_jaxpr(fn)(x, w))
        if each.primitive.name == "clamp" and each.outvars[0].aval.shape == w.shape
    ]
    assert (len(kernels(again)), len(kernels(once))) == (2, 1)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(again)(x, w), jax.jit(once)(x, w))


@pytest.mark.parametrize("policy", [None, "dots_saveable"])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(JaxmpError, match=f"{policy!r} is not a function"):
        fp8.checkpoint_policy(policy)
