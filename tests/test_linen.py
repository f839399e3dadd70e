"""apply_policy in Linen: results, casts and errors."""

import contextlib
import copy
import functools
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from arrays import floats
from grids import EXPENSIVE, fast_cases
from jaxmp import Policy, PolicyMap, Rule, attention_fn
from jaxmp._flax._linen_interceptor import module_paths
from jaxmp._flax._linen_model import apply_policy
from jaxmp.errors import CompositionError, RecipeWarning, RuleError
from models import MIXED, tokens
from models_linen import MLP, Attention, Outer, RawParam, TiedLM, Transformer
from programs import dtypes, leaf_dtypes, module_path, named, products, relative_error, trace

KEY = jax.random.key(0)
fp32_softmax_attention = attention_fn()
BF16 = "p=f32,c=bf16,o=bf16"


def shapes(model, *args):
    """Returns zero variables of `model`, without running its initializers."""
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(model.init, KEY, *args)
    )


def operands_by_module(model, variables, *args, **kwargs):
    """Returns module name -> operand dtype of its matmuls."""
    traced = trace(lambda v: model.apply(v, *args, **kwargs), variables)
    return {module_path(e).rsplit("/")[-1]: dtypes(e)[0] for e in products(traced)}


# ---------------------------------------------------------------------------
# The wrapped model
# ---------------------------------------------------------------------------


def test_result_is_of_the_models_class_and_looks_like_it():
    model = MLP()
    wrapped = apply_policy(model, MIXED)
    assert isinstance(wrapped, MLP)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(wrapped), name) == getattr(MLP, name)
    assert repr(wrapped) == repr(model)


def test_original_is_untouched():
    model, x = Attention(), floats(2, 6, 8)
    variables = shapes(model, x)
    before, attributes = str(jax.make_jaxpr(model.apply)(variables, x)), dict(vars(model))
    jax.eval_shape(apply_policy(model, MIXED).apply, variables, x)
    assert str(jax.make_jaxpr(model.apply)(variables, x)) == before
    assert vars(model) == attributes


def test_equal_models_under_equal_policies_are_equal():
    policy, model = Policy("f32", "bf16", "f32"), apply_policy(MLP(), MIXED)
    for policies in (policy, PolicyMap(policy), {"compute": "bf16", "output": "f32"}):
        # A second policy replaces the first.
        for same in (
            apply_policy(MLP(), policies),
            apply_policy(apply_policy(MLP(), BF16), policies),
        ):
            assert same == model and hash(same) == hash(model) and type(same) is type(model)
    assert model != apply_policy(MLP(), BF16)
    assert model != MLP()


@pytest.mark.parametrize(
    "remake",
    [
        lambda model: pickle.loads(pickle.dumps(model)),
        copy.deepcopy,
        copy.copy,
        lambda model: model.clone(),
        lambda model: model.copy(),
    ],
    ids=["pickle", "deepcopy", "copy", "clone", "module_copy"],
)
def test_copies_keep_the_policies(remake):
    policies = PolicyMap(MIXED, [Rule("head", "o=f32", why="logits")])
    model = apply_policy(MLP(), policies)
    again = remake(model)
    assert again == model
    variables = shapes(model, floats(2, 8))
    assert set(operands_by_module(again, variables, floats(2, 8)).values()) == {"bfloat16"}


def test_the_authors_own_constructor_equality_and_hash_stay():
    class Own(nn.Module):
        width: int = 2

        def __eq__(self, other):
            return isinstance(other, Own)

        def __hash__(self):
            return 7

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.width)(x)

    wrapped = apply_policy(Own(3), MIXED)
    assert wrapped.width == 3 and wrapped == Own(4) and hash(wrapped) == 7


# ---------------------------------------------------------------------------
# All entry points
# ---------------------------------------------------------------------------


