"""Planned trials: their schedule, gangs and status."""
