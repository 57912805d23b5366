"""``python -m weightlift``: the command line."""

import sys

from weightlift.cli import main

sys.exit(main())
