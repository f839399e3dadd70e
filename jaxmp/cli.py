"""The `jaxmp` command: list recipes, show what one does, explain which rule decides where."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import jax

import jaxmp
from jaxmp._audit import AuditReport
from jaxmp._audit._compile import check_target
from jaxmp._audit._script import ScriptAudit, audit_script
from jaxmp._audit._sections import counted, flops_words
from jaxmp._core._compat import unchecked_cuda
from jaxmp._core._dtypes import is_16bit
from jaxmp._loss_scale import DynamicLossScale
from jaxmp._policies._op_table import CATEGORIES, OpTable
from jaxmp._policies._policy import Policy, without_inputs
from jaxmp._policies._rules import Explanation, PolicyMap, Rule, named_dtypes
from jaxmp._recipe import Recipe, list_recipes, load_recipe
from jaxmp.errors import AuditFailedError, JaxmpError, RuleError, missing_dependency
from jaxmp.fp8._scaling import as_scaling

try:
    import rich.box
    import typer
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise missing_dependency(
        str(error.name).partition(".")[0], "the jaxmp command", "cli"
    ) from None

app = typer.Typer(
    help="Mixed precision for JAX and Flax: what each recipe does, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_RecipeArgument = Annotated[
    str, typer.Argument(help="A recipe's name, a file ending in .toml, or p=f32,c=bf16,o=f32.")
]
_ModelArgument = Annotated[
    str,
    typer.Argument(
        help="module.path:factory; the factory returns a Linen model and example inputs, or an NNX"
        " model."
    ),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command; errors print as one red message.

    Args:
      arguments: what follows `jaxmp` on the command line. None: what the shell gave.

    Raises:
      SystemExit: always; 0 if all is well, 1 if a required rule matched nothing or an audit failed,
        2 for an error.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="jaxmp")
    except JaxmpError as error:
        _print_error(error)
        raise SystemExit(
            1 if isinstance(error, (_UnmatchedRule, AuditFailedError)) else 2
        ) from None


class _UnmatchedRule(RuleError):
    """A required rule matched nothing: the recipe does not fit this model."""


def _print_error(error: JaxmpError) -> None:
    console = Console(stderr=True, soft_wrap=True)
    console.print(_text(f"Error: {error}", "red"))


# ---------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print versions and exit.")] = False,
) -> None:
    if version:
        python = platform.python_version()
        _console().print(f"jaxmp {jaxmp.__version__} (jax {jax.__version__}, Python {python})")
        raise typer.Exit


@app.command("recipes")
def _recipes() -> None:
    """List the shipped recipes."""
    table = _table("recipe", "policy", "loss scale", "summary")
    for name in list_recipes():
        recipe = load_recipe(name)
        kind = recipe.data.loss_scale.kind
        # `show` lists the arguments that are kept.
        policy = _policy_words(without_inputs(recipe.policies.default))
        table.add_row(_text(name, "bold"), policy, kind, _text(recipe.summary))
    _console().print(table)


@app.command("show")
def _show(
    recipe: _RecipeArgument,
    ops: Annotated[
        bool, typer.Option("--ops", help="Print the whole table of operations, with reasons.")
    ] = False,
) -> None:
    """Print everything that a recipe does, with reasons."""
    loaded = load_recipe(recipe)
    console = _console()
    console.print(_text(loaded.name, "bold"), _text(loaded.summary, "dim"), sep="  ")
    for title, rows in _all_operations(loaded.ops) if ops else _sections(loaded):
        console.print()
        console.print(Text(title, style="bold cyan"))
        console.print(Padding(_pairs(rows), (0, 0, 0, 2)))


@app.command("explain")
def _explain(recipe: _RecipeArgument, model: _ModelArgument) -> None:
    """Print which rule decides for each module of a model, and which rules decide nothing."""
    policies = load_recipe(recipe).policies
    explain, paths = _explained(model)
    try:
        policies.check_required(paths)
    except RuleError as error:
        _print_explanation(policies, policies.explain_modules(paths))
        raise _UnmatchedRule(str(error)) from None
    _print_explanation(policies, explain(policies))


@app.command("audit", context_settings={"ignore_unknown_options": True, "allow_extra_args": False})
def _audit(
    step: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STEP | ARGUMENTS...",
            help="module.path:make_step, or file.py:make_step; make_step(recipe), or make_step(),"
            " returns a function and its arguments, which may be shapes. With --script, the"
            " arguments of the script; options with the names of those below go after --.",
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Run a training script, unedited, until its train step was traced, and audit that."
            " -m MODULE runs a module.",
        ),
    ] = None,
    listing: Annotated[
        bool, typer.Option("--list", help="With --script: only list the jitted functions.")
    ] = False,
    function: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --script: audit this function.")
    ] = None,
    max_seconds: Annotated[
        float, typer.Option(help="With --script: how long the script may run.")
    ] = 600.0,
    recipe: Annotated[
        str | None, typer.Option(help="What the step is meant to follow; make_step is given it.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="Compile for a100, h100, h200 or b200 too; the card need not be there."),
    ] = None,
    fail_on: Annotated[
        str, typer.Option(help="Checks that fail, by commas; any: every error; none.")
    ] = "any",
    baseline: Annotated[
        str | None, typer.Option(metavar="FILE", help="JSON; fail on more errors than it has.")
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Print warnings, modules, casts, alignment and rules too."),
    ] = False,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write a page.")] = None,
    markdown: Annotated[str | None, typer.Option(metavar="FILE", help="Write Markdown.")] = None,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write all numbers.")] = None,
) -> None:
    """Print what a training step runs in which dtype, and what is wrong with it."""
    arguments = step or []
    if script is None:
        if listing or function is not None:
            raise JaxmpError("--list and --function need --script train.py.")
        if len(arguments) != 1 or arguments[0].startswith("-"):
            _refuse(arguments)
        report = _audit_make_step(arguments[0], recipe, target)
    else:
        result = _run_script(
            script,
            arguments,
            recipe=recipe,
            target=target,
            function=function,
            listing=listing,
            max_seconds=max_seconds,
        )
        _print_functions(result, listing)
        if result.report is None:
            return
        report = result.report
    # Code is not wrapped, so that it can be pasted.
    _console().print(report.to_rich(full=full), soft_wrap=True)
    views = {
        html: lambda: report.to_html(full=full),
        markdown: lambda: report.to_markdown(full=full),
        json: report.to_json,
    }
    for file, view in views.items():
        if file is not None:
            _write(file, view())
    if fail_on == "any" and baseline is None:
        raise typer.Exit(0 if report.ok else 1)  # the report lists the errors
    checks = None if fail_on == "any" else [name for name in fail_on.split(",") if name != "none"]
    report.check(checks, baseline=baseline)


def _refuse(arguments: list[str]) -> NoReturn:
    """Refuses arguments that are no step."""
    wrong = next((a for a in arguments if a.startswith("-")), None)
    what = f"there is no option {wrong}" if wrong else f"{len(arguments)} arguments, not one"
    raise JaxmpError(
        f"{what}. Name a function that makes the step, or a script:\n"
        "    jaxmp audit my_package.train:make_step --recipe bf16\n"
        "    jaxmp audit --script train.py"
    )


def _audit_make_step(step: str, recipe: str | None, target: str | None) -> AuditReport:
    policies = None if recipe is None else load_recipe(recipe)
    with contextlib.nullcontext() if target is None else unchecked_cuda():
        fn, *args = _call_make_step(step, recipe)
        return _run(
            f"the step of {step}", lambda: jaxmp.audit(fn, *args, policies=policies, target=target)
        )


def _run_script(script: str, arguments: list[str], **options: Any) -> ScriptAudit:
    """Audits a script, after a check of the options that needs no script."""
    if options["recipe"] is not None:
        load_recipe(options["recipe"])
    if options["target"] is not None:
        check_target(options["target"])
    if script == "-m" and not arguments:
        raise JaxmpError("-m needs a module: jaxmp audit --script -m my_package.train")
    module = script == "-m"
    return audit_script(arguments if module else [script, *arguments], module=module, **options)


def _print_functions(result: ScriptAudit, listing: bool) -> None:
    """A table of the functions, or a line about the one that was audited."""
    if result.audited is not None:
        row = result.audited
        others = len(result.functions) - 1
        more = f"; --list prints {counted(others, 'other function')}" if others else ""
        location = f" ({row.location})" if row.location else ""
        what = "" if row.takes_gradients else ", which takes no gradients"
        _console().print(_text(f"Function {row.name}{location}{what}{more}", "dim"), soft_wrap=True)
        return
    table = _table("function", "line", "matmul FLOPs of a call", "what it does")
    for row in result.functions:
        does = ["takes gradients"] * row.takes_gradients + [
            "returns an updated state"
        ] * row.updates
        words = " and ".join(does) or "no gradients"
        table.add_row(_text(row.name, "bold"), _text(row.location), flops_words(row.flops), words)
    _console().print(table)


def _write(file: str, text: str) -> None:
    """Writes a file, or leaves the old one as it was."""
    partial = f"{file}.partial"
    try:
        with open(partial, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.replace(partial, file)
    except OSError as error:
        raise JaxmpError(f"{file!r} cannot be written: {error}") from None


# ---------------------------------------------------------------------------
# What a recipe does, in words
# ---------------------------------------------------------------------------

_Rows = list[tuple[str, str]]

_ATTENTION = {
    "auto": "cuDNN's fused kernel where it fits, else block by block, or whole where it is small;"
    " layers in FP32 are left to Flax",
    "cudnn": "cuDNN's fused kernel, or an error",
    "blockwise": "block by block, in memory linear in the length",
    "xla": "two products and a softmax, with the logits of all pairs in memory",
}
_MASK = {
    "array": "array: attention layers read the mask that the model passes",
    "causal": "causal: declared, position t sees keys 0 to t",
    "padding": "padding: declared, hides the positions behind the end of each sequence",
    "causal+padding": "causal+padding: declared, position t sees keys 0 to t of its sequence",
    "full": "full: declared, hides nothing",
}
_MATMUL = {
    "default": "JAX's own choice for FP32 operands: TF32 on NVIDIA Tensor Cores",
    "tf32": "FP32 operands are rounded to TF32: 10 bits of mantissa, FP32 range and sums",
    "highest": "FP32 operands keep all their bits",
    "fp8": "linear layers multiply in FP8 where their sizes allow it",
}
_SKIP = {
    "auto": "select when compiling for GPU or TPU, lax.cond when compiling for CPU",
    "select": "the new state is computed, and taken or left element by element",
    "cond": "the optimizer runs in a lax.cond, only if the step is taken",
    "none": "nothing is skipped: a non-finite gradient reaches the parameters",
}
_MASTER = {
    "fp32": "FP32 masters in the optimizer state, 4 more bytes each",
    "packed": "the 16 bits that bfloat16 drops of FP32 beside them, 2 more bytes each",
    "none": "no masters: an update below half a step of the stored dtype is lost",
}
_ALWAYS_FP32: _Rows = [
    (
        "norm statistics",
        "means of squares cancel; Flax's norms take them in FP32, and compute with"
        " scale and bias in FP32",
    ),
    ("batch statistics", "running averages stall in 8 bits of mantissa: never cast"),
    (
        "attention softmax",
        "Flax's attention takes logits, mask and softmax in FP32: float16 logits"
        " overflow beyond 65504",
    ),
    ("loss", "value_and_grad takes the loss in FP32 and seeds its gradient with the loss scale"),
    ("unscaled gradients", "unscaled, clipped and handed to the optimizer in FP32"),
    (
        "optimizer state",
        "second moments underflow in 16 bits: moments are kept for the FP32 masters",
    ),
]
_RAW_CODE = (
    "This holds inside Flax's own modules, in jaxmp's gradients and optimizers, and in modules that"
    " a rule puts in FP32. A raw jax.nn.softmax runs in the dtype it is given."
)


def _sections(recipe: Recipe) -> list[tuple[str, _Rows]]:
    rules = [(str(n), _rule_words(rule)) for n, rule in enumerate(recipe.policies.rules, start=1)]
    return [
        ("Policy: for every module for which no rule decides", _policy_rows(recipe)),
        ("Rules: the first that matches decides alone", rules or [("none", "")]),
        ("Loss scale", _loss_scale_rows(recipe)),
        ("Optimizer", _optimizer_rows(recipe)),
        (
            "In FP32 whatever the recipe says, unless a rule says otherwise",
            [*_ALWAYS_FP32, ("elsewhere", _RAW_CODE)],
        ),
        ("Operations (autocast)", _operation_rows(recipe.ops)),
    ]


def _policy_rows(recipe: Recipe) -> _Rows:
    policy = recipe.policies.default
    rows = [
        ("stored", f"{policy.param_dtype.name}: parameters in the train state"),
        (
            "computed",
            f"{policy.compute_dtype.name}: operands inside modules, and what they hand to"
            " each other; matmuls accumulate in FP32",
        ),
        ("output", f"{policy.output_dtype.name}: what the whole model returns"),
        ("matmul", f"{policy.matmul}: {_MATMUL[policy.matmul]}"),
        *_fp8_rows(recipe.policies),
        ("attention", f"{policy.implementation}: {_ATTENTION[policy.implementation]}"),
        ("mask", f"{_MASK[policy.mask]}{_window_words(policy.window)}"),
    ]
    author = "is kept" if policy.respect_explicit else "is overridden"
    rows.append(("explicit dtypes", f"a dtype that the author set on a Flax module {author}"))
    float64 = "cast like the others" if policy.cast_float64 else "left alone"
    rows.append(("float64 arrays", float64))
    kept = _field_words("keep_inputs", policy.keep_inputs)
    return [*rows, ("inputs kept", f"{kept}: arguments of modules that are not cast")]


def _window_words(window: tuple[int, int] | None) -> str:
    return "" if window is None else f", within {window[0]} positions left and {window[1]} right"


def _fp8_rows(policies: PolicyMap) -> _Rows:
    named = [policies.default.matmul, *(rule.fields.get("matmul") for rule in policies.rules)]
    if "fp8" not in named:
        return []
    kind = as_scaling(policies.fp8).kind
    words = f"{kind} scaling; a CPU emulates it: rounds to FP8, and multiplies in a wider dtype"
    return [("FP8", words)]


def _rule_words(rule: Rule) -> str:
    about = [] if rule.path is None else [repr(rule.path)]
    below = " and all below them" if rule.subtree else ""
    about += [] if rule.module_type is None else [f"modules of type {rule.module_type}{below}"]
    fields = ", ".join(f"{name} = {_field_words(name, v)}" for name, v in rule.fields.items())
    required = "" if rule.required else " (may match nothing)"
    return f"{', '.join(about)}: {fields}{required}" + (f"\n{rule.why}" if rule.why else "")


def _field_words(name: str, value: Any) -> str:
    if name == "keep_inputs":
        return ", ".join(map(str, value)) or "none"
    return value.name if name.endswith("_dtype") else str(value).lower()


def _loss_scale_rows(recipe: Recipe) -> _Rows:
    data = recipe.data.loss_scale
    if data.kind == "none":
        half = any(d.name == "float16" for _, _, d in named_dtypes(recipe.policies))
        why = (
            "but float16 gradients below 6e-8 become 0"
            if half
            else "bfloat16 and float32 have the range that gradients need"
        )
        return [("none", f"gradients are not scaled; {why}")]
    if data.kind == "static":
        return [("static", f"gradients are scaled by {dict(data.arguments)['value']:g}, always")]
    return _dynamic_rows(recipe.loss_scale, data.preset or "jaxmp")


def _dynamic_rows(scale: Any, preset: str) -> _Rows:
    assert isinstance(scale, DynamicLossScale)
    refill = "at each growth" if scale.hysteresis_refill == "growth" else "at each clean step"
    tolerance = (
        "backs off at every overflow"
        if scale.hysteresis == 1
        else f"backs off from overflow {scale.hysteresis} on, counted anew {refill}"
    )
    delay = scale.first_growth_delay
    return [
        ("dynamic", f"the rule of {preset}; a step that overflows is skipped"),
        ("start", _power(float(scale.scale_value))),
        (
            "growth",
            f"times {scale.growth_factor:g} after {scale.growth_interval} clean steps in a"
            f" row" + (f", not counting the first {delay}" if delay else ""),
        ),
        ("backoff", f"times {scale.backoff_factor:g}; {tolerance}"),
        ("bounds", f"from {_power(scale.floor)} to {_power(scale.ceiling)}"),
        ("unscaling", "in FP32, by the scale that scaled, before clipping and weight decay"),
    ]


def _power(value: float) -> str:
    """`65536 (2**16)`."""
    mantissa, exponent = value.hex().split("p")
    power = f" (2**{int(exponent)})" if mantissa == "0x1.0000000000000" else ""
    return f"{value:.10g}{power}"


def _optimizer_rows(recipe: Recipe) -> _Rows:
    stored = {d for _, field, d in named_dtypes(recipe.policies) if field == "param_dtype"}
    halves = sorted(dtype.name for dtype in stored if is_16bit(dtype))
    master = "fp32" if recipe.master == "auto" else recipe.master
    masters = (
        f"parameters stored in {' and '.join(halves)} have {_MASTER[master]}"
        if halves
        else "parameters stored in float32 are their own masters"
    )
    return [
        ("masters", f"{recipe.master}: {masters}"),
        (
            "skipped steps",
            "a step whose loss or gradients are not finite changes nothing but the"
            " loss scale and the counters"
            if recipe.skip != "none"
            else _SKIP["none"],
        ),
        ("skip", f"{recipe.skip}: {_SKIP[recipe.skip]}"),
        ("microbatches", f"gradients are added up in {recipe.accumulate_dtype}"),
        (
            "devices",
            f"gradients are averaged in {recipe.reduce_dtype} over the optimizer's axis_name"
            " (pmap, vmap, shard_map); under jit with shardings XLA chooses the dtype",
        ),
    ]


def _operation_rows(table: OpTable) -> _Rows:
    """How many operations each category has, and each that the recipe moved."""
    counts = [
        (category, f"{len(table.names(category))} operations; {meaning}")
        for category, meaning in CATEGORIES.items()
    ]
    moved = [
        (name, f"{category}, moved from {table.op(name).category}: {table.op(name).reason}")
        for name, category in table.differs().items()
    ]
    return [*counts, *(moved or [("moved", "none: this is the default table")])]


def _all_operations(table: OpTable) -> list[tuple[str, _Rows]]:
    return [
        (f"{category}: {meaning}", [(n, _operation_words(table, n)) for n in table.names(category)])
        for category, meaning in CATEGORIES.items()
    ]


def _operation_words(table: OpTable, name: str) -> str:
    op = table.op(name)
    moved = table.category(name) != op.category
    return f"moved from {op.category}: {op.reason}" if moved else op.reason


# ---------------------------------------------------------------------------
# Explaining a model
# ---------------------------------------------------------------------------


def _call_factory(target: str) -> tuple[Any, ...]:
    example = "jaxmp explain bf16 my_package.model:make"
    factory = _named_function(target, "factory", example, "return model, example_input")
    made = _run(f"{target}()", factory)
    parts = tuple(made) if isinstance(made, (tuple, list)) else (made,)
    if len(parts) < 2 and not any(map(_is_nnx, parts)):
        raise JaxmpError(
            f"{target}() returned {type(made).__name__}, not a model and its example inputs. "
            "Return both:\n    return model, example_input"
        )
    return parts


def _named_function(target: str, word: str, command: str, result: str) -> Callable[..., Any]:
    """The function `module.path:name`; the other arguments are shown where there is none."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name.isidentifier():
        raise JaxmpError(f"{target!r} is not module.path:{word}; for example:\n    {command}")
    folder, module_name = _importable(module_name)
    sys.path.insert(0, folder)
    module = _run(f"importing {module_name!r}", lambda: importlib.import_module(module_name))
    if not callable(getattr(module, name, None)):
        raise JaxmpError(
            f"{module_name!r} has no function {name!r}. Write one:\n"
            f"    def {name}():\n        {result}"
        )
    return getattr(module, name)


