"""From measured trials to the ratios of a runtime."""
