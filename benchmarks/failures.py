"""Public failures of precision, re-created, and what the tools of jaxmp print for each.

    python benchmarks/failures.py            # all programs of examples/failures
    python benchmarks/failures.py --only router
    python benchmarks/failures.py --page     # also writes docs/failures.md

Each program has at most 30 lines. It is run as it is, and with the lines of its repair. Nothing
requires a GPU.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import jaxmp
from result_file import parser_of

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "examples/failures"
PAGE = ROOT / "docs/failures.md"
GITHUB = "https://github.com/"


@dataclasses.dataclass(frozen=True)
class Failure:
    """A public failure, its program in examples/failures, and the repair of the program.

    named: the checks, the cause or the verdict that a tool reports; empty if none reports it.
    repair: lines of the program, and what replaces them.
    remark: what the reader of the output should know.
    """

    program: str
    thread: str
    happened: str
    tool: str
    named: frozenset[str]
    repair: tuple[tuple[str, str], ...]
    remark: str = ""

    def source(self, repaired: bool) -> str:
        """Returns the program, or the program with its repair."""
        text = (PROGRAMS / f"{self.program}.py").read_text("utf-8")
        for old, new in self.repair if repaired else ():
            if text.count(old) != 1:
                raise ValueError(f"{self.program}.py contains {old!r} {text.count(old)} times.")
            text = text.replace(old, new)
        return text

    def diff(self) -> str:
        """Returns the repair as changed lines."""
        old, new = (self.source(repaired).splitlines() for repaired in (False, True))
        lines = list(difflib.unified_diff(old, new, lineterm="", n=0))[2:]
        return "\n".join(line for line in lines if not line.startswith("@@"))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a tool reports for a program: the names of its findings, and the lines of the page."""

    named: frozenset[str]
    text: str


# ---------------------------------------------------------------------------
# Tools
# ---------------------------------------------------------------------------


def audit(module: ModuleType) -> Outcome:
    """Audits the step of a program."""
    report = jaxmp.audit(*module.make_step())
    lines = str(report).splitlines()
    sections = "\n".join(lines[lines.index("Errors") :]) if report.errors else ""
    shown = sections.partition("\nMatmuls by operand dtype")[0].partition("\nDetails")[0]
    text = f"{lines[0]}\n\n{shown}" if shown else lines[0]
    return Outcome(frozenset(finding.check for finding in report.errors), text.rstrip())


def locate(module: ModuleType) -> Outcome:
    """Runs the step of a program, and locates the first value that is not finite."""
    report = jaxmp.locate_nonfinite(*module.make_step())
    text = str(report)
    head, _, cause = text.partition("\n\nOperands\n")
    cause = cause.partition("\n\n")[2]
    return Outcome(frozenset({report.cause} - {""}), f"{head}\n\n{cause}".rstrip())


def validate(module: ModuleType) -> Outcome:
    """Trains a program in FP32 and in BF16, and compares the trainings."""
    report = jaxmp.validate(module.make_run, ["bf16"], steps=200, progress=False)
    verdict = report["bf16"].verdict
    return Outcome(frozenset({verdict} - {"pass"}), str(report).splitlines()[0])


TOOLS: dict[str, Callable[[ModuleType], Outcome]] = {
    "audit": audit,
    "locate": locate,
    "validate": validate,
}
COMMANDS = {
    "audit": "jaxmp audit examples/failures/{}.py:make_step",
    "locate": "jaxmp locate examples/failures/{}.py:make_step",
    "validate": "jaxmp validate examples/failures/{}.py:make_run --recipes bf16 --steps 200",
}


