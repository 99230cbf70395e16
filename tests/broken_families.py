"""What breaks a law of the family kit on purpose, and what the kit then says."""

import pytest

from mlxcel.testing.family_kit import check_family


def broken_by(family, checkpoint, **options):
    """What the kit says of a family."""
    with pytest.raises(AssertionError) as caught:
        check_family(family, checkpoint, **options)
    return str(caught.value)


class ChangedContext:
    """A context that passes everything on; subclasses change an op."""

    def __init__(self, ctx):
        self.ctx = ctx

    def __getattr__(self, name):
        return getattr(self.ctx, name)
