"""Unedited models of other projects, at small sizes with random weights."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import jraphx.nn.models as jraphx
import mamba2_jax
import nano_moe
import numpy as np
import transformers
from flax import nnx

# ---------------------------------------------------------------------------
# A model, whatever its framework
# ---------------------------------------------------------------------------


class Linen(NamedTuple):
    """A Linen module; `call(module, variables, train)` returns the original outputs."""

    module: nn.Module
    variables: Any
    call: Callable[[Any, Any, bool], Any]
    # dtype -> module that computes in it, if the author provides a dtype argument.
    typed: Callable[[Any], nn.Module] | None = None

    def bind(self, recipe: Any) -> tuple[Any, Callable[[Any, bool], Any]]:
        """Returns the parameters in their storage dtypes, and `outputs(params, train)`."""
        module = recipe.wrap(self.module)

        def outputs(params: Any, train: bool) -> Any:
            return self.call(module, {**self.variables, "params": params}, train)

        return recipe.cast_params(self.variables["params"]), outputs


class Nnx(NamedTuple):
    """An NNX module; `call(model, train)` returns the original outputs."""

    module: nnx.Module
    call: Callable[[Any, bool], Any]
    typed: None = None

    def bind(self, recipe: Any) -> tuple[Any, Callable[[Any, bool], Any]]:
        """Returns the parameters in their storage dtypes, and `outputs(params, train)`."""
        graphdef, *states = nnx.split(recipe.wrap(self.module), nnx.Param, ...)
        params, rest = map(nnx.as_pure, states)

        def outputs(params: Any, train: bool) -> Any:
            return self.call(nnx.merge(graphdef, params, rest), train)

        return recipe.cast_params(params), outputs


class Model(NamedTuple):
    """The source of a model, and the function that creates it."""

    name: str
    source: str  # name of the distribution, or folder in the Flax repository
    framework: str
    make: Callable[..., Linen | Nnx]


INSTALLED: list[Model] = []
FLAX_EXAMPLES: list[Model] = []


def installed(name: str, source: str, framework: str) -> Callable[..., Any]:
    """Registers a function that creates a model of an installed package."""

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        INSTALLED.append(Model(name, source, framework, make))
        return make

    return register


def flax_example(name: str, path: str, framework: str, script: bool = False) -> Callable[..., Any]:
    """Registers a function that creates a model from a file of the Flax repository."""

    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        load = definitions if script else run_module
        made = lambda examples: make(load(examples / path))
        FLAX_EXAMPLES.append(Model(name, f"examples/{path}", framework, made))
        return make

    return register


def run_module(path: Path) -> Any:
    """Runs a file as a module, which can import the files in its folder."""
    name = f"flax_example_{path.parent.name}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    sys.path.remove(str(path.parent))
    return module


def definitions(path: Path) -> Any:
    """Returns the classes and functions of a training script, without running the training.

    The packages of its data set (TensorFlow, `datasets`) do not have to be installed.
    """
    script = ModuleType(f"flax_example_{path.parent.name}_{path.stem}")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef)):
            with contextlib.suppress(ModuleNotFoundError):
                exec(compile(ast.Module([node], []), str(path), "exec"), vars(script))
    return script


def floats(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def tokens(*shape: int, vocabulary: int = 64) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(2, vocabulary, shape), jnp.int32)


def initial(init: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of `init(key, *args)`, compiled, which is faster than op by op."""
    compiler = {"xla_backend_optimization_level": 0}
    return jax.jit(init, compiler_options=compiler)(jax.random.key(0), *args)


# ---------------------------------------------------------------------------
# transformers (Linen)
# ---------------------------------------------------------------------------


