"""Compares trainings of the byte-level GPT with moments in FP32 and in bfloat16.

    python benchmarks/moment_validate.py                         # 4,000 steps, five seeds
    python benchmarks/moment_validate.py --steps 300 --seeds 2   # shorter
    python benchmarks/moment_validate.py --out benchmarks/results/moment_validate_cpu.json

Both trainings are those of the recipe `bf16`, with AdamW and a decay of 0.999 of second moments.
`jaxmp.validate` prints the interval of the difference between the held-out losses. It passes if the
difference is within 0.1 %. Five seeds take 40 minutes of CPU time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import optax

import jaxmp
from result_file import parser_of, write_result

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from byte_gpt import GPT, even_batches, random_batch, standard_library_text

BATCH, LENGTH = 16, 64


def loss_fn(model: Any, tokens_BT: jax.Array) -> jax.Array:
    logits_BTV = model(tokens_BT[:, :-1])
    losses_BT = jaxmp.losses.softmax_cross_entropy(logits_BTV, tokens_BT[:, 1:])
    return losses_BT.mean()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    text, steps = standard_library_text(), arguments.steps
    bf16 = jaxmp.load_recipe("bf16")
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 20, steps)
    report = jaxmp.validate(
        GPT(),
        {"moments_bfloat16": bf16.replace(moment_dtype="bfloat16")},
        reference_recipe=bf16,
        steps=steps,
        seeds=arguments.seeds,
        budgets=1e-3,
        loss_fn=loss_fn,
        batches=lambda seed: (
            random_batch(text.train, BATCH, LENGTH, seed, step) for step in range(steps)
        ),
        optimizer=optax.adamw(schedule, b2=0.999),
        held_out=list(even_batches(text.held_out, 4, 4 * BATCH, LENGTH)),
        eval_every=max(steps // 4, 1),
    )
    print(report)
    rows = report.to_dict()
    (candidate,) = rows["candidates"]
    parts = ("headline", "verdict", "checks", "pairs", "power", "training")
    own = {name: candidate[name] for name in parts}
    write_result(arguments.out, steps=rows["steps"], seeds=rows["seeds"], **own)


if __name__ == "__main__":
    main()
