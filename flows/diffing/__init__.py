"""`refiner diff`: differences of two runs, trials or stages, from records and files alone.

    words ──> sides ──> pairs of stages ──┬─> settings: configuration, sources, judge, rubrics,
              which runs                  │   code, environment
              are meant                   └─> outcomes: rows that the data stages have prepared, the
                                                │       first step that is not bitwise the same,
                                                │       evaluations under one protocol
                                    document ───┴──> lines, JSON

In: two names, and their workspaces. Out: one document. Reads only.
"""
