"""Requests to the API server: what they hold, when refused ones are sent again, and why pods are refused."""
