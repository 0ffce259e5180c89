"""Jobs on Slurm: profiles of clusters, submitting through submitit, states judged by ourselves."""
