"""Training scripts of other projects: the edits that port them, and functions that run them.

    python benchmarks/compatibility_scripts.py CHECKOUTS NAME SEEDS VARIANT ...

The command prints the losses of each variant as a line of JSON. `compatibility.py --scripts
CHECKOUTS` calls it for all scripts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from script_ports import (
    AUTHOR_BF16,
    AUTHOR_FP16,
    Edit,
    Losses,
    Port,
    Recorder,
    cycle,
    digits,
    measure,
    sentences,
)

Module = Callable[..., Any]
HELD_OUT = 357  # of the 1,797 digits

IMPORT = Edit(r"^import jax$", "import jax\nimport jaxmp\nrecipe = jaxmp.load_recipe('{recipe}')")
GRADIENT_WITH_AUX = Edit(
    r"jax.value_and_grad\(loss_fn, has_aux=True\)", "state.value_and_grad(loss_fn, has_aux=True)"
)

# ---------------------------------------------------------------------------
# Flax: examples/mnist
# ---------------------------------------------------------------------------

DIGITS = "scikit-learn's handwritten digits, enlarged to 28x28; a tenth of the labels is random"


class Batches:
    """The part of a `tf.data.Dataset` that a script reads."""

    def __init__(self, size: int, batch_size: int, part: slice) -> None:
        images, labels = digits(size)
        self.arrays, self.batch_size = (images[part], labels[part]), batch_size

    def as_numpy_iterator(self) -> Iterator[dict[str, np.ndarray]]:
        batches = cycle(self.arrays, self.batch_size)
        for _ in range(len(self.arrays[0]) // self.batch_size):
            yield dict(zip(("image", "label"), next(batches), strict=True))


def run_mnist(module: Module, author: bool) -> Losses:
    train = module("train")
    recorder = Recorder()
    config = module("ml_collections").ConfigDict(
        {"learning_rate": 0.02, "momentum": 0.9, "batch_size": 16, "num_epochs": 2}
    )
    parts = slice(HELD_OUT, HELD_OUT + 480), slice(HELD_OUT)
    datasets = [Batches(28, config.batch_size, part) for part in parts]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(train, "get_datasets", lambda config: datasets),
        mock.patch.object(train.tensorboard, "SummaryWriter", lambda folder: recorder),
    ):
        train.train_and_evaluate(config, folder)
    return Losses(recorder.mean("train_loss", 1), recorder.mean("test_loss", 1))


def typed_mnist(dtype: str) -> dict[str, tuple[Edit, ...]]:
    """Returns edits that set the `dtype` argument of the layers with matmuls."""
    return {
        "train.py": tuple(
            Edit(rf"(self.{name} = .*), rngs=rngs\)$", rf"\1, rngs=rngs, dtype=jax.numpy.{dtype})")
            for name in ("conv1", "conv2", "linear1", "linear2")
        )
    }


MNIST = Port(
    name="MNIST CNN",
    checkout="flax",
    folder="examples/mnist",
    framework="NNX",
    data=DIGITS,
    run=run_mnist,
    author={AUTHOR_BF16: typed_mnist("bfloat16"), AUTHOR_FP16: typed_mnist("float16")},
    absent=("orbax.export",),
    edits={
        "train.py": (
            IMPORT,
            Edit(r"nnx.value_and_grad\(loss_fn", "optimizer.value_and_grad(loss_fn"),
            Edit(
                r"model = CNN\(rngs=nnx.Rngs\(0\)\)", "model = recipe.wrap(CNN(rngs=nnx.Rngs(0)))"
            ),
            Edit(r"optimizer = nnx.Optimizer\(", "optimizer = jaxmp.nnx.Optimizer("),
            Edit(
                r"model, optax.sgd\(learning_rate, momentum\), wrt=nnx.Param",
                "model, recipe.optimizer(optax.sgd(learning_rate, momentum)), wrt=nnx.Param",
            ),
        )
    },
)

# ---------------------------------------------------------------------------
# Flax: examples/vae
# ---------------------------------------------------------------------------


def run_vae(module: Module, author: bool) -> Losses:
    train = module("train")
    images = (digits(28)[0].reshape(-1, 784) > 0.5).astype(np.float32)
    heldout, images = images[:HELD_OUT], images[HELD_OUT:]
    steps, batch_size, losses = 300, 32, []
    original = train.eval_f

    def eval_f(params: Any, batch: Any, *args: Any) -> Any:
        losses.append(original(params, images[:HELD_OUT], *args)[0]["loss"])
        result = original(params, batch, *args)
        losses.append(result[0]["loss"])
        return result

    builder = mock.MagicMock()
    builder.info.splits = {"train": SimpleNamespace(num_examples=steps * batch_size)}
    pipeline = SimpleNamespace(
        build_train_set=lambda size, builder: (batch for (batch,) in cycle((images,), size)),
        build_test_set=lambda builder: heldout,
    )
    config = module("ml_collections").ConfigDict(
        {"learning_rate": 0.001, "latents": 20, "batch_size": batch_size, "num_epochs": 1}
    )
    with (
        mock.patch.object(train, "eval_f", eval_f),
        mock.patch.object(train, "input_pipeline", pipeline),
        mock.patch.object(train, "vae_utils", mock.MagicMock()),
        mock.patch.object(train.tfds, "builder", lambda name: builder),
    ):
        train.train_and_evaluate(config, "unused")
    return Losses(*losses[-2:])


VAE = Port(
    name="Variational autoencoder",
    checkout="flax",
    folder="examples/vae",
    framework="Linen",
    data="the same digits, black and white; the training step is compiled here",
    run=run_vae,
    # The original step is not compiled, and a run would take minutes.
    toy={
        "train.py": (
            Edit(
                r"^def train_step\(", "@lambda fn: jax.jit(fn, static_argnums=3)\ndef train_step("
            ),
        )
    },
    edits={
        "models.py": (
            Edit(
                r"^import jax.numpy as jnp$",
                "import jax.numpy as jnp\nimport jaxmp\nrecipe = jaxmp.load_recipe('{recipe}')",
            ),
            Edit(r"return VAE\(latents=latents\)", "return recipe.wrap(VAE(latents=latents))"),
        ),
        "train.py": (
            Edit(r"^import ml_collections$", "import jaxmp\nimport ml_collections"),
            Edit(
                r"grads = jax.grad\(loss_fn\)\(state.params\)",
                "_, grads = state.value_and_grad(loss_fn)()",
            ),
            Edit(r"train_state.TrainState.create\(", "jaxmp.TrainState.create("),
            Edit(
                r"tx=optax.adam\(config.learning_rate\)",
                "tx=models.recipe.optimizer(optax.adam(config.learning_rate))",
            ),
        ),
    },
)

# ---------------------------------------------------------------------------
# Flax: examples/imagenet
# ---------------------------------------------------------------------------


def run_imagenet(module: Module, author: bool) -> Losses:
    train = module("train")
    recorder = Recorder()
    steps, batch_size, size = 60, 16, 32
    images, labels = digits(size)
    images = np.concatenate([images, 1 - images, images**2], axis=-1)
    parts = {True: slice(HELD_OUT, None), False: slice(HELD_OUT)}
    devices = jax.local_device_count()

    def create_input_iter(*args: Any, train: bool, **kwargs: Any) -> Iterator[Any]:
        arrays = images[parts[train]], labels[parts[train]]
        for batch in cycle(arrays, batch_size):
            shards = [array.reshape(devices, -1, *array.shape[1:]) for array in batch]
            yield dict(zip(("image", "label"), shards, strict=True))

    builder = mock.MagicMock()
    builder.info.splits = {"train": SimpleNamespace(num_examples=steps * batch_size)}
    config = module("ml_collections").ConfigDict(
        {
            "model": "_ResNet1",
            "dataset": "digits",
            "learning_rate": 2.0,
            "momentum": 0.9,
            "batch_size": batch_size,
            "num_epochs": 1,
            "warmup_epochs": 0,
            "num_train_steps": steps,
            "steps_per_eval": HELD_OUT // batch_size,
            "half_precision": author,
            "cache": False,
            "prefetch": 1,
            "shuffle_buffer_size": 1,
            "profile": False,
            "log_every_steps": 10,
        }
    )
    with (
        mock.patch.object(train, "create_input_iter", create_input_iter),
        mock.patch.object(train, "NUM_CLASSES", 10),
        mock.patch.object(train, "save_checkpoint", lambda state, workdir: None),
        mock.patch.object(train, "restore_checkpoint", lambda state, workdir: state),
        mock.patch.object(train.tfds, "builder", lambda name: builder),
        mock.patch.object(train.metric_writers, "create_default_writer", lambda **kwargs: recorder),
    ):
        train.train_and_evaluate(config, "unused")
    return Losses(recorder.mean("train_loss", 2), recorder.mean("eval_loss", 1))


IMAGENET = Port(
    name="ImageNet ResNet",
    checkout="flax",
    folder="examples/imagenet",
    framework="Linen",
    data="the same digits at 32x32 in 3 channels; ResNet of one block, pmap over two CPU devices",
    run=run_imagenet,
    devices=2,
    toy={"train.py": (Edit(r"image_size = 224", "image_size = 32"),)},
    author={AUTHOR_BF16: {"train.py": (Edit(r"(model_dtype = )jnp.float16", r"\1jnp.bfloat16"),)}},
    edits={
        "train.py": (
            IMPORT,
            Edit(
                r"return model_cls\((num_classes=NUM_CLASSES, dtype=model_dtype, \*\*kwargs)\)",
                r"return recipe.wrap(model_cls(\1))",
            ),
            GRADIENT_WITH_AUX,
            Edit(r"^    aux, grads = grad_fn\(state.params\)", "    aux, grads = grad_fn()"),
            Edit(r"^    grads = lax.pmean\(grads, axis_name='batch'\)\n", ""),
            Edit(
                r"^class TrainState\(train_state.TrainState\):",
                "class TrainState(jaxmp.TrainState):",
            ),
            Edit(
                r"^  state = TrainState.create\(",
                "  tx = recipe.optimizer(tx, axis_name='batch')\n  state = TrainState.create(",
            ),
        )
    },
)

# ---------------------------------------------------------------------------
# Flax: examples/lm1b
# ---------------------------------------------------------------------------

MARKOV = "sentences of a random Markov chain over 64 tokens"


class Tensor(np.ndarray):
    """An array with the method `numpy` of TensorFlow's tensors."""

    def _numpy(self) -> np.ndarray:
        return np.asarray(self)


