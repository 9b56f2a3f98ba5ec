"""The autograd graph: one member per process, or replicas that are threads of one."""
