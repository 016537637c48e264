"""All Triton kernels and their vmap rules: fast paths of layers and of the training step on CUDA."""
