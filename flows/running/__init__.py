"""Calls of `refiner run`: begun, worked on, shown, detached, cancelled.

``calls`` begins them, ``recording`` records them, ``showing`` works on one with its
progress, ``console`` and ``screen`` show it, ``attaching`` starts what shows it in Prefect,
``detach`` leaves it to the background,
``cancelling`` ends it; ``status`` and ``logs`` read how it stands from records alone.
"""