class Tokens:
    """A tokenizer of 64 tokens."""

    def vocab_size(self) -> int:
        return 64

    GetPieceSize = vocab_size

    def pad_id(self) -> int:
        return 0

    def tokenize(self, text: str) -> Any:
        return SimpleNamespace(numpy=lambda: np.array([3, 4, 5, 2], np.int32))

    def detokenize(self, tokens: Any) -> Any:
        return SimpleNamespace(numpy=lambda: b"text")


def run_lm1b(module: Module, author: bool) -> Losses:
    train = module("train")
    recorder = Recorder()
    config = module("configs.default").get_config()
    config.update(
        {
            "per_device_batch_size": 16,
            "sampling_top_k": 4,
            "num_train_steps": 60,
            "num_eval_steps": 8,
            "learning_rate": 0.02,
            "warmup_steps": 10,
            "max_target_length": 24,
            "max_eval_target_length": 24,
            "max_predict_length": 6,
            "num_layers": 1,
            "qkv_dim": 32,
            "emb_dim": 32,
            "mlp_dim": 64,
            "num_heads": 2,
            "eval_every_steps": 40,
            "use_bfloat16": author,
            "save_checkpoints": False,
            "restore_checkpoints": False,
        }
    )

    def batches(count: int) -> Iterator[dict[str, Any]]:
        for _ in range(count):
            yield {"inputs": sentences(16, 24, 64, first=3).view(Tensor)}

    datasets = batches(60), list(batches(8)), None, Tokens()
    with (
        mock.patch.object(train.input_pipeline, "get_datasets", lambda **kwargs: datasets),
        mock.patch.object(
            train.metric_writers, "create_default_writer", lambda *args, **kwargs: recorder
        ),
    ):
        train.train_and_evaluate(config, "unused")
    return Losses(recorder.mean("train_loss", 1), recorder.mean("eval_loss", 1))


