"""Losses of pairs, one formula each, by their names in TRL's `loss_type`.

In the formulas, chosen and rejected are the log-ratios log pi(y|x) / pi_ref(y|x) of the two
answers, sums over their tokens. Without a reference model they are mean log-probabilities of a
token. s is the logistic function, and log s its logarithm, `logsigmoid`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from optrun.config.schema.chat_tasks import PreferenceConfig, PreferenceLoss
from optrun.task.preference_pairs import PairScores


def pair_losses(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute the loss of each pair; shape (pairs,)."""
    return _FORMULAS[config.loss_type](config, scores)


def _sigmoid(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute DPO's loss, -log s(beta (chosen - rejected)): arXiv:2305.18290, Eq. 7."""
    return -logsigmoid(_margin(config, scores))


def _hinge(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute max(0, 1 - beta (chosen - rejected)): SLiC, arXiv:2305.10425.

    In the form of RSO, arXiv:2309.06657.
    """
    return torch.relu(1 - _margin(config, scores))


def _ipo(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute (difference - 1 / (2 beta))^2: IPO, arXiv:2310.12036, Eq. 17.

    The difference is chosen - rejected, each divided by the tokens of its answer. The paper writes
    tau for beta.
    """
    return (scores.mean_difference - 1 / (2 * config.beta)).square()


def _robust(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute DPO's loss without the bias of labels flipped with probability e: arXiv:2403.00409.

    e is `label_smoothing`.
    """
    flipped = config.label_smoothing
    margin = _margin(config, scores)
    expected = flipped * logsigmoid(-margin) - (1 - flipped) * logsigmoid(margin)
    return expected / (1 - 2 * flipped)


def _nca_pair(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute the loss of NCA on a pair, arXiv:2402.05369.

    -log s(beta chosen) - (log s(-beta chosen) + log s(-beta rejected)) / 2.
    """
    beta = config.beta
    return (
        -logsigmoid(beta * scores.chosen)
        - 0.5 * logsigmoid(-beta * scores.chosen)
        - 0.5 * logsigmoid(-beta * scores.rejected)
    )


def _bco_pair(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute -log s(beta chosen) - log s(-beta rejected): BCO, arXiv:2404.04656.

    Without the shift of rewards in the paper.
    """
    beta = config.beta
    return -logsigmoid(beta * scores.chosen) - logsigmoid(-beta * scores.rejected)


def _sppo_hard(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2: SPPO, arXiv:2405.00675.

    "Hard": the probabilities that an answer is preferred are 1 and 0.
    """
    half = 0.5 / config.beta
    return (scores.chosen - half).square() + (scores.rejected + half).square()


def _apo_zero(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute 1 - s(beta chosen) + s(beta rejected): APO, arXiv:2408.06266, Eq. 7."""
    beta = config.beta
    return 1 - torch.sigmoid(beta * scores.chosen) + torch.sigmoid(beta * scores.rejected)


def _apo_down(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute s(beta chosen) + 1 - s(beta (chosen - rejected)): APO, arXiv:2408.06266, Eq. 8."""
    return torch.sigmoid(config.beta * scores.chosen) + 1 - torch.sigmoid(_margin(config, scores))


def _sigmoid_norm(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute -log s(beta difference): arXiv:2411.15124, section 5.

    The difference is chosen - rejected, each divided by the tokens of its answer.
    """
    return -logsigmoid(config.beta * scores.mean_difference)


def _orpo(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute the loss of ORPO, arXiv:2403.07691, Eq. 6 and 7.

    nll - beta log s(log odds chosen - log odds rejected). Both are mean log-probabilities x of a
    token here, and log odds x = x - log(1 - exp x).
    """
    chosen = scores.chosen
    rejected = scores.rejected
    log_odds_ratio = chosen - rejected - (_log1mexp(chosen) - _log1mexp(rejected))
    return scores.nll - config.beta * logsigmoid(log_odds_ratio)


def _simpo(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute -(1 - e) log s(m) - e log s(-m), m = beta (chosen - rejected) - gamma.

    SimPO, arXiv:2405.14734, Eq. 6, is the case e = 0. Both are mean log-probabilities of a token
    here. e is `label_smoothing`: a preference holds with probability 1 - e, else its reverse.
    """
    flipped = config.label_smoothing
    margin = _margin(config, scores) - config.simpo_gamma
    return -(1 - flipped) * logsigmoid(margin) - flipped * logsigmoid(-margin)


_FORMULAS = {
    PreferenceLoss.sigmoid: _sigmoid,
    PreferenceLoss.hinge: _hinge,
    PreferenceLoss.ipo: _ipo,
    PreferenceLoss.robust: _robust,
    PreferenceLoss.nca_pair: _nca_pair,
    PreferenceLoss.bco_pair: _bco_pair,
    PreferenceLoss.sppo_hard: _sppo_hard,
    PreferenceLoss.apo_zero: _apo_zero,
    PreferenceLoss.apo_down: _apo_down,
    PreferenceLoss.sigmoid_norm: _sigmoid_norm,
    PreferenceLoss.orpo: _orpo,
    PreferenceLoss.simpo: _simpo,
}


def _margin(config: PreferenceConfig, scores: PairScores) -> Tensor:
    """Compute beta (chosen - rejected) for each pair."""
    return config.beta * (scores.chosen - scores.rejected)


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) for x below 0 without cancellation (Mächler 2012).

    expm1 is exact near 0, log1p far from it; -log 2 separates the two cases.

    Example:
        >>> _log1mexp(torch.tensor([-1.0]))
        tensor([-0.4587])
    """
    is_near_0 = x > -0.6931471805599453
    # `where` computes both cases, and their gradients. Where log1p is taken, expm1 gets another x,
    # since a NaN gradient would remain NaN times 0.
    near_0 = torch.where(is_near_0, x, torch.full_like(x, -1.0))
    return torch.where(is_near_0, torch.log(-torch.expm1(near_0)), torch.log1p(-torch.exp(x)))
