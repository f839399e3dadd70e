"""The interpreter of traced programs: every construct of JAX that puts a jaxpr into an equation."""

import functools
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp._programs._analysis import Backward, Body, Forward, primitives
from jaxmp._programs._constructs import CALLS, CONSTRUCTS, OPAQUE, REMATS, call_of, loop_of
from jaxmp._programs._interpreter import Interpreter
from jaxmp._programs._jaxprs import equations, trace
from jaxmp._programs._locations import Lines
from jaxmp._programs._operations import axes_of, dot_of, jit_of, name_of
from jaxmp._tools.validate._probe import with_outputs
from sources import text_of

pytestmark = pytest.mark.usefixtures("standard_promotion", "rank_promotion")

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)
CELL = lambda carry, row: (jnp.tanh(carry * row + carry), jnp.sin(carry))
TRACED = jax.jit(lambda x: jnp.tanh(x @ x)).trace(X)


@jax.custom_jvp
def own_tangent(x):
    return jnp.tanh(x)


own_tangent.defjvp(lambda primals, tangents: (own_tangent(*primals), 2 * tangents[0]))


def own_gradient(symbolic_zeros=False, optimize_remat=False):
    """Returns a function with a gradient that is not its derivative."""

    @jax.custom_vjp
    def fn(x):
        return jnp.tanh(x)

    def forward(x):
        x = x.value if symbolic_zeros else x
        return jnp.tanh(x), x

    options = {"symbolic_zeros": symbolic_zeros, "optimize_remat": optimize_remat}
    fn.defvjp(forward, lambda saved, cotangent: (3 * cotangent * saved,), **options)
    return fn


@jax.custom_batching.custom_vmap
def own_batching(x):
    return jnp.sin(x)


own_batching.def_vmap(lambda size, batched, x: (jnp.sin(x), batched[0]))


def scan(x, **options):
    carry, rows = lax.scan(CELL, x[0], x, **options)
    return carry + rows


def remat(policy=None, prevent_cse=True):
    options = {"policy": policy, "prevent_cse": prevent_cse}
    return jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ x)), **options)


def linear_solve(x):
    double = lambda v: 2 * v
    return lax.custom_linear_solve(double, x, lambda _, b: b / 2, lambda _, b: b / 2)


def sharded(x, check_vma=True):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    total = lambda x: lax.psum(jnp.tanh(x), "data")
    specs = {"in_specs": P("data"), "out_specs": P()}
    return jax.shard_map(total, mesh=mesh, check_vma=check_vma, **specs)(x)


def kernel(x):
    def double(source, target):
        target[...] = 2 * source[...]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double, out_shape=shape, interpret=True)(x)


# Name of a construct -> function of a matrix. Those in `ONCE` have no gradient.
DOTS = jax.checkpoint_policies.checkpoint_dots
PROGRAMS = {
    "jit": jax.jit(lambda x: jnp.tanh(x @ x), inline=False),
    "Traced": lambda x: TRACED(x),
    "remat": remat(),
    "remat with a policy": remat(DOTS),
    "remat that XLA may merge": remat(prevent_cse=False),
    "scan": scan,
    "reversed scan": functools.partial(scan, reverse=True),
    "unrolled scan": functools.partial(scan, unroll=2),
    "scan with a split transpose": functools.partial(scan, _split_transpose=True),
    "scan of a remat": lambda x: lax.scan(jax.checkpoint(CELL), x[0], x)[0],
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 100, lambda c: c * c + 1, x),
    "fori": lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) * x + i, x),
    "fori with unknown bounds": lambda x: lax.fori_loop(
        0, x[0, 0].astype(int) + 3, lambda i, c: jnp.sin(c), x
    ),
    "cond": lambda x: lax.cond(x.sum() > 0, jnp.sin, lambda y: y @ y, x),
    "switch": lambda x: lax.switch(1, [jnp.sin, jnp.cos, jnp.tanh], x),
    "platform_dependent": lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
    "shard_map": sharded,
    "shard_map without types": functools.partial(sharded, check_vma=False),
    "custom_jvp": own_tangent,
    "custom_vjp": own_gradient(),
    "custom_vjp with symbolic zeros": own_gradient(symbolic_zeros=True),
    "custom_vjp with optimized remat": own_gradient(optimize_remat=True),
    "custom_linear_solve": linear_solve,
    "custom_vmap": own_batching,
    "associative_scan": lambda x: lax.associative_scan(jnp.multiply, x),
    "pallas_call": kernel,
    "combined elements": lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,)),
}
ONCE = {"while", "fori with unknown bounds", "pallas_call", "combined elements", "custom_vmap"}