LM1B = Port(
    name="LM1B Transformer",
    checkout="flax",
    folder="examples/lm1b",
    framework="Linen",
    data=MARKOV,
    run=run_lm1b,
    author={AUTHOR_BF16: {}},
    edits={
        "train.py": (
            Edit(
                r"^from jax import random$",
                "import jaxmp\nfrom jax import random\nrecipe = jaxmp.load_recipe('{recipe}')",
            ),
            Edit(
                r"models.TransformerLM\(config\)(.apply\(\n        \{\"params\": params\},\n)",
                r"recipe.wrap(models.TransformerLM(config))\1",
            ),
            Edit(
                r"models.TransformerLM\(config\)(.apply\(\{\"params\": params\}, inputs\))",
                r"recipe.wrap(models.TransformerLM(config))\1",
            ),
            Edit(r"models.TransformerLM\(eval_config\)", r"recipe.wrap(\g<0>)"),
            GRADIENT_WITH_AUX,
            Edit(r"grad_fn\(state.params\)", "grad_fn()"),
            Edit(r"      m, optimizer, config,", "      m, recipe.optimizer(optimizer), config,"),
        ),
        "utils.py": (
            Edit(r"^from flax.training import train_state$", "import jaxmp as train_state"),
        ),
    },
)

# ---------------------------------------------------------------------------
# Flax: examples/seq2seq
# ---------------------------------------------------------------------------