def _importable(name: str) -> tuple[str, str]:
    """`(folder, module)` of `package.module` from here, or of `folder/module.py` from there."""
    if not name.endswith(".py"):
        return os.getcwd(), name
    folder, file = os.path.split(os.path.abspath(name))
    return folder, file.removesuffix(".py")


def _call_make_step(target: str, recipe: str | None) -> tuple[Any, ...]:
    """`(function, *arguments)` of `make_step(recipe)`, or of `make_step()` if it takes none."""
    example = "jaxmp audit my_package.train:make_step --recipe bf16"
    result = "return train_step, state, batch"
    make = _named_function(target, "make_step", example, result)
    takes = inspect.signature(make).parameters
    given = (recipe,) if takes and recipe is not None else ()
    made = _run(f"{target}({', '.join(map(repr, given))})", lambda: make(*given))
    if not isinstance(made, (tuple, list)) or not made or not callable(made[0]):
        raise JaxmpError(
            f"{target} returned {type(made).__name__}, not a function and its arguments. Return "
            "them:\n    return train_step, state, batch"
        )
    return tuple(made)


def _explained(target: str) -> tuple[Callable[[Any], Explanation], dict[str, Any]]:
    """`explain(policies)`, and all paths, of the model that a factory makes."""
    model, *inputs = _call_factory(target)
    where = f"the model of {target}"
    adapter = jaxmp.nnx if _is_nnx(model) else jaxmp.linen
    if _is_nnx(model):
        paths = _run(where, lambda: adapter.module_paths(model))
        # An NNX model has paths without inputs; with them, its FLOPs can be counted.
        inputs = inputs if any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(inputs)) else []
    else:
        paths = _run(where, lambda: adapter.module_paths(model, *inputs))
    return lambda policies: _run(where, lambda: adapter.explain(model, policies, *inputs)), paths


