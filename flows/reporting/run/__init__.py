"""The report of one run: gathered from its records, and written as a page, JSON and Markdown.

::

    records ──> stages ──> numbers, curves, examples, cost, facts
                                      └──> report ──> RunReport and its files

Reads only but for the files that it writes: asks no scheduler, needs neither torch nor Prefect,
and works while the run goes on, after it failed, and after most of its files were reclaimed. What
cannot be read is a warning in the report.
"""

from flows.reporting.run.report import report_of_run, report_run

__all__ = ["report_of_run", "report_run"]