def run_seq2seq(module: Module, author: bool) -> Losses:
    train = module("train")
    recorder = Recorder()
    flags = train.FLAGS
    if not flags.is_parsed():
        flags(["train", "--batch_size=32", "--hidden_size=32", "--num_train_steps=81"])
        flags.decode_frequency = 10
    with mock.patch.object(train.metric_writers, "create_default_writer", lambda folder: recorder):
        state = train.train_and_evaluate("unused")
    table = train.CTable("0123456789+= ", flags.max_len_query_digit)
    batch = table.get_batch(512)
    key = jax.random.key(1)
    logits, _ = state.apply_fn(
        {"params": state.params}, batch["query"], batch["answer"], rngs={"lstm": key}
    )
    metrics = train.compute_metrics(logits, batch["answer"][:, 1:], table.eos_id)
    return Losses(recorder.mean("loss", 4), metrics["loss"])


SEQ2SEQ = Port(
    name="LSTM that learns to add",
    checkout="flax",
    folder="examples/seq2seq",
    framework="Linen",
    data="the script's own sums",
    run=run_seq2seq,
    edits={
        "train.py": (
            IMPORT,
            Edit(
                r"return models.Seq2seq\(((?:.|\n)*?)\n  \)",
                r"return recipe.wrap(models.Seq2seq(\1\n  ))",
            ),
            Edit(r"tx = (optax.adam\(FLAGS.learning_rate\))", r"tx = recipe.optimizer(\1)"),
            Edit(r"state = train_state.TrainState.create", "state = jaxmp.TrainState.create"),
            Edit(r"jax.value_and_grad\(loss_fn", "state.value_and_grad(loss_fn"),
            Edit(r"grad_fn\(state.params\)", "grad_fn()"),
        )
    },
)

# ---------------------------------------------------------------------------
# Flax: examples/ppo
# ---------------------------------------------------------------------------