def test_every_entrance_obeys_the_policy():
    lm, x = TiedLM(), tokens(2, 6)
    model, variables = apply_policy(lm, BF16), shapes(lm, x)
    hidden = floats(2, 16)

    def enter(variables):
        bound = model.bind(variables)
        return [
            model.apply(variables, x),
            model.apply(variables, x, method="encode"),
            model.apply(variables, x, method=TiedLM.encode),
            model.apply(variables, x, method=model.encode),
            model.apply(variables, x, method=lambda m, x: m.norm(m.embed(x))),
            model.apply(variables, hidden, method=lambda m, h: m.body(h)),
            model.apply(variables, x, method=lm.encode),
            model.apply(
                variables, hidden, method=functools.partial(lambda m, h, n: m.body(h), n=1)
            ),
            model.init_with_output(KEY, x, method=lambda m, x: m.embed(x))[0],
            nn.apply(lambda m, h: m.body(h), model)(variables, hidden),
            nn.apply(lambda m, x: m(x), model)(variables, x),
            model.init_with_output(KEY, x)[0],
            bound(x),
            bound.encode(x),
            bound.body(hidden),
            bound.embed(x),
            bound.embed.attend(hidden),
            bound.embed.embedding,
            bound.body.layers[0](hidden),
        ]

    results = jax.eval_shape(enter, variables)
    assert [str(result.dtype) for result in results] == ["bfloat16"] * len(results)


def test_a_submodule_can_be_called_by_name():
    model = apply_policy(Outer(nn.Dense(3)), BF16)
    variables = model.init(KEY, floats(2, 4))
    assert model.apply(variables, floats(2, 4), method="inner").dtype == jnp.bfloat16


class Field(nn.Module):
    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="last")(self.inner(x).astype(jnp.float32))


@pytest.mark.parametrize("plain", [nn.Dense(3), Field(nn.Dense(3))])
def test_an_unbound_model_equals_the_model_that_was_bound(plain):
    model, x = apply_policy(plain, MIXED), floats(2, 8)
    bound = model.bind(model.init(KEY, x))
    out = bound(x)
    module, variables = bound.unbind()
    assert module == model
    np.testing.assert_array_equal(module.apply(variables, x), out)
    np.testing.assert_array_equal(bound(x), out)


