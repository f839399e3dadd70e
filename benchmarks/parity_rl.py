"""Measures the mismatch of training and serving in bfloat16 and in float16, on three models.

    python benchmarks/parity_rl.py
    python benchmarks/parity_rl.py --out benchmarks/results/parity_rl_cpu.json

Each model is trained in FP32 on the source code of Python's standard library, and its
log-probabilities of held-out text are then compared by `jaxmp.parity`:

    serving     plain attention, as in training, and attention in blocks, one example at a time,
                both with the recipe
    fp32 head   the same, with the last matmul in FP32 in both
    fp32        the pass of training with the recipe, and in FP32

Parameters are FP32 in all programs. The difference is the mean absolute difference of the
log-probability of a token. Requires pip install -e ".[examples]"; takes eight minutes on two cores.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import jax
import jax.numpy as jnp
import optax

import byte_gpt
import gpt
import jaxmp
import llama
from result_file import parser_of, write_result

LENGTH, BATCH, STEPS = 64, 8, 150
MODELS = {
    "byte_gpt": byte_gpt.GPT(layers=3, width=128, heads=4),
    "gpt": gpt.GPT(layers=4, width=128, heads=4, vocabulary=256, max_length=LENGTH),
    "llama": llama.Llama(llama.SIZES["tiny"]),
}
RECIPES = ("bf16", "fp16", "fp8")


def log_probs(
    model: Any, recipe: jaxmp.Recipe, implementation: str, *, fp32_head: bool = False
) -> Callable[..., jax.Array]:
    """Returns the program of a recipe: the log-probability of each next token.

    Args:
      model: the model.
      recipe: the recipe.
      implementation: of attention, in Flax's layers and in calls of the models.
      fp32_head: True to compute the last matmul in FP32, from the rounded result of the last norm.
    """
    recipe = recipe.replace(implementation=implementation)
    if fp32_head:
        # The first rule that matches decides.
        rules = (jaxmp.Rule("lm_head", "c=f32,o=f32"), *recipe.policies.rules)
        recipe = recipe.replace(policies=dataclasses.replace(recipe.policies, rules=rules))
    wrapped, logits_or_loss = recipe.wrap(model), gpt.logits_or_loss
    attention = functools.partial(jaxmp.dot_product_attention, implementation=implementation)
    in_fp32 = lambda x, *rest, **more: logits_or_loss(x.astype(jnp.float32), *rest, **more)

    def run(params: Any, tokens: jax.Array) -> jax.Array:
        with (
            mock.patch.object(jaxmp, "dot_product_attention", attention),
            mock.patch.object(gpt, "logits_or_loss", in_fp32 if fp32_head else logits_or_loss),
        ):
            logits = wrapped.apply(params, tokens[:, :-1]).astype(jnp.float32)
        labels = tokens[:, 1:, None]
        return jnp.take_along_axis(jax.nn.log_softmax(logits), labels, axis=-1)[..., 0]

    return run


def trained(model: Any, steps: int) -> Any:
    """Returns parameters after a training in FP32."""
    text = byte_gpt.standard_library_text().train
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    tx = optax.adam(1e-3)
    run = log_probs(model, jaxmp.load_recipe("fp32"), "xla")
    loss = lambda params, tokens: -jnp.mean(run(params, tokens))

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    state, value = tx.init(params), 0.0
    for n in range(steps):
        tokens = byte_gpt.random_batch(text, BATCH, LENGTH - 1, 0, n)
        params, state, value = step(params, state, jnp.asarray(tokens))
    return params, float(value)


def main() -> None:
    """Measures all models, and prints and writes the results."""
    parser = parser_of(__doc__, MODELS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the training")
    args = parser.parse_args()
    held_out = byte_gpt.standard_library_text().held_out
    rows: list[dict[str, Any]] = []
    for name in args.only:
        model = MODELS[name]
        params, loss = trained(model, args.steps)
        batches = [
            (params, jnp.asarray(tokens))
            for tokens in byte_gpt.even_batches(held_out, 4, BATCH, LENGTH - 1)
        ]
        exact = log_probs(model, jaxmp.load_recipe("fp32"), "xla")
        for recipe_name in RECIPES:
            make = functools.partial(log_probs, model, jaxmp.load_recipe(recipe_name))
            pairs = {"serving": (make("xla"), make("blockwise"))}
            if recipe_name != "fp8":
                wide = functools.partial(make, fp32_head=True)
                pairs |= {
                    "fp32 head": (wide("xla"), wide("blockwise")),
                    "fp32": (exact, make("xla")),
                }
            for comparison, programs in pairs.items():
                size = None if comparison == "fp32" else 1
                report = jaxmp.parity(*programs, batches, batch_size=size, search=False)
                row = {"model": name, "recipe": recipe_name, "comparison": comparison, "loss": loss}
                rows.append(row | dataclasses.asdict(report.rows[0]))
                print(*rows[-1].values(), flush=True)
    mean = {(row["model"], row["comparison"], row["recipe"]): row["difference"] for row in rows}
    ratios = {
        f"{model}, {comparison}": mean[model, comparison, "bf16"] / mean[model, comparison, "fp16"]
        for model, comparison, recipe in mean
        if recipe == "bf16"
    }
    print(ratios)
    write_result(args.out, steps=args.steps, bf16_over_fp16=ratios, rows=rows)


if __name__ == "__main__":
    main()
