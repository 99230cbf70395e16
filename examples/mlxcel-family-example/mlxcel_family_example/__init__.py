"""GPT-NeoX for mlxcel, as a third party would add it."""
