"""What several test modules share; no test is in here."""
