"""Test networks, each implemented in Linen and in NNX."""

import dataclasses
import functools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxmp
import jaxmp.nnx
import models_linen as in_linen
import models_nnx as in_nnx
from arrays import floats
from jaxmp import PolicyMap, Rule, get_policy
from jaxmp._flax._linen_interceptor import module_paths
from programs import equations

MIXED = "p=f32,c=bf16,o=f32"
# The name scopes of norms.
NORM = re.compile(r"/\w*(norm|_ln)", re.IGNORECASE)


def tokens(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, 32, size=shape), jnp.int32)


# ---------------------------------------------------------------------------
# A test network in both frameworks
# ---------------------------------------------------------------------------

Renames = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Case:
    """A test network, its inputs, and the rules and exceptions that it requires."""

    name: str
    args: Callable[[], tuple[Any, ...]]
    # A Linen module, and `rngs -> NNX module`; None if the framework does not have such layers.
    linen: Any
    nnx: Any
    _: dataclasses.KW_ONLY
    rules: tuple[Rule, ...] = ()
    # Regular expressions and replacements that convert the path of a parameter in NNX to its path
    # in Linen. None if the shapes of the parameters differ.
    linen_names: Renames | None = ()
    # The code that violates strict promotion, Flax or the model; "" if there is none.
    promotes: str = ""

    def policies(self, default: str = MIXED) -> PolicyMap:
        return PolicyMap(get_policy(default), self.rules)

    def promotion(self) -> Any:
        return jax.numpy_dtype_promotion("standard" if self.promotes else "strict")

    def linen_path(self, path: tuple[Any, ...]) -> str:
        """Returns the Linen path of the NNX leaf at `path`; list members are named `list_0`."""
        name = re.sub(r"/(\d+)", r"_\1", "/".join(map(str, path)))
        for pattern, replacement in self.linen_names or ():
            name = re.sub(pattern, replacement, name)
        return name

    def __str__(self) -> str:
        return self.name

    @property
    def is_twin(self) -> bool:
        """Returns True if the Linen and the NNX network have the same parameters."""
        return None not in (self.linen, self.nnx, self.linen_names)


class Build:
    """A test network in one framework."""

    framework: str

    def __init__(self, case: Case) -> None:
        self.case = case

    def __str__(self) -> str:
        return f"{self.case.name}-{self.framework}"

    def model(self, policies: str | None = None) -> Any:
        """Returns the model under these policies and the rules of the case; unwrapped for None."""
        raise NotImplementedError

    def function(self, policies: str | None) -> tuple[Callable[..., Any], Any]:
        """Returns `params -> (output, other state)`, and the parameters in their storage dtypes."""
        raise NotImplementedError

    def classes(self) -> set[str]:
        """Returns the class names of the modules of the model."""
        raise NotImplementedError

    def stored(self, params: Any, policies: str | None) -> Any:
        return params if policies is None else get_policy(policies).cast_to_param(params)

    @functools.cache  # noqa: B019  (as many builds as there are tests of them)
    def gradient(self, policies: str | None) -> Any:
        """Traces `params -> (gradients of the mean square of the output, (output, other state))`.

        All tests of a network use this program.
        """
        function, params = self.function(policies)

        def loss(params: Any) -> Any:
            out, state = function(params)
            return jnp.square(out.astype(jnp.float32)).mean(), (out, state)

        with self.case.promotion():
            return jax.jit(jax.grad(loss, has_aux=True)).trace(params)

    def program(self, policies: str | None) -> list[Any]:
        """Returns the equations of `gradient`, including those of the forward pass."""
        return list(equations(self.gradient(policies).jaxpr.jaxpr))

    @functools.cache  # noqa: B019
    def forward(self, policies: str | None) -> tuple[list[Any], Any, Any]:
        """Returns the equations of the forward pass, and the shapes of `(output, other state)`."""
        function, params = self.function(policies)
        with self.case.promotion():
            jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(params)
        return list(equations(jaxpr.jaxpr)), *shapes

    @functools.cache  # noqa: B019
    def run(self, policies: str | None) -> tuple[Any, Any, Any]:
        """Runs `gradient`; returns `(output, other state, gradients)`."""
        _, params = self.function(policies)
        lowered = self.gradient(policies).lower()
        gradients, (out, state) = lowered.compile()(params)
        return out, state, gradients

    @functools.cache  # noqa: B019
    def output(self, policies: str | None) -> Any:
        """Runs the forward pass alone; returns the output."""
        function, params = self.function(policies)
        with self.case.promotion():
            return jax.jit(lambda params: function(params)[0])(params)


