"""Description of a user's model for the planner: counted from its layers, whose shapes, formats and values are checked."""
