"""A checkpoint of which some values are not finite."""

import attrs
import numpy as np

from mlxcel.finite_weights import FiniteWeights


@attrs.frozen(eq=False)
class SpoiltCheckpoint(FiniteWeights):
    """As the one inside, but for NaN at one place of each tensor in `places`."""

    places: dict = attrs.field(factory=dict)

    def read(self, name, out=None):
        values = self.inside.read(name, out)
        if name in self.places:
            values[self.places[name]] = np.nan
        return values
