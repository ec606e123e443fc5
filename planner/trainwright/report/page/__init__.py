"""Page of an answer: one HTML file with its own drawings, which loads nothing."""
