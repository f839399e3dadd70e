"""Validation: programs in candidate precisions compared with a reference.

`_validate` compares trainings: `_report` documents the JSON layout of its report, `_compare` the
test, and `_diagnose` the causes that it finds.

`_parity` compares the outputs of a program that trains with those of one that serves: `_walk` runs
programs one operation at a time and contains the criterion, and `_parity_search` finds the cause.
"""
