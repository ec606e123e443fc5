"""The plan executor: one rank's part of a plan, run iteration by iteration."""
