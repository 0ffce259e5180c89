"""Shipped profiles of clusters; see :mod:`infra.slurm.profiles`."""
