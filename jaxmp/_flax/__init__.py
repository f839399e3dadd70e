"""The parts shared by the Linen and NNX adapters, and the casts of each framework."""
