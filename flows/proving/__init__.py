"""Proving that training resumes exactly: what `refiner prove-resume` does.

``planning`` says which stages are run, how they are shortened and where they are hit, ``runs`` runs
them as `refiner run` would, ``interrupting`` hits them meanwhile, ``comparing`` reads both and
``work`` puts it together; ``text`` is what is shown. Records are :mod:`infra.store.proof_records`.
"""

from flows.proving.planning import Asked, Plans, plan_proofs
from flows.proving.work import prove_resume

__all__ = ["Asked", "Plans", "plan_proofs", "prove_resume"]
