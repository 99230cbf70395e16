"""Mosaic GPU kernels for Hopper: one kind a file, each beside a plain jnp reference of what it computes."""
