"""Text for people: tables of candidates, estimates and compared searches, and explanations of plans."""
