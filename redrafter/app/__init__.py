"""Code that all commands share: flags, argument parsing, loading of models, error messages and exit codes."""
