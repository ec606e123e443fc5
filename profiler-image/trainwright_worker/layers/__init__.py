"""The layers of a model as torch modules: the same kinds, parameters and boundaries that `trainwright.families` counts.

Every layer's whole weights follow from the seed and its place in the model; a rank then keeps its part of them. So
all plans start from the same weights. One file a family.
"""
