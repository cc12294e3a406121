"""The protocol of the ``tinker`` SDK over this machine's model: several adapters over one base."""
