"""The name by which configurations of Ray Serve call the application of replicas."""
