"""The NumPy backend: the readable oracle, and the default where there is no accelerator."""
