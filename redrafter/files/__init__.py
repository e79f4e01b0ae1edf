"""Files and folders that are written atomically, and the kinds of checkpoints that a directory may hold."""