def hugging_face(model_class: Any, config: Any, **inputs: Any) -> Linen:
    """Returns a model of `transformers`: a Linen module in a wrapper that provides its inputs."""
    model = model_class(config, _do_init=False)
    variables = initial(lambda key: model.init_weights(key, model.input_shape))
    has_statistics = "batch_stats" in variables

    def call(module: nn.Module, variables: Any, train: bool) -> Any:
        wrapper = copy.copy(model)
        wrapper._module = module
        if has_statistics:
            return wrapper(**inputs, params=variables, train=train)[0]
        return wrapper(**inputs, params=variables["params"])[0]

    if not has_statistics:
        variables = {"params": variables}
    return Linen(model.module, variables, call, lambda dtype: model.module.clone(dtype=dtype))


TEXT = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)


@installed("BERT, classifier", "transformers", "Linen")
def bert() -> Linen:
    config = transformers.BertConfig(**TEXT, intermediate_size=64)
    return hugging_face(
        transformers.FlaxBertForSequenceClassification, config, input_ids=tokens(2, 12)
    )


@installed("GPT-2, language model", "transformers", "Linen")
def gpt2() -> Linen:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)
    return hugging_face(transformers.FlaxGPT2LMHeadModel, config, input_ids=tokens(2, 12))


@installed("Llama, language model", "transformers", "Linen")
def llama() -> Linen:
    config = transformers.LlamaConfig(
        **TEXT, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=32
    )
    return hugging_face(transformers.FlaxLlamaForCausalLM, config, input_ids=tokens(2, 12))


@installed("ViT, classifier", "transformers", "Linen")
def vit() -> Linen:
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    return hugging_face(
        transformers.FlaxViTForImageClassification, config, pixel_values=floats(2, 3, 16, 16)
    )


@installed("ResNet, classifier", "transformers", "Linen")
def resnet() -> Linen:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    )
    return hugging_face(
        transformers.FlaxResNetForImageClassification, config, pixel_values=floats(2, 3, 32, 32)
    )


@installed("Whisper, speech to text", "transformers", "Linen")
def whisper() -> Linen:
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2)
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=1, max_source_positions=16)
    config = transformers.WhisperConfig(
        vocab_size=64,
        num_mel_bins=8,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        **heads,
        **sizes,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
    )
    inputs = dict(input_features=floats(2, 8, 32), decoder_input_ids=tokens(2, 6))
    return hugging_face(transformers.FlaxWhisperForConditionalGeneration, config, **inputs)


