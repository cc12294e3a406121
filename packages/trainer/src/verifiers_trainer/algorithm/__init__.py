"""Turn finished rollouts into a gradient: advantages, samples, packing, losses. Pure: no I/O, no
engine, no loop."""
