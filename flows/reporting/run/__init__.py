"""Report of one run: gathered from its records, and written as a page, JSON and Markdown.

::

    records ──> stages ──> numbers, curves, examples, cost, facts
                                      └──> report ──> RunReport and its files

Writes only the report's files: asks no scheduler, needs neither torch nor Prefect, and works during
the run, after a failure, and after most files were reclaimed. Unreadable records become warnings in
the report.
"""

from flows.reporting.run.report import report_of_run, report_run

__all__ = ["report_of_run", "report_run"]
