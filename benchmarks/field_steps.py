"""Training steps of other projects, as their scripts make them: functions and shapes of arguments.

Each step is imported from a checkout, at the sizes that the project sets, and nothing is computed.
Packages that are not installed (input pipelines, logging) are replaced by stand-ins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state

from script_ports import ABSENT, imports


class Audited(NamedTuple):
    """A training step, and what `jaxmp.audit` gets with it.

    fn: the step, jitted as the project jits it.
    args: shapes of its arguments.
    policies: what the project's own settings ask for.
    kwargs: shapes of its keyword arguments.
    context: what the project enters around the step, such as its mesh.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    policies: str
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()


class Step(NamedTuple):
    """A training step of another project.

    name: what the tables call it.
    checkout: folder of the project among the checkouts.
    folder: folder in the checkout that goes on the path.
    source: the files that define step and model.
    size: the audited sizes, as text.
    make: gets a function that imports a module of the project.
    absent: further packages that are replaced by stand-ins.
    """

    name: str
    checkout: str
    folder: str
    source: str
    size: str
    make: Callable[[Callable[[str], Any]], Audited]
    absent: Sequence[str] = ()


STEPS: dict[str, Step] = {}


def step(
    name: str, checkout: str, folder: str, source: str, size: str, absent: Sequence[str] = ()
) -> Callable[..., Any]:
    """Registers a function that makes a training step out of a project's modules."""

    def register(make: Callable[..., Audited]) -> Callable[..., Audited]:
        STEPS[name] = Step(name, checkout, folder, source, size, make, absent)
        return make

    return register


def project(step: Step, checkouts: Path) -> Any:
    """Gives a function that imports modules of a project from its checkout."""
    folder = (checkouts / step.checkout / step.folder).resolve()
    packages = {*ABSENT, *step.absent}
    return imports(folder, sorted(p for p in packages if importlib.util.find_spec(p) is None))


def shape(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


KEY = jax.eval_shape(lambda: jax.random.key(0))
OLD_KEY = jax.eval_shape(lambda: jax.random.PRNGKey(0))

# ---------------------------------------------------------------------------
# nanodo
# ---------------------------------------------------------------------------


@step(
    "nanodo",
    "nanodo",
    ".",
    "nanodo/train.py, nanodo/model.py",
    "configs/default.py unchanged: 6 layers, width 512, 8 heads, 512 tokens, batch 256, "
    "vocabulary 32,000, bfloat16, AdamW",
)
def nanodo(module: Callable[[str], Any]) -> Audited:
    train = module("nanodo.train")
    config = module("nanodo.configs.default").get_config()
    # The settings that the script's own main() adds are not needed by the step.
    model, loss = module("nanodo.model_factory").get_model_and_loss(config, 32_000)
    tx = module("nanodo.optimizer").get_optimizer(config.opt)

    def init(key: Any, tokens: Any) -> Any:
        params = model.init(key, tokens)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    state = jax.eval_shape(init, OLD_KEY, shape(1, config.model.L))
    fn = jax.jit(
        functools.partial(train._train_step, c=config, get_loss_fn=loss),
        donate_argnames=("state", "in_BxL"),
    )
    return Audited(fn, (state, shape(config.batch_size, config.model.L)), "bf16")


# ---------------------------------------------------------------------------
# Flax: examples/lm1b, wmt, gemma, imagenet
# ---------------------------------------------------------------------------


def transformer_fields(config: Any) -> dict[str, Any]:
    """Returns the fields of `TransformerConfig` that the scripts of lm1b and wmt set alike."""
    return {
        "vocab_size": config.vocab_size,
        "output_vocab_size": config.vocab_size,
        "logits_via_embedding": config.logits_via_embedding,
        "emb_dim": config.emb_dim,
        "num_heads": config.num_heads,
        "num_layers": config.num_layers,
        "qkv_dim": config.qkv_dim,
        "mlp_dim": config.mlp_dim,
        "max_len": max(config.max_target_length, config.max_eval_target_length),
        "dropout_rate": config.dropout_rate,
        "attention_dropout_rate": config.attention_dropout_rate,
    }


def flax_optimizer(train: Any, config: Any) -> tuple[Any, optax.GradientTransformation]:
    """Returns the learning rate schedule and the optimizer of Flax's examples."""
    schedule = train.create_learning_rate_schedule(
        learning_rate=config.learning_rate, warmup_steps=config.warmup_steps
    )
    tx = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)
    return schedule, tx


