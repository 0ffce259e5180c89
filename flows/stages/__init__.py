"""What each kind of stage does: the wiring from records and configuration to the science.

``kinds`` has one function a kind. What they share: ``judging`` (a judge with store and servers),
``serving`` (the judge as a service), ``environments``, ``rubric_sets`` and ``judge_prompts`` (what
a stage was planned with, or it is refused). Of their own: ``fetch`` and ``foreign`` (trainers of
others).
"""
