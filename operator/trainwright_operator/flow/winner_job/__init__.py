"""Job that the winner became, while the plan owns it."""
