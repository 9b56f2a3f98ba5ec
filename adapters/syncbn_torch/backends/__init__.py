"""The steps of batch normalization for tensors: on the CPU, on CUDA devices, anywhere."""
