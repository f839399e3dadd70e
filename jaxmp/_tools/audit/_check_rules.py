"""Check of required rules that decide for no module."""

from __future__ import annotations

from collections.abc import Iterator

from jaxmp._core._messages import did_you_mean
from jaxmp._policies._rules import Rule, rule_text
from jaxmp._programs._locations import FULL_PRECISION, module_of
from jaxmp._tools.audit._auditor import Auditor
from jaxmp._tools.audit._checks import Check
from jaxmp._tools.audit._rows import Finding
from jaxmp._tools.audit._trace import Traced

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
            fix = f"Correct the path, or allow it to match nothing:\n    jaxmp.{rule!r}"
            hint = did_you_mean(str(rule.path), filter(None, modules))
            yield UNUSED_RULE.finding(message + hint, f"{fix[:-1]}, required=False)")