def again(fn):
    """Returns `fn`, traced and run again by the interpreter without a client."""

    def run(*args):
        closed, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
        leaves = Interpreter().run(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return run


def gradient(fn):
    return jax.grad(lambda x: jnp.square(fn(x)).sum())


def counts(fn):
    """Returns the number of each operation.

    Calls, which may be inlined, do not count, and neither does the index of a branch.
    A recomputation is lowered to its operations behind a barrier, and runs again in that form.
    """
    names = []
    for equation in equations(jax.make_jaxpr(fn)(X)):
        name = equation.primitive.name
        if name in REMATS and call_of(equation).is_recomputation:
            name = "optimization_barrier" if call_of(equation).prevent_cse else "jit"
        names += [] if name in CALLS | {"clamp", "platform_index"} else [name]
    return Counter(names)


@pytest.mark.parametrize("name", PROGRAMS)
def test_running_a_construct_again_changes_nothing(name):
    fn = PROGRAMS[name]
    # The gradient of the program that ran again, and the gradient's program, run again.
    pairs = [(fn, again(fn))]
    if name not in ONCE:
        pairs += [(gradient(fn), gradient(again(fn))), (gradient(fn), again(gradient(fn)))]
    for plain, replayed in pairs:
        assert counts(plain) == counts(replayed)
        expected, result = jax.jit(lambda x, fns=(plain, replayed): [f(x) for f in fns])(X)
        np.testing.assert_array_equal(result, expected)


def test_a_jitted_function_of_jax_that_runs_again_has_the_line_of_its_call():
    """JAX records what is inside of `jnp.std` without the frames of its caller."""

    def spread(x):
        return jnp.std(x, axis=0).sum()

    closed = jax.make_jaxpr(spread)(jnp.ones((2, 3)))
    again = jax.make_jaxpr(lambda x: Interpreter().run(closed, [x]))(jnp.ones((2, 3)))
    (root,) = (each for each in equations(again) if each.primitive.name == "sqrt")
    line = spread.__code__.co_firstlineno + 1
    assert Lines().of((root,)) == (spread.__code__.co_filename, line)


def test_the_programs_contain_every_construct():
    inside = set()
    for name, fn in PROGRAMS.items():
        inside |= set(counts(fn)) | (set() if name in ONCE else set(counts(gradient(fn))))
    assert inside >= CONSTRUCTS - CALLS
    assert {"custom_linear_solve", "custom_vmap_call", "pallas_call", "reduce"} <= inside & OPAQUE


class Largest(Interpreter):
    """Client with side results: the largest element of each sine, by the scopes of the sine."""

    has_side_results = True

    def equation(self, equation, operands, frame):
        results = super().equation(equation, operands, frame)
        if equation.primitive.name == "sin":
            scopes = frame.place.of(equation).names
            self.side["/".join(scopes)] = jnp.max(results[0]), jnp.array(True)
        return results

    def joined(self, value):
        return jax.tree.map(jnp.max, value)


def sine(x):
    with jax.named_scope("sine"):
        return jnp.sin(x)


SINES = {
    "call": jax.jit(sine),
    "remat": jax.checkpoint(sine),
    "reversed scan": lambda x: lax.scan(lambda c, r: (c, sine(r)), 0, x, reverse=True)[1],
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 1e3, lambda c: c + 10 + sine(x), x),
    "while loops of rows": jax.vmap(
        lambda x: lax.while_loop(lambda c: c[0] < 9, lambda c: c + 1 + abs(sine(x)), x)
    ),
    "branch": lambda x: lax.cond(x.sum() < 1e3, sine, jnp.cos, x),
    "other branch": lambda x: lax.cond(x.sum() > 1e3, sine, jnp.cos, x),
    "platform": lambda x: lax.platform_dependent(x, cpu=sine, default=jnp.cos),
    "shard_map": lambda x: jax.shard_map(
        sine,
        mesh=jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=P("d"),
        out_specs=P("d"),
    )(x),
}


