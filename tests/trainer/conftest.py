"""One thread for torch: the models here are so small that more only get in each other's way."""

import torch

torch.set_num_threads(1)
