"""For all tests: torch's threads must not spin for ticks, since other processes of the suite share the cores."""

from __future__ import annotations

import os

from headrace.platforms.openmp import limit_spinning

limit_spinning(os.environ)
