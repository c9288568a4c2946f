"""Losses of pairs, one formula each, by their names in TRL's `loss_type`.

With w, l for the log-ratios log pi(y|x) / pi_ref(y|x) of the chosen and the rejected answer, sums
over its tokens, and d for w - l.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from optrun.config.schema.chat_tasks import PreferenceConfig, PreferenceLoss
from optrun.task.pairs import PairScores


def pair_losses(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute the loss of each pair; shape (pairs,)."""
    beta, flipped, chosen, rejected = (
        config.beta,
        config.label_smoothing,
        scores.chosen,
        scores.rejected,
    )
    margin = beta * (chosen - rejected)
    match config.loss_type:
        case PreferenceLoss.sigmoid:
            # -log s(beta d): DPO, arXiv:2305.18290, Eq. 7
            return -logsigmoid(margin)
        case PreferenceLoss.hinge:
            # max(0, 1 - beta d): SLiC, arXiv:2305.10425, in the form of RSO, arXiv:2309.06657
            return torch.relu(1 - margin)
        case PreferenceLoss.ipo:
            # (d - 1 / (2 beta))^2 with d by token: IPO, arXiv:2310.12036, Eq. 17, where beta is
            # called tau
            return (scores.mean_difference - 1 / (2 * beta)).square()
        case PreferenceLoss.robust:
            # DPO's expected loss under labels flipped with probability e: arXiv:2403.00409
            return (flipped * logsigmoid(-margin) - (1 - flipped) * logsigmoid(margin)) / (
                1 - 2 * flipped
            )
        case PreferenceLoss.nca_pair:
            # -log s(beta w) - (log s(-beta w) + log s(-beta l)) / 2: NCA, arXiv:2402.05369
            return (
                -logsigmoid(beta * chosen)
                - 0.5 * logsigmoid(-beta * chosen)
                - 0.5 * logsigmoid(-beta * rejected)
            )
        case PreferenceLoss.bco_pair:
            # -log s(beta w) - log s(-beta l): BCO, arXiv:2404.04656, for pairs, without its shift
            return -logsigmoid(beta * chosen) - logsigmoid(-beta * rejected)
        case PreferenceLoss.sppo_hard:
            # (w - 1 / (2 beta))^2 + (l + 1 / (2 beta))^2: SPPO, arXiv:2405.00675, with
            # probabilities 1 and 0
            return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()
        case PreferenceLoss.apo_zero:
            # 1 - s(beta w) + s(beta l): APO, arXiv:2408.06266, Eq. 7
            return 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
        case PreferenceLoss.apo_down:
            # s(beta w) + 1 - s(beta d): APO, arXiv:2408.06266, Eq. 8
            return torch.sigmoid(beta * chosen) + 1 - torch.sigmoid(margin)
        case PreferenceLoss.sigmoid_norm:
            # -log s(beta d) with d by token: arXiv:2411.15124, section 5
            return -logsigmoid(beta * scores.mean_difference)
        case PreferenceLoss.orpo:
            # nll - beta log s(log odds w - log odds l): ORPO, arXiv:2403.07691, Eq. 6 and 7
            odds = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
            return scores.nll - beta * logsigmoid(odds)
        case PreferenceLoss.simpo:
            # -log s(beta d - gamma): SimPO, arXiv:2405.14734, Eq. 6, with labels flipped with
            # probability e
            apart = margin - config.simpo_gamma
            return -(1 - flipped) * logsigmoid(apart) - flipped * logsigmoid(-apart)


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) for x below 0, in the form that keeps its digits (Mächler 2012)."""
    near = x > -0.6931471805599453
    safe = torch.where(near, x, torch.full_like(x, -1.0))
    return torch.where(near, torch.log(-torch.expm1(safe)), torch.log1p(-torch.exp(x)))
