"""Check of required rules that decide for no module."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from jaxmp._audit._auditor import Auditor
from jaxmp._audit._checks import Check
from jaxmp._audit._rows import Finding
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
    policies = audit.context.policies
    if policies is None:
        return
    modules: dict[str, None] = {}
    decisive: set[Rule | None] = set()
    for names in audit.locations.names:
        if FULL_PRECISION not in names:
            modules[module_of(names, audit.root)] = None
            decisive.add(audit.context.resolve(names).rule)
    # A program contains no module types and parameters.
    for rule in dict.fromkeys(policies.rules):
        is_checked = rule.required and rule.module_type is None and not rule.addresses_parameter
        if is_checked and rule not in decisive:
            text = rule_text(rule, with_reason=False)
            message = f"the required rule {text} decides for no module of this program."
            yield UNUSED_RULE.finding(message, _fix(rule, list(modules)))


def _fix(rule: Rule, modules: list[str]) -> str:
    """Returns the rule with the most similar module path, and as an optional rule."""
    code = f"jaxmp.{rule!r}"
    optional = f"{code[:-1]}, required=False)"
    similar = difflib.get_close_matches(str(rule.path), [name for name in modules if name], 1)
    if not similar:
        return f"Allow the rule to match nothing:\n    {optional}"
    corrected = code.replace(repr(rule.path), repr(similar[0]), 1)
    return f"Correct the path:\n    {corrected}\nOr allow it to match nothing:\n    {optional}"
