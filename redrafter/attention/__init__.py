"""Who attends to whom when token trees stand behind rows of unequal length."""
