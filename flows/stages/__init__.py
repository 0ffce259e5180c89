"""What each kind of stage does: the wiring from records and configuration to the science."""
