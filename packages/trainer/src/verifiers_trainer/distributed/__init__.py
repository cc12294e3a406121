"""Training in several processes: ranks, shared batches, and models split by FSDP2 or DeepSpeed."""
