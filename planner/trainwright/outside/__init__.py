"""Text from outside: its plain data within bounds, and without control characters."""
