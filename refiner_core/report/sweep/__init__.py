"""The report of a sweep: its arms compared, drawn and said."""
