"""Reports: rows of plain data that become text, colored text, JSON and HTML pages with charts.

A report is a subclass of `_views.Report`, which also renders it as a page. `_section` has the
tables that it consists of, and renders them as text.
"""
