"""Sweeps: a file with varied fields becomes arms and trials, with what they share and cost.

    sweep file ── definition ──> SweepFile ── planning ──> Arm … ── checks ──> SweepPlan
                                                                  │ forecast (hours, calls, disk)
                                                                  │ power (detectable effect)

Pure: reads only the sweep file, knows neither workspace nor scheduler. A *factor* is a varied field
of the recipe, a *level* one value of it, an *arm* one setting of all factors, a *trial* one arm
with one seed. A trial is a run of its recipe like any other, with its own record: everything that
works on a run works on a trial. Shipped sweeps are beside this file (``sweeps/*.yaml``).
"""
