"""Kernels that are quantized once per step instead of once per microbatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from gpu_compiler import needs_compiler
from grids import EXPENSIVE, fast_cases
from jaxmp import PolicyMap, _overwritten, fp8
from jaxmp._audit._compile import compile_for
from jaxmp._audit._trace import trace
from jaxmp._core import _compat
from jaxmp._core._hlo import Program
from jaxmp._core._jaxprs import equations, sub_jaxprs
from jaxmp.fp8 import _layer, _repeated
from models_linen import TwoResiduals

WIDTH = 64
LINEAR = (((1,), (0,)), ((), ()))


def policy(scaling):
    return PolicyMap("p=f32,c=bf16,o=bf16,matmul=fp8", fp8=scaling)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def mean_square(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def used_equations(jaxpr):
    """Returns the equations that results depend on; Flax leaves others in scans (JAX 0.10)."""
    body, _ = _compat.jaxpr_body(jaxpr)
    variables = set(map(id, body.outvars))
    used = []
    for equation in reversed(body.eqns):
        if not variables.isdisjoint(map(id, equation.outvars)):
            used.append(equation)
            variables |= set(map(id, equation.invars))
    return used


def count_kernels(jaxpr):
    """Returns the number of quantizations of kernels in a jaxpr, at any depth."""
    used = used_equations(jaxpr)
    inner = (count_kernels(sub) for equation in used for sub in sub_jaxprs(equation))
    return sum(map(_repeated._is_kernel, used)) + sum(inner)


def quantizations(step, *args):
    """Returns the numbers of kernels that are quantized outside and inside of the microbatches."""
    closed = jax.make_jaxpr(step)(*args)
    loops = [e for e in equations(closed) if e.primitive.name == "scan" and e.params["length"] == 4]
    inside = sum(count_kernels(loop.params["jaxpr"]) for loop in loops)
    return count_kernels(closed) - inside, inside


def check_step(monkeypatch, make_step, *args):
    """Checks that a step equals, bit by bit, one that quantizes kernels in each microbatch."""
    actual, (outside, inside) = jax.jit(make_step())(*args), quantizations(make_step(), *args)
    monkeypatch.setattr(_overwritten, "scan_with_same_kernels", jax.lax.scan)
    expected = jax.jit(make_step())(*args)
    assert inside == 0 < outside
    # Copies that no result depends on are also quantized outside, and XLA removes them.
    outside_before, inside_before = quantizations(make_step(), *args)
    assert outside_before == 0 < inside_before <= outside
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize(
    ("scaling", "form"),
    [
        (fp8.CurrentScaling(), "scan and remat"),
        (fp8.DelayedScaling(), "scan"),
        (fp8.DelayedScaling(kernels="pallas"), "remat"),
        (fp8.RowwiseScaling(), "plain"),
    ],
    ids=["current", "delayed", "pallas", "rowwise"],
)
@fast_cases("current", "delayed")
def test_kernels_are_quantized_once_per_step(monkeypatch, scaling, form):
    monkeypatch.setattr(_layer, "INTERPRET", True)
    model = jaxmp.load_recipe(policy(scaling)).wrap(TwoResiduals(form, WIDTH))
    x = normal(0, 256, WIDTH)
    variables = model.init(jax.random.key(1), x[:64])

    def make_step():
        loss = lambda variables, x: mean_square(model.apply(variables, x))
        step = jaxmp.value_and_grad(loss, microbatches=4)

        def steps(variables, x):
            first = step(variables, x)
            # The second step of delayed scaling has active scales.
            state = {key: g for key, g in first[1].items() if key != "params"}
            return first, step({**variables, **state}, x)

        return steps if state_of(variables) else step

    check_step(monkeypatch, make_step, variables, x)


def state_of(variables):
    return [key for key in variables if key != "params"]


def test_kernels_of_nnx_are_quantized_once(monkeypatch):
    model = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0))
    model = jaxmp.load_recipe(policy(fp8.CurrentScaling())).wrap(model)
    graph, state = nnx.split(model)

    def make_step():
        def step(state, x):
            model = nnx.merge(graph, state)
            loss = lambda model, x: mean_square(model(x))
            run = jaxmp.nnx.value_and_grad(loss, microbatches=4)
            value, grads = run(model, x)
            return value, nnx.to_pure_dict(grads)

        return step

    check_step(monkeypatch, make_step, state, normal(0, 256, WIDTH))


def test_kernels_of_autocast_are_quantized_once(monkeypatch):
    fn = jaxmp.autocast(lambda w, x: mean_square(x @ w), policy(fp8.CurrentScaling()))
    make_step = lambda: jaxmp.value_and_grad(fn, microbatches=4)
    args = normal(1, WIDTH, WIDTH), normal(0, 256, WIDTH)
    check_step(monkeypatch, make_step, *args)


def product(x, w):
    return fp8.dot_general("current")(x, w, LINEAR)


def test_kernels_that_depend_on_the_batch_are_quantized_in_each_microbatch():
    def loss(w, x):
        return mean_square(product(x, w * jnp.max(x)))

    step = jaxmp.value_and_grad(loss, microbatches=4)
    assert quantizations(step, normal(1, WIDTH, WIDTH), normal(0, 256, WIDTH)) == (0, 1)


@EXPENSIVE
def test_with_stats_measures_kernels_once():
    loss = lambda w, x: mean_square(product(x, w))
    w = normal(1, WIDTH, WIDTH)
    step = jaxmp.with_stats(jaxmp.value_and_grad(loss, microbatches=4))
    stats = step(w, normal(0, 256, WIDTH)).tensors["operands"]
    (kernel,) = (stats[name] for name in stats if "kernel" in name)
    assert kernel.amax == jnp.abs(w).max()


@needs_compiler
def test_microbatches_read_fp8_copies_of_kernels_on_a_gpu():
    loss = lambda kernels, x: mean_square(product(product(x, kernels[0]), kernels[1]))
    step = jaxmp.value_and_grad(loss, microbatches=4)
    shapes = (2048, 4096), (4096, 2048), (1024, 2048)
    *kernels, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    with _compat.context(target="gpu", capability=(9, 0)):
        program = Program(compile_for("h200", trace(step, (kernels, x), {})).text)
    is_kernel = lambda shape: set(getattr(shape, "sizes", ())) == {2048, 4096}
    writes = [
        each.times
        for each in program.steps()
        if each.instruction.opcode not in ("while", "tuple", "parameter", "get-tuple-element")
        and any(is_kernel(s) and s.type.startswith("f8") for s in each.instruction.shapes)
    ]
    assert writes and set(writes) == {1}