def test_lazy_init_and_tabulate():
    model, x = apply_policy(MLP(), MIXED), floats(2, 8)
    lazy = model.lazy_init(KEY, jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert jax.tree.structure(lazy) == jax.tree.structure(model.init(KEY, x))
    table = model.tabulate(KEY, x, depth=1, console_kwargs={"width": 120, "no_color": True})
    assert "bfloat16" in table and "head" in table


def test_a_wrapped_model_is_a_submodule():
    policies = PolicyMap(MIXED, [Rule("head", "c=f32")])

    class Setup(nn.Module):
        def setup(self):
            self.inner = apply_policy(MLP(), policies)
            self.last = nn.Dense(4)

        def __call__(self, x):
            return self.last(self.inner(x))

    class Compact(nn.Module):
        @nn.compact
        def __call__(self, x):
            inner = apply_policy(MLP(parent=None, name="inner"), policies)
            return nn.Dense(4, name="last")(inner(x))

    for model in (Field(apply_policy(MLP(), policies)), Setup(), Compact()):
        variables = shapes(model, floats(2, 8))
        assert set(variables["params"]) == {"inner", "last"}
        found = operands_by_module(model, variables, floats(2, 8))
        assert found == {"Dense_0": "bfloat16", "head": "float32", "last": "float32"}


def test_the_innermost_policy_owns_its_subtree():
    model = apply_policy(Field(apply_policy(MLP(), "float16")), BF16)
    found = operands_by_module(model, shapes(model, floats(2, 8)), floats(2, 8))
    assert found == {"Dense_0": "float16", "head": "float16", "last": "bfloat16"}


def test_compact_name_scope_and_mixins_are_entrances_too():
    class Mixin:
        def twice(self, x):
            return self.up(self.up(x))

    class Model(Mixin, nn.Module):
        @nn.compact_name_scope
        def up(self, x):
            return nn.Dense(x.shape[-1])(x)

        def __call__(self, x):
            return self.up(x)

    model, x = apply_policy(Model(), BF16), floats(2, 4)
    bound = model.bind(model.init(KEY, x))
    assert [f(x).dtype.name for f in (bound, bound.up, bound.twice)] == ["bfloat16"] * 3


# ---------------------------------------------------------------------------
# Dtypes
# ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:0% of the matmul FLOPs:jaxmp.errors.RecipeWarning")
def test_a_users_own_field_named_dtype_is_never_set():
    seen = []

    class Tokenizer(nn.Module):
        dtype: Any = "utf-8"

        @nn.compact
        def __call__(self, x):
            seen.append(self.dtype)
            return nn.Dense(4)(x)

    class Inherits(nn.Dense):
        @nn.compact
        def __call__(self, x):
            seen.append(self.dtype)
            return super().__call__(x)

    class MyDense(Inherits):
        dtype: Any = jnp.float32

    for model in (Tokenizer(), MyDense(2), Inherits(2)):
        variables = shapes(model, floats(2, 3))
        seen.clear()
        jax.eval_shape(apply_policy(model, MIXED).apply, variables, floats(2, 3))
        expected = {Tokenizer: "utf-8", MyDense: jnp.float32, Inherits: jnp.bfloat16}[type(model)]
        assert seen and all(dtype == expected for dtype in seen)


def test_root_output_and_named_outputs_alone_leave_the_compute_dtype():
    seen = {}

    class Probe(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen["in"] = x.dtype.name
            x = nn.Dense(4, name="plain")(x)
            seen["plain"] = x.dtype.name
            seen["named"] = nn.Dense(4, name="named")(x).dtype.name
            seen["fp32"] = nn.Dense(4, name="fp32")(x).dtype.name
            return x

    policies = PolicyMap(MIXED, [Rule("named", "o=f32"), Rule("fp32", "c=f32,o=bf16")])
    model, x = apply_policy(Probe(), policies), floats(2, 3)
    out = jax.eval_shape(model.apply, shapes(Probe(), x), x)
    assert seen == {"in": "bfloat16", "plain": "bfloat16", "named": "float32", "fp32": "bfloat16"}
    assert out.dtype == jnp.float32


def test_own_methods_are_no_boundary():
    """A method that the model calls on itself is not a boundary: FP32 values stay FP32."""
    seen = []

    class Model(nn.Module):
        def logits(self, x):
            return x.astype(jnp.float32) * 3

        def __call__(self, x):
            logits = self.logits(x)
            seen.append(logits.dtype.name)
            return logits

    jax.eval_shape(apply_policy(Model(), BF16).apply, {}, floats(2, 3))
    assert set(seen) == {"float32"}


def test_only_floating_arrays_are_cast():
    received = {}

    class Model(nn.Module):
        def __call__(self, **given):
            received.update(given)
            return given

    given = {
        "f32": jnp.ones(2),
        "f16": jnp.ones(2, jnp.float16),
        "numpy": np.ones(2, np.float32),
        "int": jnp.arange(2),
        "bool": jnp.array(True),
        "complex": jnp.ones(2, jnp.complex64),
        "key": jax.random.key(0),
        "fp8": jnp.ones(2, jnp.float8_e4m3fn),
        "python": 1.5,
        "string": "text",
        "none": None,
        "function": jnp.sin,
        "layer": nn.Dense(2, dtype=jnp.float32),
        "nnx": nnx.Rngs(0),
    }
    out = apply_policy(Model(), BF16).apply({}, **given)
    cast = {"f32", "f16", "numpy"}
    assert {received[name].dtype.name for name in cast} == {"bfloat16"}
    assert all(received[name] is given[name] for name in given if name not in cast)
    assert all(out[name] is given[name] for name in given if name not in cast)


def test_rules_address_one_raw_parameter():
    seen, x = {}, floats(2, 3)

    class One(nn.Module):
        @nn.compact
        def __call__(self, x):
            for name in ("a", "b"):
                seen[name] = self.param(name, nn.initializers.ones, (3,)).dtype.name
            return x

    policies = PolicyMap(MIXED, [Rule(":a", "c=f32", why="a temperature")])
    model = apply_policy(One(), policies)
    variables = model.init(KEY, x)
    jax.eval_shape(model.apply, variables, x)
    assert seen == {"a": "float32", "b": "bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(variables)} == {"float32"}


def test_partitioned_parameters_keep_their_boxes():
    model, x = RawParam(), floats(2, 3)
    variables = jax.eval_shape(apply_policy(model, MIXED).init, KEY, x)
    assert isinstance(variables["params"]["v"], nn.Partitioned)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), variables)
    assert jax.eval_shape(apply_policy(model, MIXED).apply, zeros, x).dtype == jnp.float32


def test_parameters_that_follow_the_input_are_drawn_as_the_author_wrote():
    class Follows(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x * self.param("w", nn.initializers.normal(), x.shape, x.dtype)

    x = floats(2, 3)
    plain, wrapped = Follows().init(KEY, x), apply_policy(Follows(), BF16).init(KEY, x)
    np.testing.assert_array_equal(plain["params"]["w"], wrapped["params"]["w"])
    assert wrapped["params"]["w"].dtype == jnp.float32


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, nn.InstanceNorm, nn.BatchNorm])
@pytest.mark.parametrize("stored", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_norms_compute_in_fp32_and_hand_on_bf16(norm, stored):
    model = norm(use_running_average=False) if norm is nn.BatchNorm else norm()
    x = floats(2, 5, 4) * 300
    variables = jax.tree.map(
        lambda leaf: leaf.astype(stored) if leaf.ndim else leaf, dict(shapes(model, x))
    )
    variables["params"] = jax.tree.map(lambda leaf: leaf + stored(1.5), variables["params"])
    if "batch_stats" in variables:
        variables["batch_stats"] = shapes(model, x)["batch_stats"]
    wrapped = apply_policy(model, BF16)
    apply = lambda v: wrapped.apply(v, x, mutable=["batch_stats"])
    for equation in named(trace(apply, variables), "mul", "sub", "rsqrt", "reduce_sum"):
        assert equation.invars[0].aval.dtype == jnp.float32
    out, state = apply(variables)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} <= {"float32"}
    reference, _ = model.apply(
        jax.tree.map(lambda leaf: leaf.astype(jnp.float32), variables), x, mutable=["batch_stats"]
    )
    assert relative_error(out, reference) < 0.005


