"""Calls of `refiner run`: begun, worked on, shown, detached, cancelled.

``calls`` begins them, ``recording`` records them, ``pipeline`` works on one (a campaign, its
picture, its progress), ``console`` and ``screen`` show it, ``detach`` leaves it to the background,
``cancelling`` ends it; ``status`` and ``logs`` read how it stands from records alone.
"""
