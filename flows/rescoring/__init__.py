"""Rescoring of stored rollouts: from command line options to files and a table.

``reading`` finds rollouts in a workspace, ``rescore_plan`` makes settings from options and counts
the questions, ``rescore`` asks judges, computes scores and metrics, writes the files, and formats
the output. From the same answers without a judge: ``criteria`` reports what each criterion teaches,
``labelling`` compares the judge with people's labels.
"""
