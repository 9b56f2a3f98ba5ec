"""Making models synchronized: which layer becomes which, and what is replaced where."""