def load(failure: Failure, repaired: bool, folder: Path) -> ModuleType:
    """Writes a program into a folder and imports it, so that reports contain its lines."""
    path = folder / f"{failure.program}.py"
    path.write_text(failure.source(repaired), "utf-8")
    spec = importlib.util.spec_from_file_location(failure.program, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(failure: Failure, repaired: bool) -> Outcome:
    """Returns what the tool reports for a program, or for its repair."""
    with tempfile.TemporaryDirectory() as folder:
        return TOOLS[failure.tool](load(failure, repaired, Path(folder)))


# ---------------------------------------------------------------------------
# Failures
# ---------------------------------------------------------------------------

MASTERS = frozenset({"missing_master", "optimizer_state_16bit"})

FAILURES = (
    Failure(
        "fused_loss",
        "marin-community/marin/pull/8368",
        "The backward pass of a fused linear cross-entropy made its gradient of the logits in "
        "FP32, so two of its four matmuls ran in TF32. The loss was 2.33 times as fast on a GB200 "
        "after the repair, with other block sizes.",
        "audit",
        frozenset({"fp32_matmul"}),
        (
            (
                "    dx, dw = delta @ w.T.astype(delta.dtype), x.T.astype(delta.dtype) @ delta",
                "    delta = delta.astype(x.dtype)\n    dx, dw = delta @ w.T, x.T @ delta",
            ),
        ),
        "`autocast` does not change the rules of a `custom_vjp`, so the cast is written by hand. "
        "`jaxmp.losses.linear_cross_entropy` multiplies in 16 bits in both passes.",
    ),
    Failure(
        "router",
        "marin-community/marin/issues/8435",
        "A training of 535 billion parameters cast the scores of its routers to FP32 after a "
        "matmul had rounded them to BF16. It was measured at step 126,000: with FP32 results, "
        "2.65 % of the tokens go to other experts.",
        "audit",
        frozenset({"rounded_output"}),
        (
            (
                'jnp.einsum("td,de->te", x, router).astype(jnp.float32)',
                'jnp.einsum("td,de->te", x, router, preferred_element_type=jnp.float32)',
            ),
        ),
    ),
    Failure(
        "block_scale",
        "marin-community/marin/issues/7271",
        "The first backward pass in MXFP8 had a gradient that was not finite, in the last matmul "
        "of the experts, after a finite loss. The thread does not state the operation; this "
        "program has a block of 32 zeros, whose scale is zero.",
        "locate",
        frozenset({"division_by_zero"}),
        (
            (
                "    rounded = (blocks / scale)",
                "    scale = jnp.where(amax == 0, 1, scale)\n    rounded = (blocks / scale)",
            ),
        ),
    ),
    Failure(
        "baseline",
        "NVIDIA/TransformerEngine/pull/2976",
        "A tutorial compared MXFP8 with a BF16 baseline, and was 2.5 times as fast. The layer of "
        "the baseline had no dtype, so Flax promoted its BF16 inputs and multiplied in FP32. With "
        "a BF16 baseline the factor is 1.6.",
        "audit",
        frozenset({"fp32_matmul"}),
        (
            (
                "layer = nn.Dense(2048)",
                'layer = jaxmp.load_recipe("bf16").wrap(nn.Dense(2048))',
            ),
            ("import jax.numpy as jnp\n", "import jax.numpy as jnp\n\nimport jaxmp\n"),
        ),
    ),
    Failure(
        "bf16_adamw",
        "areal-project/AReaL/issues/1292",
        "AdamW was created from BF16 parameters, so its moments were in BF16 and no FP32 masters "
        "existed. The final loss was three times that of two other frameworks.",
        "audit",
        MASTERS,
        (("LOADED = jnp.bfloat16", "LOADED = jnp.float32"),),
        "The repair of the thread: FP32 parameters, which the loss casts. The printed fix keeps "
        "the parameters in BF16, beside FP32 masters.",
    ),
    Failure(
        "expert_weights",
        "NVIDIA-NeMo/Automodel/pull/1896",
        "The FP32 masters of expert weights were lost silently, for example where a second "
        "initialization cast all parameters to its default dtype, BF16.",
        "audit",
        MASTERS,
        (("dtype=jnp.bfloat16):", "dtype=jnp.float32):"),),
    ),
    Failure(
        "cast_policy",
        "TensorAuto/OpenTau/issues/181",
        "The policy of a robot was cast to BF16 before its optimizer was created. With DeepSpeed, "
        "which makes FP32 masters itself, 94 % of the trials succeeded, and without it none.",
        "validate",
        frozenset({"fail"}),
        (
            (
                "    params = recipe.policies.default.cast_to_compute(params)"
                "  # policy.to(bfloat16)\n",
                "",
            ),
        ),
    ),
    Failure(
        "adam_count",
        "NVIDIA/Megatron-LM/issues/5974",
        "Megatron-FSDP created Adam's state by an update with zero gradients, which also advanced "
        "the step counter. The bias correction of the first update was that of the second, and "
        "the update 1.34 times too small.",
        "audit",
        frozenset(),
        (
            (
                "    _, opt_state = tx.update(optax.tree.zeros_like(params), opt_state, params)\n",
                "",
            ),
        ),
        "**No.** All dtypes are right, and no tool of jaxmp knows which count a fresh optimizer "
        "has.",
    ),
    Failure(
        "divergence",
        "vllm-project/speculators/pull/788",
        "Losses between two distributions computed their softmaxes in BF16. Their gradient is the "
        "difference of two similar probabilities, and had an error of 19 % for a good draft model.",
        "audit",
        frozenset({"softmax_16bit", "loss_16bit", "exp_16bit"}),
        (
            (
                "    log_q = jax.nn.log_softmax(draft_logits)\n"
                "    p = jax.nn.softmax(target_logits)\n",
                "    log_q = jax.nn.log_softmax(draft_logits.astype(jnp.float32))\n"
                "    p = jax.nn.softmax(target_logits.astype(jnp.float32))\n",
            ),
        ),
    ),
    Failure(
        "trainer_log_probs",
        "AI-Hypercomputer/maxtext/pull/5231",
        "A trainer for reinforcement learning computed the logits of its last layer in BF16, whose "
        "steps of 1/32 dominated the difference from the log-probabilities of the sampler, with a "
        "band of 0.999 to 1.002 for their ratio. The change computes the logits in FP32.",
        "audit",
        frozenset({"rounded_output"}),
        (
            (
                'jnp.matmul(hidden, params["head"].astype(jnp.bfloat16)).astype(jnp.float32)',
                'jnp.matmul(\n        hidden, params["head"].astype(jnp.bfloat16), '
                "preferred_element_type=jnp.float32\n    )",
            ),
        ),
        "[Parity](parity.md) with a sampler that has FP32 logits names this matmul as the cause.",
    ),
    Failure(
        "half_norm",
        "jax-ml/jax/issues/39899",
        "`jnp.linalg.norm` of a float16 array sums squares in FP32 and casts the sum to float16 "
        "before the root. The norm is infinite and all gradients are zero, so no NaN and no "
        "skipped step shows it.",
        "locate",
        frozenset({"float16_range"}),
        (
            (
                "jnp.linalg.norm(h).astype(jnp.float32)",
                "jnp.linalg.norm(h.astype(jnp.float32))",
            ),
        ),
    ),
    Failure(
        "weight_gradient",
        "jax-ml/jax/issues/34330",
        "The backward pass of a matmul of BF16 activations and an FP32 kernel rounds the gradient "
        "of the kernel to BF16, and then casts it to FP32.",
        "audit",
        frozenset(),
        (
            ("LEARNING_RATE * jax.grad(", "LEARNING_RATE * jaxmp.grad("),
            ("import jax.numpy as jnp\n", "import jax.numpy as jnp\n\nimport jaxmp\n"),
        ),
        "**No finding**, because every program of `jax.grad` does this, and it is rarely a defect. "
        "`jaxmp.grad` and `jaxmp.value_and_grad` compute this gradient in FP32.",
    ),
)


# ---------------------------------------------------------------------------
# Page
# ---------------------------------------------------------------------------

INTRODUCTION = """# Would it have caught this?

Twelve public failures of precision. Each is re-created in at most 30 lines of our own code in
`examples/failures`; most of the original programs use PyTorch. Below are the output for the
program, the repair, and the output after it. {named} of the 12 are named, and nothing is reported
for the repaired programs. `python benchmarks/failures.py --page` runs all of them on a CPU and
writes this page (JAX {version}).

| failure | tool | named |
|---|---|---|
"""


def short(thread: str) -> str:
    """Returns a thread as `repository#number`."""
    parts = thread.split("/")
    return f"{parts[1]}#{parts[3]}"


def section(failure: Failure, before: Outcome, after: Outcome) -> str:
    """Returns the section of a failure."""
    command = COMMANDS[failure.tool].format(failure.program)
    shown = [f"## {short(failure.thread)}", ""]
    shown += [f"[{failure.thread}]({GITHUB}{failure.thread}). {failure.happened}", ""]
    shown += ["```text", f"$ {command}", *wrap(before.text), "```", ""]
    shown += [failure.remark, ""] if failure.remark else []
    shown += ["```diff", failure.diff(), "```", ""]
    return "\n".join([*shown, f"After the repair: `{after.text.splitlines()[0]}`", ""])


def wrap(text: str) -> list[str]:
    """Returns lines of at most 100 characters."""
    lines = []
    for line in text.splitlines():
        while len(line) > 100:
            cut = line.rfind(" ", 0, 100)
            lines.append(line[:cut])
            line = line[cut + 1 :]
        lines.append(line)
    return lines


def row(failure: Failure) -> str:
    """Returns the row of a failure in the first table."""
    name = short(failure.thread)
    anchor = name.lower().replace("#", "")
    named = ", ".join(f"`{each}`" for each in sorted(failure.named)) or "no"
    return f"| [{name}](#{anchor}) | `{failure.tool}` | {named} |"


def page(outcomes: list[tuple[Failure, Outcome, Outcome]]) -> str:
    """Returns the text of docs/failures.md."""
    named = sum(bool(failure.named) for failure, _, _ in outcomes)
    introduction = INTRODUCTION.format(named=named, version=jax.__version__)
    rows = "\n".join(row(failure) for failure, _, _ in outcomes)
    return introduction + rows + "\n\n" + "\n".join(section(*each) for each in outcomes)


def main() -> None:
    parser = parser_of(__doc__, [failure.program for failure in FAILURES])
    parser.add_argument("--page", action="store_true", help=f"write docs/{PAGE.name}")
    options: Any = parser.parse_args()
    outcomes = []
    for failure in FAILURES:
        if failure.program in options.only:
            before, after = run(failure, repaired=False), run(failure, repaired=True)
            outcomes.append((failure, before, after))
            result = "as expected" if before.named == failure.named and not after.named else "NOT"
            print(f"{short(failure.thread)}, {result}\n{before.text}\n{after.text}\n", flush=True)
    if options.page:
        PAGE.write_text(page(outcomes), "utf-8")
    wrong = [f for f, before, after in outcomes if before.named != f.named or after.named]
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
