"""Galvatron-Base and Galvatron-BMW: one strategy per layer, from decision trees and dynamic programming."""
