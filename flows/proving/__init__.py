"""Proof that training resumes exactly, for `refiner prove-resume`.

``proof_plan`` selects the stages, shortens them, draws the interruptions, and formats the results;
``runs`` runs them as `refiner run` does, interrupts one of the runs, compares both and records the
proof (:mod:`infra.store.provenance`).
"""
