"""Reads programs: what they compute in which dtype, as traced and as compiled, and why.

`_audit` is the audit: `_auditor` walks over the traced program, and `_check_*.py` have the checks,
one file for each subject. `_explain` is about the decisions of a recipe. Other tools read programs
with `_trace`, `_compile` and `_hlo`, which load no checks.
"""
