"""A plain training loop, and the three lines that make it a peer of a run.

python examples/digits_plain_loop.py                  # alone, in this process
python examples/digits_plain_loop.py run.toml         # a peer of the run in run.toml
"""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import cross_entropy

import torchbft
from torchbft.pytorch.solo import SoloNode, local_run
from torchbft.pytorch.tasks import get_task

torch.manual_seed(0)
torch.set_num_threads(1)
digits = get_task("digits")
train_set, test_set = digits.train_set, digits.test_set
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)

run, link = (sys.argv[1], None) if len(sys.argv) > 1 else (local_run(training={"rounds": 10}), None)
if not isinstance(run, str):
    link = SoloNode(run, samples=len(train_set))

swarm = torchbft.join(run, model, optimizer, scheduler, link=link)


@swarm.on_round
def evaluate(round: int) -> tuple[float, float]:
    """Runs with the agreed model loaded: evaluate and save here."""
    model.eval()
    with torch.no_grad():
        x, y = test_set.tensors
        logits = model(x)
    loss, accuracy = cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()
    print(f"round {round}: loss {loss:.3f}, accuracy {accuracy:.3f}")
    return loss, accuracy


for x, y in swarm.batches(train_set, batch_size=32):
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    scheduler.step()

print(f"{swarm.over.status}; agreed root {swarm.state.root().hex()[:16]}")
