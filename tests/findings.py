"""Findings of the audit."""


def the_only(findings, check):
    """Returns the finding of a check, of which there is exactly one."""
    (found,) = (finding for finding in findings if finding.check == check)
    return found
