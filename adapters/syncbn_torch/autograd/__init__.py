"""The autograd nodes: `alone`, over `processes`, and of `replicas`, the threads of a process."""
