"""The JAX backend: on NVIDIA GPUs, and on the CPU by XLA:CPU."""
