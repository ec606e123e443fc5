"""Galvatron-Base and Galvatron-BMW: strategies by layer, by decision trees and dynamic programming."""
