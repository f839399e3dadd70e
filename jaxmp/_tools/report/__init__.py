"""Reports: rows of plain data that become text, colored text, JSON and HTML pages with charts.

A report is a subclass of `_views.Report`. `_section` has the tables that it is rendered from,
`_text` and `_page` render them, and `_chart` draws curves for a page.
"""
