"""Check of required rules that decide for no module, and the table of decisions."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import Check
from jaxmp._audit._rows import Finding, ModuleRow, RuleRow
from jaxmp._audit._trace import Traced
from jaxmp._core._locations import FULL_PRECISION, module_of
from jaxmp._policies._rules import Rule, rule_text

UNUSED_RULE = Check(
    id="unused_rule",
    explanation="A required rule decides for no module of the program.",
    fix="jaxmp.Rule('decoder/**', 'c=f32', required=False)",
)


@UNUSED_RULE.on_program
def check_rules(audit: Auditor, traced: Traced) -> Iterator[Finding]:
    """Reports required rules without a module."""
    del traced
    if audit.context.policies is None:
        return
    modules, rows = decisions(audit)
    # Equal rules share a row.
    rules = dict.fromkeys(audit.context.policies.rules)
    for rule, row in zip(rules, rows, strict=True):
        if row.required and not row.modules:
            message = f"the required rule {row.rule} decides for no module of this program."
            yield UNUSED_RULE.finding(message, _fix(rule, [module.module for module in modules]))


def decisions(audit: Auditor) -> tuple[tuple[ModuleRow, ...], tuple[RuleRow, ...]]:
    """Returns the rule of each module of the program, and the modules of each rule."""
    policies = audit.context.policies
    if policies is None:
        return (), ()
    root = audit.root
    modules: dict[str, ModuleRow] = {}
    decided: dict[Rule, dict[str, None]] = {rule: {} for rule in policies.rules}
    for names in audit.locations.names:
        if FULL_PRECISION in names:
            continue
        resolved = audit.context.resolve(names)
        rule = resolved.rule
        module = module_of(names, root)
        if rule is not None:
            decided[rule][module] = None
        text = "" if rule is None else rule_text(rule, with_reason=False)
        modules[module] = ModuleRow(module=module, policy=str(resolved.policy), rule=text)
    rules = tuple(
        RuleRow(
            rule=rule_text(rule, with_reason=False),
            why=rule.why,
            modules=tuple(paths),
            required=rule.required and rule.module_type is None and not rule.addresses_parameter,
        )
        for rule, paths in decided.items()
    )
    return tuple(modules.values()), rules


def _fix(rule: Rule, modules: list[str]) -> str:
    """Returns the rule with the most similar module path, and as an optional rule."""
    code = f"jaxmp.{rule!r}"
    optional = f"{code[:-1]}, required=False)"
    similar = difflib.get_close_matches(str(rule.path), [name for name in modules if name], 1)
    if not similar:
        return f"Allow the rule to match nothing:\n    {optional}"
    corrected = code.replace(repr(rule.path), repr(similar[0]), 1)
    return f"Correct the path:\n    {corrected}\nOr allow it to match nothing:\n    {optional}"
