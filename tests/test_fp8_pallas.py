"""The Pallas kernel that quantizes and transposes, evaluated in JAX, against XLA."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from grids import EXPENSIVE, fast_cases
from jaxmp import fp8
from jaxmp._core._jaxprs import equations
from jaxmp.fp8 import _layer
from jaxmp.fp8._cast_transpose import cast_transpose
from jaxmp.fp8._operands import amax
from jaxmp.fp8._quantize import quantize

LINEAR = (((1,), (0,)), ((), ()))


@pytest.fixture
def interpreted(monkeypatch):
    """Evaluates the kernel in JAX on a CPU."""
    monkeypatch.setattr(_layer, "INTERPRET", True)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def assert_equal(found, expected):
    def as_bytes(x):
        # The sign of NaN has no meaning.
        return jnp.where(jnp.isnan(x), 0x7F, x.view(jnp.uint8)) if x.dtype.itemsize == 1 else x

    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(as_bytes(a), as_bytes(b)), found, expected
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("target", [jnp.float8_e4m3fn, jnp.float8_e5m2])
@pytest.mark.parametrize("value", [0.5, 3e4, np.inf, np.nan])
@fast_cases(
    "0.5-float8_e4m3fn-bfloat16",
    "0.5-float8_e5m2-float32",
    "30000.0-float8_e4m3fn-float16",
    "30000.0-float8_e5m2-bfloat16",
    "inf-float8_e4m3fn-float32",
    "inf-float8_e5m2-float16",
    "nan-float8_e4m3fn-bfloat16",
    "nan-float8_e5m2-float32",
)
def test_the_kernel_equals_xla(dtype, target, value):
    x = normal(0, 128, 256, dtype=dtype).at[70, 130].set(value)
    scale = jnp.float32(100)
    # 4 of 8 tiles: two tiles per block.
    run = functools.partial(cast_transpose, prologue=lambda x: x, count=4, sums=True)
    found = run((x,), scale, target, interpret=True)
    expected = quantize(x, scale, target)
    assert_equal(found.values, expected)
    assert_equal(found.transposed, expected.T)
    assert found.partials.shape == (4,)
    bits = jnp.max(found.partials.view(jnp.int32))
    assert bits == amax(x).view(jnp.int32)
    np.testing.assert_allclose(found.sums, jnp.sum(x.astype(jnp.float32), 0), rtol=1e-5, atol=1e-4)


def test_the_kernel_computes_a_prologue_in_fp32():
    x, y = normal(0, 64, 64, dtype=jnp.bfloat16), normal(1, 64, 64, dtype=jnp.bfloat16)
    prologue = lambda x, y: jax.nn.gelu(x) * y
    run = functools.partial(cast_transpose, prologue=prologue, count=4, sums=False, interpret=True)
    found = run((x, y), jnp.float32(8), jnp.float8_e4m3fn)
    wide = jax.jit(prologue)(x.astype(jnp.float32), y.astype(jnp.float32))
    np.testing.assert_allclose(found.partials.max(), jnp.abs(wide).max(), rtol=1e-6)
    error = found.values.astype(jnp.float32) / 8 - wide
    assert 10 * jnp.log10(jnp.sum(wide**2) / jnp.sum(error**2)) > 28


# ---------------------------------------------------------------------------
# Training steps
# ---------------------------------------------------------------------------


def assert_close(found, expected):
    # XLA for CPUs sums the products of transposed matrices in another order.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
    jax.tree.map(close, found, expected)


def plain(product, variables, x):
    params, states = variables["params"], variables["_overwrite_with_gradient"]
    hidden = jax.nn.gelu(product(x, params["up"], LINEAR, state=states["up"]))
    return jnp.mean(product(hidden, params["down"], LINEAR, state=states["down"]) ** 2)


def rematerialized(product, variables, x):
    policy = jax.checkpoint_policies.save_only_these_names(fp8._checkpoint.CHECKPOINT_NAME)
    return jax.checkpoint(functools.partial(plain, product), policy=policy)(variables, x)


def scanned(product, variables, x):
    body = lambda carry, x: (carry + plain(product, variables, x), None)
    return jax.lax.scan(body, 0.0, x.reshape(2, -1, x.shape[-1]))[0]


def mapped(product, variables, x):
    loss = functools.partial(plain, product, variables)
    return jnp.sum(jax.vmap(loss)(x.reshape(2, -1, x.shape[-1])))


def three_steps(scaling, loss, **options):
    product = fp8.dot_general(scaling)
    states = {"up": fp8.init_state(scaling), "down": fp8.init_state(scaling)}
    params = {"up": normal(1, 64, 192), "down": normal(2, 192, 64)}
    step = jax.jit(jaxmp.grad(functools.partial(loss, product), **options))
    results = []
    for size in (1, 4, 2):
        x = normal(3, 256, 64, dtype=jnp.bfloat16) * size
        grads = step({"params": params, "_overwrite_with_gradient": states}, x)
        states = grads["_overwrite_with_gradient"]
        results.append(grads)
    return results


@pytest.mark.parametrize("loss", [plain, rematerialized, scanned, mapped])
@fast_cases("plain")
def test_steps_equal_those_of_xla(interpreted, loss):
    scaling = fp8.DelayedScaling(amax_history_len=2)
    found = three_steps(fp8.DelayedScaling(amax_history_len=2, kernels="pallas"), loss)
    expected = three_steps(scaling, loss)
    assert_close(found, expected)


def test_the_kernel_is_in_the_program(interpreted):
    scaling = fp8.DelayedScaling(kernels="pallas")
    variables = {
        "params": {"up": normal(1, 64, 192), "down": normal(2, 192, 64)},
        "_overwrite_with_gradient": {n: fp8.init_state(scaling) for n in ("up", "down")},
    }
    step = jax.jit(jaxmp.grad(functools.partial(plain, fp8.dot_general(scaling))))
    text = str(jax.make_jaxpr(step)(variables, normal(0, 128, 64)))
    # Input, kernel and output gradient of two layers.
    assert text.count("name=jaxmp_cast_transpose") == 6


# ---------------------------------------------------------------------------
# Where the kernel does not apply
# ---------------------------------------------------------------------------


def reasons(scaling, x, target="gpu"):
    model = jaxmp.load_recipe(jaxmp.PolicyMap("p=f32,c=bf16,matmul=fp8", fp8=scaling)).wrap(
        nn.Dense(192, use_bias=False)
    )
    variables = model.init(jax.random.key(0), x)
    loss = lambda variables, x: jnp.sum(model.apply(variables, x).astype(jnp.float32))
    # Gradients are traced under jit, where jaxmp updates the states.
    step = lambda variables, x: jax.jit(jaxmp.grad(loss))(variables, x)
    return [row.kernels_reason for row in jaxmp.explain(step, target=target)(variables, x).fp8.rows]


def test_reasons_are_listed():
    scaling = fp8.DelayedScaling(kernels="pallas", emulate=True)
    x = jnp.ones((128, 64))
    assert reasons(scaling, x) == [""]
    assert reasons(scaling, x, "cpu") == ["compiled for a CPU, not for CUDA"]
    assert reasons(scaling, x[:100]) == ["sizes [100, 64] are not multiples of 64"]
    high = fp8.DelayedScaling(kernels="pallas", emulate=True, wgrad="high")
    assert reasons(high, x) == ["an operand has two formats, or a dot does not use FP8"]
    assert reasons(fp8.DelayedScaling(emulate=True), x[:100]) == [""]


@EXPENSIVE
def test_without_value_and_grad_xla_quantizes(interpreted):
    scaling = fp8.DelayedScaling(kernels="pallas")
    product, state = fp8.dot_general(scaling), fp8.init_state(scaling)
    x, w = normal(0, 128, 64), normal(1, 64, 64)
    found = jax.grad(lambda w: jnp.sum(product(x, w, LINEAR, state=state)))(w)
    other = fp8.dot_general(fp8.DelayedScaling())
    assert_equal(found, jax.grad(lambda w: jnp.sum(other(x, w, LINEAR, state=state)))(w))


@EXPENSIVE
@pytest.mark.parametrize("devices", [2])
def test_on_several_devices_xla_quantizes(interpreted, devices):
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ("data",), types, devices=jax.devices()[:devices])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    scaling = fp8.DelayedScaling(kernels="pallas")
    variables = {
        "params": {"up": normal(1, 64, 192), "down": normal(2, 192, 64)},
        "_overwrite_with_gradient": {n: fp8.init_state(scaling) for n in ("up", "down")},
    }
    x = jax.device_put(normal(0, 128, 64), sharding)
    step = jax.jit(jaxmp.grad(functools.partial(plain, fp8.dot_general(scaling))))
    assert "pallas_call" not in str(jax.make_jaxpr(step)(variables, x))
    step(variables, x)


def test_the_setting_is_checked():
    with pytest.raises(jaxmp.errors.RecipeError, match="kernels must be 'xla' or 'pallas'"):
        fp8.DelayedScaling(kernels="triton")
    with pytest.raises(jaxmp.errors.RecipeError, match="calibrate must be True or False"):
        fp8.DelayedScaling(calibrate=1)


# ---------------------------------------------------------------------------
# fp8.mlp
# ---------------------------------------------------------------------------


class Block(nn.Module):
    """An MLP with `fp8.mlp`, or as a user writes it without."""

    activation: str
    fused: bool = True
    use_bias: bool = True
    residual_name: str | None = None

    @nn.compact
    def __call__(self, x):
        layer = lambda n, name: nn.Dense(
            n, use_bias=self.use_bias, bias_init=nn.initializers.normal(1.0), name=name
        )
        up, down = layer(128, "up"), layer(64, "down")
        gate = layer(128, "gate") if self.activation == "swiglu" else None
        if self.fused:
            name = None if gate else self.activation
            names = {"activation": name, "residual_name": self.residual_name}
            return fp8.mlp(x, up, down, gate=gate, **names)
        if gate:
            return down(jaxmp.functional.swiglu(gate(x), up(x)))
        return down(getattr(jaxmp.functional, self.activation)(up(x)))


PALLAS = fp8.DelayedScaling(amax_history_len=2, kernels="pallas")


def block_step(block, scaling, steps=2, wrap=lambda apply: apply):
    policies = jaxmp.PolicyMap("p=f32,c=bf16,matmul=fp8", fp8=scaling)
    model = jaxmp.load_recipe(policies).wrap(block)
    x = normal(5, 4, 64, 64)
    variables = model.init(jax.random.key(0), x)
    target = normal(6, 4, 64, 64)

    def loss(variables, x):
        return jnp.sum(wrap(model.apply)(variables, x).astype(jnp.float32) * target)

    step = jax.jit(jaxmp.value_and_grad(loss, argnums=(0, 1)))
    for _ in range(steps):
        value, (grads, dx) = step(variables, x)
        state = grads.get("_overwrite_with_gradient", {})
        variables = {**variables, "_overwrite_with_gradient": state}
    return value, grads["params"], dx, state, str(jax.make_jaxpr(step)(variables, x))


def sqnr(found, expected):
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    error = max(np.sum((found - expected) ** 2), 1e-30)
    return 10 * np.log10(np.sum(expected**2) / error)


@EXPENSIVE
@pytest.mark.parametrize("activation", ["gelu", "silu", "swiglu"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_fused_mlp_equals_its_layers_up_to_the_rounding(interpreted, activation, use_bias):
    block = Block(activation, use_bias=use_bias)
    _, found, of_x, state, jaxpr = block_step(block, PALLAS)
    plain_block = Block(activation, fused=False, use_bias=use_bias)
    _, expected, dx, expected_state, _ = block_step(plain_block, fp8.DelayedScaling())
    # Input, kernel and output gradient of each layer. The jaxpr shows equal functions once.
    assert jaxpr.count("name=jaxmp_cast_transpose") >= 6
    jax.tree.map(lambda a, b: assert_at_least(sqnr(a, b), 28), found, expected)
    assert_at_least(sqnr(of_x, dx), 28)
    for name in expected_state:
        for leaf in ("input", "kernel", "output_grad"):
            newest = [s[name][f"fp8_{leaf}_amax_history"][0] for s in (state, expected_state)]
            np.testing.assert_allclose(*newest, rtol=0.02)


def assert_at_least(value, limit):
    assert value >= limit


@EXPENSIVE
def test_a_fused_mlp_under_remat(interpreted):
    found = block_step(Block("gelu"), PALLAS, wrap=jax.checkpoint)
    expected = block_step(Block("gelu"), PALLAS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found[:4], expected[:4]
    )


@pytest.mark.parametrize("scaling", [PALLAS, fp8.CurrentScaling()], ids=["fused", "layers"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_remat_saves_named_residuals(interpreted, activation, scaling):
    """If the results of `up` and `gate` are saved, their matmuls are not computed again."""
    policies = jaxmp.PolicyMap("p=f32,c=bf16,matmul=fp8", fp8=scaling)
    block = Block(activation, residual_name="hidden")
    model = jaxmp.load_recipe(policies).wrap(block)
    x = normal(5, 4, 64, 64)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def count_matmuls(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        apply = jax.checkpoint(model.apply, policy=policy)
        loss = lambda variables, x: jnp.sum(apply(variables, x).astype(jnp.float32))
        step = jax.jit(jaxmp.value_and_grad(loss, argnums=(0, 1)))
        found = equations(jax.make_jaxpr(step)(variables, x))
        return sum(equation.primitive.name == "dot_general" for equation in found)

    assert count_matmuls() - count_matmuls("hidden") == {"gelu": 1, "swiglu": 2}[activation]


@EXPENSIVE
@pytest.mark.parametrize("scaling", [fp8.CurrentScaling(), fp8.DelayedScaling(amax_history_len=2)])
def test_other_scalings_call_the_layers(scaling):
    found = block_step(Block("gelu"), scaling)
    expected = block_step(Block("gelu", fused=False), scaling)
    assert_equal(found[:4], expected[:4])


def test_other_recipes_call_the_layers():
    x = normal(0, 8, 64)
    model = jaxmp.load_recipe("p=f32,c=bf16,o=f32").wrap(Block("silu"))
    plain_model = jaxmp.load_recipe("p=f32,c=bf16,o=f32").wrap(Block("silu", fused=False))
    variables = model.init(jax.random.key(0), x)
    assert_equal(variables, plain_model.init(jax.random.key(0), x))
    assert_equal(model.apply(variables, x), plain_model.apply(variables, x))


def test_a_fused_mlp_in_nnx(interpreted):
    class NnxBlock(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 64, rngs=rngs)

        def __call__(self, x):
            return fp8.mlp(x, self.up, self.down)

    policies = jaxmp.PolicyMap("p=f32,c=bf16,o=f32,matmul=fp8", fp8=PALLAS)
    model = jaxmp.load_recipe(policies).wrap(NnxBlock(nnx.Rngs(0)))
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(1e-3))

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = optimizer.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2))(model, x)
        optimizer.update(model, grads)
        return loss

    x = normal(0, 128, 64)
    losses = [step(model, optimizer, x) for _ in range(3)]
    assert losses[2] < losses[0]
    assert model.up.fp8_output_grad_amax_history[0] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "gelo"}, "gate=None. Did you mean 'gelu'? Allowed"),
        ({"activation": "relu"}, "gate=None. Allowed"),
        ({"activation": "swiglu"}, "'swiglu' with a gate"),
        ({"gate": abs, "activation": "gelu"}, "gate=a layer. Allowed"),
    ],
)
def test_activations_are_checked(options, message):
    x = normal(0, 8, 8)
    with pytest.raises(jaxmp.JaxmpError, match=re.escape(message)) as info:
        fp8.mlp(x, abs, abs, **options)
    # The call of the layers for any other activation.
    call = str(info.value).partition(" as in ")[2].removesuffix(".")
    assert eval(call, {"jax": jax, "x": x, "down": abs, "up": abs, **options}).shape == x.shape


@pytest.mark.parametrize("role", ["up", "down", "gate"])
def test_arrays_are_no_layers(role):
    layers = {"up": abs, "down": abs, "gate": abs, role: normal(0, 8, 8)}
    with pytest.raises(jaxmp.JaxmpError, match=f"{role} is a .*Array.*, which is not a layer"):
        fp8.mlp(normal(0, 8, 8), **layers)
