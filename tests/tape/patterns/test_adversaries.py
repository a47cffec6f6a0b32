"""Programs of several models and optimizers, whose iterations are of several kinds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models import normal
from .script import Script, compare

WIDTH = 64
ROWS = 128


def net(out: int, last: type[nn.Module] = nn.Identity) -> nn.Module:
    """Layers whose activations can be rebuilt."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.GELU(), nn.Linear(WIDTH, out), last()
    )


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(net(WIDTH), nn.Tanh())


class Judge(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(net(1))


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=1e-3, betas=(0.5, 0.999))


def binary(out: Tensor, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, torch.full_like(out, float(real)))


@pytest.mark.parametrize("held", [False, True])
def test_gan_with_two_steps(held: bool) -> None:
    """The generator runs once for the judge's step and once for its own. Of the first run's graph nobody has a use, whether
    the script holds it or not: that does not make one iteration of the two."""

    def make() -> Script:
        g, d = Generator(), Judge()
        to_g, to_d = adam(g), adam(d)
        fakes: list[Tensor] = []

        def step(i: int) -> list[Tensor]:
            to_d.zero_grad()
            fake = g(torch.randn(ROWS, WIDTH))
            fakes[:] = [fake] * held
            judged = binary(d(normal(i, ROWS, WIDTH)), True) + binary(d(fake.detach()), False)
            judged.backward()
            to_d.step()
            to_g.zero_grad()
            fooled = binary(d(g(torch.randn(ROWS, WIDTH))), True)
            fooled.backward()
            to_g.step()
            return [judged.detach(), fooled.detach()]

        return Script([g, d], step)

    compare(make, kinds=2, steps=16)


def test_gan_that_judges_one_fake_twice() -> None:
    """As in PyTorch's tutorial: the graph of the fake is used by a backward pass of the next iteration."""

    def make() -> Script:
        g, d = Generator(), Judge()
        to_g, to_d = adam(g), adam(d)

        def step(i: int) -> list[Tensor]:
            d.zero_grad()
            real = binary(d(normal(i, ROWS, WIDTH)).view(-1), True)
            real.backward()
            fake = g(torch.randn(ROWS, WIDTH))
            made = binary(d(fake.detach()).view(-1), False)
            made.backward()
            to_d.step()
            g.zero_grad()
            fooled = binary(d(fake).view(-1), True)
            fooled.backward()
            to_g.step()
            return [real.detach(), made.detach(), fooled.detach()]

        return Script([g, d], step)

    compare(make, kinds=2)


def test_wasserstein_gan_with_a_gradient_penalty() -> None:
    """Five steps of the judge, with double backward, for each of the generator."""

    def make() -> Script:
        g, d = Generator(), Judge()
        to_g, to_d = adam(g), adam(d)

        def step(i: int) -> list[Tensor]:
            losses = []
            for j in range(3):
                real = normal(3 * i + j, ROWS, WIDTH)
                with torch.no_grad():
                    fake = g(torch.randn(ROWS, WIDTH))
                to_d.zero_grad()
                loss = d(fake).mean() - d(real).mean()
                mix = torch.rand(ROWS, 1)
                between = (mix * real + (1 - mix) * fake).requires_grad_()
                (slope,) = torch.autograd.grad(d(between).sum(), between, create_graph=True)
                loss = loss + 10 * (slope.norm(dim=1) - 1).square().mean()
                loss.backward()
                to_d.step()
                losses.append(loss.detach())
            for p in d.parameters():
                p.requires_grad_(False)
            to_g.zero_grad()
            loss = -d(g(torch.randn(ROWS, WIDTH))).mean()
            loss.backward()
            to_g.step()
            for p in d.parameters():
                p.requires_grad_(True)
            return [*losses, loss.detach()]

        return Script([g, d], step)

    compare(make, kinds=2)