def test_statistics_of_large_float16_activations_are_finite():
    """The square of 300 overflows float16; the statistics are computed in FP32."""
    x = jnp.full((2, 64), 300.0).at[:, ::2].set(-300.0)
    out = apply_policy(nn.RMSNorm(), "float16").apply({"params": {"scale": jnp.ones(64)}}, x)
    np.testing.assert_allclose(out, np.sign(x), rtol=1e-3)


@pytest.mark.parametrize(
    "module, args",
    [
        (nn.Dense(4), (floats(2, 3),)),
        (nn.DenseGeneral((2, 2)), (floats(2, 3),)),
        (nn.Conv(4, (3,)), (floats(2, 5, 3),)),
        (nn.Einsum((3, 4), "bi,io->bo"), (floats(2, 3),)),
        (nn.ConvTranspose(4, (3,)), (floats(2, 5, 3),)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_a_wider_output_is_emitted_by_the_product_itself(module, args):
    model = apply_policy(Outer(module), PolicyMap(MIXED, [Rule("inner", "o=f32")]))
    variables = jax.tree.map(lambda leaf: leaf + 0.3, shapes(model, *args))
    traced = trace(lambda v: model.apply(v, *args), variables)
    assert [dtypes(e) for e in products(traced)] == [("bfloat16", "bfloat16", "float32")]
    # 1/3 rounded to bfloat16 loses 8e-4; the bias is added in FP32.
    adds = [e for e in named(traced, "add") if e.outvars[0].aval.dtype == jnp.float32]
    assert adds and not named(traced, "reduce_precision")


def test_a_perturbation_in_fp32_does_not_promote():
    dtypes = []

    class Perturbed(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = self.perturb("p", nn.Dense(4)(x))
            dtypes.append(y.dtype)
            return y

    model, x = apply_policy(Perturbed(), BF16), floats(2, 3)
    variables = Perturbed().init(jax.random.key(0), x)
    apply = lambda p: model.apply({**variables, "perturbations": p}, x)
    out, gradient = jax.vjp(apply, variables["perturbations"])
    assert dtypes[-1] == jnp.bfloat16 and gradient(out)[0]["p"].dtype == jnp.float32


@pytest.mark.parametrize("boxed", [False, True])
def test_the_gradient_of_a_row_that_is_looked_up_is_summed_in_fp32(boxed):
    normal = nn.initializers.normal()
    names = nn.with_partitioning(normal, ("rows", None)) if boxed else normal
    layer = nn.Embed(4, 8, embedding_init=names)
    model, rows = apply_policy(layer, BF16), jnp.zeros(1000, jnp.int32)
    variables = model.init(KEY, rows)

    def loss(variables):
        out = model.apply(variables, rows)
        assert out.dtype == jnp.bfloat16
        return out.astype(jnp.float32).sum(), out

    gradient, out = jax.jit(jax.grad(loss, has_aux=True))(variables)
    (table,), (slope,) = map(jax.tree.leaves, (variables, gradient))
    # Sums of ones stop growing at 256 in bfloat16.
    np.testing.assert_array_equal(slope, np.pad(np.full((1, 8), 1000.0), ((0, 3), (0, 0))))
    np.testing.assert_array_equal(out, table.astype(jnp.bfloat16)[rows])


def test_a_tied_table_multiplies_in_16_bits_and_its_gradients_are_added_in_fp32():
    model, x = apply_policy(TiedLM(), BF16), tokens(2, 6)
    loss = lambda v: model.apply(v, x, method="transposed").astype(jnp.float32).sum()
    traced = trace(jax.grad(loss), shapes(TiedLM(), x))
    assert {dtypes(e)[:2] for e in products(traced)} == {("bfloat16", "bfloat16")}
    adds = [dtypes(e) for e in named(traced, "add_any") if e.outvars[0].aval.shape == (32, 16)]
    assert adds == [("float32",) * 3]


def test_an_authors_own_product_is_kept():
    calls = []

    def mine(*args, **kwargs):
        calls.append(args[0].dtype.name)
        return jax.lax.dot_general(*args, **kwargs)

    model = apply_policy(nn.Dense(4, dot_general=mine), PolicyMap(MIXED, [Rule("", "o=f32")]))
    out = jax.eval_shape(model.apply, shapes(nn.Dense(4), floats(2, 3)), floats(2, 3))
    assert set(calls) == {"bfloat16"} and out.dtype == jnp.float32


def test_matmul_precision_follows_the_rules():
    variables, x = shapes(MLP(), floats(2, 8)), floats(2, 8)

    def precisions(*rules):
        model = apply_policy(MLP(), PolicyMap("p=f32,matmul=highest", rules))
        traced = products(trace(lambda v: model.apply(v, x), variables))
        return {module_path(e).rsplit("/")[-1]: str(e.params["precision"]) for e in traced}

    assert all("HIGHEST" in precision for precision in precisions().values())
    found = precisions(Rule("head", "matmul=tf32"), Rule("Dense_0", "matmul=default"))
    assert found["Dense_0"] == "None" != found["head"] and "HIGHEST" not in found["head"]


# ---------------------------------------------------------------------------
# Recurrent state
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.OptimizedLSTMCell, nn.GRUCell, nn.SimpleCell])
def test_a_cells_carry_keeps_its_dtypes(cell):
    model, x = cell(4), floats(2, 3)
    with jax.numpy_dtype_promotion("standard"):  # Flax multiplies an FP32 state with bf16 gates
        carry = model.initialize_carry(KEY, x.shape)
        variables = jax.eval_shape(model.init, KEY, carry, x)
        out = jax.eval_shape(apply_policy(model, BF16).apply, variables, carry, x)
    assert leaf_dtypes(out[0]) == leaf_dtypes(carry)
    assert out[1].dtype == jnp.bfloat16


def test_a_cells_carry_is_not_rounded():
    model, carry, x = nn.RNN(nn.GRUCell(3), return_carry=True), floats(2, 3) / 3, floats(2, 5, 3)
    variables = jax.tree.map(jnp.copy, model.init(KEY, x))
    variables["params"]["cell"]["iz"]["bias"] += 100  # keeps the whole carry
    with jax.numpy_dtype_promotion("standard"):  # the layers return 16 bits
        kept, _ = apply_policy(model, BF16).apply(variables, x, initial_carry=carry)
    np.testing.assert_array_equal(kept, carry)


def test_the_state_that_an_rnn_returns_can_be_fed_back():
    model, x = nn.RNN(nn.GRUCell(4), return_carry=True), floats(2, 5, 3)
    with jax.numpy_dtype_promotion("standard"):  # as above
        wrapped = apply_policy(model, BF16)
        variables = jax.eval_shape(model.init, KEY, x)
        carry, ys = jax.eval_shape(wrapped.apply, variables, x)
        again, _ = jax.eval_shape(
            lambda v, c: wrapped.apply(v, x, initial_carry=c), variables, carry
        )
    assert (carry.dtype, ys.dtype, again.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)


# ---------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------


def attention_inputs(dtype=jnp.float32):
    return [floats(2, 5, 2, 4, seed=seed).astype(dtype) for seed in range(3)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": np.tri(5, dtype=bool)},
        {"bias": floats(2, 5, 5)},
        {"dropout_rng": KEY, "dropout_rate": 0.5},
        {"dropout_rng": KEY, "dropout_rate": 0.5, "broadcast_dropout": False},
        {"dropout_rng": KEY, "dropout_rate": 0.5, "deterministic": True},
        {"precision": jax.lax.Precision.HIGHEST},
        {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
@fast_cases(
    "mask",
    "dropout_rng-dropout_rate-deterministic",
    "qk_attn_weights_einsum-attn_weights_value_einsum",
)
def test_attention_agrees_with_flax(options):
    with jax.numpy_rank_promotion("allow"):  # Flax broadcasts masks and biases
        inputs = attention_inputs()
        mine = fp32_softmax_attention(*inputs, **options)
        theirs = nn.dot_product_attention(*inputs, **options)
        half = fp32_softmax_attention(*attention_inputs(jnp.bfloat16), **options)
    np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-6)
    assert half.dtype == jnp.bfloat16
    assert relative_error(half, theirs) < 0.02


def test_attention_refuses_half_of_a_pair_of_einsums():
    with pytest.raises(ValueError, match="Pass both"):
        fp32_softmax_attention(*attention_inputs(), qk_attn_weights_einsum=jnp.einsum)


def test_an_authors_attention_fn_is_kept():
    calls = []

    def mine(query, key, value, **kwargs):
        calls.append(query.dtype.name)
        return value

    model = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=mine)
    variables = shapes(model, floats(2, 5, 4))
    calls.clear()
    jax.eval_shape(apply_policy(model, BF16).apply, variables, floats(2, 5, 4))
    assert set(calls) == {"bfloat16"}


def test_attention_weights_are_sown():
    model = apply_policy(nn.MultiHeadDotProductAttention(num_heads=2), BF16)
    x = floats(2, 5, 4)
    _, state = model.apply(shapes(model, x), x, sow_weights=True, mutable=["intermediates"])
    (weights,) = state["intermediates"]["attention_weights"]
    assert weights.shape == (2, 2, 5, 5) and weights.dtype == jnp.bfloat16


# The projections of attention are no heads, although they have few outputs here.
@pytest.mark.parametrize("limit", [0, 16])
def test_decoding_writes_a_cache_in_the_compute_dtype(limit):
    model = nn.MultiHeadDotProductAttention(num_heads=2, decode=True)
    wrapped = apply_policy(model, f"p=f32,c=bf16,o=bf16,fp32_outputs_below={limit}")
    x = floats(1, 4, 8)
    variables, plain = jax.jit(lambda: (wrapped.init(KEY, x), model.init(KEY, x)))()
    assert variables["cache"]["cached_key"].dtype == jnp.bfloat16
    assert variables["params"]["query"]["kernel"].dtype == jnp.float32

    @jax.jit
    def decode(state, reference, token):
        out, new = wrapped.apply(
            {"params": variables["params"], "cache": state}, token, mutable=["cache"]
        )
        expected, new_reference = model.apply(
            {"params": plain["params"], "cache": reference}, token, mutable=["cache"]
        )
        return out, expected, new["cache"], new_reference["cache"]

    state, reference = variables["cache"], plain["cache"]
    for step in range(3):
        out, expected, state, reference = decode(state, reference, x[:, step : step + 1])
        assert relative_error(out, expected) < 0.02
    assert leaf_dtypes(dict(state)) == leaf_dtypes(dict(variables["cache"]))


# ---------------------------------------------------------------------------
# Rules, paths, explain
# ---------------------------------------------------------------------------


def test_module_paths():
    parameters = ["Dense_0:bias", "Dense_0:kernel", "LayerNorm_0:bias", "LayerNorm_0:scale"]
    parameters += ["head:bias", "head:kernel"]
    paths = module_paths(MLP(), (jax.ShapeDtypeStruct((2, 8), jnp.float32),), {}, None, {})
    assert paths == {
        "": MLP,
        "Dense_0": nn.Dense,
        "LayerNorm_0": nn.LayerNorm,
        "head": nn.Dense,
        **dict.fromkeys(parameters),
    }
    assert module_paths(apply_policy(MLP(), BF16), (floats(2, 8),), {}, None, {}) == paths


def test_module_paths_sees_what_nn_jit_has_cached():
    jitted = nn.jit(MLP)

    class Twice(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jitted(name="a")(x) + jitted(name="b")(x)

    for _ in range(2):
        paths = module_paths(Twice(), (floats(2, 8),), {}, None, {})
        assert {"a/head", "b/head"} <= set(paths)


def test_explain_names_the_deciding_rule():
    policies = PolicyMap(
        MIXED,
        [
            Rule("lm_head", "o=f32", why="the loss reads FP32 logits"),
            Rule(module_type="LayerNorm", policy="c=f32", why="norms"),
            Rule("block_*/**", "matmul=highest", why="below a block"),
            Rule("embed:embedding", "c=f32", why="one table"),
            Rule("absent/**", "c=f32", required=False),
        ],
    )
    explanation = jaxmp.explain(Transformer(), policies)(tokens(2, 6)).policies
    why = {row.path: row.why for row in explanation.rows}
    assert why["lm_head"] == "the loss reads FP32 logits"
    assert why["block_0/LayerNorm_0"] == "norms"
    assert why["block_0/up"] == why["block_1"] == "below a block"
    assert why["block_0/MultiHeadDotProductAttention_0/query"] == "below a block"
    assert why["embed:embedding"] == "one table"
    assert why["embed"] == ""
    assert [rule.path for rule in explanation.unused] == ["absent/**"]


@pytest.mark.parametrize(
    "start",
    [
        lambda model, x: model.init(KEY, x),
        lambda model, x: model.init_with_output(KEY, x),
        lambda model, x: model.tabulate(KEY, x, depth=1),
        lambda model, x: jax.eval_shape(model.init, KEY, x),
        lambda model, x: (
            jaxmp.explain(model, PolicyMap(MIXED, [Rule("haed", "o=f32")]))(x).policies
        ),
    ],
    ids=["init", "init_with_output", "tabulate", "jitted", "explain"],
)
def test_a_required_rule_that_matches_nothing_raises(start):
    model = apply_policy(MLP(), PolicyMap(MIXED, [Rule("haed", "o=f32")]))
    with pytest.raises(RuleError, match=r"'haed'.*nearest paths: 'head'"):
        start(model, floats(2, 8))


def test_partial_calls_do_not_judge_rules():
    model = apply_policy(TiedLM(), PolicyMap(MIXED, [Rule("nowhere", "o=f32")]))
    jax.eval_shape(functools.partial(model.init, method="encode"), KEY, tokens(2, 6))
    encode = functools.partial(model.apply, method="encode")
    jax.eval_shape(encode, shapes(TiedLM(), tokens(2, 6)), tokens(2, 6))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("haed", "o=f32"), "nearest paths: 'head'"),
        (Rule("Dense_0:kernle", "c=f32"), "nearest paths: 'Dense_0:kernel'"),
        (Rule(module_type="RMSNorm", policy="c=f32"), "nearest types: LayerNorm"),
        (Rule("head", "o=f32"), ""),
        (Rule("head:bias", "c=f32"), ""),
        (Rule(module_type="Dense", policy="c=f32"), ""),
        (Rule("haed", "o=f32", required=False), ""),
    ],
)
def test_variables_of_the_plain_model_judge_rules_too(rule, message):
    model, variables = apply_policy(MLP(), PolicyMap(MIXED, [rule])), MLP().init(KEY, floats(2, 8))
    is_told = pytest.warns(RecipeWarning, match=message) if message else contextlib.nullcontext()
    with is_told:
        model.apply(variables, floats(2, 8))
    model.apply(variables, floats(2, 8))


