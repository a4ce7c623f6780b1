"""One thread: the models of the tests are small, and a test machine may be busy with other things."""

import torch

torch.set_num_threads(1)
