"""The JAX backend for NVIDIA GPUs. It offers its probe; the engine side comes with a later version."""
