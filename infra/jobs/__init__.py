"""Jobs: their interface, this machine's dispatcher, and what a job runs.

``dispatcher`` defines a job and its command; ``dispatch`` picks its dispatcher: this machine, or
:mod:`infra.slurm`. ``signals`` and ``failures``: who asked a job to end, which attempt a restarted
job continues, and why an attempt ended. ``niceness`` lowers the priority of background jobs.
"""