class LinenBuild(Build):
    framework = "linen"

    def model(self, policies: str | None = None) -> Any:
        if policies is None:
            return self.case.linen
        return jaxmp.load_recipe(self.case.policies(policies)).wrap(self.case.linen)

    @functools.cached_property
    def variables(self) -> Any:
        random = np.random.default_rng(1)
        with self.case.promotion():
            shapes = jax.eval_shape(self.model().init, jax.random.key(0), *self.case.args())
        return {
            name: jax.tree.map(lambda leaf: fill(leaf, name, random), collection)
            for name, collection in nn.meta.unbox(shapes).items()
        }

    @property
    def numbers(self) -> dict[str, jax.Array]:
        """Returns path -> value of every parameter and statistic, without the collection."""
        leaves = jax.tree_util.tree_leaves_with_path(self.variables)
        return {"/".join(key.key for key in path[1:]): leaf for path, leaf in leaves}

    def function(self, policies: str | None) -> tuple[Callable[..., Any], Any]:
        model, variables = self.model(policies), self.variables
        state = {name: value for name, value in variables.items() if name != "params"}

        def run(params: Any) -> Any:
            return model.apply({"params": params, **state}, *self.case.args(), mutable=list(state))

        return run, self.stored(variables["params"], policies)

    def classes(self) -> set[str]:
        with self.case.promotion():
            paths = module_paths(self.case.linen, self.case.args(), {}, None, {})
        return {cls.__name__ for cls in paths.values() if cls is not None}


@functools.cache
def linen_build(case: Case) -> LinenBuild:
    return LinenBuild(case)


class NNXBuild(Build):
    """A test network in NNX, with the parameters of its Linen counterpart if there is one."""

    framework = "nnx"

    def model(self, policies: str | None = None) -> Any:
        if policies is None:
            return self.plain
        return jaxmp.load_recipe(self.case.policies(policies)).wrap(self.plain)

    @functools.cached_property
    def plain(self) -> Any:
        abstract = nnx.eval_shape(lambda: self.case.nnx(nnx.Rngs(0)))
        graphdef, state = nnx.split(abstract)
        twin = linen_build(self.case).numbers if self.case.is_twin else {}
        random = np.random.default_rng(1)

        def value(path: tuple[Any, ...], variable: Any) -> jax.Array:
            name = self.case.linen_path(path)
            if name in twin:
                return twin[name]
            return fill(variable.get_raw_value(), type(variable).__name__, random)

        leaves = nnx.to_flat_state(state)
        filled = [(path, leaf.replace(value(path, leaf))) for path, leaf in leaves]
        return nnx.merge(graphdef, nnx.from_flat_state(filled))

    def function(self, policies: str | None) -> tuple[Callable[..., Any], Any]:
        graphdef, params, rest = nnx.split(self.model(policies), nnx.Param, ...)

        def run(params: Any) -> Any:
            model = nnx.merge(graphdef, params, rest, copy=True)
            return model(*self.case.args()), nnx.state(model, nnx.Not(nnx.Param))

        return run, self.stored(params, policies)

    def classes(self) -> set[str]:
        return {type(module).__name__ for _, module in nnx.iter_modules(self.plain)}


