"""Keep the import path that Ray Serve configurations use for the application of replicas."""
