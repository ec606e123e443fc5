"""Layers of a model as torch modules, with the kinds, parameters and boundaries that `trainwright.families` counts.

Every layer's full weights follow from the seed and its index in the model, and a rank keeps its part of them; so all
plans start from the same weights. One file per family.
"""