def fill(leaf: Any, kind: str, random: np.random.Generator) -> jax.Array:
    """Fills a leaf: parameters have size 1 / sqrt(fan-in), statistics are 1, and counts are 0."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    if kind in ("batch_stats", "BatchStat", "RngCount"):
        return jnp.full(leaf.shape, kind != "RngCount", leaf.dtype)
    fan_in = max(leaf.size // leaf.shape[-1], 1)
    return jnp.asarray(random.normal(size=leaf.shape) * fan_in**-0.5, leaf.dtype)


# ---------------------------------------------------------------------------
# List of networks
# ---------------------------------------------------------------------------

_ROUTER = Rule("**/router/**", "c=f32", why="routing is a discrete decision")
_HEAD = Rule("lm_head", "o=f32", why="the loss reads FP32 logits")
_POOL = "nn.avg_pool divides by an int"
_GATES = "Flax's gated cells multiply the FP32 state with a bfloat16 gate"

# Linen generates names for these layers.
_MLP = (("hidden", "Dense_0"), ("norm", "LayerNorm_0"))
_BLOCK = (
    (r"\battention\b", "MultiHeadDotProductAttention_0"),
    (r"\bnorm1\b", "LayerNorm_0"),
    (r"\bnorm2\b", "LayerNorm_1"),
)
_TRANSFORMER = (*_BLOCK, (r"^norm\b", "LayerNorm_0"), ("^blocks_", "block_"))
_CELL = (("^rnn/", ""), (r"\bif_\b", "if"), ("dense_", ""))


def _vectors() -> tuple[Any, ...]:
    return (floats(4, 8),)


def _sequences() -> tuple[Any, ...]:
    return (floats(2, 5, 8),)


def _sentences() -> tuple[Any, ...]:
    return (tokens(2, 6),)


def _images() -> tuple[Any, ...]:
    return (floats(2, 8, 8, 3),)


def _recurrent(name: str, cell: str, **about: Any) -> Case:
    linen = in_linen.Recurrent(getattr(nn, cell))
    return Case(name, _sequences, linen, partial(in_nnx.Recurrent, getattr(nnx, cell)), **about)


def _with_rule(name: str, case: Case, rule: Rule, **about: Any) -> Case:
    return dataclasses.replace(case, name=name, rules=(rule,), **about)


_mlp = Case("mlp", _vectors, in_linen.MLP(), in_nnx.MLP, linen_names=_MLP)
_tied = Case("tied", _sentences, in_linen.TiedLM(), in_nnx.TiedLM)
_cnn = Case("cnn", _images, in_linen.CNN(), in_nnx.CNN, promotes=_POOL)

CASES = [
    _mlp,
    _with_rule("mlp_wide_head", _mlp, Rule("head", "o=f32")),
    Case("einsum", _vectors, in_linen.Einsum(), in_nnx.Einsum),
    _tied,
    _with_rule(
        "tied_wide",
        _tied,
        Rule("embed", "o=f32"),
        promotes="TiedLM adds the FP32 embedding to its bfloat16 body",
    ),
    _cnn,
    _with_rule("cnn_wide", _cnn, Rule("conv", "o=f32")),
    _recurrent("lstm", "LSTMCell", linen_names=_CELL, promotes=_GATES),
    _recurrent("simple_cell", "SimpleCell", linen_names=_CELL),
    # NNX stores the gates of these layers in one kernel.
    _recurrent("fast_lstm", "OptimizedLSTMCell", linen_names=None, promotes=_GATES),
    _recurrent("gru", "GRUCell", linen_names=None, promotes=_GATES),
    Case(
        "bidirectional",
        _sequences,
        in_linen.Bidirectional(),
        in_nnx.Bidirectional,
        linen_names=None,
        promotes=_GATES,
    ),
    Case("mgu", _sequences, in_linen.Recurrent(nn.MGUCell), None, promotes=_GATES),
    Case(
        "conv_lstm",
        lambda: (floats(2, 3, 8, 8, 1),),
        in_linen.ConvRecurrent(),
        None,
        promotes=_GATES,
    ),
    Case("attention", _sequences, in_linen.Attention(), in_nnx.Attention),
    Case(
        "qk_norm",
        _sequences,
        in_linen.Attention(normalize_qk=True),
        partial(in_nnx.Attention, normalize_qk=True),
    ),
    Case("grouped_queries", _sequences, None, in_nnx.GroupedQueries),
    Case(
        "transformer",
        _sentences,
        in_linen.Transformer(),
        in_nnx.Transformer,
        rules=(_HEAD,),
        linen_names=_TRANSFORMER,
    ),
    Case(
        "scanned",
        _sentences,
        in_linen.Transformer(scanned=True),
        partial(in_nnx.Transformer, scanned=True),
        rules=(_HEAD,),
        linen_names=_TRANSFORMER,
    ),
    Case(
        "encoder_decoder",
        lambda: (tokens(2, 6), tokens(2, 5)),
        in_linen.EncoderDecoder(),
        in_nnx.EncoderDecoder,
        rules=(_HEAD,),
        linen_names=_BLOCK,
    ),
    Case("vit", _images, in_linen.ViT(), in_nnx.ViT, linen_names=_BLOCK),
    Case("unet", lambda: (floats(2, 8, 8, 1), tokens(2)), in_linen.UNet(), in_nnx.UNet),
    Case("ensemble", _vectors, in_linen.Ensemble(), in_nnx.Ensemble, linen_names=_MLP),
    Case("shared", _vectors, in_linen.Shared(), in_nnx.Shared, linen_names=(("^child/", ""),)),
    Case(
        "hard_coded",
        _vectors,
        in_linen.HardCoded(),
        in_nnx.HardCoded,
        linen_names=(("hidden", "Dense_0"),),
    ),
    Case("raw_param", _vectors, in_linen.RawParam(), in_nnx.RawParam),
    Case("nested_params", _vectors, None, in_nnx.NestedParams),
    Case(
        "moe",
        _vectors,
        in_linen.MoE(),
        in_nnx.MoE,
        rules=(_ROUTER,),
        linen_names=(("experts_", "expert_"), ("router/logits", "router/Dense_0")),
    ),
    Case("lora", _vectors, None, in_nnx.LoRA),
]

BUILDS = [
    build(case)
    for case in CASES
    for build, network in ((linen_build, case.linen), (NNXBuild, case.nnx))
    if network is not None
]
BY_NAME = {str(build): build for build in BUILDS}

TWINS = [case for case in CASES if case.is_twin]
# One build of each pair of twins, alternately in Linen and in NNX.
SECOND = {f"{case}-{('linen', 'nnx')[i % 2]}" for i, case in enumerate(TWINS)}
