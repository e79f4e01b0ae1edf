"""What all commands share: flags, parsing, loading, errors and exit codes."""
