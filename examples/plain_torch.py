"""Use LAMB and a cosine schedule in a loop of your own.

They are a torch Optimizer and a torch LRScheduler.
"""

import torch
from torch.nn.functional import mse_loss

from optrun.optimizer import Lamb
from optrun.scheduler import build_scheduler

STEPS = 100

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
inputs = torch.randn(64, 8)
targets = inputs.sum(dim=1, keepdim=True)

optimizer = Lamb(model.named_parameters(), lr=5e-2, exclude_from_weight_decay=["bias"])
scheduler = build_scheduler(optimizer, "cosine", num_training_steps=STEPS, num_warmup_steps=5)

for step in range(STEPS):
    loss = mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == STEPS - 1:
        print(f"step {step:2}  loss {loss.item():.4f}  lr {scheduler.get_last_lr()[0]:.2e}")
