"""Statistics of the FP8 quantization of each matmul, in training programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from byte_gpt import GPT
from grids import EXPENSIVE
from jaxmp import PolicyMap, fp8
from jaxmp.errors import JaxmpError

LINEAR = (((1,), (0,)), ((), ()))
ROLES = {":input", ":kernel", ":output_grad"}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


W, X = normal(0, 32, 64), normal(1, 48, 32)


def loss(w, x, recipe="current"):
    with jax.named_scope("layer"):
        y = fp8.dot_general(recipe)(x, w, LINEAR)
    return jnp.square(y).mean()


def fractions(x, dtype="e4m3fn"):
    """Returns the fractions for a tensor with its current scale."""
    x = jnp.asarray(x)
    scale = fp8._quantize.compute_scale(jnp.abs(x).max(), dtype, power_of_two=True)
    return fp8._quantize.stats_of(x, x.astype(jnp.float32) * scale, jnp.dtype(f"float8_{dtype}"))


def same(got, want):
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@EXPENSIVE
def test_of_all_three_operands_and_nothing_else_changes():
    spread = X * jnp.exp2(jnp.linspace(-20, 0, 32))[None]
    run = jax.value_and_grad(loss)
    want = jax.jit(run)(W, spread)
    got, stats = jax.jit(fp8.with_stats(run))(W, spread)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert set(stats) == {f"layer{role}" for role in ROLES}
    same(stats["layer:input"], fractions(spread))
    same(stats["layer:kernel"], fractions(W))
    # Numbers down to 2**-20 of the largest: E4M3 has 2**-17 of it, the last three as subnormals.
    assert 0.05 < float(stats["layer:input"].underflowed) < 0.3
    assert 0.05 < float(stats["layer:input"].subnormal) < 0.3
    y = fp8.dot_general("current")(spread, W, LINEAR)
    same(stats["layer:output_grad"], fractions(2 * y / y.size, "e5m2"))


@EXPENSIVE
def test_stale_scales_saturate_and_what_is_not_finite_shows():
    recipe = fp8.DelayedScaling(amax_history_len=2)
    state = fp8.init_state(recipe)
    product = lambda x, state: fp8.dot_general(recipe)(x, W, LINEAR, state=state)
    _, state = jax.grad(lambda x, s: product(x, s).sum(), (0, 1))(X, state)
    _, stats = jax.jit(fp8.with_stats(product))((4 * X).at[0, 0].set(jnp.nan), state)
    row = stats[":input"]
    # Elements beyond the range that the scale of the step before maps to 448, counted by hand.
    finite = np.abs(np.delete(np.asarray(X).ravel(), 0))
    largest = 448 / np.exp2(np.floor(np.log2(448 / np.abs(X).max())))
    assert float(row.saturated) == pytest.approx(np.mean(4 * finite > largest), rel=1e-6)
    assert float(row.saturated) > 0.05 and float(stats[":kernel"].saturated) == 0
    assert float(row.finite) == pytest.approx(1 - 1 / X.size)
    assert float(row.amax) == 4 * finite.max()


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        (fp8.RowwiseScaling(), 6),
        pytest.param(fp8.MXScaling(), 6, marks=pytest.mark.slow),
        (fp8.CurrentScaling(wgrad="high"), 4 - 1),
    ],
    ids=["rowwise", "mx", "high"],
)
def test_what_is_rounded_twice_has_two_rows(recipe, keys):
    _, stats = jax.jit(fp8.with_stats(jax.grad(loss)), static_argnums=2)(W, X, recipe)
    assert len(stats) == keys and {key.partition("#")[0] for key in stats} == {
        f"layer{role}" for role in ROLES
    }
    # Neighbours have separate scales, so nothing saturates.
    assert all(float(row.saturated) == 0 and float(row.finite) == 1 for row in stats.values())


@EXPENSIVE
def test_scan_gives_a_row_of_each_step_and_remat_none_twice():
    ws = normal(2, 3, 32, 32) * jnp.array([1.0, 2.0, 4.0])[:, None, None] / 6

    def stacked(ws, x):
        def step(x, w):
            with jax.named_scope("layer"):
                return jnp.tanh(jax.jit(fp8.dot_general("current"), static_argnums=2)(x, w, LINEAR))

        return lax.scan(lambda x, w: (jax.checkpoint(step)(x, w), None), x, ws)[0].sum()

    run = jax.value_and_grad(stacked, (0, 1))
    got, stats = jax.jit(fp8.with_stats(run))(ws, X)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(run)(ws, X)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert set(stats) == {f"layer{role}" for role in ROLES}
    amax = stats["layer:kernel"].amax
    np.testing.assert_array_equal(amax, jnp.abs(ws).max((1, 2)))
    assert float(stats["layer:input"].amax[0]) == float(jnp.abs(X).max())
    # The gradient of the last iteration is computed first in the backward pass, and is last here.
    gradients = np.asarray(stats["layer:output_grad"].amax)
    assert gradients.shape == (3,) and gradients[2] <= 1


def test_vmap_counts_all_examples():
    x = jnp.stack([X, 2 * X])
    mapped = jax.vmap(lambda x: fp8.dot_general("current")(x, W, LINEAR))
    _, stats = jax.jit(fp8.with_stats(mapped))(x)
    assert float(stats[":input"].amax) == float(jnp.abs(x).max())
    np.testing.assert_allclose(stats[":input"].underflowed, fractions(X).underflowed, rtol=1e-6)


def test_of_a_model_as_of_autocast():
    model, tokens = GPT(layers=1, width=32, heads=2, max_length=16), jnp.arange(32).reshape(2, 16)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    policies = PolicyMap("p=f32,c=bf16,o=f32,matmul=fp8", [jaxmp.Rule("lm_head", "matmul=default")])
    by_modules = jaxmp.load_recipe(policies).wrap(model).apply
    by_trace = jaxmp.autocast(model.apply, policies)
    found = []
    for apply in (by_modules, by_trace):
        gradients = jax.grad(lambda p, apply=apply: jnp.square(apply(p, tokens)).mean())
        found.append(jax.eval_shape(fp8.with_stats(gradients), params)[1])
    names = [f"attention/{name}" for name in ("query", "key", "value", "out")]
    layers = [f"GPT/block_0/{name}" for name in (*names, "mlp_up", "mlp_down")]
    wanted = {f"{layer}{role}" for layer in layers for role in ROLES}
    assert set(found[0]) == set(found[1]) == wanted
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype("float32")}


def test_a_program_without_fp8_has_none():
    got, stats = fp8.with_stats(lambda x: {"y": x @ x.T, "n": 3})(X)
    assert stats == {} and set(got) == {"y", "n"}


def test_it_is_not_differentiated():
    with pytest.raises(JaxmpError, match=r"with_stats\(jax.value_and_grad\(loss_fn\)\)"):
        jax.grad(lambda w: fp8.with_stats(loss)(w, X)[0])(W)
