"""Inputs of commands: documents, model files, and whether what they say is plausible and fits together."""
