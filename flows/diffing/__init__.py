"""`refiner diff`: in what two runs, trials or stages differ, from records and files alone.

    words ──> sides ──> pairs of stages ──┬─> settings: configuration, sources, judge, rubrics,
              which runs                  │   code, environment
              are meant                   └─> outcomes: rows that the data stages have prepared, the
                                                │       first step that is not bitwise the same,
                                                │       evaluations under one protocol
                                    document ───┴──> lines, JSON

In: two names, and the workspaces that they are recorded in. Out: one document. Reads only.
"""
