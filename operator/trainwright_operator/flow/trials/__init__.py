"""Planned trials: their document, schedule, gangs and status."""
