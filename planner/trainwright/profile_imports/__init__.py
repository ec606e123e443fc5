"""Layer profiles in the formats of other tools."""
