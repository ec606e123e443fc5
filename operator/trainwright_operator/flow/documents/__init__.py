"""Documents that the operator stores in ConfigMaps, and the values that they are of."""
