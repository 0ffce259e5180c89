"""Sweeps: a file that says what is varied becomes arms and trials, with what they share and cost.

    sweep file ── definition ──> SweepFile ── planning ──> Arm … ── checks ──> SweepPlan
                                                                  │ forecast (hours, calls, room)
                                                                  │ power (what effect can be seen)

Pure: reads the sweep file and nothing else, knows neither workspace nor scheduler. A *factor* is
a field of the recipe that is varied, a *level* one value of it, an *arm* one setting of all
factors, a *trial* one arm with one seed. A trial is a run of its recipe like any other, with a
record of its own: everything that works on a run works on a trial. Shipped sweeps lie beside this
file (``sweeps/*.yaml``).
"""
