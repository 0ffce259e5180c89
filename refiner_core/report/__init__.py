"""Reports of sweeps and runs: each as one document, and as pages made of it.

    records ── flows/reporting ──> evidence ── comparing ──> SweepReport (values, JSON)
                                └────────────────────────> RunReport
    a report ──> html (one self-contained page), Markdown; of a sweep also CSV

``sweep`` and ``run`` each have a document, what renders it, and templates of a page and of
Markdown. What they share lies here: style and script (``base.css``, ``base.js``), policy and
templates (``pages``), interactive charts (``charts``, drawn by ``charts.js`` with Bokeh), drawings
within tables (values in ``drawing``, markup in ``drawing.html.jinja``), transcripts, how numbers
are printed. Pure functions of values: nothing here reads a workspace.
"""