class Game:
    """A game for PPO: the bright quarter of the screen determines the rewarded action."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(np.random.randint(2**31))

    def reset(self) -> np.ndarray:
        self.time, self.right = 0, self.random.integers(4)
        screen = self.random.integers(0, 40, (84, 84, 4)).astype(np.float32)
        row, column = divmod(int(self.right), 2)
        screen[42 * row : 42 * row + 42, 42 * column : 42 * column + 42] += 200
        return screen

    def step(self, action: int) -> tuple[np.ndarray, float, bool, dict[str, Any]]:
        reward = float(action == self.right)
        time = self.time + 1
        screen = self.reset()
        self.time = time
        return screen, reward, time == 8, {}


class Simulator:
    """`agent.RemoteSimulator` in this process; `recv` returns a state, then an experience."""

    def __init__(self, name: str) -> None:
        self.conn, self.game = self, Game()
        self.state, self.experience = self.game.reset()[None], None

    def recv(self) -> Any:
        experience, self.experience = self.experience, None
        return self.state if experience is None else experience

    def send(self, action: int) -> None:
        screen, reward, done, _ = self.game.step(action)
        self.experience = self.state, action, reward, done
        self.state = self.game.reset()[None] if done else screen[None]


def run_ppo(module: Module, author: bool) -> Losses:
    ppo = module("ppo_lib")
    model = module("models").ActorCritic(num_outputs=4)
    model = getattr(ppo, "recipe", SimpleNamespace(wrap=lambda model: model)).wrap(model)
    config = module("configs.default").get_config()
    config.update(
        {
            "total_frames": 4 * 16 * 32,
            "learning_rate": 1e-3,
            "batch_size": 32,
            "num_agents": 4,
            "actor_steps": 16,
            "num_epochs": 2,
        }
    )
    losses, original = [], ppo.train_step

    def train_step(*args: Any, **kwargs: Any) -> Any:
        state, loss = original(*args, **kwargs)
        losses.append(loss / 2)
        return state, loss

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(ppo.agent, "RemoteSimulator", Simulator),
        mock.patch.object(ppo.test_episodes.env_utils, "create_env", lambda *a, **k: Game()),
        mock.patch.object(ppo, "train_step", train_step),
        mock.patch.object(ppo.checkpoints, "restore_checkpoint", lambda folder, state: state),
        mock.patch.object(ppo.tensorboard, "SummaryWriter", lambda folder: Recorder()),
    ):
        state = ppo.train(model, config, folder)
        simulators = [Simulator("") for _ in range(4)]
        experience = ppo.get_experience(state, simulators, 16)
    heldout = ppo.process_experience(experience, 16, 4, config.gamma, config.lambda_)
    loss = ppo.loss_fn(state.params, state.apply_fn, heldout, 0.1, 0.5, 0.01)
    return Losses(np.mean(losses[-6:]), loss)


# Float16 by hand, with the loss scale of Flax. It is the reference of `fp16`, because both skip the
# first updates.
FLOAT16_PPO = {
    "models.py": (
        Edit(r"dtype = jnp.float32", "dtype = jnp.float16"),
        Edit(r"nn.log_softmax\(logits\)", "nn.log_softmax(logits.astype(jnp.float32))"),
        Edit(r"log_probabilities, value$", "log_probabilities, value.astype(jnp.float32)"),
    ),
    "ppo_lib.py": (
        Edit(
            r"^from flax.training import train_state$",
            "from flax.training import dynamic_scale, train_state\n"
            "class ScaledState(train_state.TrainState):\n"
            "  scale: dynamic_scale.DynamicScale",
        ),
        Edit(r"jax.value_and_grad\(loss_fn\)", "state.scale.value_and_grad(loss_fn)"),
        Edit(r"^    l, grads = grad_fn\(", "    scale, finite, l, grads = grad_fn("),
        Edit(
            r"^    state = (state.apply_gradients\(grads=grads)\)$",
            r"    new = \1, scale=scale)\n"
            "    select = lambda new, old: jnp.where(finite, new, old)\n"
            "    state = jax.tree.map(select, new, state.replace(scale=scale))",
        ),
        Edit(
            r"train_state.TrainState.create\(",
            "ScaledState.create(scale=dynamic_scale.DynamicScale(), ",
        ),
    ),
}

PPO = Port(
    name="PPO",
    checkout="flax",
    folder="examples/ppo",
    framework="Linen",
    data="a game of our own in the shape of Atari's screens",
    run=run_ppo,
    author={AUTHOR_FP16: FLOAT16_PPO},
    absent=("cv2", "ale_py"),
    edits={
        "ppo_lib.py": (
            IMPORT,
            Edit(
                r"grad_fn = jax.value_and_grad\(loss_fn\)",
                "grad_fn = state.value_and_grad(loss_fn)",
            ),
            Edit(r"^        state.params, (state.apply_fn, batch)", r"        \1"),
            Edit(r"tx = optax.adam\(lr\)", "tx = recipe.optimizer(optax.adam(lr))"),
            Edit(r"state = train_state.TrainState.create", "state = jaxmp.TrainState.create"),
        ),
        "ppo_main.py": (
            Edit(
                r"model = (models.ActorCritic\(num_outputs=num_actions\))",
                r"model = ppo_lib.recipe.wrap(\1)",
            ),
        ),
    },
)

# ---------------------------------------------------------------------------
# nanodo
# ---------------------------------------------------------------------------


def run_nanodo(module: Module, author: bool) -> Losses:
    train, data = module("nanodo.train"), module("nanodo.data")
    recorder = Recorder()
    steps, size = 100, 16
    config = module("nanodo.configs.default").get_config()
    config.model.update(
        {"D": 32, "H": 2, "L": 32, "N": 2, "F": 64, "dtype": "bfloat16" if author else "float32"}
    )
    config.opt.update({"num_train_steps": steps, "peak_learning_rate": 0.02, "warmup_steps": 10})
    config.update(
        {
            "batch_size": size,
            "vocab_path": "unused",
            "checkpoint": False,
            "eval_every_steps": steps,
            "eval_steps": 8,
            "eval_max_target_length": 32,
            "log_internal_metrics": False,
        }
    )

    def batches(*, split: str, **kwargs: Any) -> Any:
        count = steps + 1 if split == "train" else 8
        return [sentences(size, 32, 64) for _ in range(count)]

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(data, "py_batched_tfds", batches),
        mock.patch.object(data, "get_py_tokenizer", lambda path: Tokens()),
        mock.patch.object(
            train.metric_writers, "create_default_writer", lambda *args, **kwargs: recorder
        ),
    ):
        config.workdir = folder
        train.train_and_evaluate(config)
    return Losses(recorder.mean("train_loss", 10), recorder.mean("eval_loss", 1))


NANODO = Port(
    name="nanodo language model",
    checkout="nanodo",
    folder=".",
    framework="Linen",
    data=MARKOV,
    run=run_nanodo,
    author={AUTHOR_BF16: {}},
    # Current JAX raises an error for a mask of floats.
    toy={"nanodo/evaluate.py": (Edit(r"mask=weights_BxL", "mask=weights_BxL > 0"),)},
    edits={
        "nanodo/train.py": (
            IMPORT,
            Edit(
                r"^from flax.training.train_state import TrainState$",
                "from jaxmp import TrainState",
            ),
            Edit(
                r"^(  model, get_loss_fn = model_factory.*)$",
                r"\1\n  model = recipe.wrap(model)",
            ),
            Edit(
                r"tx=optimizer.get_optimizer\(c.opt\)",
                "tx=recipe.optimizer(optimizer.get_optimizer(c.opt))",
            ),
            Edit(r"grad_fn = jax.value_and_grad\(", "grad_fn = state.value_and_grad("),
            Edit(r"grad_fn\(state.params\)", "grad_fn()"),
            Edit(
                r"^  # Access to optax updates.$",
                "  multi_steps = optax.tree.get(state.opt_state, 'MultiStepsState')",
            ),
            Edit(r"step=state.opt_state.gradient_step", "step=multi_steps.gradient_step"),
            Edit(
                r"get_metrics\(aux_data, c, loss, state, grads, updates\)",
                "get_metrics(\n"
                "      aux_data, c, loss, state.replace(opt_state=multi_steps), grads, updates)",
            ),
        ),
    },
)

# ---------------------------------------------------------------------------
# Optax: examples/nanolm.ipynb
# ---------------------------------------------------------------------------


def run_nanolm(module: Module, author: bool) -> Losses:
    letters = np.array([chr(97 + i) if i < 26 else chr(39 + i) for i in range(52)])
    texts = ["".join(letters[sentences(1, length, 52, first=0)[0]]) for length in (9000, 3000)]
    splits = {
        name: mock.MagicMock(as_numpy_iterator=lambda text=text: [{"text": text.encode()}])
        for name, text in zip(("train", "validation"), texts, strict=True)
    }
    splits["train"].concatenate = lambda other: splits["train"]
    splits["test"] = None
    with mock.patch.object(module("tensorflow_datasets"), "load", lambda name: splits):
        script = module("nanolm", fresh=True)
    keys = jax.random.split(jax.random.key(7), 8)
    heldout = [
        script.eval_step(script.var_params, *script.get_batch(key, script.eval_data))
        for key in keys
    ]
    return Losses(np.mean(script.all_train_losses[-10:]), np.mean(heldout))


NANOLM = Port(
    name="nanolm notebook",
    checkout="optax",
    folder="examples",
    framework="Linen",
    data="a text of a random Markov chain over 52 letters",
    run=run_nanolm,
    toy={
        "nanolm.ipynb": (
            Edit(r"^BATCH_SIZE = \d+", "BATCH_SIZE = 16"),
            Edit(r"^N_ITERATIONS = \d+_\d+", "N_ITERATIONS = 80"),
            Edit(r"^BLOCK_SIZE = \d+", "BLOCK_SIZE = 32"),
            Edit(r"^NUM_LAYERS = \d+", "NUM_LAYERS = 1"),
            Edit(r"^EMBED_SIZE = \d+", "EMBED_SIZE = 32"),
            Edit(r"^NUM_HEADS = \d+", "NUM_HEADS = 2"),
            Edit(r"^HEAD_SIZE = \d+", "HEAD_SIZE = 16"),
            Edit(r"var_params, 1000\)", "var_params, 8)"),
        )
    },
    edits={
        "nanolm.ipynb": (
            IMPORT,
            Edit(r"^def loss_fun\(", "model = recipe.wrap(model)\ndef loss_fun("),
            Edit(r"^opt = (optax.adamw\(.*\))$", r"opt = recipe.optimizer(\1)"),
            Edit(
                r"^opt_state = opt.init\(var_params\)$",
                r"\g<0>\nvar_params = recipe.cast_params(var_params)",
            ),
            Edit(
                r"jax.value_and_grad\(loss_fun\)",
                "jaxmp.value_and_grad(loss_fun, loss_scale=jaxmp.get_loss_scale(opt_state))",
            ),
        )
    },
)

# Equinox adds updates without a cast, so that parameters in 16 bits would become float32.
APPLY = Edit(
    r"model = eqx.apply_updates\(model, updates\)",
    "model = eqx.combine(optax.apply_updates(params, updates), static)",
)

# ---------------------------------------------------------------------------
# Equinox: docs/examples/score_based_diffusion.ipynb
# ---------------------------------------------------------------------------


def run_diffusion(module: Module, author: bool) -> Losses:
    script = module("score_based_diffusion")
    images = jnp.asarray(digits(24)[0].transpose(0, 3, 1, 2)[:, :, 4:20, 4:20] * 255)
    losses, models, original = [], [], script.make_step

    def make_step(*args: Any) -> Any:
        result = original(*args)
        losses.append(result[0])
        models[:] = [(result[1], *args[1:3])]
        return result

    with (
        mock.patch.object(script, "mnist", lambda: images[HELD_OUT:]),
        mock.patch.object(script, "make_step", make_step),
    ):
        script.main(
            hidden_size=16,
            mix_patch_size=16,
            mix_hidden_size=32,
            num_blocks=1,
            num_steps=100,
            lr=3e-3,
            batch_size=32,
            dt0=2.5,
            sample_size=1,
        )
    train = images[HELD_OUT:]
    heldout = (images[:HELD_OUT] - train.mean()) / train.std()
    key = jax.random.key(1)
    evaluate = script.eqx.filter_jit(script.batch_loss_fn)
    model, *schedule = models[0]
    model = jaxmp.get_policy("float32").cast_to_compute(model)
    return Losses(np.mean(losses[-20:]), evaluate(model, *schedule, heldout, 10.0, key))


DIFFUSION = Port(
    name="Score-based diffusion",
    checkout="equinox",
    folder="docs/examples",
    framework="functions",
    data="the same digits at 16x16",
    run=run_diffusion,
    toy={"score_based_diffusion.ipynb": (Edit(r"^main\(\)$", ""),)},
    edits={
        "score_based_diffusion.ipynb": (
            IMPORT,
            Edit(
                r"^    loss_fn = eqx.filter_value_and_grad\(batch_loss_fn\)$",
                "    params, static = eqx.partition(model, eqx.is_inexact_array)\n"
                "    loss_fn = lambda params, *args: jaxmp.autocast(batch_loss_fn, recipe)("
                "eqx.combine(jaxmp.get_policy('float32').cast_to_compute(params), static), *args)\n"
                "    loss_fn = jaxmp.value_and_grad("
                "loss_fn, loss_scale=jaxmp.get_loss_scale(opt_state))",
            ),
            Edit(r"loss, grads = loss_fn\(model,", "loss, grads = loss_fn(params,"),
            Edit(r"opt_update\(grads, opt_state\)", "opt_update(grads, opt_state, params)"),
            APPLY,
            Edit(r"opt = optax.adabelief\(lr\)", "opt = recipe.optimizer(optax.adabelief(lr))"),
            Edit(
                r"^    opt_state = opt.init\(.*\)$",
                r"\g<0>\n    model = recipe.cast_params(model)",
            ),
            Edit(
                r"^    sample_key = jr.split",
                "    model = jaxmp.get_policy('float32').cast_to_compute(model)\n\\g<0>",
            ),
        )
    },
)

# ---------------------------------------------------------------------------
# Diffrax: docs/examples/neural_ode.ipynb
# ---------------------------------------------------------------------------


def run_neural_ode(module: Module, author: bool) -> Losses:
    script = module("neural_ode")
    ts, ys, model = script.main(
        dataset_size=64,
        batch_size=16,
        width_size=8,
        depth=1,
        steps_strategy=(60,),
        length_strategy=(0.2,),
        plot=False,
        print_every=1000,
    )
    _, heldout = script.get_data(64, key=jax.random.key(99))
    ts = ts[:20]

    def loss(model: Any, ys: Any) -> Any:
        return jnp.mean((ys[:, :20] - jax.vmap(model, in_axes=(None, 0))(ts, ys[:, 0])) ** 2)

    evaluate = script.eqx.filter_jit(loss)
    return Losses(evaluate(model, ys), evaluate(model, heldout))


NEURAL_ODE = Port(
    name="Neural ODE",
    checkout="diffrax",
    folder="docs/examples",
    framework="functions",
    data="the script's own trajectories",
    run=run_neural_ode,
    toy={"neural_ode.ipynb": (Edit(r"^ts, ys, model = main\(\)$", ""),)},
    edits={
        "neural_ode.ipynb": (
            IMPORT,
            Edit(r"self.mlp\(y\)", "jaxmp.autocast(self.mlp, recipe)(y)"),
            Edit(r"^    @eqx.filter_value_and_grad\n", ""),
            Edit(
                r"^        loss, grads = grad_loss\(model, ti, yi\)$",
                "        params, static = eqx.partition(model, eqx.is_inexact_array)\n"
                "        loss_fn = lambda params: grad_loss(eqx.combine(params, static), ti, yi)\n"
                "        scale = jaxmp.get_loss_scale(opt_state)\n"
                "        loss, grads = jaxmp.value_and_grad(loss_fn, loss_scale=scale)(params)",
            ),
            Edit(r"optim = optax.adabelief\(lr\)", "optim = recipe.optimizer(optax.adabelief(lr))"),
            Edit(
                r"^        opt_state = optim.init\(.*\)$",
                r"\g<0>\n        model = recipe.cast_params(model)",
            ),
            Edit(r"optim.update\(grads, opt_state\)", "optim.update(grads, opt_state, params)"),
            APPLY,
        )
    },
)

_PORTS = (MNIST, VAE, IMAGENET, LM1B, SEQ2SEQ, PPO, NANODO, NANOLM, DIFFUSION, NEURAL_ODE)
PORTS = {port.name: port for port in _PORTS}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("name", choices=list(PORTS))
    parser.add_argument("seeds", type=int)
    parser.add_argument("variants", nargs="+")
    args = parser.parse_args()
    for variant in args.variants:
        losses = measure(PORTS[args.name], args.checkouts, variant, args.seeds)
        print(json.dumps({variant: losses}), flush=True)


if __name__ == "__main__":
    main()