def test_actor_and_critic() -> None:
    """Roll-outs without gradients, several epochs over them, a critic with an optimizer of its own, a target by averaging."""

    def make() -> Script:
        actor, critic, target = net(8), net(1), net(1)
        target.load_state_dict(critic.state_dict())
        to_actor, to_critic = adam(actor), adam(critic)

        def step(i: int) -> list[Tensor]:
            state = normal(i, ROWS, WIDTH)
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=actor(state)).sample()
                reward = normal(i + 1, ROWS) + target(state).squeeze(1)
            found = []
            for _ in range(2):
                to_critic.zero_grad()
                off = F.smooth_l1_loss(critic(state).squeeze(1), reward)
                off.backward()
                nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
                to_critic.step()
                policy = torch.distributions.Categorical(logits=actor(state))
                advantage = (reward - critic(state).squeeze(1)).detach()
                loss = -(policy.log_prob(action) * advantage).mean() - 0.01 * policy.entropy().mean()
                to_actor.zero_grad()
                loss.backward()
                to_actor.step()
                found += [off.detach(), loss.detach()]
            with torch.no_grad():
                for mine, theirs in zip(target.parameters(), critic.parameters(), strict=True):
                    mine.lerp_(theirs, 0.05)
            return found

        return Script([actor, critic, target], step)

    compare(make, kinds=2)


def test_an_auxiliary_task_in_some_iterations() -> None:
    def make() -> Script:
        trunk, main, side = net(WIDTH), net(4), net(WIDTH)
        optimizer = torch.optim.SGD([*trunk.parameters(), *main.parameters(), *side.parameters()], lr=0.01)

        def step(i: int) -> Tensor:
            optimizer.zero_grad()
            features = trunk(normal(i, ROWS, WIDTH))
            loss = main(features).square().mean()
            if i % 3 == 2:
                loss = loss + side(features).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([trunk, main, side], step)

    compare(make, kinds=2, steps=18)


def test_one_of_two_heads_at_random() -> None:
    """The first call does not tell which: the second does."""

    def make() -> Script:
        trunk, heads = net(WIDTH), nn.ModuleList([net(WIDTH), nn.Sequential(net(WIDTH), nn.Tanh(), net(4))])
        optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], lr=0.01)
        coins = torch.Generator().manual_seed(2)

        def step(i: int) -> Tensor:
            optimizer.zero_grad()
            head = heads[int(torch.randint(2, (), generator=coins))]
            loss = head(trunk(normal(i, ROWS, WIDTH))).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([trunk, heads], step)

    compare(make, kinds=2, steps=24)


def test_requires_grad_toggled_between_calls() -> None:
    """First the head alone is trained, then the whole; and in every third step the trunk is frozen again."""

    def make() -> Script:
        trunk, head = net(WIDTH), net(4)
        model = nn.Sequential(trunk, head)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(i: int) -> Tensor:
            trunk.requires_grad_(i >= 4 and i % 3 != 0)
            optimizer.zero_grad()
            loss = model(normal(i, ROWS, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([model], step)

    compare(make, kinds=2, steps=18)


def test_parameters_that_an_optimizer_writes_between_forward_and_backward() -> None:
    """Right in eager PyTorch, as backward does not read them; a recipe would. Of the two iterations that is one."""

    def make() -> Script:
        first, rest, other = nn.Linear(WIDTH, WIDTH), net(4), net(4)
        optimizer = torch.optim.SGD([*first.parameters(), *other.parameters()], lr=0.01, weight_decay=0.1)
        last = torch.optim.SGD(rest.parameters(), lr=0.01)

        def step(i: int) -> list[Tensor]:
            optimizer.zero_grad(set_to_none=False)
            last.zero_grad()
            x = normal(i, ROWS, WIDTH)
            out = rest(torch.tanh(first(x)))
            side = other(x).square().mean()
            side.backward()
            optimizer.step()
            loss = out.square().mean() + other(x).square().mean()
            loss.backward()
            last.step()
            return [side.detach(), loss.detach()]

        return Script([first, rest, other], step)

    compare(make)


def test_a_kind_of_iteration_that_comes_once_in_a_while() -> None:
    """Too seldom to be planned: it must not spoil the plan of the others."""

    def make() -> Script:
        model, probe = net(WIDTH), net(WIDTH)
        optimizer = torch.optim.SGD([*model.parameters(), *probe.parameters()], lr=0.01)

        def step(i: int) -> Tensor:
            optimizer.zero_grad()
            loss = model(normal(i, ROWS, WIDTH)).square().mean()
            if i in (0, 8):
                loss = loss + probe(normal(i, ROWS, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Script([model, probe], step)

    compare(make, kinds=1, steps=15)