@installed("Wav2Vec2, speech recognition", "transformers", "Linen")
def wav2vec2() -> Linen:
    convolutions = dict(conv_dim=[16, 16], conv_kernel=[4, 4], conv_stride=[4, 2])
    config = transformers.Wav2Vec2Config(
        **TEXT,
        intermediate_size=64,
        **convolutions,
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    return hugging_face(transformers.FlaxWav2Vec2ForCTC, config, input_values=floats(2, 2048))


# ---------------------------------------------------------------------------
# Smaller packages
# ---------------------------------------------------------------------------


@installed("NanoMoE, language model", "nano-moe-jax", "Linen")
def moe() -> Linen:
    config = nano_moe.NanoMoEConfig(
        vocab_size=64, n_layers=1, n_heads=2, d_model=32, d_ff=64, block_size=16, dropout_rate=0.0
    )
    module, ids = nano_moe.NanoMoE(config), tokens(2, 12)
    return Linen(module, initial(module.init, ids), lambda m, v, _: m.apply(v, ids))


@installed("Mamba-2, language model", "mamba2-jax", "NNX")
def mamba2() -> Nnx:
    config = mamba2_jax.Mamba2Config(
        vocab_size=64, hidden_size=32, state_size=8, head_dim=16, chunk_size=8, num_hidden_layers=1
    )
    ids = tokens(2, 20)
    model = mamba2_jax.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
    return Nnx(model, lambda model, _: model(ids)["logits"])


def graph_network(cls: Any, **options: Any) -> Nnx:
    """Returns a model of `jraphx` on a ring of 10 nodes."""
    nodes, ring = floats(10, 8), jnp.arange(10, dtype=jnp.int32)
    edges = jnp.stack([ring, (ring + 1) % 10])
    model = cls(8, 16, num_layers=2, out_features=4, rngs=nnx.Rngs(0), **options)
    return Nnx(model, lambda model, _: model(nodes, edges))


@installed("Graph convolutions with BatchNorm", "jraphx", "NNX")
def gcn() -> Nnx:
    return graph_network(jraphx.GCN, norm="batch_norm")


@installed("Graph attention with LayerNorm", "jraphx", "NNX")
def gat() -> Nnx:
    return graph_network(jraphx.GAT, norm="layer_norm", heads=2)


# ---------------------------------------------------------------------------
# The Flax repository: Linen
# ---------------------------------------------------------------------------


@flax_example("ResNet-18", "imagenet/models.py", "Linen")
def imagenet(file: Any) -> Linen:
    images = floats(2, 4, 32, 32, 3)
    module = file.ResNet18(num_classes=10, num_filters=8)
    variables = initial(lambda key: module.init(key, images[0], train=False))

    def call(module: Any, variables: Any, train: bool) -> Any:
        if not train:
            return module.apply(variables, images[0], train=False)
        one = lambda images: module.apply(variables, images, mutable=["batch_stats"])[0]
        return jax.vmap(one, axis_name="batch")(images)  # the author's `axis_name`

    return Linen(module, variables, call, lambda dtype: module.clone(dtype=dtype))


NO_DROPOUT = dict(dropout_rate=0.0, attention_dropout_rate=0.0)
SMALL = dict(emb_dim=32, num_heads=2, num_layers=1, qkv_dim=32, mlp_dim=64, max_len=32)


def of_dtype(module: Any) -> Callable[[Any], nn.Module]:
    return lambda dtype: module.clone(config=module.config.replace(dtype=dtype))


@flax_example("Transformer language model", "lm1b/models.py", "Linen")
def lm1b(file: Any) -> Linen:
    config = file.TransformerConfig(vocab_size=64, output_vocab_size=64, **SMALL, **NO_DROPOUT)
    module, ids = file.TransformerLM(config), tokens(2, 12)
    variables = initial(module.init, ids)
    return Linen(module, variables, lambda m, v, _: m.apply(v, ids), of_dtype(module))


@flax_example("Transformer for translation", "wmt/models.py", "Linen")
def wmt(file: Any) -> Linen:
    config = file.TransformerConfig(
        vocab_size=64,
        output_vocab_size=64,
        share_embeddings=True,
        logits_via_embedding=True,
        **SMALL,
        **NO_DROPOUT,
    )
    module, inputs, targets = file.Transformer(config), tokens(2, 12), tokens(2, 10)
    variables = initial(module.init, inputs, targets)
    call = lambda m, v, _: m.apply(v, inputs, targets)
    return Linen(module, variables, call, of_dtype(module))


@flax_example("Transformer for tagging", "nlp_seq/models.py", "Linen")
def nlp_seq(file: Any) -> Linen:
    config = file.TransformerConfig(vocab_size=64, output_vocab_size=16, **SMALL, **NO_DROPOUT)
    module, ids = file.Transformer(config), tokens(2, 12)
    variables = initial(lambda key: module.init(key, inputs=ids, train=False))
    call = lambda m, v, train: m.apply(v, inputs=ids, train=train)
    return Linen(module, variables, call, of_dtype(module))


@flax_example("LSTM encoder-decoder", "seq2seq/models.py", "Linen")
def seq2seq(file: Any) -> Linen:
    module = file.Seq2seq(teacher_force=True, hidden_size=16, vocab_size=12)
    inputs, targets = (jax.nn.one_hot(tokens(2, length, vocabulary=12), 12) for length in (6, 5))
    rngs = {"params": jax.random.key(0), "lstm": jax.random.key(1)}
    variables = initial(lambda key: module.init({"params": key, "lstm": key}, inputs, targets))
    call = lambda m, v, _: m.apply(v, inputs, targets, rngs={"lstm": rngs["lstm"]})[0]
    return Linen(module, variables, call)


@flax_example("Bidirectional LSTM with attention", "sst2/models.py", "Linen")
def sst2(file: Any) -> Linen:
    module = file.TextClassifier(
        embedding_size=16,
        hidden_size=16,
        vocab_size=64,
        output_size=2,
        dropout_rate=0.0,
        word_dropout_rate=0.0,
        deterministic=True,
    )
    ids, lengths = tokens(2, 8), jnp.array([8, 5])
    variables = initial(module.init, ids, lengths)
    return Linen(module, variables, lambda m, v, _: m.apply(v, ids, lengths))


@flax_example("Variational autoencoder", "vae/models.py", "Linen")
def vae(file: Any) -> Linen:
    module, images, key = file.VAE(latents=8), jax.nn.sigmoid(floats(4, 784)), jax.random.key(1)
    variables = initial(module.init, images, key)
    return Linen(module, variables, lambda m, v, _: m.apply(v, images, key))


@flax_example("Actor-critic of PPO", "ppo/models.py", "Linen")
def ppo(file: Any) -> Linen:
    module, frames = file.ActorCritic(num_outputs=4), 128 + 64 * floats(2, 84, 84, 4)
    variables = initial(module.init, frames)
    return Linen(module, variables, lambda m, v, _: m.apply(v, frames))


@flax_example("Graph network", "ogbg_molpcba/models.py", "Linen")
def ogbg(file: Any) -> Linen:
    module = file.GraphNet(
        latent_size=16, num_mlp_layers=2, message_passing_steps=2, output_globals_size=4
    )
    graphs = file.jraph.GraphsTuple(
        nodes=floats(6, 8),
        edges=floats(8, 4),
        globals=jnp.zeros((2, 1)),
        senders=jnp.array([0, 1, 2, 0, 3, 4, 5, 3]),
        receivers=jnp.array([1, 2, 0, 2, 4, 5, 3, 5]),
        n_node=jnp.array([3, 3]),
        n_edge=jnp.array([4, 4]),
    )
    variables = initial(module.init, graphs)
    return Linen(module, variables, lambda m, v, _: m.apply(v, graphs).globals)


# ---------------------------------------------------------------------------
# The Flax repository: NNX
# ---------------------------------------------------------------------------


@flax_example("Gemma 3", "gemma/transformer.py", "NNX")
def gemma(file: Any) -> Nnx:
    configuration = sys.modules["transformer_cfg"]
    kinds = configuration.AttentionType
    config = configuration.TransformerConfig(
        num_layers=2,
        num_embed=64,
        embed_dim=32,
        hidden_dim=64,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
        sliding_window_size=4,
        use_qk_norm=True,
        attn_logits_soft_cap=50.0,
    )
    ids = tokens(2, 12)
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    mask = file.make_causal_attn_mask(ids > 0)
    model = file.Transformer(config, rngs=nnx.Rngs(0))
    return Nnx(model, lambda model, _: model(ids, positions, None, mask)[0])


@flax_example("CNN with BatchNorm", "mnist/train.py", "NNX", script=True)
def mnist(file: Any) -> Nnx:
    model, images = file.CNN(nnx.Rngs(0)), floats(4, 28, 28, 1)

    def call(model: Any, train: bool) -> Any:
        model = nnx.view(model, deterministic=not train, use_running_average=not train)
        return model(images, nnx.Rngs(dropout=0))

    return Nnx(model, call)


@flax_example("Variational autoencoder", "nnx_toy_examples/05_vae.py", "NNX", script=True)
def nnx_vae(file: Any) -> Nnx:
    model = file.VAE(784, 64, 8, (28, 28), rngs=nnx.Rngs(0, noise=1))
    images = jax.nn.sigmoid(floats(4, 28, 28))
    return Nnx(model, lambda model, _: model(images))


@flax_example(
    "Scanned MLP with BatchNorm", "nnx_toy_examples/06_scan_over_layers.py", "NNX", script=True
)
def scanned(file: Any) -> Nnx:
    model, x = file.ScanMLP(16, n_layers=3, rngs=nnx.Rngs(0)), floats(8, 16)

    def call(model: Any, train: bool) -> Any:
        return nnx.view(model, deterministic=not train, use_running_average=not train)(x)

    return Nnx(model, call)
