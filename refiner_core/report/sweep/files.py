"""Names of the files that the report of a sweep consists of, for who writes and who shows them."""

PAGE = "report.html"
TEXT = "report.md"
NUMBERS = "report.csv"
TRIALS = "trials.csv"
VALUES = "report.json"
