"""Replicas of a model in threads of one process."""
