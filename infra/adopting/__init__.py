"""Dead runs, ours or anybody's, become stages that go on here."""
