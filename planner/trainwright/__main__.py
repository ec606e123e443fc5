"""`python -m trainwright`: the command line without its script."""

from __future__ import annotations

from trainwright.cli import app

if __name__ == "__main__":
    app(prog_name="trainwright")
