"""Training state on disk and back, exactly.

``checkpoint`` writes and reads it for any engine and number of ranks, and holds a copy in memory
while a save goes on behind training; ``equality`` says where two trainings differ.
"""
