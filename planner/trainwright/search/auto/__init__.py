"""Search for unequal devices, seeded by the other searches."""
