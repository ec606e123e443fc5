"""Cost model: seconds of one iteration and peak bytes per device. Entry point: `estimate.estimate`."""
