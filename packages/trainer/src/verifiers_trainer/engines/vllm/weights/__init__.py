"""Weight transfer to inference servers, one method per module; ``choice`` selects the method.

lora_dir   adapter files under a name that is never reused
reload     a folder of safetensors files that the server reads again; works everywhere
nccl       a broadcast to the server's GPUs
ipc        CUDA memory shared on one GPU
"""
