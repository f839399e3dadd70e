"""Weights that are split over devices are gathered in the dtype of their matmuls.

The CPU compiler widens collectives, so that most tests read the traced program: a weight is
gathered where a `sharding_constraint` removes the axes of the batch.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from arrays import uniform
from grids import fast_cases
from jaxmp._gradients._fp32._layout import WeightLayout, _reshaped, batch_axes
from jaxmp._programs._jaxprs import equations
from jaxmp.errors import JaxmpError
from models_nnx import pure_gradients
from training_steps import new_state

ROWS, WIDTH = 64, 16


def mesh_of(axis_type=AxisType.Auto):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)


MESH = mesh_of()


def on(*spec, mesh=MESH):
    return NamedSharding(mesh, P(*spec))


def gathers(fn, *args):
    """Returns (dtype, spec) of each constraint of an array that is first constrained to be split.

    The second of two constraints in a row gathers the array.
    """
    rows, seen = [], set()
    for equation in equations(jax.make_jaxpr(fn)(*args)):
        if equation.primitive.name == "sharding_constraint":
            (operand,), (result,) = equation.invars, equation.outvars
            if operand in seen and equation.params["sharding"].spec == P(
                *[None] * operand.aval.ndim
            ):
                rows.append(str(operand.aval.dtype))
            seen.add(result)
    return sorted(rows)


PARAMS = {"w": uniform((WIDTH, WIDTH)), "b": uniform(WIDTH, 1), "table": uniform((32, WIDTH), 2)}
SPECS = {"w": P("data", None), "b": P("data"), "table": P("data", None)}
X = uniform((ROWS, WIDTH), 3)


def low(tree, dtype=jnp.bfloat16):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


# ---------------------------------------------------------------------------
# Uses of weights: (params, x in 16 bits) -> rows, and the dtypes of the gathers of both passes
# ---------------------------------------------------------------------------


def dense(params, x):
    return x @ low(params["w"])


def with_bias(params, x):
    return x @ low(params["w"]) + low(params["b"])[None]


def transposed(params, x):
    return x @ low(params["w"].T)


def reshaped(params, x):
    return jnp.einsum("bi,ihk->bhk", x, low(params["w"]).reshape(WIDTH, 4, WIDTH // 4))


def rows_of_table(params, x):
    rows = jnp.take(params["table"], jnp.arange(len(x)) % 32, axis=0)
    return x * low(rows)


def in_scan(params, x):
    stacked = jnp.stack([params["w"], params["w"] / 2])
    stacked = jax.lax.with_sharding_constraint(stacked, on(None, "data", None))
    body = lambda x, w: (jax.lax.with_sharding_constraint(x @ low(w), on("data")), None)
    return jax.lax.scan(body, x, stacked)[0]


def in_remat(params, x):
    return jax.checkpoint(lambda w, x: jnp.tanh(x @ low(w)))(params["w"], x)


def gathered_by_hand(params, x):
    w = jax.lax.with_sharding_constraint(low(params["w"]), on("data", None))
    return x @ jax.lax.with_sharding_constraint(w, on())


def gathered_before_the_cast(params, x):
    return x @ low(jax.lax.with_sharding_constraint(params["w"], on()))


def fp8(params, x, scaling="current"):
    product = jaxmp.fp8.dot_general(scaling)
    return product(x, low(params["w"]), (((1,), (0,)), ((), ())))


def fp8_rowwise(params, x):
    return fp8(params, x, "rowwise")


TWICE = ["bfloat16", "bfloat16"]
USES = {
    dense: TWICE,
    with_bias: [*TWICE, "bfloat16"],
    transposed: TWICE,
    reshaped: TWICE,
    rows_of_table: ["bfloat16"],
    in_scan: TWICE,
    in_remat: TWICE,
    gathered_by_hand: TWICE,
    gathered_before_the_cast: TWICE,
    fp8: ["float8_e4m3fn", "float8_e4m3fn"],
    fp8_rowwise: ["float8_e4m3fn", "float8_e4m3fn"],
}


def gradient_of(use, *, is_split=True, **options):
    def loss_fn(params, x):
        if is_split:
            split = {name: on(*SPECS[name]) for name in params}
            params = jax.lax.with_sharding_constraint(params, split)
        x = jax.lax.with_sharding_constraint(low(x), on("data"))
        return jnp.sum(use(params, x).astype(jnp.float32) ** 2)

    return jaxmp.value_and_grad(loss_fn, **options)


def placed(is_split=True):
    specs = SPECS if is_split else dict.fromkeys(SPECS, P())
    params = {name: jax.device_put(PARAMS[name], on(*specs[name])) for name in PARAMS}
    return params, jax.device_put(X, on("data"))


@pytest.mark.parametrize("use", USES)
def test_weights_are_gathered_in_the_dtype_of_the_matmul(use):
    params, x = placed()
    assert gathers(gradient_of(use), params, x) == USES[use]
    # Without a sharding, nothing is known about the weights.
    assert gathers(gradient_of(use, is_split=False), params, x) in ([], ["bfloat16"], TWICE)


@pytest.mark.parametrize("use", USES)
@fast_cases("fp8", "rows_of_table", "with_bias")
def test_losses_and_gradients_do_not_depend_on_the_sharding(use):
    loss, grads = jax.jit(gradient_of(use))(*placed())
    expected_loss, expected = jax.jit(gradient_of(use, is_split=False))(*placed(False))
    np.testing.assert_allclose(loss, expected_loss, rtol=2**-9)
    for name, grad in grads.items():
        scale = abs(np.asarray(expected[name])).max()
        np.testing.assert_allclose(grad, expected[name], atol=2**-8 * scale)
        assert grad.dtype == jnp.float32


@pytest.mark.parametrize("use", [dense, fp8])
def test_gathered_weights_can_be_kept(use):
    params, x = placed()
    once = USES[use][:1]
    assert gathers(gradient_of(use, regather=False), params, x) == once
    # A backward pass that runs the forward pass again gathers again.
    assert gathers(gradient_of(in_remat, regather=False), params, x) == TWICE


def test_gradients_are_split_like_their_weights():
    _, grads = jax.jit(gradient_of(dense))(*placed())
    assert grads["w"].sharding.spec == P("data", None)


def test_a_weight_is_not_gathered_over_other_axes():
    def loss_fn(params, x):
        w = jax.lax.with_sharding_constraint(params["w"], on("data", "model"))
        x = jax.lax.with_sharding_constraint(low(x), on("data"))
        return jnp.sum((x @ low(w)).astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jaxmp.value_and_grad(loss_fn))(*placed())
    specs = [
        e.params["sharding"].spec
        for e in equations(jaxpr)
        if e.primitive.name == "sharding_constraint" and e.invars[0].aval.dtype == jnp.bfloat16
    ]
    assert P(None, "model") in specs and P(None, None) not in specs


def test_weights_remain_split_if_no_activation_is_constrained():
    def loss_fn(params, x):
        params = jax.lax.with_sharding_constraint(params, {n: on(*SPECS[n]) for n in params})
        return jnp.sum((low(x) @ low(params["w"])).astype(jnp.float32))

    assert gathers(jaxmp.value_and_grad(loss_fn), *placed()) == []


def test_explicit_axes_are_gathered_after_the_cast():
    mesh = mesh_of(AxisType.Explicit)
    params = {"w": jax.device_put(PARAMS["w"], on("data", None, mesh=mesh))}
    x = jax.device_put(X, on("data", mesh=mesh))

    def loss_fn(params, x):
        w = low(jax.reshard(params["w"], P(None, None)))
        return jnp.sum((low(x) @ w).astype(jnp.float32) ** 2)

    with jax.set_mesh(mesh):
        run = jaxmp.value_and_grad(loss_fn)
        narrow = [
            e.invars[0].aval.dtype.name
            for e in equations(jax.make_jaxpr(run)(params, x))
            if e.primitive.name == "reshard"
            and e.invars[0].aval.ndim == 2
            and e.invars[0].aval.sharding.spec == P("data", None)
            and e.outvars[0].aval.sharding.spec == P(None, None)
            and e.outvars[0].aval.dtype == jnp.bfloat16
        ]
        loss, grads = jax.jit(run)(params, x)
    assert narrow == TWICE
    expected_loss, expected = jax.jit(gradient_of(dense, is_split=False))(*placed(False))
    np.testing.assert_allclose(loss, expected_loss, rtol=2**-9)
    np.testing.assert_allclose(grads["w"], expected["w"], rtol=2**-7)


# ---------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------


class Model(nn.Module):
    """Embedding and two layers, whose activations are constrained to the batch axis."""

    annotate: bool = False

    @nn.compact
    def __call__(self, tokens):
        init = nn.initializers.normal(0.1)
        if self.annotate:
            init = nn.with_partitioning(init, ("data", None))
        x = nn.Embed(32, 16, name="embed", embedding_init=init)(tokens)
        x = jax.lax.with_sharding_constraint(x, on("data"))
        return nn.Dense(32, name="out", kernel_init=init)(nn.LayerNorm(name="norm")(x))


class NnxModel(nnx.Module):
    """Embedding and a layer."""

    def __init__(self, rngs, metadata):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.out = nnx.Linear(16, 32, rngs=rngs)
        for variable in (self.embed.embedding, self.out.kernel) if metadata else ():
            variable.set_metadata(out_sharding=("data", None))

    def __call__(self, tokens):
        return self.out(jax.lax.with_sharding_constraint(self.embed(tokens), on("data")))


TOKENS = np.random.default_rng(0).integers(0, 32, (16, 8)).astype(np.int32)


def split_kernels(tree):
    return jax.tree.map(lambda p: on("data", None) if p.ndim == 2 else on(), tree)


def linen_gradients(recipe, source):
    plain = Model(source == "metadata")
    params = plain.init(jax.random.key(0), TOKENS)["params"]
    where = split_kernels(params)
    model = recipe.wrap(plain, shardings=None if source == "metadata" else where)
    params = recipe.wrap(plain).init(jax.random.key(0), TOKENS)
    state = new_state(params, recipe, apply_fn=model.apply)
    loss_fn = lambda params, tokens: model.apply(params, tokens).astype(jnp.float32).mean()
    return lambda state, tokens: state.value_and_grad(loss_fn)(tokens)[1], state


def nnx_gradients(recipe, source):
    plain = NnxModel(nnx.Rngs(0), source == "metadata")
    where = split_kernels(nnx.to_pure_dict(nnx.state(plain, nnx.Param)))
    model = recipe.wrap(plain, shardings=None if source == "metadata" else where)
    # Flax requires a mesh to copy metadata.
    with jax.set_mesh(MESH):
        optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.sgd(0.1)))
    loss_fn = lambda model, tokens: model(tokens).astype(jnp.float32).mean()
    return pure_gradients(model, optimizer, loss_fn)


@pytest.mark.parametrize("source", ["metadata", "argument"])
@pytest.mark.parametrize("make", [linen_gradients, nnx_gradients])
@pytest.mark.parametrize("name", ["bf16", "fp16_params"])
@fast_cases("bf16-linen_gradients-metadata", "bf16-nnx_gradients-argument")
def test_models_gather_kernels_and_tables(name, make, source):
    recipe = jaxmp.load_recipe(name)
    run, state = make(recipe, source)
    state = jax.device_put(state, on())
    dtype = "bfloat16" if name == "bf16" else "float16"
    # The kernel in both passes, the table in the forward pass.
    assert gathers(run, state, jax.device_put(TOKENS, on("data"))) == [dtype] * 3
    kept, state = make(recipe.replace(regather=False), source)
    state = jax.device_put(state, on())
    assert gathers(kept, state, jax.device_put(TOKENS, on("data"))) == [dtype] * 2


def test_wrap_does_not_change_the_variables_of_the_original():
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    where = split_kernels(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    wrapped = jaxmp.load_recipe("bf16").wrap(model, shardings=where)
    assert "jaxmp_spec" not in model.kernel.get_metadata()
    assert wrapped.kernel.get_metadata()["jaxmp_spec"] == P("data", None)


def test_a_copy_of_a_wrapped_model_has_its_shardings():
    where = {"kernel": on("data", None), "bias": on()}
    model = jaxmp.load_recipe("bf16").wrap(nn.Dense(4), shardings=where)
    assert model.clone()._jaxmp_shardings == {("kernel",): where["kernel"], ("bias",): on()}


@pytest.mark.parametrize("make", [lambda: nn.Dense(4), lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))])
def test_other_shardings_are_refused(make):
    with pytest.raises(JaxmpError, match=r"shardings has P\('data',\).*'kernel'.*NamedSharding"):
        jaxmp.load_recipe("bf16").wrap(make(), shardings={"kernel": P("data")})


THREE = AbstractMesh((3,), ("data",))


@pytest.mark.parametrize(
    ("shardings", "message"),
    [
        ({"kernal": on()}, "'kernal', and the model has no such parameter. Did you mean 'kernel'"),
        ({"kernel": on(None, None, "data")}, r"\(4, 4\). Use at most 2 entries: P\(None, None\)"),
        ({"kernel": on("data")}, "contains no sharding for 'bias'. Use the tree"),
        (
            {name: NamedSharding(THREE, P("data")) for name in ("kernel", "bias")},
            r"'bias'.*\(4,\): 3 devices cannot share dimension 0 evenly. .*P\(None,\)",
        ),
    ],
)
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_shardings_that_do_not_fit_the_parameters_are_refused(framework, shardings, message):
    recipe = jaxmp.load_recipe("bf16")
    with pytest.raises(JaxmpError, match=message):
        if framework == "nnx":
            recipe.wrap(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), shardings=shardings)
        model = recipe.wrap(nn.Dense(4), shardings=shardings)
        model.apply({"params": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}, jnp.ones((1, 4)))


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_shardings_on_another_mesh_are_refused(framework):
    recipe, other = jaxmp.load_recipe("bf16"), AbstractMesh((2,), ("rows",))
    where = {"kernel": NamedSharding(other, P("rows")), "bias": NamedSharding(other, P())}
    x = jax.device_put(jnp.ones((4, 4)), on("data"))
    if framework == "linen":
        model = recipe.wrap(nn.Dense(4), shardings=where)
        params = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}
        state = new_state({"params": params}, recipe, apply_fn=model.apply)
        step = lambda state, x: state.value_and_grad(lambda p, x: model.apply(p, x).sum())(x)
    else:
        model = recipe.wrap(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), shardings=where)
        optimizer = jaxmp.nnx.Optimizer(model, recipe.optimizer(optax.sgd(0.1)))
        step, state = pure_gradients(model, optimizer, lambda model, x: model(x).sum())
    with pytest.raises(JaxmpError, match=r"P\('rows',\).*another mesh, .*'data'.*NamedSharding\("):
        jax.jit(step)(jax.device_put(state, on()), x)


def test_shardings_of_a_shared_layer():
    class Tied(nnx.Module):
        def __init__(self):
            self.second = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
            self.first = self.second

    model = Tied()
    where = split_kernels(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    wrapped = jaxmp.load_recipe("bf16").wrap(model, shardings=where)
    assert wrapped.second.kernel.get_metadata()["jaxmp_spec"] == P("data", None)


# ---------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "entries", "expected"),
    [
        ((8, 4, 2), (8, 8), ("d", "m", None), ("d", "m")),
        ((8, 8), (8, 4, 2), ("d", "m"), ("d", "m", None)),
        ((8,), (1, 1, 8), ("d",), (None, None, "d")),
        ((8, 4, 2), (8, 8), (None, None, "m"), None),
        ((6, 4), (24,), (None, "m"), None),
        ((6, 4), (4, 6), ("d", None), None),
        ((6, 4), (4, 6), (None, None), (None, None)),
    ],
)
def test_specs_of_reshaped_arrays(before, after, entries, expected):
    assert _reshaped(before, after, entries) == expected


def test_axes_of_the_batch_come_from_the_first_constrained_activation():
    def fn(w, x):
        w = jax.lax.with_sharding_constraint(w * 2, on("model", None))
        inner = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, on(("data",), "model")))
        return jax.lax.with_sharding_constraint(inner(x) @ w, on("model"))

    closed = jax.make_jaxpr(fn)(PARAMS["w"], X)
    assert batch_axes(closed, [True, False]) == ("data",)
    assert batch_axes(jax.make_jaxpr(jnp.dot)(X, PARAMS["w"]), [False, True]) == ()


def test_a_second_constraint_is_where_matmuls_read_a_weight():
    layout = WeightLayout(batch_axes=("data",)).constrained(on(None, "data"), 2)
    assert layout.gathered.spec == P(None, None) and layout.is_split
    by_hand = WeightLayout().constrained(on("data", "model"), 2).constrained(on(None, "model"), 2)
    assert by_hand.stored.spec == P("data", "model") and by_hand.gathered.spec == P(None, "model")
    moved = by_hand.constrained(on("model", "data"), 2)
    assert moved.stored.spec == P("model", "data") and not moved.is_split
