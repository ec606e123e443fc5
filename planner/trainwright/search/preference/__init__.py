"""Which of the candidates to take: simpler ones within a tolerance, and those that keep what runs where it is."""
