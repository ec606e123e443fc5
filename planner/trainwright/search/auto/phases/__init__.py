"""What `auto` does, one file a phase: each goes on from what a run knows, and adds to it."""
