"""How new weights reach an inference server, one way per module; ``choice`` says which one fits a situation.

shared     nothing moves: the embedded engine computes with the trainer's own parameters
lora_dir   adapter files under a name that is never used twice
reload     a folder of safetensors files that the server reads again: portable, boring
nccl       a broadcast to the server's GPUs
ipc        CUDA memory handed over on one GPU
"""
