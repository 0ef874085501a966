"""The batched Muon makes torch's steps, and its state is torch's."""

from copy import deepcopy

import torch

from commands.train.muon import Muon


def test_the_steps_are_torchs_also_from_torchs_state() -> None:
    torch.manual_seed(0)
    shapes = [(24, 16), (16, 24), (24, 16), (8, 8)]
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [torch.nn.Parameter(p.data.clone()) for p in ours]
    muon = Muon(ours, lr=0.02, weight_decay=0.1)
    reference = torch.optim.Muon(
        theirs, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for number in range(6):
        if number == 3:
            muon.load_state_dict(
                muon.state_dict() | {"state": deepcopy(reference.state_dict()["state"])}
            )
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        before = [p.detach().clone() for p in ours]
        muon.step()
        reference.step()
        assert all(
            torch.allclose(one, other, atol=3e-3) for one, other in zip(ours, theirs, strict=True)
        )
        assert all((one - old).norm() > 0.01 for one, old in zip(ours, before, strict=True))
