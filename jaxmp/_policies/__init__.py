"""Policies, the rules that assign them to modules, and the op table of autocast."""
