"""Replicas of a server on Ray Serve: which one answers a request, and who goes on with it when that one is lost."""