@step(
    "Flax lm1b",
    "flax",
    "examples/lm1b",
    "examples/lm1b/train.py, models.py",
    "configs/default.py unchanged: 6 layers, width 512, 8 heads, 128 tokens, batch 32, "
    "vocabulary 30,000, bfloat16, AdamW",
)
def lm1b(module: Callable[[str], Any]) -> Audited:
    train, models = module("train"), module("models")
    config = module("configs.default").get_config()
    dtype = jnp.bfloat16 if config.use_bfloat16 else jnp.float32
    model_config = models.TransformerConfig(dtype=dtype, **transformer_fields(config))
    model = models.TransformerLM(model_config.replace(deterministic=True))
    schedule, tx = flax_optimizer(train, config)
    tokens = shape(config.per_device_batch_size, config.max_target_length)

    def init(key: Any, tokens: Any) -> Any:
        params = model.init(key, tokens)["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    state = jax.eval_shape(init, OLD_KEY, tokens)
    keys = ("inputs", "inputs_position", "inputs_segmentation")
    batch = {key: tokens for key in keys}
    fn = jax.jit(train.train_step, static_argnums=(2, 3, 4), donate_argnums=0)
    return Audited(fn, (state, batch, model_config, schedule, 0.0, OLD_KEY), "bf16")


@step(
    "Flax wmt",
    "flax",
    "examples/wmt",
    "examples/wmt/train.py, models.py",
    "configs/default.py unchanged: 6 + 6 layers, width 1024, 16 heads, 256 tokens, batch 32, "
    "vocabulary 32,000, float16 with a loss scale (its choice on a GPU), AdamW",
)
def wmt(module: Callable[[str], Any]) -> Audited:
    train, models = module("train"), module("models")
    config = module("configs.default").get_config()
    with mock.patch.object(jax, "local_devices", lambda: [SimpleNamespace(platform="gpu")]):
        dtype = train.preferred_dtype(config)
    model_config = models.TransformerConfig(
        dtype=dtype, share_embeddings=config.share_embeddings, **transformer_fields(config)
    )
    model = models.Transformer(model_config.replace(deterministic=True))
    schedule, tx = flax_optimizer(train, config)
    size = config.per_device_batch_size, config.max_target_length
    replicated = functools.partial(
        jax.tree.map, lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype)
    )

    def init(key: Any) -> Any:
        params = model.init(key, jnp.ones(size), jnp.ones(size))["params"]
        scale = train.dynamic_scale_lib.DynamicScale() if dtype == jnp.float16 else None
        return train.TrainState.create(
            apply_fn=model.apply, params=params, tx=tx, dynamic_scale=scale
        )

    state = jax.eval_shape(init, KEY)
    batch = {key: shape(*size) for key in ("inputs", "targets")}
    fn = jax.pmap(
        functools.partial(
            train.train_step,
            config=model_config,
            learning_rate_fn=schedule,
            label_smoothing=config.label_smoothing,
        ),
        axis_name="batch",
        donate_argnums=(0,),
    )
    arguments = replicated(state), replicated(batch)
    return Audited(fn, arguments, "fp16", {"dropout_rng": replicated(KEY)})


@step(
    "Flax gemma",
    "flax",
    "examples/gemma",
    "examples/gemma/train.py, transformer.py, modules.py",
    "configs/default.py, but 6 of 26 layers: gemma3_1b, width 1152, 128 tokens, batch 32, "
    "vocabulary 35,008, bfloat16, AdamW",
)
def gemma(module: Callable[[str], Any]) -> Audited:
    train, transformer = module("train"), module("transformer")
    configuration = module("transformer_cfg")
    config = module("configs.default").get_config()
    model_config = configuration.TransformerConfig.from_version_name(
        config.transformer_name,
        num_embed=config.vocab_size,
        dtype=jnp.bfloat16 if config.use_bfloat16 else jnp.float32,
    )
    model_config = dataclasses.replace(
        model_config, num_layers=6, attention_types=model_config.attention_types[:6]
    )
    _, tx = flax_optimizer(train, config)

    def make() -> Any:
        model = transformer.Transformer(model_config, rngs=nnx.Rngs(params=0, dropout=0))
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        return model, optimizer, nnx.Rngs(params=0, dropout=0), metrics

    state = nnx.eval_shape(make)
    tokens = shape(config.per_device_batch_size, config.max_target_length)
    keys = ("inputs", "inputs_position", "inputs_segmentation", "targets")
    step = functools.partial(train.jax_train_step, with_capture=True)
    fn = jax.jit(
        step, static_argnames=("label_smoothing", "pad_id"), donate_argnames=("model", "optimizer")
    )
    model, optimizer, rngs, metrics = state
    return Audited(fn, (model, optimizer, rngs, dict.fromkeys(keys, tokens), metrics), "bf16")
