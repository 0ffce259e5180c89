"""Proving that training resumes exactly: what `refiner prove-resume` does.

``planning`` says which stages are run, how they are shortened and where they are hit, and what is
shown; ``runs`` runs them as `refiner run` would, hits them meanwhile, compares both and records
what came out (:mod:`infra.store.provenance`).
"""
