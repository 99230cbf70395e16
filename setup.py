"""Only what pyproject.toml cannot say: packages.find does not rename, and the backends live outside mlxcel/."""

from setuptools import find_packages, setup


def renamed(folder: str, name: str) -> list[str]:
    return [name, *(f"{name}.{package}" for package in find_packages(folder))]


setup(
    packages=[
        *find_packages(include=["mlxcel", "mlxcel.*"]),
        *renamed("backends/jax_cuda", "mlxcel_jax_cuda"),
        *renamed("backends/reference_numpy", "mlxcel_reference_numpy"),
    ]
)
