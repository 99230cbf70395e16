"""`python -m mlxcel`."""

import sys

from mlxcel.cli.start import main

sys.exit(main())