def _is_nnx(model: Any) -> bool:
    """Whether `model` is an NNX module; Flax is imported by whoever made one."""
    return any(cls.__module__ == "flax.nnx.module" for cls in type(model).__mro__)


def _run(what: str, call: Callable[[], Any]) -> Any:
    """Runs a user's code; its exception becomes a message that says where it was raised."""
    try:
        return call()
    except JaxmpError:
        raise
    except Exception as error:
        raise JaxmpError(f"{what} raised {type(error).__name__}: {error}{_place(error)}") from error


def _place(error: Exception) -> str:
    """Where a user's own file raised `error`, as far as one did."""
    frames = traceback.extract_tb(error.__traceback__)
    here = os.path.dirname(__file__)
    own = [f for f in frames if not f.filename.startswith((here, "<", sys.prefix, sys.base_prefix))]
    return f" ({os.path.basename(own[-1].filename)}, line {own[-1].lineno})" if own else ""


def _print_explanation(policies: PolicyMap, explanation: Explanation) -> None:
    console = _console()
    table = _table("path", "type", "policy", "rule")
    for row in explanation.rows:
        number = "default" if row.rule is None else str(row.rule + 1)
        path = _text(row.path or "(root)")
        table.add_row(path, _text(row.module_type), _policy_words(row.policy), number)
    console.print(table)
    for line in explanation.summary:
        console.print(_text(line))
    deciding = {row.rule for row in explanation.rows}
    for number, rule in enumerate(policies.rules, start=1):
        unused = number - 1 not in deciding
        label = f"rule {number}, unused" if unused else f"rule {number}"
        console.print(_text(label, "yellow" if unused else "bold"))
        console.print(Padding(_text(_rule_words(rule)), (0, 0, 0, 2)))


# ---------------------------------------------------------------------------
# Printing
# ---------------------------------------------------------------------------


def _console() -> Console:
    return Console(highlight=False)


def _text(value: str, style: str = "") -> Text:
    """Text without markup, in which control characters are shown and not obeyed."""
    plain = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in value)
    return Text(plain, style=style)


def _table(*columns: str) -> Table:
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        whole = column in ("recipe", "policy", "loss scale", "rule")
        table.add_column(column, overflow="fold", no_wrap=whole)
    return table


def _policy_words(policy: Policy) -> str:
    """The three dtypes on a line, and each further setting on its own."""
    parts = str(policy).split(",")
    return "\n".join([",".join(parts[:3]), *parts[3:]])


def _pairs(rows: _Rows) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, words in rows:
        grid.add_row(_text(label), _text(words))
    return grid


if __name__ == "__main__":
    main()
