"""The steps of batch normalization for tensors: `cpu`, `cuda`, and `plain` for any device."""
