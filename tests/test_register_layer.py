"""Layer classes of users in the table of layer classes, in Linen and in NNX."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from jaxmp._flax._linen_fields import LINEN_LAYERS
from jaxmp._flax._nnx_layers import NNX_LAYERS
from jaxmp._policies._rules import Rule
from jaxmp.errors import CompositionError
from programs import dtypes, products, trace

KEY = jax.random.key(0)
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), jnp.float32)
DIMS = (((1,), (0,)), ((), ()))
AMAX = float(np.abs(np.asarray(X).astype(jnp.bfloat16)).max())
BF16 = ("bfloat16",) * 2

# ---------------------------------------------------------------------------
# A norm and a dense layer, in both frameworks
# ---------------------------------------------------------------------------


def center(x, scale):
    """Subtracts the mean in the dtype of the input."""
    return scale * (x - jnp.mean(x, axis=-1, keepdims=True, dtype=x.dtype))


def linen_norm():
    class Norm(nn.Module):
        dtype: Any = None

        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "dtypes", (x.dtype, self.dtype))
            return center(x, self.param("scale", nn.initializers.ones, (1, x.shape[-1])))

    return Norm


def nnx_norm():
    class Norm(nnx.Module):
        def __init__(self, dtype=None):
            self.scale, self.dtype = nnx.Param(jnp.ones((1, 16))), dtype

        def __call__(self, x):
            return center(x, self.scale[...])

    return Norm


def linen_dense(setup=False):
    class Dense(nn.Module):
        features: int = 32
        dot: Callable[..., Any] = jax.lax.dot_general

        @nn.compact
        def __call__(self, x):
            shape = x.shape[-1], self.features
            weight = self.param("weight", nn.initializers.lecun_normal(), shape)
            return self.dot(x, weight, DIMS) + self.param("bias", nn.initializers.ones, (1, 32))

    class SetupDense(nn.Module):
        features: int = 32
        dot: Callable[..., Any] = jax.lax.dot_general

        def setup(self):
            self.weight = self.param("weight", nn.initializers.lecun_normal(), (16, 32))
            self.bias = self.param("bias", nn.initializers.ones, (1, 32))

        def __call__(self, x):
            return self.dot(x, self.weight, DIMS) + self.bias

    return SetupDense if setup else Dense


def nnx_dense():
    class Dense(nnx.Module):
        def __init__(self, dot=jax.lax.dot_general):
            self.weight = nnx.Param(jax.random.normal(KEY, (16, 32)))
            self.bias, self.dot = nnx.Param(jnp.ones((1, 32))), dot

        def __call__(self, x):
            return self.dot(x, self.weight[...], DIMS) + self.bias[...]

    return Dense


def linen_program(model, policies):
    model = jaxmp.load_recipe(policies).wrap(model)
    variables = model.init(KEY, X)
    return trace(lambda v, x: model.apply(v, x), variables, X)


def nnx_program(model, policies):
    graphdef, state = nnx.split(jaxmp.load_recipe(policies).wrap(model))
    return trace(lambda state, x: nnx.merge(graphdef, state)(x), state, X)


FRAMEWORKS = {
    "linen": (linen_norm, linen_dense, linen_program),
    "nnx": (nnx_norm, nnx_dense, nnx_program),
}
both = pytest.mark.parametrize(("norm", "dense", "program"), FRAMEWORKS.values(), ids=FRAMEWORKS)


def registered(dense):
    """Registers the class of a dense layer, and returns it."""
    jaxmp.register_layer(dense, kernel="weight", dot_general="dot")
    return dense


def fp8_casts(traced):
    return [e for e in traced if "float8" in str(getattr(e.outvars[0].aval, "dtype", ""))]


# ---------------------------------------------------------------------------
# Norms
# ---------------------------------------------------------------------------


@both
def test_the_statistics_of_a_registered_norm_are_fp32(norm, dense, program):
    plain, registered = norm(), norm()
    jaxmp.register_layer(registered, norm=True, dtype="dtype")
    means = {}
    for cls in (plain, registered):
        traced = program(cls(), "p=f32,c=bf16,o=bf16")
        (mean,) = [e for e in traced if e.primitive.name == "reduce_sum"]
        means[cls] = str(mean.invars[0].aval.dtype)
        assert str(traced[-1].outvars[0].aval.dtype) == "bfloat16"
    assert means == {plain: "bfloat16", registered: "float32"}


def test_the_dtype_of_a_registered_norm_is_fp32():
    norm = linen_norm()
    jaxmp.register_layer(norm, norm=True, dtype="dtype")
    model = jaxmp.load_recipe("p=f32,c=bf16,o=bf16").wrap(norm())
    _, state = model.apply(norm().init(KEY, X), X, mutable="intermediates")
    assert state["intermediates"]["dtypes"][0] == (jnp.float32, jnp.float32)


def test_nnx_sets_the_registered_dtype():
    norm = nnx_norm()
    jaxmp.register_layer(norm, norm=True, dtype="dtype")
    policy = jaxmp.Policy("f32", "bf16", "bf16")
    assert jaxmp.load_recipe(policy).wrap(norm(jnp.float16)).dtype == jnp.float32


# ---------------------------------------------------------------------------
# Dense layers
# ---------------------------------------------------------------------------


@both
def test_the_kernel_of_a_registered_dense_layer_has_the_compute_dtype(norm, dense, program):
    layer = registered(dense())
    (dot,) = products(program(layer(), "p=f32,c=bf16,o=bf16"))
    assert dtypes(dot) == (*BF16, "bfloat16")


@both
@pytest.mark.filterwarnings("ignore:The policies of:jaxmp.errors.RecipeWarning")
def test_a_registered_dense_layer_runs_in_fp8(norm, dense, program):
    layer, recipe = registered(dense()), jaxmp.load_recipe("fp8")
    assert not fp8_casts(program(dense()(), recipe))
    assert fp8_casts(program(layer(), recipe))
    # A dot that the model sets itself is kept.
    own = lambda x, weight, dims: jax.lax.dot_general(x, weight, dims)
    assert not fp8_casts(program(layer(dot=own), recipe))


@both
def test_a_wide_result_of_a_registered_dense_layer(norm, dense, program):
    layer = registered(dense())
    policies = jaxmp.PolicyMap("p=f32,c=bf16,o=f32", [Rule("", "c=bf16,o=f32")])
    traced = program(layer(), policies)
    (dot,) = products(traced)
    assert dtypes(dot) == (*BF16, "float32")
    # The bias is added in FP32, without a cast to bfloat16.
    casts = [e for e in traced if e.primitive.name == "convert_element_type"]
    assert not [e for e in casts if e.invars[0].aval.shape == (1, 32)]


@pytest.mark.parametrize("setup", [False, True], ids=["compact", "setup"])
def test_delayed_scaling_of_a_registered_linen_layer(setup):
    layer = registered(linen_dense(setup))
    model = jaxmp.load_recipe("fp8").replace(fp8="delayed").wrap(layer())
    variables = model.init(KEY, X)
    assert variables["_overwrite_with_gradient"]["fp8_age"].shape == ()
    loss, grads = jaxmp.value_and_grad(lambda v, x: model.apply(v, x).sum())(variables, X)
    state = grads["_overwrite_with_gradient"]
    assert np.isfinite(loss) and state["fp8_input_amax_history"][0] == AMAX


def test_delayed_scaling_of_a_registered_nnx_layer():
    layer = registered(nnx_dense())
    model = jaxmp.load_recipe("fp8").replace(fp8="delayed").wrap(layer())
    loss, grads = jaxmp.nnx.value_and_grad(lambda model, x: model(x).sum())(model, X)
    state = nnx.state(grads, jaxmp.nnx.OverwriteWithGradient)
    assert np.isfinite(loss)
    assert state["fp8_input_amax_history"][...][0] == AMAX


def test_stacked_nnx_layers_have_stacked_fp8_state():
    layer = registered(nnx_dense())
    model = nnx.vmap(lambda _: layer(), axis_size=3)(jnp.arange(3))
    model = jaxmp.load_recipe("fp8").replace(fp8="delayed").wrap(model)
    assert model.fp8_age.shape == (3,)


@both
def test_subclasses_inherit_the_row(norm, dense, program):
    layer = registered(dense())
    assert fp8_casts(program(type("Child", (layer,), {})(), "fp8"))


@both
def test_a_registered_subclass_of_a_flax_layer_keeps_the_other_columns(norm, dense, program):
    if norm is linen_norm:
        base, attribute = nn.Dense, {"matmul": None, "__annotations__": {"matmul": Any}}
        child = type("Child", (base,), {"__module__": __name__, **attribute})
        jaxmp.register_layer(child, dot_general="matmul")
        traits = LINEN_LAYERS.traits(child)
    else:
        child = type("Child", (nnx.Linear,), {})
        jaxmp.register_layer(child, dot_general="matmul")
        traits = NNX_LAYERS.traits(child)
    assert traits.kernel == "kernel" and traits.dtype == "dtype"
    assert traits.dot.name == "matmul" and not traits.casts_params


def test_a_registered_attention_function_is_replaced():
    class Attention(nnx.Module):
        def __init__(self):
            self.attend = nnx.dot_product_attention

    jaxmp.register_layer(Attention, attention_fn="attend")
    model = jaxmp.load_recipe("bf16").wrap(Attention())
    assert model.attend == jaxmp.attention_fn()


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


@both
def test_wrong_arguments_are_refused(norm, dense, program):
    cls = dense()
    for arguments, message in (
        ({}, "pass at least one property.*norm=True"),
        ({"norm": True, "dot_general": "dot", "kernel": "weight"}, "at most one of norm"),
        ({"einsum": "dot", "dot_general": "dot", "kernel": "weight"}, "at most one of norm"),
        ({"dot_general": "dot"}, "Pass it too, for example kernel='kernel'"),
        ({"dot_general": 3}, "dot_general must be the name of an attribute"),
        ({"kernel": "a b"}, "kernel must be the name of an attribute"),
    ):
        with pytest.raises(CompositionError, match=message):
            jaxmp.register_layer(cls, **arguments)
    with pytest.raises(CompositionError, match=r"received 'Dense'. Pass a subclass of"):
        jaxmp.register_layer("Dense", norm=True)
    with pytest.raises(CompositionError, match=r"not an object: .*\(MyLayer, ...\)"):
        jaxmp.register_layer(cls(), norm=True)


def test_attributes_that_do_not_exist_are_refused():
    with pytest.raises(CompositionError, match=r"no field 'dott'.*'features', 'dot'.*Add the"):
        jaxmp.register_layer(linen_dense(), kernel="weight", dot_general="dott")
    layer = nnx_dense()
    jaxmp.register_layer(layer, kernel="weight", dot_general="dott")
    with pytest.raises(CompositionError, match=r"'dott', but the Dense at '' has none.*self\.dott"):
        jaxmp.load_recipe("bf16").wrap(layer())


@both
def test_a_class_has_one_row(norm, dense, program):
    cls = norm()
    jaxmp.register_layer(cls, norm=True)
    jaxmp.register_layer(cls, norm=True)
    with pytest.raises(CompositionError, match="has a row with other values already"):
        jaxmp.register_layer(cls, dtype="dtype")
    flax = nn.Dense if norm is linen_norm else nnx.Linear
    with pytest.raises(CompositionError, match="register a subclass of it"):
        jaxmp.register_layer(flax, norm=True)


@both
def test_a_class_that_was_used_under_a_policy_cannot_change(norm, dense, program):
    """Compiled functions depend on the row, so none of them can be outdated."""
    cls = dense()
    child = type("Child", (cls,), {})
    program(child(), "bf16")
    with pytest.raises(CompositionError, match="Child has been used under a policy already"):
        jaxmp.register_layer(cls, kernel="weight", dot_general="dot")


@both
def test_the_class_of_a_wrapped_model_is_refused(norm, dense, program):
    wrapped = type(jaxmp.load_recipe("bf16").wrap(dense()()))
    with pytest.raises(CompositionError, match="class of a wrapped model"):
        jaxmp.register_layer(wrapped, norm=True)
