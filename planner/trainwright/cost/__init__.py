"""What a plan costs: seconds of one iteration and bytes on every device. Start at `estimate.estimate`."""
