"""`python -m trainwright_operator`: hold the lease, then watch and work until told to end."""

from __future__ import annotations

import sys

from trainwright_operator.kube.main import main

if __name__ == "__main__":
    sys.exit(main())
