"""Values that nodes say of themselves: amounts, names and memory of devices, shares of them, platform, network devices."""
