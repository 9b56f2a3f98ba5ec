"""The autograd nodes: `single` for one member per process, `replicas` for threads of a process."""