@pytest.mark.parametrize("name", SINES)
def test_side_results_leave_constructs(name):
    @jax.jit
    def run(x):
        client = Largest()
        closed = jax.make_jaxpr(SINES[name])(x)
        return client.run(closed, [x])[0], client.side["sine"]

    result, (largest, runs) = run(X)
    np.testing.assert_array_equal(result, SINES[name](X))
    assert runs == (name != "other branch")
    assert largest == (jnp.sin(X).max() if runs else 0)


def unknown_operation(name):
    """Returns a function that records a primitive with a jaxpr, as a later JAX might."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, jaxpr: x)
    primitive.def_abstract_eval(lambda x, jaxpr: x)
    ad.defjvp(primitive, lambda tangent, x, jaxpr: tangent)
    mlir.register_lowering(primitive, lambda ctx, x, jaxpr: [x])
    closed = jax.make_jaxpr(lambda x: x @ x)(X)
    return lambda x: primitive.bind(x, jaxpr=closed)


def test_an_unknown_operation_with_a_jaxpr_is_reported_once():
    class Client(Interpreter):
        consequence = "nothing is certain"

    fn = unknown_operation("jaxmp_test_operation")
    closed = jax.make_jaxpr(lambda x: fn(fn(x)))(X)
    message = (
        f"does not enter the operation 'jaxmp_test_operation' of JAX {jax.__version__} at "
        ".*test_programs.py:[0-9]+.*It runs as it was recorded: nothing is certain"
    )
    with pytest.warns(jaxmp.errors.RecipeWarning, match=message) as warned:
        np.testing.assert_array_equal(Client().run(closed, [X])[0], X)
    assert len(warned) == 1


def fp32_gradients(fn):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    w = jax.device_put(X, jax.NamedSharding(mesh, P()))
    loss = lambda w: jnp.sum(fn(w) @ w.astype(jnp.bfloat16).astype(jnp.float32))
    jax.make_jaxpr(lambda w: jaxmp.value_and_grad(loss)(w))(w)


# Client -> (call for a function with an unknown operation, consequence).
CLIENTS = {
    "autocast": (
        lambda fn: jax.make_jaxpr(jaxmp.autocast(fn, "bf16"))(X),
        "computes in the dtypes in which it was traced",
    ),
    "gradients": (fp32_gradients, "weights that it reads are summed in the dtype"),
    "with_stats": (lambda fn: jaxmp.with_stats(fn)(X), "tensors inside of it are not measured"),
    "memory": (lambda fn: jaxmp.estimate_memory(fn, X), "memory of the operations inside is not"),
    "locate": (lambda fn: jaxmp.locate_nonfinite(fn, X), "and not to the operations inside"),
    "validate": (
        lambda fn: jax.make_jaxpr(with_outputs(fn))(X),
        "outputs of the modules inside of it are not compared",
    ),
    "parity": (
        lambda fn: jaxmp.parity(fn, lambda x: jnp.sin(fn(x)), [X], outputs="outputs"),
        "operations inside of it are not compared",
    ),
}


@pytest.mark.parametrize(
    "around",
    [lambda fn: fn, lambda fn: lambda x: lax.scan(lambda c, _: (fn(c), None), x, length=2)[0]],
    ids=["alone", "in a scan"],
)
@pytest.mark.parametrize("name", CLIENTS)
def test_each_client_names_the_consequence(name, around):
    call, consequence = CLIENTS[name]
    with pytest.warns(jaxmp.errors.RecipeWarning, match=consequence) as warned:
        result = call(around(unknown_operation("jaxmp_test_unknown")))
    assert name == "parity" or len(warned) == 1  # parity runs programs several times
    # Their reports name it too.
    assert name not in ("with_stats", "memory", "parity") or result.unknown == (
        "jaxmp_test_unknown",
    )
    assert name != "parity" or "inside of jaxmp_test_unknown are not compared\n" in str(result)


def test_a_validation_names_an_unknown_operation():
    fn = unknown_operation("jaxmp_test_validated")
    options = {"loss_fn": lambda model, x: jnp.square(fn(model(x))).mean(), "seeds": 1, "steps": 1}
    options |= {"batches": lambda seed: [X], "optimizer": optax.sgd(0.1), "held_out": [X]}
    with pytest.warns(jaxmp.errors.RecipeWarning, match="jaxmp_test_validated"):
        report = jaxmp.validate(nn.Dense(len(X)), ["bf16"], compare_steps=[0], **options)
    lines = report.to_text(width=500).splitlines()
    assert "jaxmp_test_validated at" in report.notes[0] and report.notes[0] in lines[:4]


def test_the_documentation_names_every_construct():
    text = text_of("docs/how-it-works.md")
    assert [name for name in CONSTRUCTS if f"`{name}`" not in text] == []


# ---------------------------------------------------------------------------
# Analyses
# ---------------------------------------------------------------------------


class Unions:
    """Analysis whose facts are sets: that of each variable is the union of those before it."""

    nothing = frozenset()
    join = staticmethod(frozenset.union)

    def equation(self, equation, known, frame):
        if equation.primitive.name in CONSTRUCTS:
            return self.enter(equation, known, frame)
        others = equation.outvars if isinstance(self, Forward) else equation.invars
        return [frozenset().union(*known)] * len(others)


class DependsOn(Unions, Forward):
    """For each variable, the numbers of the arguments from which it is computed."""


class Reaches(Unions, Backward):
    """For each variable, the numbers of the results that are computed from it."""


def rotated(x, y, z):
    """Returns three values, of which the first depends on `z` only after two iterations."""
    return lax.scan(lambda c, row: ((c[1], c[2] + row, 0.0), row), (x, y, 0.0), z)


def looped(x, y, z):
    return lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, c[2], z[0]), (x, y, 0.0))


# Name -> function of two scalars and a vector, and the arguments on which each result depends.
DEPENDENCES = {
    "scan": (rotated, ["12", "2", "", "2"]),
    "while": (looped, ["0", "12", "2"]),
    "branches": (
        lambda x, y, z: lax.cond(x > 0, lambda y, z: (y, 1.0), lambda y, z: (z[0], y), y, z),
        ["12", "1"],
    ),
    "remat": (jax.checkpoint(lambda x, y, z: (x * y, z)), ["01", "2"]),
    "own derivative": (lambda x, y, z: (own_tangent(y), x), ["1", "0"]),
    "call": (jax.jit(lambda x, y, z: (y + z, x), inline=False), ["12", "0"]),
}


@pytest.mark.parametrize("name", DEPENDENCES)
def test_facts_pass_through_constructs_in_both_directions(name):
    fn, expected = DEPENDENCES[name]
    closed = jax.make_jaxpr(fn)(1.0, 1.0, X[0])
    forward = DependsOn().run(closed, [frozenset({n}) for n in range(3)])
    assert ["".join(map(str, sorted(each))) for each in forward] == expected
    numbers = range(len(expected))
    backward = Reaches().run(closed, [frozenset({n}) for n in numbers])
    assert backward == [frozenset(n for n in numbers if a in forward[n]) for a in range(3)]


def test_a_body_has_an_index_of_its_variables():
    def fn(x, y):
        z = jnp.sin(x)
        return (z + y).T, jnp.cos(y)

    body = Body(jax.make_jaxpr(fn)(X, X))
    (x, y), (moved, other) = body.jaxpr.invars, body.jaxpr.outvars
    assert body.source_of(moved, frozenset({"transpose"})) is body.maker(moved).invars[0]
    assert body.maker_through(moved, frozenset({"transpose"})).primitive.name == "add"
    assert {each.primitive.name for each in body.readers(y)} == {"add", "cos"}
    assert body.depends_on(moved, x) and not body.depends_on(other, x)
    assert body.depends_on(other, other) and not body.depends_on(x, moved)
    assert moved in body.dependents([x]) and other not in body.dependents([x])
    assert body.positions[other] == 3


def test_records_read_the_parameters_of_operations():
    def fn(x):
        return jnp.einsum("bij,bjk->bik", x, x).sum(0), jnp.cumsum(x, 1)

    closed = jax.make_jaxpr(jax.jit(fn, donate_argnums=0))(jnp.ones((2, 3, 3)))
    rows = {each.primitive.name: each for each in equations(closed)}
    outer = next(equations(closed))
    assert name_of(outer) == "fn" and jit_of(outer).donated == (True,)
    dot = dot_of(rows["dot_general"])
    assert (dot.contracted, dot.batch) == (((2,), (1,)), ((0,), (0,)))
    assert axes_of(rows["reduce_sum"]) == (0,) and axes_of(rows["cumsum"]) == (1,)
    (loop,) = [each for each in equations(jax.make_jaxpr(rotated)(1.0, 1.0, X[0]))][-1:]
    assert loop_of(loop) is None
    for each, length in ((rotated, 4), (looped, None)):
        loop = next(filter(None, map(loop_of, equations(jax.make_jaxpr(each)(1.0, 1.0, X[0])))))
        assert (len(loop.incoming), len(loop.outgoing), loop.length) == (3, 3, length)
    assert {"scan", "add"} <= primitives(jax.make_jaxpr(rotated)(1.0, 1.0, X[0]))


def own_rule_with_reference(w, x):
    """A function with a derivative of its own, which JAX loses where references become values."""

    @jax.custom_vjp
    def fn(w, x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] @ w
        return ref[...]

    fn.defvjp(lambda w, x: (fn(w, x), None), lambda _, g: (2 * g, 3 * g))
    return fn(w, x)


def loops_with_reference(w, x):
    """Writes into a reference in a jitted function, a loop and a branch."""
    ref, write = jax.new_ref(x), jax.jit(lambda ref, w: ref.__setitem__(..., ref[...] @ w))
    lax.fori_loop(0, 3, lambda i, ref_is_read: (write(ref, w), ref_is_read)[1], 0)
    lax.cond(x[0, 0] < 9, lambda: write(ref, w), lambda: None)
    return ref[...]


def test_references_become_values():
    traced = trace(loops_with_reference, (X, X), {})
    assert primitives(traced.closed).isdisjoint({"new_ref", "get", "swap"})
    gradient = jax.grad(lambda x: Interpreter().run(traced.closed, [X, x])[0].sum())(X)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: (x @ X @ X @ X @ X).sum())(X), 1e-5)
    # Those of the caller, and those inside of a function with its own derivative, remain.
    shared = jax.new_ref(X)
    for fn in (own_rule_with_reference, lambda w, x: loops_with_reference(w, x) + shared[...]):
        assert "new_ref" in primitives(trace(fn, (X, X), {}).closed)
    closed = trace(own_rule_with_reference, (X, X), {}).closed
    assert jax.grad(lambda x: Interpreter().run(closed, [X, x])[0].sum())(X)[0, 0] == 3


UPGRADES = [f"jax_{name}" for name in ("remat3", "custom_jvp3", "custom_vjp3")]
# Flag of JAX -> a function that it concerns. In older versions than 0.12, some have no effect.
FLAGS = {"jax_disable_jit": scan}
if jax.__version_info__ >= (0, 12):
    FLAGS |= zip(UPGRADES, (remat(DOTS), own_tangent, own_gradient()), strict=True)


@pytest.mark.skipif(len(FLAGS) == 1, reason="JAX 0.12 has the rules of recomputation")
def test_rules_that_require_a_flag_are_traced_with_it(request):
    fn, rule = jax.custom_vjp(jnp.sin), lambda saved, x: (jnp.sin(x), x)
    fn.defremat(lambda x: (jnp.sin(x), ()), rule, lambda x, cotangent: (3 * cotangent * x,))
    request.addfinalizer(lambda: jax.config.update("jax_custom_vjp3", False))
    jax.config.update("jax_custom_vjp3", True)
    assert jax.grad(lambda x: jaxmp.autocast(fn, "bf16")(x).sum())(X)[0, 0] == 3 * X[0, 0]


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_jax_do_not_change_what_is_traced(flag, request):
    fn = FLAGS[flag]
    expected = primitives(trace(gradient(fn), (X,), {}).closed)
    jax.clear_caches()
    request.addfinalizer(lambda: jax.config.update(flag, False))
    jax.config.update(flag, True)
    closed = trace(fn, (X,), {}).closed
    assert primitives(jax.make_jaxpr(fn)(X)) != primitives(closed)
    assert primitives(trace(gradient(fn), (X,), {}).closed) == expected
    run = lambda x: Interpreter().run(closed, [x])[0]
    np.testing.assert_allclose(gradient(run)(X), gradient(fn)(X), 1e-6)
