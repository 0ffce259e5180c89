"""Reports of sweeps and runs: each as one document, and as pages.

    records ── flows/reporting ──> evidence ── comparing ──> SweepReport (values, JSON)
                                └────────────────────────> RunReport
    a report ──> html (one self-contained page), Markdown; of a sweep also CSV

``sweep`` and ``run`` each have a document, its rendering, and templates for page and
Markdown. Shared parts are here: style and script (``base.css``, ``base.js``), security policy and
templates (``pages``), drawings within tables and interactive charts (values in ``drawing``, markup
in ``drawing.html.jinja``, charts drawn by ``charts.js`` with Bokeh), transcripts, and number
formats (``printing``). Pure functions of values: nothing here reads a workspace.
"""