def test_a_rule_may_match_a_module_that_a_call_does_not_enter():
    class Auxiliary(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            if train:
                x = nn.LayerNorm(name="norm")(nn.Dense(8, name="extra")(x))
            return nn.Dense(4, name="head")(x)

    variables = Auxiliary().init(KEY, floats(2, 8), True)
    for rule in (Rule("extra", "c=f32"), Rule(module_type="LayerNorm", policy="c=f32")):
        apply_policy(Auxiliary(), PolicyMap(MIXED, [rule])).apply(variables, floats(2, 8), False)


def test_rules_are_judged_at_every_init_of_a_jitted_model():
    model = apply_policy(nn.jit(MLP)(), PolicyMap(MIXED, [Rule("head", "o=f32")]))
    for _ in range(2):
        model.init(KEY, floats(2, 8))


# ---------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------


@EXPENSIVE
def test_a_bound_model_is_refused_with_a_fix_that_works():
    x = floats(2, 8)
    variables = MLP().init(KEY, x)
    with pytest.raises(CompositionError, match=r"recipe\.wrap\(model\)\.bind\(variables\)"):
        apply_policy(MLP().bind(variables), MIXED)
    recipe = jaxmp.load_recipe(BF16)
    assert recipe.wrap(MLP()).bind(variables)(x).dtype == jnp.bfloat16


def test_a_method_that_is_assigned_to_the_class_later_is_called():
    class Model(nn.Module):
        def setup(self):
            self.dense = nn.Dense(2)

        def __call__(self, x):
            return self.dense(x)

    model = apply_policy(Model(), BF16)
    params = model.init(KEY, floats(2, 3))
    before = model.apply(params, floats(2, 3))
    Model.__call__ = lambda self, x: 2 * self.dense(x)
    assert np.array_equal(model.apply(params, floats(2, 3)), 2 * before)
