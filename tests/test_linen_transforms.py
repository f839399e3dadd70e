"""Policies under Flax's lifted transformations, with the cache of nn.jit, and in threads."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from arrays import floats
from grids import EXPENSIVE, fast_cases
from jaxmp import PolicyMap, Rule
from jaxmp._flax._linen_interceptor import module_paths
from jaxmp._flax._linen_model import apply_policy
from jaxmp.errors import CompositionError, RecipeWarning
from models import MIXED
from models_linen import MLP, Block, Outer
from programs import dtypes, module_path, named, products, trace

KEY = jax.random.key(0)


def operands(model, *args):
    """Returns the operand dtypes of every matmul of `model`, forward and backward."""
    variables = jax.eval_shape(model.init, KEY, *args)
    variables = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), variables)

    def loss(variables):
        return sum(leaf.sum() for leaf in jax.tree.leaves(model.apply(variables, *args)))

    return [dtypes(e)[:2] for e in products(trace(jax.grad(loss), variables))]


# ---------------------------------------------------------------------------
# nn.jit: a cached trace must not outlive the policy it was traced under
# ---------------------------------------------------------------------------

JittedDense = nn.jit(nn.Dense)


class UsesJitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return JittedDense(4)(x)


def test_one_module_level_jit_serves_plain_bf16_f16_plain():
    model, x = UsesJitted(), floats(2, 3)
    variables = model.init(KEY, x)
    models = [model, apply_policy(model, "bfloat16"), apply_policy(model, "float16"), model]
    expected = ["float32", "bfloat16", "float16", "float32"]
    assert [m.apply(variables, x).dtype.name for m in models] == expected
    inner = [dtypes(products(trace(m.apply, variables, x))[0])[0] for m in models]
    assert inner == expected
    # A jitted function around `apply` is traced again too.
    step = jax.jit(lambda model, variables: model.apply(variables, x), static_argnums=0)
    assert [step(m, variables).dtype.name for m in models] == expected


class Siblings(nn.Module):
    """Model with equal jitted modules: in a field, in setup, and in a list."""

    field: nn.Module
    fields: tuple[nn.Module, ...]

    def setup(self):
        self.made = JittedDense(3)
        self.nested = Nested()

    def __call__(self, x):
        return [m(x) for m in (self.field, *self.fields, self.made, self.nested)]


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x):
        a, b = JittedDense(3, name="a")(x), JittedDense(3, name="b")(x)
        return a.astype(x.dtype) + b.astype(x.dtype)


@pytest.mark.parametrize("path", ["field", "fields_0", "fields_1", "made", "nested/a", "nested/b"])
def test_a_rule_by_path_reaches_one_of_several_equal_jitted_modules(path):
    model = Siblings(JittedDense(3), (JittedDense(3), JittedDense(3)))
    x = floats(2, 3)
    variables = model.init(KEY, x)
    wrapped = apply_policy(model, PolicyMap("bfloat16", [Rule(path, "c=f32")]))
    found = {module_path(e): dtypes(e)[0] for e in products(trace(wrapped.apply, variables, x))}
    paths = ["field", "fields_0", "fields_1", "made", "nested/a", "nested/b"]
    assert found == {
        f"Siblings/{other}": "float32" if other == path else "bfloat16" for other in paths
    }


def scan_class(body):
    return nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)


class ScannedSiblings(nn.Module):
    @nn.compact
    def __call__(self, x):
        return scan_class(CarryNested)(name="body")(x, None)[0]


class CarryNested(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Nested(name="nested")(x), None


def test_a_rule_by_path_reaches_a_jitted_module_inside_a_scan():
    policies = PolicyMap("bfloat16", [Rule("body/nested/b", "c=f32")])
    assert sorted(set(operands(apply_policy(ScannedSiblings(), policies), floats(2, 3)))) == [
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
    ]


class JittedMethod(nn.Module):
    @nn.jit
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


# ---------------------------------------------------------------------------
# Loops: a carry keeps its dtypes
# ---------------------------------------------------------------------------


class FloatCarry(nn.Module):
    """Model whose embedding computes in FP32 by a rule, and whose blocks do not."""

    body: Any = Block

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(8, 8, name="embed")(tokens)
        return scan_class(self.body)(name="blocks")(x, None)[0]


@pytest.mark.parametrize("body", [Block, nn.remat(Block)], ids=["scan", "scan_of_remat"])
def test_scan_of_a_class_whose_carry_comes_in_fp32(body):
    policies = PolicyMap(MIXED, [Rule("embed", "c=f32,o=f32")])
    tokens = jnp.zeros((2, 4), jnp.int32)
    assert set(operands(apply_policy(FloatCarry(body), policies), tokens)) == {("bfloat16",) * 2}


class Accumulates(nn.Module):
    """Module that carries an FP32 sum next to its activations."""

    @nn.compact
    def __call__(self, carry, _):
        x, total = carry
        x = nn.Dense(x.shape[-1])(x)
        return (x, total + x.astype(jnp.float32).sum().astype(total.dtype)), x


def test_a_tree_of_carries_keeps_each_leafs_dtype():
    class Totals(nn.Module):
        @nn.compact
        def __call__(self, x):
            (x, total), xs = scan_class(Accumulates)()((x, jnp.zeros((), jnp.float32)), None)
            return x, total, xs

    model = apply_policy(Totals(), "p=f32,c=bf16,o=bf16")
    variables = model.init(KEY, floats(2, 4))
    (scan,) = named(trace(model.apply, variables, floats(2, 4)), "scan")
    assert [(v.aval.shape, v.aval.dtype.name) for v in scan.outvars] == [
        ((2, 4), "bfloat16"),
        ((), "float32"),
        ((3, 2, 4), "bfloat16"),
    ]


class ScannedFunction(nn.Module):
    @nn.compact
    def __call__(self, x):
        def body(module, carry, _):
            return nn.Dense(4)(carry), carry.sum()

        scan = nn.scan(body, variable_broadcast="params", split_rngs={"params": False}, length=2)
        carry, sums = scan(self, x.astype(jnp.float32), None)
        return carry.sum() + sums.sum().astype(carry.dtype)


class ScannedMethod(nn.Module):
    def setup(self):
        self.dense = nn.Dense(4)

    @functools.partial(nn.scan, variable_broadcast="params", split_rngs={"params": False}, length=2)
    def step(self, carry, _):
        return self.dense(carry), None

    def __call__(self, x):
        return self.step(x.astype(jnp.float32), None)[0]


class WhileLoop(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(4)
        dense(x)

        def body(module, carry):
            count, x = carry
            return count + 1, dense.clone(parent=module, name="Dense_0")(x)

        return nn.while_loop(
            lambda module, carry: carry[0] < 2, body, self, (0, x.astype(jnp.float32))
        )[1]


class ScannedChild(nn.Module):
    """Model that scans a function defined outside of the module that it receives."""

    @nn.compact
    def __call__(self, x):
        def body(dense, carry, _):
            y = dense(carry)
            assert y.dtype == jnp.bfloat16 or self.is_initializing()
            return y, None

        scan = nn.scan(body, variable_broadcast="params", split_rngs={"params": False}, length=2)
        return scan(nn.Dense(4, name="child"), x.astype(jnp.float32), None)[0]


class Rematted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(scan_class(Block))(name="blocks")(x, None)[0]


LOOPS = [ScannedFunction(), ScannedMethod(), ScannedChild(), Rematted(), JittedMethod()]


@pytest.mark.parametrize("model", LOOPS, ids=lambda model: type(model).__name__)
def test_matmuls_of_a_scan_and_of_a_jitted_method(model):
    assert set(operands(apply_policy(model, MIXED), floats(2, 4, 4))) == {("bfloat16",) * 2}


# ---------------------------------------------------------------------------
# The other transformations
# ---------------------------------------------------------------------------


class Conditional(nn.Module):
    @nn.compact
    def __call__(self, x):
        first, second = nn.Dense(4, name="first"), nn.Dense(4, name="second")
        if self.is_initializing():
            return first(x) + second(x)
        x = nn.cond(x.sum() > 0, lambda m, x: first(x), lambda m, x: second(x), self, x)
        return nn.switch(1, [lambda m, x: first(x), lambda m, x: x], self, x)


class Derivatives(nn.Module):
    """Model that uses nn.vjp, nn.jvp and nn.grad."""

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(4)
        y, pullback = nn.vjp(lambda m, x: m(x), dense, x)
        _, dx = pullback(jnp.ones_like(y))
        y, tangent = nn.jvp(
            lambda m, x: m(x), dense, (x,), (jnp.ones_like(x),), variable_tangents={}
        )
        return dx.sum() + tangent.sum()


class CustomGradient(nn.Module):
    @nn.compact
    def __call__(self, x):
        def backward(pullback, cotangent):
            parameters, *inputs = pullback(cotangent)
            return jax.tree.map(jnp.sign, parameters), *inputs

        sign = nn.custom_vjp(
            lambda m, x: m(x),
            forward_fn=lambda m, x: nn.vjp(lambda m, x: m(x), m, x),
            backward_fn=backward,
        )
        return sign(nn.Dense(4), x)


class Mapped(nn.Module):
    @nn.compact
    def __call__(self, x):
        tied = nn.map_variables(
            nn.Dense, "params", trans_in_fn=lambda v: jax.tree.map(jnp.tanh, v), init=True
        )
        return tied(4)(x)


class Metadata(nn.Module):
    @nn.compact
    def __call__(self, x):
        boxed = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        dense = functools.partial(nn.Dense, kernel_init=boxed)
        vmapped = nn.vmap(
            dense,
            in_axes=None,
            axis_size=2,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            metadata_params={nn.PARTITION_NAME: "members"},
        )
        return vmapped(4)(x)


OTHERS = [Conditional(), Derivatives(), CustomGradient(), Mapped(), Metadata(), WhileLoop()]
OTHERS += [nn.WeightNorm(nn.Dense(4))]


@pytest.mark.parametrize("model", OTHERS, ids=lambda model: type(model).__name__)
@fast_cases("Conditional", "CustomGradient", "Mapped", "WhileLoop")
@pytest.mark.filterwarnings("ignore:A gradient of this call:jaxmp.errors.RecipeWarning")
def test_transformation_computes_in_bf16(model):
    x = floats(2, 4)
    variables = nn.meta.unbox(model.init(KEY, x))
    wrapped = apply_policy(model, MIXED)
    traced = trace(wrapped.apply, variables, x)
    assert {dtypes(e)[:2] for e in products(traced)} == {("bfloat16", "bfloat16")}
    got, reference = wrapped.apply(variables, x), model.apply(variables, x)
    assert got.dtype == jnp.float32
    assert jnp.allclose(got, reference, rtol=0.05, atol=0.05)


class Scaled(nn.Module):
    """Model with a `custom_vjp` of JAX, whose forward function reads a parameter of a module."""

    @nn.compact
    def __call__(self, x):
        scale = Scale()
        scaled = jax.custom_vjp(lambda x: scale(x))
        scaled.defvjp(lambda x: (scale(x), None), lambda _, g: (g.astype(x.dtype),))
        return scaled(x)


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * self.param("scale", nn.initializers.ones, (2, 4))


def test_a_forward_function_that_runs_after_the_model_is_not_silent():
    x = floats(2, 4)
    warns = pytest.warns(RecipeWarning, match="would run the forward function")
    raises = pytest.raises(CompositionError, match="'Scale_0' is called by the forward")
    late = lambda loss: jax.grad(jax.jit(loss))
    for model, said, transform in ((CustomGradient(), warns, jax.jit), (Scaled(), raises, late)):
        wrapped, variables = apply_policy(model, MIXED), model.init(KEY, x)
        loss = lambda x, wrapped=wrapped, variables=variables: wrapped.apply(variables, x).sum()
        trace(jax.grad(loss), x)
        with said:
            trace(transform(loss), x)


class Mixin:
    def __call__(self, x):
        return self.dense(x)


class Mixed(Mixin, nn.Module):
    def setup(self):
        self.dense = nn.Dense(4)


class Named(Mixed):
    __call__ = Mixin.__call__  # as the warning says


def test_a_forward_pass_that_no_module_defines_is_said():
    x, models = floats(2, 4), [apply_policy(Outer(cls()), MIXED) for cls in (Mixed, Named)]
    with pytest.warns(RecipeWarning, match="__call__ = Mixin.__call__"):
        models[0].apply(models[0].init(KEY, x), x)
    models[1].apply(models[1].init(KEY, x), x)


@EXPENSIVE
def test_vmap_of_the_whole_model():
    model = apply_policy(MLP(), MIXED)
    variables = model.init(KEY, floats(8))
    out = jax.vmap(lambda x: model.apply(variables, x))(floats(3, 8))
    assert (out.shape, out.dtype) == ((3, 4), jnp.float32)


@EXPENSIVE
def test_forward_mode_and_hessian_vector_products_go_through_a_wide_head():
    model = apply_policy(MLP(), PolicyMap(MIXED, [Rule("head", "o=f32")]))
    x = floats(2, 8)
    variables = jax.jit(model.init)(KEY, x)
    loss = lambda v: jnp.square(model.apply(v, x)).sum()
    tangents = jax.tree.map(jnp.ones_like, variables)
    along = lambda fn: jax.jit(lambda v: jax.jvp(fn, (v,), (tangents,))[1])(variables)
    assert np.isfinite(along(loss))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(along(jax.grad(loss))))


# ---------------------------------------------------------------------------
# Threads
# ---------------------------------------------------------------------------


def test_two_policies_in_two_threads_do_not_meet():
    model, x = UsesJitted(), floats(2, 3)
    variables = model.init(KEY, x)
    names = ["bfloat16", "float16"]
    models = {name: apply_policy(model, name) for name in names}
    barrier, found = threading.Barrier(2), {name: set() for name in names}

    def work(name):
        for _ in range(5):
            barrier.wait()
            found[name].add(models[name].apply(variables, x).dtype.name)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, names))
    assert found == {"bfloat16": {"bfloat16"}, "float16": {"float16"}}
    assert model.apply(variables, x).dtype == jnp.float32


def test_paths_of_lifted_modules_are_those_of_the_parameters():
    paths = module_paths(FloatCarry(), (jnp.zeros((2, 4), jnp.int32),), {}, None, {})
    assert paths["blocks"] is Block
    assert "blocks/MultiHeadDotProductAttention_0/query" in paths
    assert paths["blocks/up:kernel"] is None
