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


# ---------------------------------------------------------------------------
# Tunix
# ---------------------------------------------------------------------------


@step(
    "Tunix, Qwen3 0.6B",
    "tunix",
    ".",
    "tunix/sft/peft_trainer.py, tunix/models/qwen3/model.py",
    "supervised fine-tuning of all parameters by PeftTrainer: qwen3_0p6b with 4 of 28 layers, "
    "parameters in bfloat16 as the checkpoint has them, 1024 tokens, batch 8, AdamW",
    absent=("perfetto", "pandas", "numba", "datasets", "metrax"),
)
def tunix(module: Callable[[str], Any]) -> Audited:
    qwen3 = module("tunix.models.qwen3.model")
    trainer_lib = module("tunix.sft.peft_trainer")
    config = qwen3.ModelConfig.qwen3_0p6b()
    config.num_layers = 4
    config.dtype = config.param_dtype = jnp.bfloat16
    made = {}

    def make() -> Any:
        model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
        trainer = trainer_lib.PeftTrainer(
            model, optax.adamw(1e-5), trainer_lib.TrainingConfig(eval_every_n_steps=1, max_steps=1)
        )
        made["trainer"] = trainer
        return trainer.model, trainer.optimizer, trainer.grad_accumulator

    state = nnx.eval_shape(make)
    batch = {
        "input_tokens": shape(8, 1024),
        "input_mask": shape(8, 1024, dtype=jnp.bool_),
        "positions": shape(8, 1024),
        "attention_mask": shape(8, 1024, 1024, dtype=jnp.bool_),
    }
    train_step = made["trainer"]._train_step
    fn = nnx.jit(train_step, donate_argnames=("optimizer", "grad_accumulator"))
    return Audited(fn, (*state, batch, shape(dtype=jnp.bool_)), "bf16")


# ---------------------------------------------------------------------------
# big_vision
# ---------------------------------------------------------------------------


class Captured(Exception):
    """Ends a script at the first call of its training step."""


def captured(main: Callable[[], Any], name: str) -> tuple[Any, dict[str, Any], list[Any]]:
    """Runs a script up to its step, which is a local function, without computing anything.

    Returns:
      The step, the keywords of its `jax.jit`, and the shapes that earlier jitted functions return.
    """
    shapes = []

    def jit(fn: Callable[..., Any], **options: Any) -> Any:
        if getattr(fn, "__name__", "") == name:
            raise Captured(fn, options)

        def call(*args: Any) -> Any:
            shapes.append(jax.eval_shape(fn, *args))
            return shapes[-1]

        return call

    try:
        with mock.patch.object(jax, "jit", jit):
            main()
    except Captured as step:
        return (*step.args, shapes)
    raise ValueError(f"The script ended before it compiled {name}.")


@step(
    "big_vision, ViT-S/16",
    "big_vision",
    ".",
    "big_vision/train.py, big_vision/models/vit.py",
    "configs/vit_s16_i1k.py with model.dtype_mm='bfloat16': 12 layers, width 384, 6 heads, "
    "224 x 224 pixels, batch 1024, Adam with a bfloat16 first moment",
)
def big_vision(module: Callable[[str], Any]) -> Audited:
    # The script parses JAX's flags and forbids implicit transfers, which would hold for us too.
    with mock.patch.object(jax.config, "parse_flags_with_absl"):
        train = module("big_vision.train")
    jax.config.update("jax_transfer_guard", "allow")
    config = module("big_vision.configs.vit_s16_i1k").get_config()
    config.model.dtype_mm = "bfloat16"
    images = config.input.batch_size, 224, 224, 3
    spec = SimpleNamespace(shape=images, dtype=SimpleNamespace(as_numpy_dtype="float32"))
    dataset = SimpleNamespace(element_spec={"image": spec})
    flags = SimpleNamespace(FLAGS=SimpleNamespace(config=config, workdir=None))
    pipeline = SimpleNamespace(
        training=lambda config: (dataset, 1_268_355), start_global=lambda *args: iter(())
    )
    with (
        mock.patch.object(train, "flags", flags),
        mock.patch.object(train, "input_pipeline", pipeline),
        mock.patch.object(train, "importlib", SimpleNamespace(import_module=imported(module))),
    ):
        fn, options, (params, opt) = captured(lambda: train.main([]), "update_fn")
    batch = {
        "image": shape(*images, dtype=jnp.float32),
        "labels": shape(config.input.batch_size, config.num_classes, dtype=jnp.float32),
    }
    return Audited(jax.jit(fn, **options), ({"params": params, "opt": opt}, OLD_KEY, batch), "bf16")


def imported(module: Callable[[str], Any]) -> Callable[[str], Any]:
    """An import that leaves out preprocessing, which needs TensorFlow."""
    return lambda name: None if ".pp." in name else module(name)


# ---------------------------------------------------------------------------
# Levanter
# ---------------------------------------------------------------------------


