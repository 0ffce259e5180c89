"""`refiner diff`: differences of two runs, trials or stages, from records and files alone.

    words ──> sides ──> pairs of stages ──┬─> settings: configuration, sources, judge, rubrics,
              the runs                    │   code, environment
                                          └─> outcomes: prepared rows of the data stages, the first
                                                │       step that is not bitwise the same,
                                                │       evaluations under one protocol
                                    document ───┴──> lines, JSON

In: two names, and their workspaces. Out: one document. Reads only.
"""
