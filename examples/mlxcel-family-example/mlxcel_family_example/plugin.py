"""What the entry point names. It is imported at every start of mlxcel: the family itself is only named here."""

from mlxcel import hookimpl
from mlxcel.core.family import FamilySpec


@hookimpl
def mlxcel_families() -> list[FamilySpec]:
    target = "mlxcel_family_example.gpt_neox:GPTNeoX"
    return [FamilySpec("gpt-neox", "GPT-NeoX and Pythia", target, model_types=("gpt_neox",))]
