"""Cards as files, folders, repositories and records, and the command that a card gives."""