@step(
    "Levanter, GPT-2 small",
    "levanter",
    "src",
    "src/levanter/trainer.py, src/levanter/models/gpt2.py",
    "config/gpt2_small.yaml, batch 32 of 512: 12 layers, width 768, 12 heads, 1024 tokens, "
    "vocabulary 50,257, jmp policy p=f32,c=bfloat16, gradient checkpointing, AdamW",
    absent=(
        "git",
        "tqdm_loggable",
        "pyarrow",
        "tblib",
        "async_lru",
        "braceexpand",
        "pytimeparse",
        "ray",
        "humanfriendly",
        "deepdiff",
        "dataclasses_json",
    ),
)
def levanter(module: Callable[[str], Any]) -> Audited:
    eqx, hax, jmp = module("equinox"), module("haliax"), module("jmp")
    trainer_lib, gpt2 = module("levanter.trainer"), module("levanter.models.gpt2")
    lm, optim = module("levanter.models.lm_model"), module("levanter.optim")
    attention = module("levanter.layers.attention")
    config = gpt2.Gpt2Config(
        hidden_dim=768,
        num_heads=12,
        num_layers=12,
        seq_len=1024,
        gradient_checkpointing=True,
        scale_attn_by_inverse_layer_idx=True,
        attn_backend=attention.AttentionBackend.JAX_FLASH,
    )
    tracker = module("levanter.tracker").NoopConfig()
    options = trainer_lib.TrainerConfig(
        id="audit",
        tracker=tracker,
        mp=jmp.get_policy("p=f32,c=bfloat16"),
        train_batch_size=32,
        num_train_steps=100,
        load_checkpoint=False,
    )
    optimizer = optim.AdamConfig(learning_rate=6e-4, weight_decay=0.1, min_lr_ratio=0.1).build(100)
    trainer = trainer_lib.Trainer(
        options,
        optimizer,
        functools.partial(lm.compute_next_token_loss, reduction=None),
        add_default_hooks=False,
    )
    axes = hax.Axis("batch", 32), config.Pos

    def init(key: Any) -> Any:
        model = config.build(hax.Axis("vocab", 50_257), key=key)
        return trainer_lib.TrainerState.init(optimizer, model, key=key, mp=options.mp)

    # A function that Haliax 1.4 calls and that JAX has made private.
    jax.core.__dict__.setdefault("is_constant_dim", lambda size: isinstance(size, int))
    context = contextlib.ExitStack()
    context.enter_context(jax.set_mesh(trainer.device_mesh))
    context.enter_context(trainer)
    state = eqx.filter_eval_shape(init, OLD_KEY)
    tokens = mask = jax.eval_shape(lambda: hax.zeros(axes, dtype=jnp.int32))
    arrays, static = eqx.partition(state, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    causal = attention.AttentionMask.causal()

    def train_step(arrays: Any, tokens: Any, mask: Any) -> Any:
        example = lm.LmExample(tokens=tokens, loss_mask=mask, attn_mask=causal)
        loss, new, *_ = trainer._train_step(eqx.combine(arrays, static), (example,), {}, True)
        return eqx.filter(new, eqx.is_array), loss

    fn = jax.jit(train_step, donate_argnums=0)
    return Audited(fn, (arrays, tokens, mask), "bf16", context=context)


# ---------------------------------------------------------------------------
# MaxText
# ---------------------------------------------------------------------------


@step(
    "MaxText, Llama 2 7B",
    "maxtext",
    "src",
    "src/maxtext/trainers/pre_train/train.py, src/maxtext/layers, src/maxtext/models/llama2.py",
    "configs/base.yml with model_name=llama2-7b, 2 of 32 layers, attention=dot_product, batch 2: "
    "width 4096, 32 heads, 2048 tokens, vocabulary 32,000, bfloat16, AdamW",
    absent=(
        "pathwaysutils",
        "jinja2",
        "tokamax",
        "drjax",
        "tiktoken",
        "sympy",
        "ml_goodput_measurement",
    ),
)
def maxtext(module: Callable[[str], Any]) -> Audited:
    pyconfig = module("maxtext.configs.pyconfig")
    compile_lib = module("maxtext.trainers.pre_train.train_compile")
    base = Path(pyconfig.__file__).with_name("base.yml")
    config = pyconfig.initialize(
        [
            "train",
            str(base),
            "run_name=audit",
            "model_name=llama2-7b",
            "override_model_config=true",
            "base_num_decoder_layers=2",
            "attention=dot_product",
            "per_device_batch_size=2",
            "hardware=cpu",
            "skip_jax_distributed_system=true",
            "enable_checkpointing=false",
            "dataset_type=synthetic",
            "log_config=false",
        ]
    )
    utils, sharding = compile_lib.maxtext_utils, compile_lib.sharding
    devices = utils.create_device_mesh(config, jax.devices()[:1])
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)
    args, kwargs, shardings, _, model = compile_lib.get_shaped_inputs(mesh, config)
    params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    fn, inputs, outputs, static, donated = utils.get_functional_train_with_signature(
        compile_lib.train.train_step,
        sharding.get_input_data_sharding(config, mesh),
        shardings,
        model,
        config,
        params,
    )
    step = jax.jit(
        fn,
        in_shardings=inputs,
        out_shardings=outputs,
        static_argnums=static,
        donate_argnums=donated,
    )
    context = contextlib.ExitStack()
    context.enter_context(jax.set_mesh(mesh))
    context.enter_context(mesh)
    rules = compile_lib.nn_partitioning.axis_rules(config.logical_axis_rules)
    context.enter_context(rules)
    return Audited(step, args, "bf16", kwargs, context)
