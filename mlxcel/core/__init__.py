"""The engine: records, protocols and the step loop. Imports no jax, no HTTP, no file format."""
